#!/usr/bin/env bash
# The trainer's part of a launch, once on every node that trains: begin a run, or go on with it when it has a checkpoint.
#
#   train.sh CONFIG RUNS_DIR [a.b=c ...]
#
# RUNS_DIR: of this one run, on the filesystem that all nodes share, new for a new run. From the environment:
# NODES, GPUS (a node's), MASTER (name or address of one of them), ADDRESS (of this node, as the others reach it).
# GRACE: seconds that the ranks have to come to a stop and save when they are asked to (SIGTERM).
# No checkpoint appears before every rank has joined, so all nodes come to the same decision.
set -euo pipefail
config=$1 runs_dir=$2 grace=${GRACE:-540}
shift 2

mkdir -p "$runs_dir"
run=$(find "$runs_dir" -mindepth 3 -maxdepth 3 -path '*/checkpoints/step-*' | sort | tail -n 1)
if [[ -n $run ]]; then
    # Only where the samplers are, and how the ranks are laid out, may differ from what the run began with.
    kept=()
    for override in "$@"; do
        [[ $override == parallel.* || $override == cluster.* || $override == rollout.servers=* || $override == rollout.token_file=* ]] && kept+=("$override")
    done
    what=(--resume "${run%/checkpoints/*}" "${kept[@]}")
else
    what=(--config "$config" "run.runs_dir=$runs_dir" "checkpoint.grace_seconds=$grace" "$@")
fi

# torchrun itself always exits with 1. Each rank leaves its own status in a file.
logs=$(mktemp -d)
torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" \
    --rdzv-backend c10d --rdzv-id "${RUN_ID:-moe-rl}" --rdzv-endpoint "$MASTER:29400" --local-addr "$ADDRESS" \
    --shutdown-timeout "$((grace + 30))" --log-dir "$logs" \
    tools/train_moe_rl.py "${what[@]}" &
ranks=$! status=0 asked=
trap 'asked=yes; kill -TERM "$ranks" 2>/dev/null || true' TERM INT
wait "$ranks" || status=$?
if [[ -n $asked ]]; then
    status=0
    wait "$ranks" || status=$?
fi
told=
if ((status != 0)); then
    for ((tries = 0; tries < 20; tries++)); do
        told=$(find "$logs" -name error.json -exec cat {} + | grep -o '"errorCode": *[0-9]*' | grep -o '[0-9]*$' | head -n 1 || true)
        # torchrun itself was killed: its ranks are about to notice, and end.
        [[ -z $told ]] && ((status == 137)) || break
        sleep 1
    done
    ((status != 137)) || status=3
fi
exit "${told:-$status}"
