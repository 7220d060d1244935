"""Defines the folder of a run: its contents, how it is created, and how it is reopened.

config.yaml     resolved, absolute paths  metrics.jsonl   one line a step       prompts.jsonl   the prompt ledger
trace/          routing-trace shards      sync/           weights in transit    checkpoints/    step-<n>
rollouts/       what steps trained on     engine.log      the sampler's output
samples.jsonl   some sequences a step     history.jsonl   each start of the run export/         step-<n>
timeline.jsonl  who worked when           groups/         groups that no step has taken yet
pool.log        the output of the pool that samples while the ranks train
trackers/       what each tracker has received, and its log
inputs.jsonl    digests of what the run reads
evidence/       what a check that ended the run was about, for `moe-rl explain`
profiles/       what report.profile recorded of steps
summary.json, report.html                 run.lock        locked by every rank while it runs; says where rank 0 is

A step's trace shards and its rollout file are kept or deleted together. The run keeps those of the last
`replay.keep_shards` steps, of the step after each kept checkpoint (sampled with that checkpoint's weights), and of step
1 (sampled with the initial model). So there are always weights whose own rollouts can be scored again.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from moe_rl import checkpoint_folder
from moe_rl.config.load import anchored, config_of, dump_config, load_config
from moe_rl.config.schema import Config
from moe_rl.config.training import TrainConfig
from moe_rl.disk import refusal, write_whole
from moe_rl.errors import About, ConfigError, DiskError, MoeRLError, Problem, describe
from moe_rl.models.hf import expected_tensors, read_model
from moe_rl.report import history, run_config, summary

# Keys that a resumed run may change. A name with a dot at its end stands for all keys of the section.
MAY_CHANGE = (
    "model.path",  # its content may not change: see `run_inputs`
    "parallel.",
    "cluster.",
    "rollout.engines",
    "rollout.in_flight",
    "rollout.servers",
    "rollout.token_file",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_lost_servers",
    "rollout.startup_timeout_seconds",
    "train.microbatch_tokens",
    "train.optimizer.lr",
    "train.optimizer.schedule",
    "train.optimizer.warmup_steps",
    "train.optimizer.decay_steps",
    "train.optimizer.min_lr",
    "run.steps",
    "run.max_hours",
    "run.peer_timeout_seconds",
    "run.hang_seconds",
    "task.heldout",
    "task.max_failed_fraction",
    "task.verifier_timeout_seconds",
    "eval.",
    "guards.",
    "checkpoint.",
    "export.",
    "report.",
)
# Seconds to wait for the ranks of an earlier process. Ranks whose peers died end within a second or two.
_STILL_ENDING = 10.0


class RunFolder:
    """Holds the paths of everything in a run folder."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / run_config.FILE
        self.summary = path / summary.FILE
        self.checkpoints = path / checkpoint_folder.FOLDER
        self.exports = path / "export"
        self.trace = path / "trace"
        self.rollouts = path / "rollouts"
        self.sync = path / "sync"
        self.profiles = path / "profiles"
        self.lock = path / "run.lock"


