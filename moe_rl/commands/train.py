"""Implements `moe-rl train` and `moe-rl plan`: asks start_checks.py for every problem, then plans, starts or trains."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.commands import launch
from moe_rl.commands.diagnosis import tracker_problems
from moe_rl.commands.start_checks import (
    checkpoint_problems,
    every_problem,
    inputs_and_changes,
    model_to_plan,
    read_task,
)
from moe_rl.config.check import refuse
from moe_rl.config.check_cluster import several_nodes
from moe_rl.config.layout import least_ranks
from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.disk import check_writable, write_json, write_whole
from moe_rl.errors import CollapseError, ConfigError, MoeRLError, SamplerGone, Stopped, TraceError
from moe_rl.models.weight_files import notes
from moe_rl.planning.cluster_plan import disk_problems, make_plan, memory_problems, transfer_problems
from moe_rl.planning.peaks import limit_problem, peaks
from moe_rl.planning.peaks import render as render_peaks
from moe_rl.planning.plan_table import render
from moe_rl.planning.sampler_memory import record_problems
from moe_rl.planning.side_balance import Speeds, side_balance
from moe_rl.report.side_speeds import measured_speeds, read_speeds
from moe_rl.train import run_folder
from moe_rl.train.hangs import tell
from moe_rl.train.peers import STOPPED
from moe_rl.train.replayed_run import replay_problems
from moe_rl.train.run_folder import RunFolder

LOST, COLLAPSED = 3, 4
# In messages of CUDA and NCCL about a mistake, which would come again.
_MISTAKES = ("device-side assert", "invalid usage", "invalid argument", "Duplicate GPU")
_EPILOG = """
Exit status of a rank: 0 done; 1 an unexpected error; 2 an error with an explanation; 3 another rank, torchrun or the
sampler is gone, or a GPU or the network between ranks failed; 4 the run has collapsed (see guards.*) and was ended with
a checkpoint and a report; 5 it was asked to stop (SIGTERM) or run.max_hours was used, and it ended after a step:
continue it with --resume. --ranks exits with the status of the rank that ended first. torchrun reports it as exitcode,
and itself exits with 1.
"""

# A rank that torchrun has not ended after this time prints its own error.
_FIRST_TELLS_SECONDS = 20.0
_RANKS_OF_A_CORE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options and the exit status of a run."""
    parser.description, parser.epilog = "Train a mixture-of-experts policy by RL with routing replay.", _EPILOG
    _add_options(parser, plan=False)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan, which is a run with --plan."""
    parser.description = (
        "Print every derived number of a run and every problem. No rank and no sampler is started. The prompts are "
        "read, and the rewards are tried on some of them in a separate process."
    )
    parser.epilog = "Exit status: 0 if there is no problem, else 2."
    _add_options(parser, plan=True)
    parser.set_defaults(plan=True, step=None)


def _add_options(parser: argparse.ArgumentParser, *, plan: bool) -> None:
    where = "" if plan else "with --plan: "
    ranks = "number of ranks to plan for (default: cluster.gpus, else the smallest number that works)"
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="config of a new run: a file or a shipped name")
    source.add_argument("--resume", type=Path, metavar="RUN_DIR", help="continue a run from its newest checkpoint")
    source.add_argument(
        "--replay",
        type=Path,
        metavar="RUN_DIR",
        help="begin a new run that trains on the rollouts that this run has kept, without a sampler",
    )
    if not plan:
        ranks = f"start this many ranks on this machine (default: torchrun has started them); {where}plan for this many"
        parser.add_argument(
            "--step",
            type=checkpoints.step_argument,
            metavar="N",
            help="with --resume: continue from the checkpoint after this many steps, or from the best one (best), and "
            "move newer ones aside; 0: start again",
        )
        parser.add_argument(
            "--plan", action="store_true", help="print every derived number and every problem; train nothing"
        )
    parser.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="INPUT",
        help="with --resume or --replay: continue although this input has changed, such as model or train/NAME; may be "
        "repeated",
    )
    parser.add_argument(
        "--trace", metavar="STORE", help=f"{where}show the peak row counts that the batches of this trace store need"
    )
    parser.add_argument(
        "--speeds",
        metavar="SAMPLED,TRAINED|RUN_DIR",
        help=f"{where}show how many samplers keep the trainers busy: completion tokens a second of one GPU that "
        "samples and of one that trains, or a run that has measured them (default with --resume: that run)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result (plan or summary) to this file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="a.b=c",
        help="replace single values of the config (with --resume: those that docs/howto/steer.md lists; with --replay: "
        "those that docs/howto/checkpoints.md lists)",
    )
    parser.add_argument("--ranks", type=_number_of_ranks, metavar="N", help=ranks)


def _number_of_ranks(value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise argparse.ArgumentTypeError(f"got {value}, expected a number of ranks, 1 or more")
    return int(value)


def run(options: argparse.Namespace) -> int:
    """Check everything, then plan, start ranks, or train as one of them.

    Return the exit status of the plan, of the started ranks, or of a rank that may not begin. A rank that has begun
    ends its process.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        if rank == 0 and options.json is not None:  # it may be on this node alone
            check_writable(options.json, "--json")
        config, folder, world_size = _configure(options)
        if options.plan:
            return _plan(config, folder, world_size, options)
        if "WORLD_SIZE" not in os.environ:
            return launch.start(world_size, _program(), config.checkpoint.grace_seconds)
        problems, task = every_problem(config, folder, world_size, first=rank == 0, step=options.step)
        inputs, changed = inputs_and_changes(config, folder, task, options.accept)
        refuse(problems + changed + checkpoint_problems(config, folder, options.step))
    except MoeRLError as error:
        # Every rank of a node finds the same problems, and the first one prints them. torchrun ends all ranks as soon
        # as one ends, so the others wait.
        first = os.environ.get("LOCAL_RANK", str(rank)) == "0"
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if under_torchrun and not first:
            time.sleep(_FIRST_TELLS_SECONDS)
        who = f" {socket.gethostname()}:" if several_nodes(os.environ) else ""
        status = LOST if isinstance(error, SamplerGone) else 2
        tell(f"moe_rl:{who} {error}", status, aloud=first or under_torchrun)
        return status
    # torch and megatron are imported only here, so that a plan or a mistake in the config does not wait for them.
    from torch import AcceleratorError
    from torch.distributed import DistBackendError

    from moe_rl.train.loop import train

    status = 0
    try:
        path = train(config, folder, task, inputs, options.step)
        if rank == 0 and options.json:
            write_whole(options.json, (path / "summary.json").read_bytes())
    except Stopped as error:
        status = STOPPED
        tell(f"moe_rl: {_told(error)}", status, aloud=rank == 0)
    except MoeRLError as error:
        status = COLLAPSED if isinstance(error, CollapseError) else 2
        status = LOST if isinstance(error, SamplerGone) else status
        tell(f"moe_rl: rank {rank}: {type(error).__name__}: {_told(error)}", status)
    except Exception as error:  # an unexpected error, or of CUDA or NCCL: print where it happened
        failed = isinstance(error, AcceleratorError | DistBackendError)
        status = LOST if failed and not any(said in str(error) for said in _MISTAKES) else 1
        tell("".join(traceback.format_exception(error)).rstrip(), status)
    _leave(status)


