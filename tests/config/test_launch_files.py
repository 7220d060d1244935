"""Tests the launch files of docs/howto/cluster.md.

Their shell code runs with stand-ins for the cluster's commands. The resulting commands must be accepted by our argument
parsers, for the config that they name.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moe_rl.commands import train as train_command
from moe_rl.commands.serve import _nodes, engine_arguments
from moe_rl.commands.serve import add_arguments as add_serve_arguments
from moe_rl.config.check_cluster import server_problems, start_problems
from moe_rl.config.layout import least_ranks
from moe_rl.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "configs/launch"
# Writes down its name and arguments; `srun` then runs what it was given, as its tasks would.
STAND_IN = (
    f"#!/bin/sh\n''':'\nexec '{sys.executable}' \"$0\" \"$@\"\n'''"  # a shell begins: the path may have spaces
    + """
import json, os, signal, subprocess, sys, time
from pathlib import Path
name = Path(sys.argv[0]).name
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
if name == "scontrol" and sys.argv[1] == "show":
    print("\\n".join(f"node{n}" for n in range(int(os.environ["SLURM_NNODES"]))))
if name == "python" and "-c" in sys.argv:
    print("t" * 43)
if name == "curl":  # until the server of this address was started
    host, port = sys.argv[-1].removeprefix("http://").removesuffix("/health").split(":")
    wanted = json.dumps(["--host", host, "--port", port])[1:-1]
    while not any(line.startswith('["python"') and wanted in line for line in open(os.environ["CALLS"])):
        time.sleep(0.1)
if name == "getent":
    print(sys.argv[-1], "STREAM")
    print("::1 STREAM")
if name == "srun":  # it forwards no SIGTERM: it kills its tasks
    at = next(at for at, word in enumerate(sys.argv) if at and not word.startswith("--"))
    task = subprocess.Popen(sys.argv[at:], env=os.environ | {"SLURMD_NODENAME": "node0"})
    signal.signal(signal.SIGTERM, lambda *_: task.kill())
    sys.exit(task.wait() % 256)
"""
)


@pytest.fixture
def shell(tmp_path):
    """Run a shell command in a copy of the repository's configs; return the calls of the stand-ins, by name."""
    folder, tools = tmp_path / "repository", tmp_path / "bin"
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    tools.mkdir()
    for name in ("torchrun", "python", "srun", "scontrol", "curl", "getent", "install", "ls", "moe-rl"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)

    def run(*command: str, ends: int = 0, says: str = "", **variables: str) -> dict[str, list[list[str]]]:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(calls)} | variables
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == ends and says in done.stderr, done.stderr
        found: dict[str, list[list[str]]] = {}
        for name, *arguments in map(json.loads, calls.read_text().splitlines()):
            found.setdefault(name, []).append(arguments)
        return found

    return run


def train_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    return parser.parse_args(arguments)


def trainer(arguments: list[str]) -> tuple[dict[str, str], object]:
    """Return the options of torchrun and of our script in a torchrun command."""
    at = arguments.index("tools/train_moe_rl.py")
    theirs = dict(zip(arguments[:at:2], arguments[1:at:2], strict=True))
    return theirs, train_options(arguments[at + 1 :])


def served(arguments: list[str]):
    """Return the options of a server's command."""
    assert arguments[0] == "tools/serve_vllm.py"
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return parser.parse_args(arguments[1:])


def configured(options):
    return load_config(ROOT / options.config, options.overrides)


def check_agreement(train, servers) -> None:
    """The trainer's config can be started, and each server serves that config."""
    config = configured(train)
    assert not [*server_problems(config), *start_problems(config)]
    shipped = load_config(ROOT / train.config, [])
    for ours, theirs in ((config.model, shipped.model), (config.task.train[0], shipped.task.train[0])):
        assert ours != theirs, "a launch file names its own checkpoint and prompts"
    assert len(servers) == len(config.rollout.servers) == config.cluster.engines
    for options in servers:
        theirs = configured(options)
        assert (theirs.run.runs_dir, theirs.model) == (config.run.runs_dir, config.model)
        assert engine_arguments(theirs) == engine_arguments(config)
        assert (options.token_file or theirs.rollout.token_file) == config.rollout.token_file


