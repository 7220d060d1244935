"""Runs reward functions in separate processes, so that no fault of a function stops the run or changes another reward.

If a function raises, hangs, dies or returns no finite number, its item gets a failed `Verdict`; other items are not
affected, except those of the same batch. A failed verdict has no reward: counting it as a wrong answer would add noise
to training.

The process boundary contains accidents, not attacks: reward functions are the user's own code (`WorkerProcess`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from moe_rl.config.check_files import dotted_path_problem
from moe_rl.config.reward_kinds import FunctionReward, ReasoningGymReward, RewardConfig
from moe_rl.config.schema import TaskConfig
from moe_rl.errors import ConfigError, RewardError, first_of
from moe_rl.tasks.reward_arguments import BUILT_IN, Columns, RewardParameters, argument_problems
from moe_rl.tasks.verifier_process import REWARD_RANGE, Scores, VerifierJob, VerifierPlace, refuse_rewards
from moe_rl.tasks.verifier_worker import Load, RewardFunction
from moe_rl.types import LARGEST_REWARD, Prompt, Verdict


@dataclass(frozen=True, slots=True)
class RewardItem:
    """Holds one completion to verify.

    Attributes:
        completion: the text without the stop token or stop string.
        columns, messages: as in `Prompt`.
        finish_reason, stop_token_id, stop_string: as in `Completion`.
        completion_token_ids: the tokens of `completion`, and those of the stop string.
        seal: the completion's seal, for its verdict.
    """

    prompt: str
    completion: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    stop_token_id: int | None = None
    completion_token_ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, Any], ...] | None = None
    stop_string: str | None = None
    seal: str = ""

    def arguments(self, parameters: RewardParameters) -> dict[str, Any]:
        """Return the values of a function's parameters: built-in arguments, or else the columns with these names.

        Raises:
            ValueError: there is no column for a parameter without a default.
        """
        if absent := [name for name in parameters.needed if name not in BUILT_IN and name not in self.columns]:
            raise ValueError(f"the prompt's row has no column {', '.join(absent)}")
        built_in = {name: getattr(self, name) for name in BUILT_IN}
        values = {**self.columns, **built_in}
        others = self.columns if parameters.others else ()
        return {name: values[name] for name in (*parameters.needed, *parameters.optional, *others) if name in values}


def _empty(prompt: Prompt) -> RewardItem:
    """Return an empty completion of a prompt."""
    return RewardItem(prompt.text, "", prompt.columns, "length", messages=prompt.messages)


def check_failed_fraction(
    verdicts: SequenceOf[Verdict], limit: float, what: str = "too many verifications failed"
) -> None:
    """Raise RewardError if more than the fraction `limit` of the verdicts failed. The message names the most common
    reasons.
    """
    failed = [verdict for verdict in verdicts if not verdict.scored]
    if len(failed) <= limit * len(verdicts):
        return
    reasons = Counter(verdict.detail for verdict in failed).most_common(3)
    raise RewardError(
        what,
        where={"key": "task.max_failed_fraction"},
        got=f"{len(failed)} of {len(verdicts)}",
        expected=f"at most {limit:.0%}",
        do="fix the source of the rewards, or raise task.max_failed_fraction or its time limit. Reasons: "
        + "; ".join(f"{count} x {reason}" for reason, count in reasons),
        fault="too many",
    )


class VerifierPool:
    """Scores completions with the configured reward functions in worker processes. Use as a context manager.

    The constructor starts the workers. Workers end with the pool and with this process. Concurrent judging, in threads
    or in an event loop, shares the workers: calls are made first in, first out.

    Args:
        timeout_seconds: the time limit, by the monotonic clock, for all unbatched functions of one item together. A
            call with a batch of items has its own limit, of the same length unless its kind of reward sets another.
        generators: options of the generators of prompts by task name, for rewards of kind `reasoning_gym`.

    Raises:
        ConfigError: naming the config key, for a function that does not exist or has parameters that cannot be named.
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
        functions = {name: reward.function for name, reward in rewards.items() if isinstance(reward, FunctionReward)}
        problems = {name: dotted_path_problem(function) for name, function in functions.items()}
        refuse_rewards({name: problem for name, problem in problems.items() if problem}, functions)
        self.rewards, self.timeout = dict(rewards), timeout_seconds
        load = Load(
            sys_path=[os.path.abspath(folder) for folder in sys.path],
            functions={name: _function(reward, generators) for name, reward in rewards.items()},
            memory_limit_bytes=memory_limit_mib << 20,
        )
        self.parameters: dict[str, RewardParameters] = {}
        self._places = [VerifierPlace(load, self.parameters) for _ in range(workers)]
        # The threads live as long as the pool, because the kernel kills a worker when the thread that started it ends.
        # There are as many threads as places, so a thread always finds a free place.
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
        """Start the verifiers of a task. workers: their number; None: as in the config."""
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
        advice = {name: reward.argument_advice for name, reward in self.rewards.items()}
        if problems := [*argument_problems(self.parameters, sources, advice)]:
            raise ConfigError(problems)

    def try_out(self, prompts: SequenceOf[Prompt], limit: float) -> None:
        """Score an empty completion of each prompt, so that rewards that always fail are found before a run starts.

        Raises:
            RewardError: more than half of the verifications failed, and more than the fraction `limit`.
        """
        items = [*map(_empty, prompts)]
        what = "the rewards were tried on the first prompts with an empty completion, and most failed"
        check_failed_fraction(self.score(items), max(limit, 0.5), what)

    def check_answers(self, prompts: SequenceOf[Prompt], limit: float) -> list[str]:
        """Read these prompts' right answers with the reward kinds that need them. Return a note if some cannot be read:
        no completion of such a prompt will have a reward.

        Raises:
            RewardError: more than the fraction `limit` cannot be read.
        """
        readers = {name: reward for name, reward in self.rewards.items() if reward.reads_answer}
        if not readers:
            return []
        with self.judging(readers) as judging:
            for number, prompt in enumerate(prompts):
                judging.add(number, _empty(prompt))
            verdicts = judging.verdicts()
        judged = zip(prompts, verdicts, strict=True)
        bad = [f"{prompt.id}: {verdict.detail}" for prompt, verdict in judged if not verdict.scored]
        if len(bad) > limit * len(prompts):
            raise RewardError(
                "right answers cannot be read",
                where={"key": "task.max_failed_fraction"},
                got=f"{len(bad)} of {len(prompts)}",
                expected=f"at most {limit:.0%}",
                do="correct these rows, or name the column of the answer with the key `answer` of the source: "
                + first_of(bad),
                fault="answers",
            )
        what = f"rewards: {len(bad)} of {len(prompts)} right answers cannot be read, so these prompts teach nothing: "
        return [what + first_of(bad)] if bad else []

    def score(self, items: SequenceOf[RewardItem]) -> list[Verdict]:
        """Return one verdict per item, in order. Takes at most about the time limit per item, even if verifiers hang.

        Raises:
            RewardError: no worker can be started. The pool is then closed.
        """
        with self.judging() as judging:
            for number, item in enumerate(items):
                judging.add(number, item)
            return judging.verdicts()

    def judging(self, rewards: Mapping[str, RewardConfig] | None = None) -> Judging:
        """Begin scoring items that arrive one by one. rewards: which of the pool's rewards to use; None: all.

        Raises:
            RewardError: the pool is closed.
        """
        if self._closed:
            raise self._refused()
        return Judging(self, self.rewards if rewards is None else rewards)

    async def judge(self, items: SequenceOf[RewardItem]) -> list[Verdict]:
        """Score items as `score` does, in an event loop, where other calls may wait at the same time.

        Cancelling it drops the calls that no worker has begun.

        Raises:
            RewardError: no worker can be started. Every other call then raises too.
        """
        with self.judging() as judging:
            for number, item in enumerate(items):
                judging.add(number, item)
            return await judging.awaited()

    def _refused(self) -> RewardError:
        return RewardError("the verifier pool is closed, or another call raised", fault="closed")

    def submit(self, job: VerifierJob) -> _Call:
        """Hand a call to the workers."""
        return self._threads.submit(self._run, job)

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