def create(config: Config) -> RunFolder:
    """Create a new folder `name-<time>` under `run.runs_dir`, and write the resolved config into it."""
    name = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        path = config.run.runs_dir / (name + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise DiskError(refusal(error, "the run folder could not be created", path)) from error
        folder = RunFolder(path)
        _write_config(folder, anchored(_with_start(config)))
        return folder
    raise ConfigError(
        "no free name for a run folder", where={"key": "run.runs_dir", "folder": config.run.runs_dir}, got=name
    )


def existing(path: Path, option: str) -> RunFolder:
    """Return the folder of an existing run. option: the option that named it. Raises ConfigError if `path` is not a run
    folder."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(
            "not a run folder" if path.is_dir() else "there is no such folder",
            where={"option": option, "folder": path},
            expected="a folder with config.yaml in it",
            do="give the run folder that the run printed",
        )
    return folder


def reopen(
    path: Path, overrides: Sequence[str] = (), may_change: Sequence[str] = MAY_CHANGE
) -> tuple[RunFolder, Config]:
    """Open the folder of an earlier run, and load the config that it ran with.

    Args:
        overrides: Config overrides.
        may_change: Keys that the overrides may change, and sections, which end with a dot.

    Raises:
        ConfigError: `path` is not a run folder, or another key is changed: that would be a different run.
    """
    folder = existing(path, "--resume, --run")
    before, config = anchored(load_config(folder.config)), anchored(load_config(folder.config, overrides))
    where: About = {"option": "--resume, --run", "folder": path}
    if wrong := edited(folder, where) or change_problem(before, config, may_change, where):
        raise ConfigError(wrong)
    return folder, config


def edited(folder: RunFolder, where: About) -> Problem | None:
    """Say which keys of a run's config.yaml differ from every recorded start of the run: somebody edited the file."""
    known, now = [], run_config.flat(load_config(folder.config).model_dump(mode="json"))
    for start in history.read_history(folder.path):
        with suppress(ConfigError):  # it has a key that this version lacks
            if start.config:  # keys that an earlier version lacked have their defaults, as they have in `now`
                known.append(run_config.flat(config_of(start.config, {}).model_dump(mode="json")))
    if not known or now in known:
        return None
    others = run_config.differing([known[-1], now])
    return describe(
        "the config of a run was changed by hand",
        where={**where, "file": folder.config},
        got=", ".join(f"{key} = {new}" for key, (_, new) in others),
        expected=", ".join(f"{key} = {old}" for key, (old, _) in others) + ", as the run had it",
        do="put these values back; make changes with overrides, key=value",
        fault="edited",
    )


def _with_start(config: Config) -> Config:
    """Set model.from_step to the step of the checkpoint of model.from_run that it selects now: the best or the
    newest."""
    model = config.model
    if model.from_run is None:
        return config
    step = checkpoint_folder.step_of(checkpoint_folder.find(model.from_run / checkpoint_folder.FOLDER, model.from_step))
    return config.model_copy(update={"model": model.model_copy(update={"from_step": step})})


def with_date(config: Config) -> Config:
    """Set run.date to today if prompts depend on the day: a run that goes on tomorrow must read the same ones.

    A new run needs it before its prompts are read: those that are kept beside a file are of one day.
    """
    model = config.model.path
    templates = [file for file in (model / "tokenizer_config.json", *model.glob("*.jinja")) if file.is_file()]
    writes = any("strftime_now" in file.read_text("utf-8", "replace") for file in templates)
    if config.run.date is not None or not writes:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"date": datetime.date.today()})})


def start_problems(config: Config) -> list[Problem]:
    """Say what is wrong with the folder that model.from_run names: it is not a run, lacks the checkpoint, or does not
    fit."""
    start = config.model
    if start.from_run is None:
        return []
    where: About = {"key": "model.from_run", "folder": start.from_run}
    try:
        start_config = load_config(RunFolder(start.from_run).config)
        checkpoint_folder.find(start.from_run / checkpoint_folder.FOLDER, start.from_step)
    except MoeRLError as error:
        return [describe(str(error), where=where, expected="a run folder with this checkpoint")]
    problems = []
    with suppress(ConfigError):  # a model that is gone: then loading the checkpoint shows what differs
        tensors, expected = (expected_tensors(read_model(settings.model.path)) for settings in (start_config, config))
        if wrong := [name for name in {**tensors, **expected} if tensors.get(name) != expected.get(name)]:
            problems.append(
                describe(
                    "that run trained another model",
                    where=where,
                    got=f"{wrong[0]} {tensors.get(wrong[0])}, and {len(wrong) - 1} other tensors that differ",
                    expected=f"the tensors of {start.path}",
                )
            )
    if start.from_optimizer:
        their, our = _optimizer_form(start_config.train), _optimizer_form(config.train)
        problems += [
            describe(
                "the optimizer of that run has another form",
                where={"key": f"train.{key}", "given": "model.from_optimizer is true"},
                got=our[key],
                expected=f"{form}, as in {start.from_run}",
                do="set it as config.yaml in that folder has it",
            )
            for key, form in their.items()
            if our[key] != form
        ]
    return problems