def test_train_sh_begins_a_run_and_goes_on_with_it(shell, tmp_path):
    runs = tmp_path / "runs"
    given = ["rollout.servers=[http://a:1]", "cluster.engines=1", "parallel.expert=4", "rollout.token_file=t"]
    given += ["train.packing=load"]
    variables = {"NODES": "2", "GPUS": "8", "MASTER": "first", "ADDRESS": "10.0.0.1"}
    command = ["bash", "configs/launch/train.sh", "configs/qwen3_30b_a3b.yaml", str(runs), *given]
    (arguments,) = shell(*command, **variables)["torchrun"]
    theirs, ours = trainer(arguments)
    assert theirs["--nnodes"] == "2" and theirs["--nproc-per-node"] == "8" and theirs["--local-addr"] == "10.0.0.1"
    assert theirs["--rdzv-endpoint"] == "first:29400" and theirs["--rdzv-backend"] == "c10d"
    assert ours.config == Path("configs/qwen3_30b_a3b.yaml") and ours.resume is None
    assert ours.overrides == [f"run.runs_dir={runs}", "checkpoint.grace_seconds=540", *given]
    assert theirs["--shutdown-timeout"] == "570"

    (runs / "name-1/checkpoints").mkdir(parents=True)  # begun, and nothing saved yet: begun again
    (arguments,) = shell(*command, **variables)["torchrun"]
    assert trainer(arguments)[1].resume is None
    (runs / "name-2/checkpoints/step-000004").mkdir(parents=True)
    (arguments,) = shell(*command, **variables)["torchrun"]
    ours = trainer(arguments)[1]
    assert ours.resume == runs / "name-2" and ours.config is None
    assert ours.overrides == given[:4], "a resumed run takes no other override"


@pytest.mark.parametrize("told", [2, None])
def test_ranks_of_a_torchrun_that_was_killed_tell_a_moment_later_why_they_end(shell, tmp_path, told):
    """If they say nothing, their node may be about to go, too: it is a loss."""
    error = "" if told is None else f'echo \'{{"message": {{"errorCode": {told}}}}}\' >"$2/error.json"'
    (tmp_path / "bin/torchrun").write_text(f"""#!/usr/bin/env bash
echo '["torchrun"]' >>"$CALLS"
while [[ $1 != --log-dir ]]; do shift; done
(sleep 1; {error or ":"}) >/dev/null 2>&1 &
kill -KILL $$
""")
    path = tmp_path / "repository/configs/launch/train.sh"
    text = path.read_text()
    assert text.count("    sleep 1\n") == 1
    path.write_text(text if told else text.replace("    sleep 1\n", "    sleep 0\n"))
    variables = {"NODES": "2", "GPUS": "8", "MASTER": "first", "ADDRESS": "10.0.0.1"}
    command = ["bash", "configs/launch/train.sh", "configs/qwen3_30b_a3b.yaml", str(tmp_path / "runs")]
    shell(*command, ends=told or 3, **variables)


def test_the_slurm_job_starts_servers_and_trainers_that_fit(shell):
    text = (LAUNCH / "slurm.sbatch").read_text()
    (nodes,) = [line.split("=")[1] for line in text.splitlines() if line.startswith("#SBATCH --nodes")]
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-5]", "SLURM_NNODES": nodes}
    calls = shell("bash", "configs/launch/slurm.sbatch", **variables)
    servers = [served(arguments) for arguments in calls["python"] if arguments[0] != "-c"]
    (arguments,) = calls["torchrun"]
    theirs, ours = trainer(arguments)
    check_agreement(ours, servers)
    config = configured(ours)
    assert sorted(config.rollout.servers) == sorted(f"http://{one.host}:{one.port}" for one in servers)
    assert int(theirs["--nnodes"]) * int(theirs["--nproc-per-node"]) == config.cluster.gpus
    # Who trains and who samples are different nodes, and together all there are.
    placed = [next(word for word in call if word.startswith("--nodelist=")) for call in calls["srun"]]
    training = placed[-1].partition("=")[2].split(",")
    assert {*training, *(one.host for one in servers)} == {f"node{n}" for n in range(int(nodes))}
    assert not set(training) & {one.host for one in servers} and theirs["--rdzv-endpoint"] == f"{training[0]}:29400"
    devices = [word for call in calls["srun"] for word in call if word.startswith("CUDA_VISIBLE_DEVICES=")]
    assert sorted(devices) == sorted(2 * [f"CUDA_VISIBLE_DEVICES={n},{n + 1}" for n in (0, 2, 4, 6)])
    (notice,) = [int(line.split("@")[1]) for line in text.splitlines() if line.startswith("#SBATCH --signal=B:TERM@")]
    assert config.checkpoint.grace_seconds < int(theirs["--shutdown-timeout"]) < notice
    assert len(calls["curl"]) == len(servers) and "requeue" not in str(calls.get("scontrol"))


