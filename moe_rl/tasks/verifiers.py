"""Runs reward functions in separate processes, so that no fault of a function stops the run or changes another reward.

If a function raises, hangs, dies or returns no finite number, its item gets a failed `Verdict`; other items are not
affected, except those of the same batch. A failed verdict has no reward. Counting it as a wrong answer would add noise
to training.

The process boundary contains accidents, not attacks: reward functions are the user's own code. The pool cannot reach a
grandchild that a function moves into another session.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from moe_rl.config.check_files import dotted_path_problem
from moe_rl.config.reward_kinds import FunctionReward, ReasoningGymReward, RewardConfig
from moe_rl.config.schema import TaskConfig
from moe_rl.errors import ConfigError, RewardError, describe
from moe_rl.tasks.reward_arguments import BUILT_IN, Columns, RewardParameters, argument_problems
from moe_rl.tasks.verifier_process import REWARD_RANGE, Scores, VerifierJob, VerifierPlace, refuse_rewards
from moe_rl.tasks.verifier_worker import Load, RewardFunction
from moe_rl.types import LARGEST_REWARD, Prompt, Verdict


@dataclass(frozen=True, slots=True)
class RewardItem:
    """Holds one completion to verify.

    Attributes:
        completion: its text without the stop token or stop string.
        columns, messages: as in `Prompt`.
        finish_reason, stop_token_id, stop_string: as in `Completion`.
        completion_token_ids: the tokens of `completion`, and those of the stop string.
    """

    prompt: str
    completion: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    stop_token_id: int | None = None
    completion_token_ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, Any], ...] | None = None
    stop_string: str | None = None

    def arguments(self, parameters: RewardParameters) -> dict[str, Any]:
        """Return the values of a function's parameters: built-in arguments, or else the columns of these names.

        Raises:
            ValueError: there is no column for a parameter without a default.
        """
        if absent := [name for name in parameters.needed if name not in BUILT_IN and name not in self.columns]:
            raise ValueError(f"the prompt's row has no column {', '.join(absent)}")
        built_in = {name: getattr(self, name) for name in BUILT_IN}
        found = {**self.columns, **built_in}
        return {name: found[name] for name in (*parameters.needed, *parameters.optional) if name in found}


def check_failed_fraction(
    verdicts: SequenceOf[Verdict], limit: float, what: str = "too many verifications failed"
) -> None:
    """Raise RewardError if more than the fraction `limit` of the verdicts failed. The message names the commonest
    reasons.
    """
    failed = [verdict for verdict in verdicts if not verdict.scored]
    if len(failed) <= limit * len(verdicts):
        return
    reasons = Counter(verdict.detail for verdict in failed).most_common(3)
    raise RewardError(
        describe(
            what,
            where={"key": "task.max_failed_fraction"},
            got=f"{len(failed)} of {len(verdicts)}",
            expected=f"at most {limit:.0%}",
            do="mend the reward function, or raise task.max_failed_fraction or task.verifier_timeout_seconds. Reasons: "
            + "; ".join(f"{count} x {reason}" for reason, count in reasons),
            fault="too many",
        )
    )


class VerifierPool:
    """Scores completions with the configured reward functions in worker processes. Use as a context manager.

    Construction starts the workers. Workers end with the pool and with this process. One thread uses the pool. In an
    event loop, several calls of `judge` share the workers: their calls are made first in, first out.

    Args:
        timeout_seconds: the time limit, by the monotonic clock, for all functions of one item together that take one
            item a call. A call with a batch of items has a limit of its own, of the same length unless its kind of
            reward says another.
        generators: options of the generators of prompts by task name, for rewards of kind `reasoning_gym`.

    Raises:
        ConfigError: naming the config key, for a function that does not exist or has parameters without a name.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardConfig],
        *,
        timeout_seconds: float,
        workers: int,
        generators: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        memory_limit_mib: int = 4096,
    ):
        functions = {name: one.function for name, one in rewards.items() if isinstance(one, FunctionReward)}
        problems = {name: dotted_path_problem(function) for name, function in functions.items()}
        refuse_rewards({name: problem for name, problem in problems.items() if problem}, functions)
        self._rewards, self._timeout = dict(rewards), timeout_seconds
        load = Load(
            sys_path=[os.path.abspath(folder) for folder in sys.path],
            functions={name: _function(reward, generators) for name, reward in rewards.items()},
            memory_limit_bytes=memory_limit_mib << 20,
        )
        self._parameters: dict[str, RewardParameters] = {}
        self._places = [VerifierPlace(load, self._parameters) for _ in range(workers)]
        # The threads live as long as the pool, because the kernel kills a worker when the thread that started it ends.
        # There are as many as places, so a thread always finds a free one.
        self._threads = ThreadPoolExecutor(workers)
        self._free: SimpleQueue[VerifierPlace] = SimpleQueue()
        self._closed = False
        try:
            list(self._threads.map(VerifierPlace.start, self._places))
        except BaseException:
            self.close()
            raise
        for place in self._places:
            self._free.put(place)

    @classmethod
    def of(cls, task: TaskConfig, *, workers: int | None = None) -> VerifierPool:
        """Start the verifiers of a task, as many as `workers` says, or as the config says."""
        return cls(
            task.rewards,
            timeout_seconds=task.verifier_timeout_seconds,
            workers=task.verifier_workers if workers is None else workers,
            generators=task.generators,
        )

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers. Each leads its own session and process group."""
        return [process.pid for place in self._places if (process := place.process) is not None]

    def close(self) -> None:
        """Kill every worker and all processes that it forked. Safe to call twice."""
        self._closed = True
        for place in self._places:
            place.end()
        self._threads.shutdown(cancel_futures=True)
        for place in self._places:
            place.bury()

    def check_arguments(self, sources: Mapping[str, Columns]) -> None:
        """Check that every reward function gets the arguments that it names.

        Args:
            sources: columns of each source of prompts, by a name for the message.

        Raises:
            ConfigError: naming each reward, argument and source.
        """
        if problems := [*argument_problems(self._parameters, sources)]:
            raise ConfigError(problems)

    def try_out(self, prompts: SequenceOf[Prompt], limit: float) -> None:
        """Score an empty completion of each prompt, so that rewards that always fail are told before a run starts.

        Raises:
            RewardError: more than half of the verifications failed, and more than the fraction `limit`.
        """
        items = [RewardItem(one.text, "", one.columns, "length", messages=one.messages) for one in prompts]
        what = "the rewards were tried on the first prompts with an empty completion, and most failed"
        check_failed_fraction(self.score(items), max(limit, 0.5), what)

    def score(self, items: SequenceOf[RewardItem]) -> list[Verdict]:
        """Return one verdict per item, in order. Takes at most about the time limit per item, even if verifiers hang.

        Raises:
            RewardError: no worker can be started any more. The pool is then closed.
        """
        results, calls = self._begin(items)
        try:
            for job, call in calls:
                _add(results, job, call.result())
        except BaseException:
            self.close()
            raise
        return [self._verdict(result) for result in results]

    async def judge(self, items: SequenceOf[RewardItem]) -> list[Verdict]:
        """Return as `score` does, in an event loop, where other calls may wait at the same time.

        If it is cancelled, calls that no worker has begun are not made.

        Raises:
            RewardError: no worker can be started any more. Every other call then raises too.
        """
        results, calls = self._begin(items)
        try:
            for job, call in calls:
                _add(results, job, await asyncio.wrap_future(call))
        finally:
            for _, call in calls:
                call.cancel()
        return [self._verdict(result) for result in results]

    def _begin(self, items: SequenceOf[RewardItem]) -> tuple[list[Scores], list[tuple[VerifierJob, _Call]]]:
        """Hand the items to the workers. Return what is known of each by now, and the calls that tell the rest."""
        if self._closed:
            raise self._refused()
        results: list[Scores] = [{} for _ in items]
        jobs = list(self._jobs(items, results))
        return results, [(job, self._threads.submit(self._run, job)) for job in jobs]

    def _refused(self) -> RewardError:
        return RewardError(describe("the verifier pool is closed, or another call raised", fault="closed"))

    def _run(self, job: VerifierJob) -> list[Scores]:
        place = self._free.get()
        try:
            if self._closed:
                raise self._refused()
            return place.run(job)
        except BaseException:
            self._closed = True  # the place has no worker, so no call may use it
            raise
        finally:
            self._free.put(place)

    def _jobs(self, items: SequenceOf[RewardItem], results: list[Scores]) -> Iterator[VerifierJob]:
        """Yield the calls that score the items. An item that cannot be sent gets its result here, and no call."""
        rows: list[dict[str, _Row]] = []
        for item, result in zip(items, results, strict=True):
            row = {}
            for name in self._rewards:
                try:
                    arguments = item.arguments(self._parameters[name])
                    row[name] = tuple(arguments), _encoded(arguments)
                except (ValueError, TypeError, RecursionError) as error:
                    result[name] = f"cannot be sent to a verifier: {error}"
            rows.append({} if result else row)
        single = [name for name, reward in self._rewards.items() if reward.batch is None]
        for index, row in enumerate(rows):
            if row and single:
                yield VerifierJob([index], {name: [row[name][1]] for name in single}, self._timeout)
        for name, reward in self._rewards.items():
            if reward.batch is None:
                continue
            alike: dict[tuple[str, ...], list[int]] = {}  # rows of one call have the same arguments
            for index, row in enumerate(rows):
                if row:
                    alike.setdefault(row[name][0], []).append(index)
            for indices in alike.values():
                limit = reward.limit_seconds or self._timeout
                for start in range(0, len(indices), reward.batch):
                    chunk = indices[start : start + reward.batch]
                    yield VerifierJob(chunk, {name: [rows[at][name][1] for at in chunk]}, limit)

    def _verdict(self, result: Scores) -> Verdict:
        """Combine what the reward functions gave for one item."""
        parts: dict[str, float] = {}
        for name in self._rewards:
            value = result.get(name)  # None: no function of an item is called when one of them cannot be
            if isinstance(value, str):
                return Verdict("failed", None, detail=f"{name}: {value}")
            if value is not None:
                parts[name] = value
        reward = sum(one.weight * parts[name] for name, one in self._rewards.items())
        if not abs(reward) <= LARGEST_REWARD:  # `not <=` also catches NaN
            detail = f"the weighted sum of the rewards is {reward}, expected {REWARD_RANGE}: {parts}"
            return Verdict("failed", None, detail=detail)
        return Verdict("scored", reward, parts)


_Row = tuple[tuple[str, ...], bytes]
"""The arguments of one call for one item: their names, and all of them as JSON."""


_Call = Future[list[Scores]]
"""A worker's answer to a job."""


def _add(results: list[Scores], job: VerifierJob, found: list[Scores]) -> None:
    for index, result in zip(job.items, found, strict=True):
        results[index] |= result


def _encoded(arguments: Mapping[str, Any]) -> bytes:
    """Encode arguments as JSON. It keeps integers of any size, which msgpack does not."""
    return json.dumps(arguments, ensure_ascii=False, default=_plain).encode()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _function(reward: RewardConfig, generators: Mapping[str, Mapping[str, Any]]) -> RewardFunction:
    batched = reward.batch is not None
    if isinstance(reward, FunctionReward):
        return RewardFunction(reward.function, None, batched)
    settings = reward.settings
    if isinstance(reward, ReasoningGymReward):
        settings["options"] = {task: dict(options) for task, options in generators.items()}
    return RewardFunction(reward.factory, settings, batched)
