"""Runs the demo on two simulated hosts and kills a server, a host, and servers that may be lost.

    python tools/dev/two_hosts.py [--steps N] [--work DIR] [--json FILE] [a.b=c ...] [-- arguments of vLLM's server]

    host-a 10.77.0.1   server 0, ranks 0 and 1       shared: the run folder
    host-b 10.77.0.2   server 1, ranks 2 and 3       not shared: network, processes, /dev/shm, host name

The hosts are namespaces on this machine. Each has a vLLM server and two Megatron ranks; expert parallelism is 4 unless
parallel.* say otherwise. `--kill server` takes about four minutes on two shared cores, and all kills two to three times
that. Lines report what is going on, and whether each check holds.
Exit status: 0 if all checks hold, 1 if one does not, 2 with one message if the test could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repository root, to import `tools.dev`

from moe_rl.errors import ConfigError, MoeRLError
from moe_rl.trace import TraceStore
from tools.dev.hosts import INTERFACE, Host, connect, enter, wait_for
from tools.dev.runs import ROOT, rows

RANKS_PER_HOST = 2
ADDRESSES = {"host-a": "10.77.0.1", "host-b": "10.77.0.2"}
_PORT, _RENDEZVOUS = 8000, 29400
_START_SECONDS, _RUN_SECONDS = 900.0, 900.0
KILLS = ("server", "host", "spare")
_RAW = argparse.RawDescriptionHelpFormatter
# Print at once, even when stdout is a file.
_SAY = partial(print, flush=True)
_PROMPTS, _GROUP = 8, 4
SHORT = (
    f"rollout.prompts_per_step={_PROMPTS}",
    f"rollout.group_size={_GROUP}",
    "rollout.kv_cache_mib=64",
    "eval.prompts=8",
    "eval.every_steps=100",
    "checkpoint.every_steps=1",
    "replay.native_every=1",
    "run.peer_timeout_seconds=20",
)


@dataclass
class Ended:
    """Holds the outcome of a run. statuses: exit status of torchrun on each host. seconds: until the last one ended."""

    folder: Path | None
    statuses: list[int]
    seconds: float
    text: str


@dataclass
class Cluster:
    """Holds the two hosts, their servers and the runs on them. overrides: changes of the tiny config, for every run."""

    work: Path
    overrides: Sequence[str] = ()
    serve: Sequence[str] = ()
    hosts: list[Host] = field(default_factory=list)
    servers: list[subprocess.Popen] = field(default_factory=list)

    def __enter__(self) -> Cluster:
        self.plug_in()
        return self

    def __exit__(self, *exception) -> None:
        for host in self.hosts:
            host.kill()

    def plug_in(self) -> None:
        """Make the hosts and start their servers, also after a power cut."""
        for host in self.hosts:
            host.kill()
        names = self.work / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in ADDRESSES.items())]
        names.write_text("".join(f"{line}\n" for line in lines))
        self.hosts = [Host(name, address, names) for name, address in ADDRESSES.items()]
        connect(self.hosts)
        self.servers = [self._serve(number) for number in range(len(self.hosts))]
        self.await_servers()

    def mend(self) -> None:
        """Start the servers that do not run."""
        for number, server in enumerate(self.servers):
            if server.poll() is not None:
                self.servers[number] = self._serve(number)
        self.await_servers()

    def kill_server(self, number: int) -> None:
        """Kill the server and all of its workers at once."""
        for process in psutil.Process(self.servers[number].pid).children(recursive=True):
            process.kill()
        self.servers[number].wait()

    def samples(self, number: int) -> bool:
        """Tell from its log whether a server has begun a shard and not published it (for a dead server: when it
        died).
        """
        log = self._log(number).read_text(errors="replace").rpartition("serving on ")[2]  # since its last start
        return log.count('"POST /moe_rl/open ') > log.count('"POST /moe_rl/publish ')

    def address(self, number: int) -> str:
        return f"{self.hosts[number].address}:{_PORT}"

    def await_servers(self) -> None:
        ready = lambda: all(self._ready(number).exists() for number in range(len(self.hosts)))  # noqa: E731
        try:
            wait_for(ready, _START_SECONDS, "the servers", self.servers)
        except ConfigError as error:
            logs = "\n".join(self._log(number).read_text(errors="replace")[-2000:] for number in range(len(self.hosts)))
            raise ConfigError(f"{error}\n{logs}") from None

    def config(self) -> list[str]:
        urls = ",".join(f"http://{self.address(number)}" for number in range(len(self.hosts)))
        return [
            *SHORT,
            f"run.runs_dir={self.work / 'runs'}",
            f"rollout.servers=[{urls}]",
            f"rollout.token_file={self.work / 'token'}",
            *self.overrides,
        ]

    def run(self, *arguments: str, fault: Callable[[Sequence[subprocess.Popen]], None] | None = None) -> Ended:
        """Run torchrun on both hosts. fault: called with the two processes once the run has a checkpoint."""
        before = self._folders()
        logs = [self.work / f"train-{host.name}-{time.time_ns()}.log" for host in self.hosts]
        ranks = [
            host.start(self._torchrun(host, arguments), self._environment(), log, ROOT)
            for host, log in zip(self.hosts, logs, strict=True)
        ]
        folder = lambda: next(iter(sorted(self._folders() - before)), None)  # noqa: E731
        if fault is not None:
            saved = lambda: folder() and list(folder().glob("checkpoints/step-*"))  # noqa: E731
            wait_for(saved, _RUN_SECONDS, "a checkpoint", ranks)
            fault(ranks)
        began = time.monotonic()
        deadline = began + _RUN_SECONDS
        try:
            statuses = [process.wait(max(1.0, deadline - time.monotonic())) for process in ranks]
        finally:
            for process in ranks:
                with suppress(ProcessLookupError):
                    process.kill()
        text = "\n".join(log.read_text(errors="replace") for log in logs)
        return Ended(folder(), statuses, time.monotonic() - began, text)

    def _serve(self, number: int) -> subprocess.Popen:
        self._ready(number).unlink(missing_ok=True)
        host = self.hosts[number]
        command = [sys.executable, "tools/serve_vllm.py", "--config", "configs/tiny_moe_cpu.yaml", *self.config()]
        command += ["--host", host.address, "--port", str(_PORT), "--json", str(self._ready(number))]
        if self.serve:
            command += ["--", *self.serve]
        return host.start(command, self._environment(), self._log(number), ROOT)

    def _torchrun(self, host: Host, arguments: Sequence[str]) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", str(len(self.hosts)), "--nproc-per-node", str(RANKS_PER_HOST),
            "--rdzv-backend", "c10d", "--rdzv-id", "drill",
            "--rdzv-endpoint", f"{self.hosts[0].address}:{_RENDEZVOUS}", "--local-addr", host.address,
            "tools/train_moe_rl.py", *arguments,
        ]  # fmt: skip

    def _environment(self) -> Mapping[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TORCHELASTIC"))}
        return kept | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CACHE_ROOT": str(self.work / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
        }

    def _ready(self, number: int) -> Path:
        return self.work / f"server{number}.json"

    def _log(self, number: int) -> Path:
        return self.work / f"server{number}.log"

    def _folders(self) -> set[Path]:
        return {path.parent for path in (self.work / "runs").glob("*/config.yaml")}


class Drill:
    """Runs the cluster several times, first undisturbed, and collects the findings.

    Attributes:
        seen: findings by name.
        wrong: findings that should be different.
        say: called with each finding.
    """

    def __init__(self, cluster: Cluster, *, steps: int = 3, say: Callable[[str], None] = _SAY):
        self.seen: dict[str, object] = {}
        self.wrong: list[str] = []
        self._cluster, self._steps, self._say = cluster, steps, say
        self._begin = ["--config", "configs/tiny_moe_cpu.yaml", *cluster.config(), f"run.steps={steps}"]
        self._trained: list[dict] = []

    def left_alone(self) -> bool:
        """Make the undisturbed run that the others are compared with. Return False if it did not finish."""
        self._say("an undisturbed run over two hosts; its servers start first")
        run = self._cluster.run(*self._begin)
        self._check(run.statuses == [0, 0], f"torchrun ended with 0 on both hosts: {run.statuses}")
        if run.statuses != [0, 0]:
            self.seen["output"] = run.text[-8000:]
            return False
        trained = self._trained = train_rows(run.folder)
        shards = TraceStore(run.folder / "trace").shards()
        self._check_steps(trained)
        canaries = [row["sync/canary_abs_diff"] for row in trained]
        self._check(all(0 < worst < 0.3 for worst in canaries), "the worst server's canary is near the trainer's")
        last = f"step{self._steps:06d}"
        self._check({f"{last}-server0", f"{last}-server1"} <= set(shards), "both servers published shards")
        self.seen |= {
            "straight_seconds": run.seconds,
            "canary_abs_diff": canaries,
            "trace_bytes": [row["trace/bytes"] for row in trained],
            "shards": shards,
        }
        return True

    def resumed(self, what: str) -> None:
        """Kill a server or a host, which ends the run; restart it and resume the run, which must equal the first."""
        cluster = self._cluster
        fault, mend, named = {
            "server": (lambda _: cluster.kill_server(1), cluster.mend, cluster.address(1)),
            "host": (lambda _: cluster.hosts[1].kill(), cluster.plug_in, "on host-b"),
        }[what]
        cluster.mend()
        self._say(f"a {what} is killed")
        broken = cluster.run(*self._begin, fault=fault)
        mine = broken.statuses if what == "server" else broken.statuses[:1]
        self._check(all(mine), f"torchrun ended with an error where it could: {broken.statuses}")
        self._check(broken.seconds < 120, f"within {broken.seconds:.0f} s of the kill")
        self._check(f"{named}" in broken.text, f"the message names {named}")
        self._check("exitcode  : 3" in broken.text, "a rank ended with status 3")
        lost = [row["step"] for row in train_rows(broken.folder)]
        self._check(len(lost) < self._steps, f"the run was under way: steps {lost}")
        mend()
        again = cluster.run("--resume", str(broken.folder))
        self._check(again.statuses == [0, 0], f"resumed, it ended with 0: {again.statuses}")
        same = train_rows(broken.folder) == self._trained
        self._check(same, "each step once, and each metric equal, bit for bit, to the undisturbed run")
        self.seen |= {f"{what}_ended_seconds": broken.seconds, f"{what}_steps_before": lost, f"{what}_same": same}
        self._keep_output(broken.text + again.text)

    def spared(self, *, sampling: bool) -> None:
        """Kill a server that the run may lose, while it samples or not. The run must finish with the other server."""
        cluster, when = self._cluster, "samples" if sampling else "idles"

        def kill(ranks: Sequence[subprocess.Popen]) -> None:
            wait_for(lambda: cluster.samples(1) == sampling, _RUN_SECONDS, f"a server that {when}", ranks)
            cluster.kill_server(1)

        cluster.mend()
        self._say(f"a server that may be lost is killed while it {when}")
        more = ["rollout.max_lost_servers=1", f"replay.keep_shards={self._steps}"]
        run = cluster.run(*self._begin, *more, fault=kill)
        self._check(cluster.samples(1) == sampling, f"it was killed while it {when}")
        self._check(run.statuses == [0, 0], f"torchrun ended with 0 on both hosts: {run.statuses}")
        self._check("moe_rl: server 1 is no longer used" in run.text, "the log names server 1")
        self._check(cluster.address(1) in run.text, f"and its address, {cluster.address(1)}")
        trained = train_rows(run.folder)
        self._check_steps(trained)
        lost = [row["rollout/lost_servers"] for row in trained]
        before = lost.count(0)
        self._check(lost == [0] * before + [1] * (self._steps - before) and 0 < before < self._steps,
                    f"lost servers, step by step: {lost}")  # fmt: skip
        self._check(
            trained[:before] == self._trained[:before],
            "before the loss each metric is equal, bit for bit, to the undisturbed run",
        )
        shards = self._check_requests(run.folder, before)
        if sampling:
            again = f"step{before + 1:06d}-server0-again1"
            self._check(again in shards, f"its share was sampled again: {again}")
        name = f"spare_{when}"
        self.seen |= {f"{name}_lost": lost, f"{name}_shards": shards, f"{name}_seconds": run.seconds}
        self._keep_output(run.text)

    def _check_steps(self, trained: Sequence[dict]) -> None:
        steps = [row["step"] for row in trained]
        self._check(steps == list(range(1, self._steps + 1)), f"each step once: {steps}")
        self._check(all(row["routing/applied_mismatch"] == 0 for row in trained), "applied mismatch 0 in every step")
        self._check(all(row["routing/coverage"] == 1 for row in trained), "every token had a recorded route")
        versions = [row["rollout/weight_version"] for row in trained]
        self._check(versions == list(range(self._steps)), "every step sampled its own version")

    def _check_requests(self, folder: Path, before: int) -> list[str]:
        """Check that each request of each step is in exactly one shard. Return the names of all shards.

        Shards of server 1 after step `before` are ignored: it was lost in the next step, and nothing refers to them.
        """
        store = TraceStore(folder / "trace")
        shards = store.shards()
        whole = True
        for step in range(1, self._steps + 1):
            mine = [name for name in shards if name.startswith(f"step{step:06d}-")]
            used = [name for name in mine if step <= before or "-server1" not in name]
            keys = sorted(record.key for name in used for record in store.records(name))
            whole &= keys == sorted(f"s{step}/p{prompt}/c{one}" for prompt in range(_PROMPTS) for one in range(_GROUP))
        self._check(whole, "each completion of each step is in exactly one shard")
        return shards

    def _check(self, holds: bool, what: str) -> None:
        self._say(f"  {'yes' if holds else 'NO '}  {what}")
        if not holds:
            self.wrong.append(what)

    def _keep_output(self, text: str) -> None:
        if self.wrong:
            self.seen.setdefault("output", text[-8000:])


def drill(cluster: Cluster, *, steps: int = 3, kills: Sequence[str] = KILLS) -> dict[str, object]:
    """Make an undisturbed run, then a run for each of `kills`. Return the findings by name; `wrong` lists the failed
    checks.
    """
    drill = Drill(cluster, steps=steps)
    if drill.left_alone():
        for what in kills:
            if what == "spare":
                drill.spared(sampling=True)
                drill.spared(sampling=False)
            else:
                drill.resumed(what)
    return drill.seen | {"wrong": drill.wrong}


def train_rows(folder: Path) -> list[dict]:
    """Return the training lines of metrics.jsonl without the values that differ between equal runs."""
    return [row for row in rows(folder) if row["kind"] == "train"] if (folder / "metrics.jsonl").exists() else []


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_RAW, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="overrides of configs/tiny_moe_cpu.yaml")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps of each run (default: 3)")
    parser.add_argument("--kill", action="append", choices=KILLS, help="make only this kill; may be repeated")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep runs and logs in this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to this file")
    options = parser.parse_args(argv[:cut])
    try:
        enter([__file__, *argv])
        with tempfile.TemporaryDirectory() as scratch:
            work = (options.work or Path(scratch)).absolute()
            work.mkdir(parents=True, exist_ok=True)
            overrides = ["parallel.expert=4", *options.overrides]
            with Cluster(work, overrides, argv[cut + 1 :]) as cluster:
                result = drill(cluster, steps=options.steps, kills=options.kill or KILLS)
    except (MoeRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if result["wrong"]:
        print(result.get("output", ""), file=sys.stderr)
    print(f"{len(result['wrong'])} wrong" if result["wrong"] else "all checks hold")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