def test_overrides_of_the_slurm_job_reach_servers_and_trainers(shell, tmp_path):
    path = tmp_path / "repository/configs/launch/slurm.sbatch"
    text = path.read_text()
    assert text.count("OURS+=()") == 1
    own = "cluster.engines=4 cluster.gpus_per_engine=4 rollout.max_concurrent=32"
    text = text.replace("OURS+=()", f"OURS+=({own})")
    path.write_text(text.replace("ENGINES_PER_NODE=4 GPUS_PER_ENGINE=2", "ENGINES_PER_NODE=2 GPUS_PER_ENGINE=4"))
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-5]", "SLURM_NNODES": "6"}
    calls = shell("bash", "configs/launch/slurm.sbatch", **variables)
    servers = [served(arguments) for arguments in calls["python"] if arguments[0] != "-c"]
    (arguments,) = calls["torchrun"]
    check_agreement(trainer(arguments)[1], servers)
    assert {configured(options).rollout.max_concurrent for options in servers} == {32}


def test_the_slurm_job_starts_an_engine_on_several_nodes(shell, tmp_path):
    path = tmp_path / "repository/configs/launch/slurm.sbatch"
    text = path.read_text()
    for old, new in (
        ("CONFIG=configs/qwen3_30b_a3b.yaml", "CONFIG=configs/deepseek_v3.yaml"),
        ("TRAIN_NODES=4", "TRAIN_NODES=32"),
        ("ENGINES_PER_NODE=4 GPUS_PER_ENGINE=2", "ENGINES_PER_NODE=1 GPUS_PER_ENGINE=8"),
        ("NODES_PER_ENGINE=1 ", "NODES_PER_ENGINE=4 "),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-47]", "SLURM_NNODES": "48"}
    calls = shell("bash", "configs/launch/slurm.sbatch", **variables)
    nodes = [served(arguments) for arguments in calls["python"] if arguments[0] != "-c"]
    serving = {one.master_addr: one for one in nodes if one.node_rank == 0}
    assert sorted(serving) == ["node32", "node36", "node40", "node44"]
    (arguments,) = calls["torchrun"]
    check_agreement(trainer(arguments)[1], list(serving.values()))
    for address, first in serving.items():
        engine = [one for one in nodes if one.master_addr == address]
        assert sorted(_nodes(one).rank for one in engine) == [0, 1, 2, 3] and {one.nnodes for one in engine} == {4}
        assert first.host == address and [one for one in engine if one.host or one.port] == [first]


def test_a_slurm_job_ends_with_the_reason_of_a_server_that_does_not_start(shell, tmp_path):
    """srun writes a server's output into its log, which the stand-in does not."""
    script = (tmp_path / "repository/configs/launch/slurm.sbatch").read_text()
    ends = script.replace("python tools/serve_vllm.py", 'bash -c \'echo "no CUDA device" >"$0"; exit 2\' "${logs[-1]}"')
    (tmp_path / "repository/ends.sbatch").write_text(ends.replace("curl ", "false "))
    says = "a server ended before it was ready; the end of"
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-5]", "SLURM_NNODES": "6"}
    calls = shell("bash", "ends.sbatch", ends=1, says=says, **variables)
    assert ends != script and "torchrun" not in calls and calls["srun"]
    shell("bash", "ends.sbatch", ends=1, says="no CUDA device", **variables)


def test_a_slurm_job_that_is_told_to_end_is_requeued(shell, tmp_path):
    """--signal=B:TERM sends SIGTERM to the script alone."""
    script = (tmp_path / "repository/configs/launch/slurm.sbatch").read_text()
    assert "#SBATCH --signal=B:TERM@" in script and "#SBATCH --requeue" in script
    # The trainer ends its script's wait, then itself.
    slow = script.replace("trainer=$!", "trainer=$!\n(sleep 2; kill -TERM $$) &", 1).replace(
        "    ADDRESS=", '    trap "exit 3" TERM; sleep 20 >&- 2>&- & wait; ADDRESS=', 1
    )
    assert slow.count("sleep 20") == 1
    path = tmp_path / "repository/slow.sbatch"
    path.write_text(slow.replace('exit "$status"', 'echo "$status" >status'))
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-5]", "SLURM_NNODES": "6"}
    calls = shell("bash", "slow.sbatch", **variables)
    assert ["requeue", "7"] in calls["scontrol"] and "torchrun" not in calls
    assert (path.parent / "status").read_text() == "3\n"


