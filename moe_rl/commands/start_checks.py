"""Finds every problem of a run before any process is started: its model, files, prompts, rewards and checkpoint."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.commands.diagnosis import installation_problems, tracker_problems
from moe_rl.config.check import config_problems, problems
from moe_rl.config.check_cluster import node_problems, start_problems
from moe_rl.config.check_files import absent_problems, prompt_problems, vocabulary_problems
from moe_rl.config.environment import EnvironmentConfig
from moe_rl.config.schema import Config
from moe_rl.errors import About, ConfigError, DataError, MoeRLError, Problem, RewardError, describe
from moe_rl.gateway.renderer_trial import renderer_problems
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import read_model, read_published
from moe_rl.models.second_reading import reading_problems
from moe_rl.planning.cluster_plan import disk_problems, make_plan, memory_problems, transfer_problems
from moe_rl.planning.sampler_memory import record_problems
from moe_rl.report.history import read_history
from moe_rl.report.lines import read_run
from moe_rl.rollout.attach import attach_problems
from moe_rl.tasks.environments.environment_pool import EnvironmentPool
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import TaskPrompts, load_task
from moe_rl.tasks.tokenizer import ChatTemplate, TextCodec, stop_tokens
from moe_rl.tasks.turn_end import endless_problem
from moe_rl.tasks.verifiers import VerifierPool
from moe_rl.train import run_folder
from moe_rl.train.replayed_run import replay_problems
from moe_rl.train.run_folder import RunFolder
from moe_rl.train.run_inputs import RunInput, input_problems, read_inputs

# Prompts of each source on which the rewards are tried.
_TRIED = 8
# Prompts of each source whose right answer is read before a run starts.
_READ = 1000


def model_to_plan(
    config: Config, folder: RunFolder | None, step: int | Literal["best"] | None, world_size: int, *, first: bool
) -> tuple[ModelFacts | None, list[Problem], list[Problem]]:
    """Return the model (None if it cannot be read), the problems, and what this machine lacks to start the run.

    The last list is empty unless a run is planned without its checkpoint. `folder`, `step`: of the run that is resumed,
    and its checkpoint. `first`: this is a plan or rank 0, which reads config.json once more through transformers.
    """
    installed = installation_problems(config)
    if folder is None or step == 0:  # the first step needs the weights that the run starts from
        installed += run_folder.start_problems(config)
    if folder is not None:  # it may have been moved out of run.runs_dir
        config = config.model_copy(update={"run": config.run.model_copy(update={"runs_dir": folder.path})})
    if config.model.published is not None and not config.model.path.is_dir():
        facts = read_published(config.model.published)
        here = describe(
            "the checkpoint, planned with model.published", where={"key": "model.path"}, got=f"no {config.model.path}"
        )
        all_problems = [*config_problems(config, facts, world_size), *prompt_problems(config)]
        return facts, all_problems, [here, *absent_problems(config), *installed]
    all_problems = problems(config, world_size) + installed
    try:
        facts = read_model(config.model.path)
    except ConfigError:
        return None, all_problems, []  # already among the problems
    if first and not all_problems:  # it takes seconds
        all_problems = reading_problems(config.model.path / "config.json", facts)
    return facts, all_problems, []


def every_problem(
    config: Config,
    folder: RunFolder | None,
    world_size: int,
    *,
    first: bool,
    step: int | Literal["best"] | None = None,
) -> tuple[list[Problem], TaskPrompts | None]:
    """Return every problem with starting here, and on rank 0 the prompts.

    first: this is rank 0, which reads what only it will use. step: of the checkpoint that is resumed; 0: none.
    """
    facts, all_problems, absent = model_to_plan(config, folder, step, world_size, first=first)
    all_problems += [*node_problems(os.environ), *start_problems(config), *(tracker_problems(config) if first else ())]
    task = None
    if facts is not None:
        plan = make_plan(config, facts, world_size)
        all_problems += [*memory_problems(plan), *transfer_problems(plan), *record_problems(config, facts)]
        all_problems += disk_problems(config, plan, folder.path if folder else None, step)
        if first and not absent:
            task, wrong = read_task(config, facts, all_problems)
            all_problems += wrong + replay_problems(config, task)
        sampled = config.run.replays is None
        if config.rollout.servers and sampled and first and not absent + all_problems:
            runs_dir = folder.path.parent if folder else config.run.runs_dir
            all_problems += attach_problems(config, facts, runs_dir, resumed=folder is not None)
    return absent + all_problems, task


def inputs_and_changes(
    config: Config, folder: RunFolder | None, task: TaskPrompts | None, accepted: Sequence[str]
) -> tuple[list[RunInput], list[Problem]]:
    """Return the run's inputs, and a problem for each one that has changed since the resumed or replayed run began.

    Nothing is compared if the prompts could not be read, or on ranks other than the first.
    """
    if task is None:
        return [], []
    inputs = read_inputs(config, task)
    return inputs, input_problems(folder, config, inputs, accepted)


def read_task(config: Config, facts: ModelFacts, known: list[Problem]) -> tuple[TaskPrompts | None, list[Problem]]:
    """Read the prompts, and try the rewards unless nothing will be scored. Return the prompts and the new problems.

    Nothing is read if a problem of the task or the model was found: it would only be reported again.
    """
    if any(str(problem.about.get("key", "")).startswith(("task.", "model.")) for problem in known):
        return None, []
    try:
        codec = TextCodec(config.model.path, stop_tokens(config, facts), config.rollout.stop)
        wrong = list(vocabulary_problems(config, facts, codec.vocabulary))
        if wrong:
            return None, wrong
        task = load_task(config, codec)
        if config.run.replays:
            return task, []
        if config.task.environment is not None:
            return task, _try_environment(config, config.task.environment)
        if task.has_chats:
            write = ChatTemplate(config.model.path, config.task.chat, config.run.date).history
            if endless := endless_problem(write, codec, facts.eos_token_ids, config.rollout):
                return task, [endless]
        return _try_rewards(config, task)
    except DataError as error:
        return None, [problem for problem in error.problems if problem not in known]


def _try_rewards(config: Config, task: TaskPrompts) -> tuple[TaskPrompts, list[Problem]]:
    """Import the reward functions as the run will, and try them. Return the task with notes on them, and the
    problems."""
    limit = config.task.max_failed_fraction
    try:
        with VerifierPool.of(config.task, workers=1) as verifiers:
            verifiers.check_arguments(task.columns())
            notes = verifiers.check_answers(task.first(_READ), limit)
            verifiers.try_out(task.first(_TRIED), limit)
    except ConfigError as error:
        return task, error.problems
    except RewardError as error:
        return task, [error.message]
    return dataclasses.replace(task, told=tuple(notes)), []


def _try_environment(config: Config, environment: EnvironmentConfig) -> list[Problem]:
    """Import the environment as the run will, and try the renderer of its chats. Return the problems."""
    if wrong := renderer_problems(config):
        return wrong
    try:
        EnvironmentPool.of(environment, concurrent=1).close()
    except ConfigError as error:
        return error.problems
    return []


def checkpoint_problems(config: Config, folder: RunFolder | None, step: int | Literal["best"] | None) -> list[Problem]:
    """Return the problems of --resume: a missing checkpoint, or damaged lines that the run would continue."""
    if folder is None:
        return []
    try:
        done = 0 if step == 0 else checkpoints.step_of(checkpoints.find(folder.checkpoints, step))
        read_run(folder.path)
        read_history(folder.path)
        PromptLedger.of_run(folder.path, config.pipeline).check(done)
    except MoeRLError as error:
        return [error.message]
    if done > config.run.steps:
        expected = f"at least {done}, the steps of the checkpoint"
        do = "raise it, or choose an earlier checkpoint with --step"
        where: About = {"key": "run.steps"}
        return [describe("the run has made more steps", where=where, got=config.run.steps, expected=expected, do=do)]
    return []
