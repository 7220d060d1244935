"""Follows docs/howto/cluster.md line by line on two simulated hosts: both sample, and both train with two ranks.

The lines are those of the page. Only what a reader must change is changed: paths, addresses, numbers of nodes and GPUs,
and the config.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree

import psutil
import pytest
import yaml

from moe_rl.report.lines import read_rows
from tools.dev.hosts import Host, connect, enter, wait_for
from tools.dev.runs import ROOT
from tools.dev.two_hosts import ADDRESSES

PAGE = ROOT / "docs/howto/cluster.md"
SECONDS = 900.0
PARTS = ("plan", "once", "doctor", "serve", "train", "resume")


def parts() -> dict[str, str]:
    """Return the commands of the page's first block of shell, by what they do."""
    block = re.search(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    return dict(zip(PARTS, block.rstrip().split("\n\n"), strict=True))


def changed(text: str, changes: dict[str, str]) -> str:
    """Return a command as a reader changes it."""
    for old, new in changes.items():
        assert old in text, f"the page has no {old!r}"
        text = text.replace(old, new)
    return text


class Reader:
    """Follows the page. Each method runs commands that it has, and says so."""

    def __init__(self, work: Path):
        self.parts, self.shared, self.work = parts(), work / "shared", work
        names = work / "names"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items()))
        self.hosts = [Host(name, address, names) for name, address in ADDRESSES.items()]
        connect(self.hosts)

    def follow(self) -> None:
        self._lay_out()
        self._run("plan", self.hosts[0], self.parts["plan"])
        once = changed(self.parts["once"], {"/shared/": f"{self.shared}/"})
        self._run("once", self.hosts[0], once)
        ours = re.search(r'OURS=".*?"', once, re.DOTALL).group() + "\n"
        mine = {"configs/qwen3_30b_a3b.yaml": str(self.shared / "config.yaml")}
        for host in self.hosts:
            name = f"doctor-{host.name}"
            self._run(name, host, ours + changed(self.parts["doctor"], mine), ends=2)
            assert "missing: cluster.gpus_per_node: " in self._text(name) and "\n1 missing" in self._text(name)
        servers = []
        for host in self.hosts:
            serve = changed(self.parts["serve"], mine | {"--host 10.0.0.5 ": f"--host {host.address} "})
            servers.append(self._begin(f"serve-{host.name}", host, ours + serve))
        serving = lambda: all("serving on" in self._text(f"serve-{host.name}") for host in self.hosts)  # noqa: E731
        wait_for(serving, SECONDS, "the servers", servers)
        begin = changed(self.parts["train"], mine)
        ranks = [self._begin(f"train-{host.name}", host, ours + self._train(begin, host)) for host in self.hosts]
        wait_for(lambda: [*self.shared.glob("run1/*/checkpoints/step-*")], SECONDS, "a checkpoint", ranks)
        os.kill(_torchrun(ranks[1]), signal.SIGKILL)  # its ranks end with it
        statuses = [process.wait(SECONDS) for process in ranks]
        assert all(statuses), f"a run without host-b's ranks ended with {statuses}"
        (run,) = self.shared.glob("run1/*/config.yaml")
        assert "the same with --resume /shared/run1/RUN in place of --config and $OURS" in self.parts["resume"]
        again = changed(begin, {f"--config {self.shared}/config.yaml $OURS": f"--resume {run.parent}"})
        ranks = [self._begin(f"resume-{host.name}", host, self._train(again, host)) for host in self.hosts]
        statuses = [process.wait(SECONDS) for process in ranks]
        assert statuses == [0, 0], statuses
        export = {"--nproc-per-node 8": "--nproc-per-node 2", "/shared/run1/RUN": str(run.parent)}
        export |= {"--out /shared": f"--out {self.shared}"}
        self._run("export", self.hosts[0], changed(self.parts["resume"], export))

    def _lay_out(self) -> None:
        """Make what the page takes for granted: checkpoint, prompts, and a config of the demo with fewer steps."""
        (self.shared / "math").mkdir(parents=True)
        copytree(ROOT / "assets/tiny_moe/policy", self.shared / "Qwen3-30B-A3B")
        for name in ("train.jsonl", "heldout.jsonl"):
            (self.shared / "math" / name).write_bytes((ROOT / "assets/tiny_moe/task" / name).read_bytes())
        config = yaml.safe_load((ROOT / "configs/tiny_moe_cpu.yaml").read_text())
        config["run"] |= {"steps": 4, "peer_timeout_seconds": 20}
        config["rollout"] |= {"prompts_per_step": 8, "group_size": 4, "kv_cache_mib": 64, "in_flight": 8}
        config["cluster"] = {"gpus": 4, "gpu_memory_gib": 79, "engines": 2, "gpus_per_engine": 1}
        config["checkpoint"] = {"every_steps": 1}
        config["eval"] = {"prompts": 8}
        (self.shared / "config.yaml").write_text(yaml.safe_dump(config))

    def _train(self, text: str, host: Host) -> str:
        """Return a command of "train" as it is typed on this host."""
        sampling = re.search(r"printf 'http://10\.0\.0\.%d:%d,' [\d ]+", text).group()
        return changed(
            text,
            {
                "--nnodes 4 --nproc-per-node 8": "--nnodes 2 --nproc-per-node 2",
                "--rdzv-endpoint 10.0.0.1": f"--rdzv-endpoint {ADDRESSES['host-a']}",
                "--local-addr 10.0.0.1": f"--local-addr {host.address}",
                sampling: "printf 'http://10.77.0.%d:%d,' 1 8000 2 8000",
            },
        )

    def _begin(self, name: str, host: Host, text: str) -> subprocess.Popen:
        print(f"{time.strftime('%H:%M:%S')} {name}\n{text}", flush=True)
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CACHE_ROOT": str(self.work / "cache"), "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        return host.start(["bash", "-euo", "pipefail", "-c", text], environment, self._log(name), ROOT)

    def _run(self, name: str, host: Host, text: str, *, ends: int = 0) -> None:
        status = self._begin(name, host, text).wait(SECONDS)
        assert status == ends, f"{name} ended with {status}:\n{self._text(name)[-4000:]}"

    def _text(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")

    def _log(self, name: str) -> Path:
        return self.work / f"{name}.log"


def _torchrun(shell: subprocess.Popen) -> int:
    """Return the pid of the torchrun that a command started."""
    children = psutil.Process(shell.pid).children(recursive=True)
    return next(child.pid for child in children if any("torchrun" in word for word in child.cmdline()))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_page_works_line_by_line_on_two_hosts(tmp_path):
    done = subprocess.run([sys.executable, "-m", "tests.tools.test_cluster_page", str(tmp_path)], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    if "Hosts cannot be made here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (run,) = (tmp_path / "shared/run1").glob("*/config.yaml")
    rows, _ = read_rows(run.parent / "metrics.jsonl")
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    assert all(row["routing/applied_mismatch"] == 0 and row["routing/coverage"] == 1 for row in trained)
    assert (run.parent / "report.html").exists()
    exported = json.loads((tmp_path / "shared/qwen3-30b-a3b-rl/config.json").read_text())
    assert exported["model_type"] == "qwen3_moe"


if __name__ == "__main__":
    enter(["-m", "tests.tools.test_cluster_page", *sys.argv[1:]])
    reader = Reader(Path(sys.argv[1]))
    try:
        reader.follow()
    finally:
        for host in reader.hosts:
            host.kill()