@pytest.fixture
def slurm_job(shell, tmp_path):
    """slurm_job(status) runs a job, number 7, in which a rank ends with this status. Returns whether it is requeued."""
    says = """#!/usr/bin/env bash
while [[ $1 != --log-dir ]]; do shift; done
mkdir -p "$2/7/attempt_0/0" && echo '{"message": {"message": "x", "errorCode": STATUS}}' >"$2/7/attempt_0/0/error.json"
exit 1
"""

    def job(status: int) -> bool:
        (tmp_path / "bin/torchrun").write_text(says.replace("STATUS", str(status)))
        # Requeues that the time limit or another job caused count too.
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-5]", "SLURM_NNODES": "6"}
        calls = shell("bash", "configs/launch/slurm.sbatch", ends=status, SLURM_RESTART_COUNT="99", **variables)
        return ["requeue", "7"] in calls["scontrol"]

    return job


@pytest.mark.parametrize("status", [2, 3, 4])
def test_a_slurm_job_is_requeued_after_a_loss_and_not_after_a_mistake(slurm_job, status):
    """torchrun exits with 1 whatever its ranks said."""
    assert slurm_job(status) == (status == 3)


def test_a_slurm_job_is_requeued_after_20_losses_only_if_it_has_got_on_since(slurm_job, tmp_path):
    runs = tmp_path / "repository/runs/7"
    runs.mkdir(parents=True)
    (runs / "losses").write_text("\n" + 20 * "a day\n")  # the run had no checkpoint
    assert not slurm_job(3)
    saved = runs / "name-1/checkpoints/step-000004"
    saved.mkdir(parents=True)
    assert slurm_job(3)
    checkpoint, *losses = (runs / "losses").read_text().splitlines()
    assert (checkpoint, len(losses)) == (str(saved), 1)


def test_a_slurm_job_starts_a_server_again_that_ran_for_a_while(tmp_path):
    (line,) = [line for line in (LAUNCH / "slurm.sbatch").read_text().splitlines() if line.startswith("again=")]
    loop = line.removeprefix("again='").removesuffix("'").replace("sleep 5", "sleep 0")
    server = 'echo >>"$0"; [[ $(wc -l <"$0") == 3 ]]'  # the third start ends well
    for enough, starts, ends in (("-1", 3, 0), ("300", 1, 1)):
        file = tmp_path / enough
        command = ["bash", "-c", loop.replace("300", enough), "server", "bash", "-c", server, str(file)]
        assert subprocess.run(command, timeout=20).returncode == ends
        assert len(file.read_text().splitlines()) == starts


@pytest.fixture(scope="module")
def manifest() -> dict[tuple[str, str], dict]:
    documents = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def test_the_manifests_names_are_each_others(manifest):
    (claim,) = re.findall(r"make a claim `(.+?)`", (LAUNCH / "kubernetes.yaml").read_text())
    image = (ROOT / "Dockerfile").read_text()
    (folder,) = [line.split()[1] for line in image.splitlines() if line.startswith("WORKDIR")]
    assert f"ENV PATH={folder}/.venv/bin:" in image
    for kind, name, service in (("StatefulSet", "moe-rl-server", "serviceName"), ("Job", "moe-rl-train", "subdomain")):
        spec = manifest[kind, name]["spec"]
        pod = spec["template"]
        assert (spec | pod["spec"])[service] == name and manifest["Service", name]["spec"]["clusterIP"] == "None"
        labels = pod["metadata"]["labels"]
        assert manifest["Service", name]["spec"]["selector"].items() <= labels.items()
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        (container,) = pod["spec"]["containers"]
        assert container["workingDir"] == folder
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim
        assert volumes["token"]["secret"]["secretName"] == "moe-rl-token"
    policy = manifest["NetworkPolicy", "moe-rl-server"]["spec"]
    assert policy["podSelector"]["matchLabels"] == {"app": "moe-rl-server"}
    (rule,) = policy["ingress"]
    assert rule.keys() == {"from"}, "NCCL chooses the ports on which it broadcasts weights"
    pods = [one["podSelector"]["matchLabels"] for one in rule["from"]]
    assert pods == [{"app": "moe-rl-train"}, {"app": "moe-rl-server"}]