class Judging:
    """Scores items that arrive one by one, in any order, while others are still sampled.

    The call for an item begins as soon as the item arrives. Batches take the items in the order of their numbers, so a
    batch waits for all items before its last one. As a context manager it finally cancels the calls that no worker has
    begun.
    """

    def __init__(self, pool: VerifierPool, rewards: Mapping[str, RewardConfig]):
        self._pool, self._rewards = pool, rewards
        batched = {name: reward for name, reward in rewards.items() if reward.batch is not None}
        self._single, self._batched = [name for name in rewards if name not in batched], batched
        self._results: list[Scores] = []  # of every item that has arrived
        self._seals: list[str] = []  # of these items
        self._places: dict[int, int] = {}  # by the number of an item: the place of its result
        self._calls: list[tuple[VerifierJob, _Call]] = []
        self._rows: dict[int, tuple[int, _Row]] = {}  # items in no batch yet, by number
        self._next = 0  # the number of the next item for a batch
        self._open: dict[tuple[str, tuple[str, ...]], list[tuple[int, bytes]]] = {}  # batches that are not full

    def __enter__(self) -> Judging:
        return self

    def __exit__(self, *_: object) -> None:
        for _job, call in self._calls:
            call.cancel()

    def add(self, number: int, item: RewardItem) -> None:
        """Add an item. The items are numbered from 0. If a number is added again, the last item counts."""
        place = self._places[number] = len(self._results)
        result: Scores = {}
        row: _Row = {}
        self._results.append(result)
        self._seals.append(item.seal)
        for name in self._rewards:
            try:
                arguments = item.arguments(self._pool.parameters[name])
                row[name] = tuple(arguments), _encoded(arguments)
            except (ValueError, TypeError, RecursionError) as error:
                result[name] = f"cannot be sent to a verifier: {error}"
        if result:
            row = {}
        if row and self._single:
            self._call([place], {name: [row[name][1]] for name in self._single}, self._pool.timeout)
        if self._batched:
            self._rows[number] = place, row
            while self._next in self._rows:
                self._fill(*self._rows.pop(self._next))
                self._next += 1

    def calls(self) -> list[_Call]:
        """Return the calls that score the items. No item may be added after this."""
        for number in sorted(self._rows):
            self._fill(*self._rows.pop(number))
        for name, arguments in list(self._open):
            self._call_batch(name, arguments)
        return [call for _, call in self._calls]

    def verdicts(self) -> list[Verdict]:
        """Return one verdict per item, in the order of their numbers, when all are scored.

        Raises:
            RewardError: no worker can be started. The pool is then closed.
        """
        self.calls()
        try:
            for job, call in self._calls:
                for place, scores in zip(job.items, call.result(), strict=True):
                    self._results[place] |= scores
        except BaseException:
            self._pool.close()
            raise
        places = [self._places[number] for number in sorted(self._places)]
        return [replace(self._verdict(self._results[place]), of=self._seals[place]) for place in places]

    async def awaited(self) -> list[Verdict]:
        """Return what `verdicts` returns, in an event loop. Cancelling it drops the calls that no worker has begun."""
        for call in self.calls():
            await asyncio.wrap_future(call)
        return self.verdicts()

    def _fill(self, place: int, row: _Row) -> None:
        """Put an item into a batch of each reward that takes batches, and start the full ones."""
        for name, reward in self._batched.items():
            if name in row:
                arguments, encoded = row[name]  # the items of a batch have the same arguments
                batch = self._open.setdefault((name, arguments), [])
                batch.append((place, encoded))
                if len(batch) == reward.batch:
                    self._call_batch(name, arguments)

    def _call_batch(self, name: str, arguments: tuple[str, ...]) -> None:
        batch = self._open.pop((name, arguments))
        limit = self._batched[name].limit_seconds or self._pool.timeout
        self._call([place for place, _ in batch], {name: [encoded for _, encoded in batch]}, limit)

    def _call(self, items: list[int], calls: dict[str, list[bytes]], limit: float) -> None:
        job = VerifierJob(items, calls, limit)
        self._calls.append((job, self._pool.submit(job)))

    def _verdict(self, result: Scores) -> Verdict:
        """Combine the reward functions' results for one item."""
        parts: dict[str, float] = {}
        for name in self._rewards:
            value = result.get(name)  # None: if one function of an item cannot be called, none is
            if isinstance(value, str):
                return Verdict("failed", None, detail=f"{name}: {value}")
            if value is not None:
                parts[name] = value
        reward = sum(config.weight * parts[name] for name, config in self._rewards.items())
        if not abs(reward) <= LARGEST_REWARD:  # `not <=` also catches NaN
            detail = f"the weighted sum of the rewards is {reward}, expected {REWARD_RANGE}: {parts}"
            return Verdict("failed", None, detail=detail)
        return Verdict("scored", reward, parts)


_Row = dict[str, tuple[tuple[str, ...], bytes]]
"""The arguments of an item for each reward: their names, and their values as JSON."""


_Call = Future[list[Scores]]
"""A worker's answer to a job."""


def _encoded(arguments: Mapping[str, Any]) -> bytes:
    """Encode arguments as JSON, which keeps integers of any size, unlike msgpack."""
    return json.dumps(arguments, ensure_ascii=False, default=_plain).encode()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _function(reward: RewardConfig, generators: Mapping[str, Mapping[str, Any]]) -> RewardFunction:
    batched = reward.batch is not None
    if isinstance(reward, FunctionReward):
        return RewardFunction(reward.function, None, batched)
    settings = reward.settings
    if isinstance(reward, ReasoningGymReward):
        settings["options"] = {task: dict(options) for task, options in generators.items()}
    return RewardFunction(reward.factory, settings, batched)
