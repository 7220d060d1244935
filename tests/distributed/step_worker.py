"""One rank of the tests of a training step on routes that are not all there, or not all of the present weights.

    torchrun --nproc-per-node N step_worker.py CHECKPOINT OUT CASES

CASES: JSON, {name: {"overrides": [config overrides], "missing": [sequences without routes], "short": [sequences whose
first two tokens have none], "old": [sequences whose prompt older weights routed], "first": only so many sequences,
"reward": the same for all}}. Rank r writes OUT/<name>-rank<r>.json: metrics, or the error.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from moe_rl.config.hf import read_model
from moe_rl.config.load import load_config
from moe_rl.errors import MoeRLError
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy, ReferencePolicy
from moe_rl.proof.batch import batch
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.train.step import Clock, TrainStep
from moe_rl.types import Provenance, Span

ROOT = Path(__file__).parents[2]
VERSION = 5


def stored(sequences, routes, spec, folder, plan):
    """The batch as a sampler leaves it: routes in a store, references in the sequences."""
    ready = []
    with ShardWriter(folder, "step", spec) as writer:
        for number, (sequence, table) in enumerate(zip(sequences, routes, strict=True)):
            tokens = np.array(sequence.prompt_token_ids + sequence.token_ids, np.int32)[:-1]
            start, prompt = 2 if number in plan.get("short", ()) else 0, len(sequence.prompt_token_ids)
            old = VERSION - 1 if number in plan.get("old", ()) else VERSION
            spans = [Span(prompt - start, old, Provenance.PREFILL)] if prompt > start else []
            spans.append(Span(len(tokens) - max(prompt, start), VERSION, Provenance.DECODE))
            spans = [span for span in spans if span.rows]
            ref = writer.add(sequence.key, table[start:], tokens[start:], spans)
            ref = None if number in plan.get("missing", ()) else replace(ref, start=start)
            ready.append(replace(sequence, weight_version=VERSION, routes=ref))
    return ready


def one(name, plan, checkpoint, out):
    facts = read_model(checkpoint)
    spec = TraceSpec.from_layers(facts.fingerprint, facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)
    overrides = [f"model.path={checkpoint}", "train.microbatch_tokens=40", "train.dtype=float32"]
    config = load_config(ROOT / "configs/tiny_moe_cpu.yaml", [*overrides, *plan.get("overrides", [])])
    world.lay_out(config.parallel, seed=1)
    folder, rank = out / name / "trace", dist.get_rank()
    sequences, routes = (part[: plan.get("first")] for part in batch(facts))
    if "reward" in plan:
        sequences = [replace(sequence, reward=plan["reward"]) for sequence in sequences]
    if rank == 0:
        stored(sequences, routes, spec, folder, plan)
    dist.barrier()
    ready = stored(sequences, routes, spec, out / name / f"own{rank}", plan)
    build = (facts, config.train, config.parallel, checkpoint)
    policy = Policy(*build, temperature=1.0)
    reference = ReferencePolicy(*build, temperature=1.0) if config.objective.kl_coef else None
    step = TrainStep(config, policy, reference, TraceStore(folder), spec)
    groups = [number // 2 for number in range(len(ready))]
    try:
        seen = step.run(ready, groups, step=1, weight_version=VERSION, measure_native=True, clock=Clock())
    except MoeRLError as error:
        seen = f"{type(error).__name__}: {error}"
    (out / f"{name}-rank{rank}.json").write_text(json.dumps(seen))
    policy.release()
    dist.barrier()


if __name__ == "__main__":
    model, results, cases = map(Path, sys.argv[1:])
    world.join(timeout_seconds=120)
    for name, plan in json.loads(cases.read_text()).items():
        one(name, plan, model, results)
    world.stop()
