"""The folder of a run: what is in it, how it begins, how it is put back to a checkpoint.

config.yaml     resolved config           metrics.jsonl   one line a step       prompts.jsonl   the prompt ledger
trace/          routing-trace shards      sync/           weights in transit    checkpoints/    step-<n>
ranks/          signs of life             engine.log      the sampler's output  summary.json, report.html
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from moe_rl.config.load import dump_config, load_config
from moe_rl.config.schema import Config
from moe_rl.errors import ConfigError, describe


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
    def sync(self) -> Path:
        return self.path / "sync"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    @property
    def engine_log(self) -> Path:
        return self.path / "engine.log"


def create(config: Config) -> RunFolder:
    """A new folder `name-<time>` that no other run has, with the resolved config in it."""
    name = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        path = config.run.runs_dir / (name + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        folder = RunFolder(path)
        folder.config.write_text(dump_config(config))
        return folder
    raise ConfigError(describe("run.runs_dir: no free name for a run folder", where=str(config.run.runs_dir), got=name))


def reopen(path: Path) -> tuple[RunFolder, Config]:
    """The folder of an earlier run and the config it ran with. Raises ConfigError when it is none."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(
            describe(
                "--resume: this is no run folder",
                got=path,
                expected="a folder with config.yaml in it",
                do="give the run_dir that the run printed",
            )
        )
    return folder, load_config(folder.config)


def clear_transient(folder: RunFolder) -> None:
    """Remove what an earlier process of this run left behind and nobody may take for new."""
    for path in (folder.ranks, folder.sync):
        shutil.rmtree(path, ignore_errors=True)
