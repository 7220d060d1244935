"""Checks a run that is to be trained again from its kept rollouts, before anything starts."""

from __future__ import annotations

from pathlib import Path

from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.errors import About, DataError, MoeRLError, Problem, describe
from moe_rl.report.history import read_history
from moe_rl.report.lines import read_run
from moe_rl.rollout.kept import KeptRollouts, shards_of
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource, TaskPrompts
from moe_rl.trace import TraceStore
from moe_rl.train.run_folder import RunFolder, change_problem, edited, goes_on

# Keys that may differ from those of the replayed run. They change neither what was sampled nor what is computed from
# it, except for rounding. A name with a dot at its end stands for all keys of the section.
MAY_DIFFER = (
    "run.replays",
    "run.name",
    "run.runs_dir",
    "run.max_hours",
    "run.peer_timeout_seconds",
    "run.hang_seconds",
    "model.path",  # its content may not differ: see `run_inputs`
    "parallel.",
    "placement.",
    "train.microbatch_tokens",
    "checkpoint.",
    "export.",
    "report.",
)


def last_step(run_dir: Path) -> int:
    """Return the last step that a run has trained; 0 for none. Raises MoeRLError for a damaged log."""
    return max((row["step"] for row in read_run(run_dir).train), default=0)


def replay_problems(config: Config, task: TaskPrompts | None) -> list[Problem]:
    """Say why a run cannot train again on what the run in run.replays kept. Changes nothing in that run.

    Every kept file is read. Routes are not: they are checked in the step that uses them.

    Args:
        task: the prompts; None if they could not be read: then the kept files are not checked.
    """
    if config.run.replays is None:
        return []
    folder = RunFolder(config.run.replays)
    where: About = {"key": "run.replays", "folder": folder.path}
    try:
        earlier = load_config(folder.config)
        history, last = read_history(folder.path), last_step(folder.path)
    except MoeRLError as error:
        return [describe(str(error), where=where, expected="the folder of a run")]
    problems = [wrong for wrong in (edited(folder, where), change_problem(earlier, config, MAY_DIFFER, where)) if wrong]
    if goes_on(folder):
        problems.append(describe("that run is still going", where=where, do="wait until it ends", fault="goes on"))
    stretched = earlier.train.optimizer.schedule != "constant" and earlier.train.optimizer.decay_steps is None
    steered = sorted(
        {
            key
            for start in history
            for key in start.changed
            if key.startswith("train.optimizer.") or (key == "run.steps" and stretched)
        }
    )
    if steered:
        problems.append(
            describe(
                "that run changed its learning rate on the way, so no single config can train it again",
                where=where,
                got=f"changes of {', '.join(steered)}",
                expected="none of them in history.jsonl",
                fault="steered",
            )
        )
    if last == 0:
        problems.append(describe("that run has trained no step", where=where, fault="no step"))
    if problems or task is None:
        return problems
    return _kept_problems(folder, earlier, task, last, where)


def _kept_problems(folder: RunFolder, earlier: Config, task: TaskPrompts, last: int, where: About) -> list[Problem]:
    """Say which steps from 1 to `last` are not kept, or were changed."""
    store = TraceStore(folder.trace)
    kept, shards = KeptRollouts(folder.rollouts, store), set(store.shards())
    ledger, source = PromptLedger.of_run(folder.path, earlier.pipeline), PromptSource(task.train, earlier.run.seed)
    problems, absent = list[Problem](), list[int]()
    for step in range(1, last + 1):
        try:
            _, batch = kept.entered(step, ledger, source, kept.load)
        except DataError as error:
            if error.message.fault == "absent":
                absent.append(step)
            else:
                problems.append(describe(str(error), where={**where, "step": step}))
        except MoeRLError as error:
            problems.append(describe(str(error), where={**where, "step": step}))
        else:
            if gone := [name for name in shards_of(batch.sequences) if name not in shards]:
                problems.append(
                    describe("routes of a step are gone", where={**where, "step": step, "shard": gone[0]}, fault="gone")
                )
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        problems.append(
            describe(
                "that run has not kept the rollouts of all its steps",
                where=where,
                got=f"no rollouts of step {shown}",
                expected=f"those of steps 1 to {last}",
                do=f"a run that is to be replayed needs replay.keep_shards of at least run.steps; it had "
                f"{earlier.replay.keep_shards}",
                fault="absent",
            )
        )
    return problems