def _told(error: MoeRLError) -> str:
    """Return the message of an error, with the notes added to it, such as how to continue."""
    text = str(error)
    return ("\n" if "\n" in text else "; ").join([text, *getattr(error, "__notes__", ())])


def _leave(status: int) -> NoReturn:
    """End the process at once.

    Collectives leave threads behind that can crash the interpreter while it exits. With gloo this showed as a
    segmentation fault after an aborted collective, and as an abort after a completed run.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def _configure(options: argparse.Namespace) -> tuple[Config, RunFolder | None, int]:
    continues = "--resume or --replay", options.resume or options.replay
    for option, value, (needed, needed_value) in (
        ("--trace", options.trace, ("--plan", options.plan)),
        ("--speeds", options.speeds, ("--plan", options.plan)),
        ("--step", options.step, ("--resume", options.resume)),
        ("--accept", ", ".join(options.accept) or None, continues),
    ):
        if value is not None and not needed_value:
            do = f"leave it out, or add {needed}"
            raise ConfigError(f"is given without {needed}", where={"option": option}, got=value, do=do)
    folder = None
    if options.resume:
        folder, config = run_folder.reopen(options.resume, options.overrides)
    elif options.replay:
        replays = f"run.replays={options.replay.absolute()}"
        config = load_config(run_folder.existing(options.replay, "--replay").config, [*options.overrides, replays])
    else:
        config = run_folder.with_date(load_config(options.config, options.overrides))
    if "WORLD_SIZE" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
        if options.ranks not in (None, world_size):
            raise ConfigError(
                "contradicts torchrun", where={"option": "--ranks"}, got=options.ranks, expected=world_size
            )
        return config, folder, world_size
    if not options.plan and options.ranks is None:
        least = least_ranks(config.parallel)
        raise ConfigError(
            "training was started without ranks",
            do=f"add --ranks {least}; or, over several machines, run: torchrun --nproc-per-node {least} "
            f"{' '.join(_program())}",
        )
    most = _RANKS_OF_A_CORE * len(os.sched_getaffinity(0))
    if not options.plan and options.ranks > most:
        raise ConfigError(
            "would start too many processes on this machine",
            where={"option": "--ranks"},
            got=options.ranks,
            expected=f"at most {most}, {_RANKS_OF_A_CORE} for each processor core",
            do="start ranks on several machines with torchrun; --plan takes any number",
        )
    planned = config.cluster.gpus if config.cluster is not None else least_ranks(config.parallel)
    return config, folder, options.ranks or planned


def _program() -> list[str]:
    """Return the typed command in the form that Python and torchrun take: a script, or a module for the console
    command."""
    script, *arguments = sys.argv
    if not script.endswith(".py") or script.endswith("__main__.py"):
        return ["-m", "moe_rl", *arguments]
    return [script, *arguments]


def _plan(config: Config, folder: RunFolder | None, world_size: int, options: argparse.Namespace) -> int:
    trace, file = options.trace, options.json
    speeds: Speeds | None = None
    if options.speeds is not None:
        speeds = read_speeds(options.speeds)
    elif folder is not None:
        speeds = measured_speeds(folder.path)
    balance = None if speeds is None else side_balance(config, world_size, speeds)
    facts, problems, absent = model_to_plan(config, folder, options.step, world_size, first=True)
    (absent if absent else problems).extend(tracker_problems(config))
    plan = asked = None
    if facts is not None:
        task, wrong = (None, []) if absent else read_task(config, facts, problems)
        problems += wrong + replay_problems(config, task)
        problems += inputs_and_changes(config, folder, task, options.accept)[1]
        plan = make_plan(config, facts, world_size, None if task is None else task.count)
        print(render(plan, balance))
        for line in task.notes() if task else ():
            print(line)
        for line in notes(config.model.path, facts) if not problems and not absent else ():
            print(line)
        problems += [*memory_problems(plan), *transfer_problems(plan), *record_problems(config, facts)]
        full = disk_problems(config, plan, folder.path if folder else None, options.step)
        (absent if absent else problems).extend(full)
    if facts is not None and trace and not problems:
        try:
            asked = peaks(config, facts, world_size, trace)
            print(render_peaks(asked, config, facts.num_experts))
            problems += filter(None, [limit_problem(asked, config)])
        except (TraceError, ConfigError) as error:
            problems.append(error.message)
    for message in absent:
        print(f"not on this machine: {message}")
    for problem in problems:
        print(f"problem: {problem}")
    print(f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "no problems")
    if file:
        result: dict[str, Any] = {"plan": plan and dataclasses.asdict(plan), "problems": problems, "absent": absent}
        result |= {"trace": asked and dataclasses.asdict(asked)} if trace else {}
        result |= {"balance": dataclasses.asdict(balance)} if balance else {}
        write_json(file, result)
    return 2 if problems else 0