def test_the_pods_commands_fit(manifest, shell, tmp_path):
    def run(kind: str, name: str, program: str) -> tuple[list[str], dict]:
        spec = manifest[kind, name]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        variables = {one["name"]: one.get("value", "10.0.0.9") for one in container["env"]}
        shared = str(tmp_path / "shared")
        text = container["args"][0].replace("/shared", shared).replace("/dev/tcp", str(tcp))
        (arguments,) = shell(*container["command"], text, **variables)[program]
        return [argument.replace(shared, "/shared") for argument in arguments], spec

    # Stands in for the sockets: a server's file can be opened once its folder is there.
    tcp = tmp_path / "tcp"
    for number in range(manifest["StatefulSet", "moe-rl-server"]["spec"]["replicas"]):
        (tcp / f"moe-rl-server-{number}.moe-rl-server").mkdir(parents=True)
    arguments, serving = run("StatefulSet", "moe-rl-server", "python")
    assert not list(tcp.glob("*/*"))
    options = served(arguments)
    arguments, training = run("Job", "moe-rl-train", "torchrun")
    assert len(list(tcp.glob("*/8000"))) == serving["replicas"], "trainers wait for every server"
    theirs, ours = trainer(arguments)
    check_agreement(ours, [options] * serving["replicas"])
    config = configured(ours)
    assert options.host == "10.0.0.9"
    assert list(config.rollout.servers) == [
        f"http://moe-rl-server-{n}.moe-rl-server:{options.port}" for n in range(serving["replicas"])
    ]
    pods = training["parallelism"]
    assert training["completions"] == pods == int(theirs["--nnodes"])
    assert training["backoffLimit"] == 100 * pods, "each loss ends all"
    (mistake,) = training["podFailurePolicy"]["rules"]
    assert mistake["action"] == "FailJob" and mistake["onExitCodes"]["values"] == [2, train_command.COLLAPSED]
    assert training["template"]["spec"]["restartPolicy"] == "Never", "Kubernetes asks this of a podFailurePolicy"
    assert pods * int(theirs["--nproc-per-node"]) == config.cluster.gpus
    grace = training["template"]["spec"]["terminationGracePeriodSeconds"]
    assert config.checkpoint.grace_seconds < int(theirs["--shutdown-timeout"]) < grace
    both = [spec["template"]["spec"]["containers"][0] for spec in (serving, training)]
    gpus = [one["resources"]["limits"]["nvidia.com/gpu"] for one in both]
    assert gpus == [config.cluster.gpus_per_engine, int(theirs["--nproc-per-node"])]
    assert theirs["--rdzv-endpoint"] == "moe-rl-train-0.moe-rl-train:29400"
    assert manifest["Service", "moe-rl-server"]["spec"]["ports"][0]["port"] == options.port


def test_the_docs_can_be_followed_line_by_line(shell, tmp_path):
    page = (ROOT / "docs/howto/cluster.md").read_text()
    section = page.partition("## Several nodes, line by line")[2].partition("\n## ")[0]
    block = section.partition("```sh\n")[2].partition("```")[0]
    script = "set -eu\n" + block.replace("/shared", str(tmp_path / "shared"))
    calls = shell("bash", "-c", script)
    (secret,) = calls["python"]
    assert secret[0] == "-c" and (tmp_path / "shared/run1/token").stat().st_mode & 0o777 == 0o600
    plan, doctor, (verb, *server) = calls["moe-rl"]
    assert plan[:2] == ["plan", "--config"] and configured(argparse.Namespace(config=plan[2], overrides=plan[3:]))
    assert verb == "serve"
    server = ["tools/serve_vllm.py", *server]
    train, export = calls["torchrun"]
    theirs, ours = trainer(train)
    config = configured(ours)
    check_agreement(ours, [served(server)] * len(config.rollout.servers))
    assert config.cluster.gpus == int(theirs["--nnodes"]) * int(theirs["--nproc-per-node"])
    assert f"http://{served(server).host}:{served(server).port}" == config.rollout.servers[0]
    assert doctor[:3] == ["doctor", "--config", str(ours.config)] and set(doctor[3:]) < set(ours.overrides)
    assert export[0] == "--nproc-per-node" and int(export[1]) % least_ranks(config.parallel) == 0
    assert export[2:6] == ["-m", "--", "moe_rl", "export"] and f"--resume {config.run.runs_dir}/RUN" in script
