"""A training run as a tree of processes, started, watched and killed from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from moe_rl.errors import MoeRLError
from moe_rl.train.peers import connect

ROOT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.01


class RunEnded(MoeRLError):
    """A run ended, or did not, against what was waited for. Carries the end of its output."""


class Launch:
    """One start of `tools/train_moe_rl.py` under torchrun, in a session of its own. Output goes into `runs_dir`.

    script: what is started instead."""

    def __init__(
        self,
        runs_dir: Path,
        *arguments: object,
        ranks: int = 2,
        environment: dict[str, str] | None = None,
        script: str = "tools/train_moe_rl.py",
    ):
        self.runs_dir = Path(runs_dir)
        self.output = self.runs_dir / f"output-{len(list(self.runs_dir.glob('output-*')))}"
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TORCHELASTIC"))}
        own |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (environment or {})
        self._store, self._signs = None, {}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                [*command, script, *map(str, arguments)],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=own,
            )

    def wait(self, timeout: float = 600) -> int:
        """torchrun's exit status. Raises RunEnded, and ends the run, when it takes longer."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RunEnded(f"the run took longer than {timeout:g} s:\n{self.text()[-4000:]}") from None

    def text(self) -> str:
        return self.output.read_text()

    @property
    def folder(self) -> Path | None:
        """The newest run folder; of this launch, unless it has none yet."""
        folders = sorted(p for p in self.runs_dir.iterdir() if p.is_dir() and (p / "config.yaml").is_file())
        return folders[-1] if folders else None

    def until(self, condition: Callable[[], object], timeout: float = 300) -> object:
        """Wait until condition() is true while the run is alive; its value. Raises RunEnded otherwise."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            if self.process.poll() is not None:
                raise RunEnded(f"the run ended early:\n{self.text()[-4000:]}")
            time.sleep(_POLL_SECONDS)
        self.kill()
        raise RunEnded(f"waited {timeout:g} s in vain:\n{self.text()[-4000:]}")

    def sign(self, rank: int = 0) -> dict[str, object]:
        """What a living rank says of itself; nothing before it is there."""
        sign = self.last_sign(rank)
        return sign if sign and running(sign["pid"]) else {}

    def last_sign(self, rank: int = 0) -> dict[str, object]:
        """What a rank of this launch last said of itself, dead or alive. It is asked for while torchrun lives."""
        with suppress(RuntimeError):  # of a store that is gone
            if self._store is None and self.folder:
                self._store = next(
                    (connect(self.folder, e) for e in map(_environment, self.processes()) if "RANK" in e), None
                )
            if self._store is not None and self._store.check([str(rank)]):
                self._signs[rank] = json.loads(self._store.get(str(rank)) or "{}")
        return self._signs.get(rank, {})

    def rank_pid(self, rank: int) -> int:
        return self.until(lambda: self.sign(rank).get("pid"))

    def engine_pid(self) -> int | None:
        return next((pid for pid in self.processes() if b"moe_rl.vllm.child" in _command(pid)), None)

    def processes(self) -> list[int]:
        """Pids of the run and of everything it started, engine and verifiers included, that still run."""
        mine, found, parents = str(self.process.pid), [], {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[stat.parent.name] = fields[1]
        for pid in parents:
            ancestor = pid
            while ancestor in parents and ancestor != mine:
                ancestor = parents[ancestor]
            if ancestor == mine:
                found.append(int(pid))
        return found

    def kill(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def still_running(pids: list[int], within: float) -> list[int]:
    """Those of the processes that have not ended so many seconds from now."""
    end = time.monotonic() + within
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    return left


def rows(folder: Path) -> list[dict[str, object]]:
    """metrics.jsonl without what may differ between equal runs: times and throughput."""
    kept = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kept.append({k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))})
    return kept


def _environment(pid: int) -> dict[str, str]:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
    return {}


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
