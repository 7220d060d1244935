"""Decides which groups of completions are sampled, where, and which of them a step trains on. Has no I/O and no clock.

A group is the completions of one prompt, numbered by the prompt's cursor. Its oldest version is the weight version with
which its first request began. The last step that may train on it is oldest + 1 + max_staleness.

    state     event                                               next state
    (none)    start: pacing admits it                             sampling
    waiting   start: a place has a free slot                      sampling
    sampling  sampled: all its completions have ended             judging
    sampling  put_back: its server is lost, or the pool stops     waiting
    judging   judged                                              ready, or dropped (failed, uninformative)
    ready     take                                                consumed
    any       take: this was its last step                        dropped (surplus, stale)

A group from an earlier process enters as waiting, judging or ready. Four rules keep the bound without waste:

room        for every step d: groups in the pool whose last step is d or earlier <= (d - next step + 1) x batch + spare
pacing      a new group enters only if there is room up to its own last step. As it has the latest last step of all,
            it takes no room from another group.
order       a step takes the ready groups with the earliest last step; ties go to the group that was ready first
patience    a step waits while the groups that it would leave do not have room. Without patience (late: drop) it
            waits only for a full batch, and a group that then misses its last step is dropped as stale.

Room bounds the wait: once all groups are ready, those that a step leaves have room. So with patience no group is ever
stale, and at most `spare` groups a step are surplus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from moe_rl.errors import About, PipelineError
from moe_rl.rollout.trajectories import Trajectory
from moe_rl.tasks.prompt_ledger import Ended
from moe_rl.types import Completion, Verdict, merged_spans

Pieces = Sequence[Sequence[Completion]]
"""The completions of a group, each as its pieces in order. A completion not yet begun has none."""


def all_pieces(pieces: Pieces) -> Iterable[Completion]:
    """Return the pieces of all completions."""
    return (piece for parts in pieces for piece in parts)


def unfinished(pieces: Pieces) -> list[int]:
    """Return the numbers of the unfinished completions."""
    return [index for index, parts in enumerate(pieces) if not parts or parts[-1].finish_reason == "abort"]


def sampled_tokens(pieces: Pieces) -> int:
    """Return the number of sampled tokens."""
    return sum(len(piece.token_ids) for piece in all_pieces(pieces))


def joined(pieces: Sequence[Completion]) -> Completion:
    """Return these pieces as one completion, with the routes of the last piece, which continues the others."""
    if len(pieces) == 1:
        return pieces[0]
    return replace(
        pieces[-1],
        key=pieces[0].key,
        prompt_token_ids=pieces[0].prompt_token_ids,
        token_ids=sum((piece.token_ids for piece in pieces), ()),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        versions=merged_spans(span for piece in pieces for span in piece.versions),
        seal="",  # the seal is for the whole
    )


State = Literal["waiting", "sampling", "judging", "ready"]
Reason = Literal["failed", "uninformative", "surplus", "stale"]


@dataclass(slots=True)
class Group:
    """Holds the completions of one prompt, from their first request to their end.

    `Groups` decides about state, place and end; the feed fills in what was sampled and judged.

    Attributes:
        oldest: the version of the weights with which its first request began.
        requests: its unfinished requests.
        place: the number of the server that samples it; None in all other states, and when that server is lost.
        arrival: its position in the order in which groups became ready.
        pieces: for each completion its pieces, in order.
        trajectories: the episodes played, if any. The sequences of each are its pieces.
        verdicts: one for each completion; empty until it is judged.
        version: the weight version that the servers had when it was kept on disk.
        leave: set to abort its requests.
        dropped: why it ended untrained.
    """

    cursor: int
    oldest: int
    requests: int
    state: State = "waiting"
    place: int | None = None
    arrival: int = 0
    pieces: list[list[Completion]] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    version: int = 0
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: Reason | None = None

    @property
    def newest(self) -> int:
        """Return the newest version of the weights that sampled its tokens."""
        return max((piece.newest_version for piece in all_pieces(self.pieces)), default=self.oldest)


@dataclass(frozen=True, slots=True)
class Taken:
    """Describes what a step consumes.

    Attributes:
        groups: those that it trains on, in the order of their last steps.
        given_up: those that ended now, before they were ready or because no step needs them.
        dropped: all groups that ended untrained since the last step, each with its reason.
    """

    step: int
    groups: list[Group]
    given_up: list[Group]
    dropped: list[tuple[int, Reason]]

    @property
    def cursors(self) -> list[int]:
        """Return the cursors of the groups that the step trains on."""
        return [group.cursor for group in self.groups]


class Groups:
    """Keeps the unfinished groups of a run.

    Attributes:
        step: the next step to be taken.
        version: the weights that the servers have.

    Args:
        places: for each server, its number and how many requests it runs at once.
        batch: groups that a step trains on.
        size: completions of a group.
        staleness: largest age of a consumed group in versions: version of the step's weights - oldest version.
        spare: surplus groups that a step need not wait for.
        patient: whether a step waits for groups that would otherwise become stale.
        last: the last step of the run.
        ended: the prompts whose groups have ended.
        held: groups that an earlier process left on disk, ready ones in the order of their arrival.
    """

    def __init__(
        self,
        places: dict[int, int],
        *,
        batch: int,
        size: int,
        staleness: int,
        spare: int,
        patient: bool,
        last: int,
        step: int,
        version: int,
        ended: Ended,
        held: Iterable[Group] = (),
    ):
        self.step, self.version = step, version
        self._batch, self._size, self._staleness = batch, size, staleness
        self._spare, self._patient, self._last = spare, patient, last
        self._slots, self._running = dict(places), dict.fromkeys(places, 0)
        self._next = ended.floor  # the lowest prompt not yet begun
        self._later = set(ended.above)  # prompts above it that have begun
        self._groups: dict[int, Group] = {}
        self._dropped: list[tuple[int, Reason]] = []
        self._arrivals = 0
        for group in held:
            self._hold(group)

    def __contains__(self, cursor: int) -> bool:
        return cursor in self._groups

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    @property
    def busy(self) -> float:
        """Return the share of slots in use."""
        used = sum(min(self._running[place], slots) for place, slots in self._slots.items())
        return used / max(1, sum(self._slots.values()))

    def all(self, *states: State) -> list[Group]:
        """Return the groups in these states."""
        return [group for group in self._groups.values() if group.state in states]

    def start(self) -> list[Group]:
        """Begin as many groups as free slots and pacing allow. Returns them with their places.

        Waiting groups begin before new ones. A whole group goes to the server with the fewest requests.
        """
        begun = []
        while (place := self._free_place()) is not None:
            waiting = self.all("waiting")
            group = min(waiting, key=lambda pending: (pending.oldest, pending.cursor)) if waiting else self._admit()
            if group is None:
                break
            group.state, group.place = "sampling", place
            self._running[place] += group.requests
            begun.append(group)
        return begun

    def requests_ended(self, cursor: int, count: int) -> None:
        """Note that `count` requests of a group have ended, which frees their slots."""
        group = self._in(cursor, "sampling")
        group.requests -= count
        self._free(group, count)

    def sampled(self, cursor: int) -> None:
        """Note that all completions of a group have ended."""
        group = self._in(cursor, "sampling")
        self._free(group, group.requests)
        group.state, group.place, group.requests = "judging", None, 0

    def put_back(self, cursor: int, *, requests: int, kept: bool) -> None:
        """Put a group back to wait for a place.

        Args:
            requests: its unfinished requests.
            kept: whether any of its tokens are kept. If not, it starts over with the current weights.
        """
        group = self._in(cursor, "sampling")
        self._free(group, group.requests)
        group.state, group.place, group.requests = "waiting", None, requests
        if not kept:
            group.oldest = self.version

    def judged(self, cursor: int, reason: Reason | None = None) -> None:
        """Note that a group is judged. It becomes ready, or is dropped if there is a reason."""
        group = self._in(cursor, "judging")
        if reason is not None:
            self._drop(group, reason)
        else:
            self._ready(group)

    def lose(self, place: int) -> None:
        """Begin no more groups on a server. The caller must put back those that it samples: they no longer have a
        place, because a server that returns has all its slots."""
        self._slots.pop(place, None)
        self._running.pop(place, None)
        for group in self._groups.values():
            if group.place == place:
                group.place = None

    def update(self, version: int, places: dict[int, int]) -> None:
        """Note that the servers now have these weights, and that the lost ones among `places` have returned."""
        self._slots = places | self._slots
        self._running = dict.fromkeys(places, 0) | self._running
        if version < self.version:
            raise self._broken("the weight version went down", version, f"at least {self.version}")
        self.version = version

    def take(self) -> Taken | None:
        """Take the groups of the next step. Returns None while the step must wait.

        Raises:
            PipelineError: a group is older than max_staleness allows.
        """
        order = sorted(self.all("ready"), key=lambda group: (self._last_step(group), group.arrival))
        chosen = order[: self._batch]
        for group in chosen:
            if (age := self.step - 1 - group.oldest) > self._staleness:
                raise self._broken(
                    "a group is too old to be trained on", age, f"at most {self._staleness}", group.cursor
                )
        taken = {group.cursor for group in chosen}
        left = [group for group in self._groups.values() if group.cursor not in taken]
        if len(chosen) < self._batch or (self._patient and not self._has_room(left, self.step + 1)):
            return None
        for group in chosen:
            self._end(group)
        given_up = [group for group in left if self._last_step(group) == self.step]
        for group in given_up:
            self._drop(group, "surplus" if self._patient else "stale")
        while self.step == self._last and (cursor := self._unused()) < max(self._later, default=0):
            # An earlier process began this prompt. Groups of later prompts from that process have taken its room.
            self._next += 1
            self._dropped.append((cursor, "surplus"))
        dropped, self._dropped = self._dropped, []
        self.step += 1
        return Taken(self.step - 1, chosen, given_up, dropped)

    def _last_step(self, group: Group) -> int:
        return min(group.oldest + 1 + self._staleness, self._last)

    def _has_room(self, groups: Iterable[Group], step: int) -> bool:
        """Return whether the steps from `step` on can consume all but `spare` of these groups in time."""
        last = sorted(map(self._last_step, groups))
        return all(count <= (due - step + 1) * self._batch + self._spare for count, due in enumerate(last, start=1))

    def _admit(self) -> Group | None:
        """Return a new group of the lowest unused cursor; None if pacing forbids it."""
        group = Group(self._unused(), self.version, self._size, pieces=[[] for _ in range(self._size)])
        steps = self._last_step(group) - self.step + 1
        if steps < 1 or len(self._groups) >= steps * self._batch + self._spare:
            return None
        self._next += 1
        self._groups[group.cursor] = group
        return group

    def _unused(self) -> int:
        """Return the lowest cursor not yet begun."""
        while self._next in self._later:
            self._later.remove(self._next)
            self._next += 1
        return self._next

    def _hold(self, group: Group) -> None:
        """Take over an earlier process's group, unless it has ended, has no room, or its weights are lost."""
        overdue = group.oldest + 1 + self._staleness < self.step
        known = group.cursor < self._next or group.cursor in self._later
        if (
            known
            or overdue
            or group.newest > self.version
            or not self._has_room([*self._groups.values(), group], self.step)
        ):
            return
        self._groups[group.cursor] = group
        self._later.add(group.cursor)
        if group.state == "ready":
            self._ready(group)

    def _free_place(self) -> int | None:
        """Return the server with the fewest requests, if it has a free slot."""
        free = [place for place, slots in self._slots.items() if self._running[place] < slots]
        return min(free, key=lambda place: (self._running[place], place), default=None)

    def _free(self, group: Group, requests: int) -> None:
        if group.place in self._running:
            self._running[group.place] -= requests

    def _ready(self, group: Group) -> None:
        self._arrivals += 1
        group.state, group.arrival = "ready", self._arrivals

    def _drop(self, group: Group, reason: Reason) -> None:
        group.dropped = reason
        self._dropped.append((group.cursor, reason))
        self._end(group)

    def _end(self, group: Group) -> None:
        self._free(group, group.requests)
        del self._groups[group.cursor]

    def _in(self, cursor: int, state: State) -> Group:
        group = self._groups.get(cursor)
        if group is None or group.state != state:
            got = "no such group" if group is None else group.state
            raise self._broken("a group is in the wrong state for an event", got, state, cursor)
        return group

    def _broken(self, what: str, got: object, expected: object, cursor: int | None = None) -> PipelineError:
        where: About = {"step": self.step, "version": self.version}
        if cursor is not None:
            where = {**where, "group": cursor}
        return PipelineError(what, where=where, got=got, expected=expected)
