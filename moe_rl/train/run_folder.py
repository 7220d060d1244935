"""The folder of a run: what is in it, how it begins, how it is put back to a checkpoint.

config.yaml     resolved config           metrics.jsonl   one line a step       prompts.jsonl   the prompt ledger
trace/          routing-trace shards      sync/           weights in transit    checkpoints/    step-<n>
rollouts/       what steps learned from   engine.log      the sampler's output
summary.json, report.html                 run.lock        held by every rank while it lives, says where rank 0 is

A step's shard and its rollout file are kept together: of the last `replay.keep_shards` steps; of the step after each
kept checkpoint, which was sampled from that checkpoint's weights; and of step 1, sampled from the initial model. So
there are always weights whose own rollouts can be scored again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe_rl import checkpoint_folder
from moe_rl.config.load import dump_config, load_config
from moe_rl.config.schema import Config
from moe_rl.disk import refusal, write_whole
from moe_rl.errors import ConfigError, DiskError, describe

# What a resumed run may have otherwise: which ranks train, and where its samplers are.
_MAY_CHANGE = ("parallel.", "rollout.servers=", "rollout.token_file=")
# Ranks whose peers died end within a second or two.
_STILL_ENDING = 10.0


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def trace(self) -> Path:
        return self.path / "trace"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def sync(self) -> Path:
        return self.path / "sync"

    @property
    def checkpoints(self) -> Path:
        return self.path / checkpoint_folder.FOLDER

    @property
    def engine_log(self) -> Path:
        return self.path / "engine.log"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"


def create(config: Config) -> RunFolder:
    """A new folder `name-<time>` that no other run has, with the resolved config in it."""
    name = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        path = config.run.runs_dir / (name + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise DiskError(refusal(error, "the run's folder could not be made", path)) from error
        folder = RunFolder(path)
        _write_config(folder, config)
        return folder
    raise ConfigError(describe("run.runs_dir: no free name for a run folder", where=str(config.run.runs_dir), got=name))


def reopen(path: Path, overrides: Sequence[str] = ()) -> tuple[RunFolder, Config]:
    """The folder of an earlier run and the config to go on with: the one it ran with, and overrides of `parallel.*` and
    of where the servers are.

    Raises ConfigError when it is no run folder, and for any other override: it would be another run.
    """
    others = [text for text in overrides if not text.startswith(_MAY_CHANGE)]
    if others:
        raise ConfigError(
            describe(
                "--resume continues a run as it was",
                got=" ".join(others),
                expected="overrides of parallel.*, rollout.servers and rollout.token_file at most",
                do="start a new run to change the config",
            )
        )
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(
            describe(
                "--resume, --run: this is no run folder",
                got=path,
                expected="a folder with config.yaml in it",
                do="give the run_dir that the run printed",
            )
        )
    return folder, load_config(folder.config, overrides)


@contextmanager
def held(folder: RunFolder, *, first: bool) -> Iterator[None]:
    """Every rank of a run holds its folder for as long as it lives; the kernel lets go of it for a process that is
    killed. first: of the ranks, rank 0, before any other: waits for what is left of an earlier process to end.

    Raises ConfigError when the run is still going: two would write into one folder.
    """
    with folder.lock.open("a+") as file:
        deadline = time.monotonic() + _STILL_ENDING
        while first:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise ConfigError(
                        describe(
                            "the run is still going",
                            where=str(folder.path),
                            got=f"ranks that hold its run.lock; {file.read() or 'rank 0 has not been there'}",
                            do="wait until it has ended, or end it",
                        )
                    ) from None
            time.sleep(0.1)
        if first:
            file.truncate(0)
            file.write(f"rank 0 is or was pid {os.getpid()} on {socket.gethostname()}")
            file.flush()
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def take_over(folder: RunFolder, config: Config) -> RunFolder:
    """Go on in the folder of an earlier process: it says what runs from now on, and holds nothing of what ran then that
    could be taken for new."""
    shutil.rmtree(folder.sync, ignore_errors=True)
    _write_config(folder, config)
    return folder


def _write_config(folder: RunFolder, config: Config) -> None:
    """Whole, also after a power cut: without it no checkpoint is of use."""
    write_whole(folder.config, dump_config(config), "the run's config")
