"""Starts, watches and kills a training run as a tree of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from moe_rl.errors import MoeRLError
from moe_rl.parent import torchrun
from moe_rl.report.lines import read_rows
from moe_rl.train.peers import connect

ROOT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.01


def python_path(*folders: Path) -> dict[str, str]:
    """Return PYTHONPATH for a child process: these folders, then the repository, then what this process was given."""
    given = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), str(ROOT), *filter(None, [given])])}


class RunEnded(MoeRLError):
    """Reports that a run ended unexpectedly, or did not end in time. Carries the end of its output."""


class Launch:
    """Runs `tools/train_moe_rl.py` once under torchrun, in a session of its own. Output goes into `runs_dir`. It ends
    with the thread that started it.

    script: another script to start instead.
    """

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
        own |= python_path() | {"OMP_NUM_THREADS": "1"} | (environment or {})
        self._store, self._signs = None, {}
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                [*torchrun(ranks), script, *map(str, arguments)],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=own,
            )

    def wait(self, timeout: float = 600) -> int:
        """Wait for the end and return torchrun's exit status. After the timeout, end the run and raise RunEnded."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RunEnded(f"the run took longer than {timeout:g} s:\n{self.text()[-4000:]}") from None

    def text(self) -> str:
        return self.output.read_text()

    @property
    def folder(self) -> Path | None:
        """Return the newest run folder. It belongs to this launch as soon as the launch has one."""
        folders = sorted(p for p in self.runs_dir.iterdir() if p.is_dir() and (p / "config.yaml").is_file())
        return folders[-1] if folders else None

    def until(self, condition: Callable[[], object], timeout: float = 300) -> object:
        """Wait until condition() is true and return its value. Raises RunEnded if the run ends or time runs out."""
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
        """Return the last sign of life of a running rank, or None before the first."""
        sign = self.last_sign(rank)
        return sign if sign and running(sign["pid"]) else {}

    def last_sign(self, rank: int = 0) -> dict[str, object]:
        """Return the last sign of life of a rank of this launch, dead or alive. Works while torchrun lives."""
        with suppress(RuntimeError):  # raised when the store has ended
            if self._store is None and self.folder:
                self._store = next(
                    (connect(self.folder, e) for e in map(_environment, self.processes()) if "RANK" in e), None
                )
            if self._store is not None and self._store.check([str(rank)]):
                self._signs[rank] = json.loads(self._store.get(str(rank)) or "{}")
        return self._signs.get(rank, {})

    def rank_pid(self, rank: int) -> int:
        return self.until(lambda: self.sign(rank).get("pid"))

    def engine_pids(self) -> list[int]:
        return [pid for pid in self.processes() if b"moe_rl.vllm.child" in _command(pid)]

    def processes(self) -> list[int]:
        """Return the pids that still run of the run and everything it started, engine and verifiers included."""
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
    """Return the processes that have not ended after this number of seconds."""
    end = time.monotonic() + within
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    return left


def rows(folder: Path) -> list[dict[str, object]]:
    """Return metrics.jsonl without the values that differ between equal runs: times, throughput and memory."""
    found, _ = read_rows(folder / "metrics.jsonl")
    differing = ("time/", "throughput/", "memory/")
    return [{key: value for key, value in row.items() if not key.startswith(differing)} for row in found]


def _environment(pid: int) -> dict[str, str]:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
    return {}


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