def _optimizer_form(train: TrainConfig) -> dict[str, object]:
    """Return the form in which a checkpoint holds the optimizer's state, by the key of `train` that decides it."""
    passed = train.megatron_optimizer
    on_gpu = passed.get("use_precision_aware_optimizer") and not passed.get("optimizer_cpu_offload")
    remainders = on_gpu and passed.get("store_param_remainders", True)
    return {
        "dtype": train.dtype,
        "distributed_optimizer": train.distributed_optimizer,
        "megatron_optimizer": "main weights of 16 bits" if remainders else "main weights of 32 bits",
    }


def changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return (old, new) value of each key that differs, by dotted key. A key that one of them lacks has None there."""
    flattened = [run_config.flat(config.model_dump(mode="json")) for config in (old, new)]
    return {key: (before, after) for key, (before, after) in run_config.differing(flattened)}


def change_problem(old: Config, new: Config, may_change: Sequence[str], where: About) -> Problem | None:
    """Say which keys differ although they may not. may_change: keys, and sections, which end with a dot."""
    others = {
        key: values
        for key, values in changes(old, new).items()
        if not any(key == name or (name.endswith(".") and key.startswith(name)) for name in may_change)
        and not (key == "task.train" and _only_moved(*values))
    }
    if not others:
        return None
    listed = ", ".join(f"{key}*" if key.endswith(".") else key for key in may_change)
    return describe(
        "an existing run cannot change this part of its config",
        where=where,
        got=", ".join(f"{key} = {new} (was {old})" for key, (old, new) in others.items()),
        expected=f"only changes of {listed}",
        do="start a new run to change the rest",
    )


def _only_moved(*sources: Sequence[dict[str, Any]]) -> bool:
    """Return whether lists of prompt sources differ only in their paths. `run_inputs` compares the content."""
    before, after = ([{**source, "data": ""} for source in several] for several in sources)
    return before == after


@contextmanager
def held(folder: RunFolder, *, first: bool) -> Iterator[None]:
    """Lock the run folder until the context ends. Every rank holds a lock; the kernel releases it if the process is
    killed.

    Args:
        first: True for rank 0, which locks before the others and waits for the ranks of an earlier process to end.

    Raises:
        ConfigError: The run is still going. Two processes must not write into one folder.
    """
    with folder.lock.open("a+") as file:
        deadline = time.monotonic() + _STILL_ENDING
        while first and not _locked(file):
            if time.monotonic() > deadline:
                file.seek(0)
                raise ConfigError(
                    "the run is still going",
                    where={"folder": folder.path},
                    got=f"a locked run.lock; {file.read() or 'rank 0 has not written to it yet'}",
                    do="wait until the run ends, or stop it",
                )
            time.sleep(0.1)
        if first:
            file.truncate(0)
            file.write(f"rank 0 is or was pid {os.getpid()} on {socket.gethostname()}")
            file.flush()
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def goes_on(folder: RunFolder) -> bool:
    """Return whether a rank of the run is still alive. Needs write permission for run.lock, and changes nothing."""
    with suppress(FileNotFoundError, PermissionError), folder.lock.open("r+") as file:
        return not _locked(file)
    return False


def _locked(file: TextIO) -> bool:
    """Lock a file exclusively; return whether that was possible."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_over(folder: RunFolder, config: Config) -> None:
    """Prepare the folder of an earlier process: write the new config, and delete weights that were in transit and the
    summary, which is written again at the end."""
    shutil.rmtree(folder.sync, ignore_errors=True)
    folder.summary.unlink(missing_ok=True)
    _write_config(folder, config)


def _write_config(folder: RunFolder, config: Config) -> None:
    """Write the config atomically, safe against a power cut: without it no checkpoint can be used."""
    write_whole(folder.config, dump_config(config), "the run's config")
