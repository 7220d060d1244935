"""The state machine of groups, under thousands of schedules with a simulated clock."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from random import Random

import numpy as np
import pytest

from moe_rl.rollout.groups import Group, Groups, Taken
from moe_rl.tasks.prompt_ledger import Ended, StepPrompts
from moe_rl.types import Completion, sampled_by

SCHEDULES = 2000


@dataclass
class Disk:
    """What survives a kill: a line for each step, group files, and the last checkpoint."""

    lines: list[Taken] = field(default_factory=list)
    files: dict[int, Group] = field(default_factory=dict)
    checkpoint: int = 0

    def ended(self) -> Ended:
        ended = Ended()
        for taken in self.lines:
            line = StepPrompts(taken.step - 1, [(at, 1) for at in taken.cursors], [], taken.dropped, "")
            assert ended.add(line, in_order=False) is None, "a prompt ended twice"
        return ended


@cache
def sampled_with(version: int) -> Completion:
    return Completion("", (), (), np.empty(0, np.float32), "stop", sampled_by(version, 1), None)


class Pool:
    """A run: servers, verifiers and a trainer that take random times, and that fail at random points."""

    def __init__(self, seed: int):
        self.random = draw = Random(seed)
        self.batch, self.size, self.last = draw.randint(1, 4), draw.randint(1, 3), draw.randint(4, 9)
        self.staleness, self.spare = draw.randint(0, 4), draw.choice((0, 0, 1, 3))
        self.patient = draw.random() < 0.7
        self.slots = draw.randint(1, 6)
        self.servers = draw.randint(1, 4)
        self.failing = draw.choice((0.0, 0.0, 0.3))
        self.changes = draw.random() < 0.3  # whether max_staleness changes when the run is resumed
        self.kills, self.losses = draw.choice((0, 0, 1, 3)), draw.randint(0, self.servers - 1)
        self.late = draw.choice((0.0, 3.0))  # how long new weights are on their way while the next step is awaited
        self.deadlines = draw.choice((0.0, 0.02))
        self.keeps = draw.random() < 0.5  # whether partial groups are kept
        self.slow = draw.choice((1.0, 4.0, 20.0))
        self.every = draw.randint(1, 3)
        self.disk = Disk()
        self.begin()

    # What happens, each after a time of its own.

    def begin(self) -> None:
        """A process starts, or starts again after a kill."""
        disk, draw = self.disk, self.random
        # Rollouts of the step after the checkpoint may be trained on as they are.
        entered = min(len(disk.lines), disk.checkpoint + draw.randint(0, 1))
        del disk.lines[entered:]
        self.clock, self.arrives, self.order, self.events = 0.0, 0.0, count(), []
        self.places = dict.fromkeys(range(self.servers), self.slots)
        held = sorted(disk.files.values(), key=lambda one: one.state)
        self.groups = Groups(
            dict(self.places),
            batch=self.batch,
            size=self.size,
            staleness=self.staleness,
            spare=self.spare,
            patient=self.patient,
            last=self.last,
            step=entered + 1,
            version=disk.checkpoint,
            ended=disk.ended(),
            held=[replace(one) for one in held],
        )
        disk.files = {cursor: one for cursor, one in disk.files.items() if cursor in self.groups}
        assert all(one.newest <= disk.checkpoint for one in disk.files.values()), "its weights are lost"
        self.oldest = {cursor: one.oldest for cursor, one in disk.files.items()}
        self.begun = {cursor for taken in disk.lines for cursor in taken.cursors}
        self.begun |= {cursor for taken in disk.lines for cursor, _ in taken.dropped} | set(disk.files)
        self.trained, self.waits = disk.checkpoint, True
        for group in self.groups.all("judging"):
            self.after(draw.random(), self.judge, group.cursor)
        if entered > disk.checkpoint:
            self.waits = False
            self.after(1.0, self.train, entered)
        else:
            self.waits = True

    def after(self, seconds: float, event, *arguments) -> None:
        heapq.heappush(self.events, (self.clock + seconds, next(self.order), event, arguments))

    def duration(self) -> float:
        return self.random.lognormvariate(0.0, 1.5)

    def sample(self, group: Group) -> None:
        left = sorted(self.duration() for _ in range(group.requests))
        for seconds in left:
            self.after(seconds, self.request, group.cursor, group.place)

    def request(self, cursor: int, place: int) -> None:
        group = self.of(cursor, "sampling")
        if group is None or group.place != place:
            return
        self.groups.requests_ended(cursor, 1)
        if not group.requests:
            self.groups.sampled(cursor)
            self.after(self.duration() / 4, self.judge, cursor)

    def judge(self, cursor: int) -> None:
        if self.of(cursor, "judging"):
            failed = self.random.random() < self.failing
            if not failed:
                self.keep(cursor, 0, "ready")
            self.groups.judged(cursor, "failed" if failed else None)

    def keep(self, cursor: int, requests: int, state: str) -> None:
        pieces = [[sampled_with(self.groups.version)]]
        self.disk.files[cursor] = Group(cursor, self.oldest[cursor], requests, state, pieces=pieces)

    def lose(self) -> None:
        place = self.random.choice(list(self.places))
        del self.places[place]
        held = [group for group in self.groups.all("sampling") if group.place == place]
        self.groups.lose(place)
        for group in held:
            self.put_back(group)

    def put_back(self, group: Group) -> None:
        """A group stops before its end: its server is lost, or a deadline has passed."""
        kept = self.keeps and group.requests < self.size
        requests = group.requests if kept else self.size
        self.groups.put_back(group.cursor, requests=requests, kept=kept)
        if kept:
            self.keep(group.cursor, requests, "waiting")
        else:
            self.oldest[group.cursor] = self.groups.version

    def train(self, step: int) -> None:
        """A step has been trained: its weights go out, and the next step is awaited."""
        self.trained = step
        if step % self.every == 0:
            self.disk.checkpoint = step
        self.arrives = max(self.arrives, self.clock + self.late * self.random.random() * bool(self.staleness))
        self.after(self.arrives - self.clock, self.update, step)
        self.waits = self.groups.step <= self.last

    def update(self, step: int) -> None:
        """New weights arrive, at times also at servers that were lost."""
        if self.random.random() < 0.5:
            self.places = dict.fromkeys(range(self.servers), self.slots)
        self.groups.update(step, dict(self.places))

    # What must hold, seen from outside.

    def of(self, cursor: int, state: str) -> Group | None:
        return next((group for group in self.groups.all(state) if group.cursor == cursor), None)

    def running(self) -> dict[int, int]:
        load = dict.fromkeys(self.places, 0)
        for group in self.groups.all("sampling"):
            load[group.place] += group.requests
        return load

    def room(self) -> int:
        """The most groups that may be in the pool for a new one to be consumed in time."""
        steps = min(self.groups.version + 1 + self.staleness, self.last) - self.groups.step + 1
        return steps * self.batch + self.spare if steps > 0 else 0

    def start(self) -> None:
        load, before = self.running(), len(self.groups.all("waiting", "sampling", "judging", "ready"))
        begun = self.groups.start()
        assert not self.groups.all("waiting") or all(one.cursor in self.begun for one in begun), "a new one came first"
        for group in begun:
            assert load[group.place] == min(load.values()) < self.slots, "not on the least loaded server"
            load[group.place] += group.requests
            if group.cursor not in self.begun:
                assert set(range(group.cursor)) <= self.begun, "not the lowest prompt"
                assert before < self.room(), "a burst"
                before += 1
                self.begun.add(group.cursor)
                self.oldest[group.cursor] = self.groups.version
            self.sample(group)
        assert load == self.running()
        assert min(load.values()) >= self.slots or before >= self.room(), "a server idles"

    def take(self) -> None:
        step = self.groups.step
        for group in self.groups.all("waiting", "sampling", "judging", "ready"):
            assert group.oldest == self.oldest[group.cursor]
        if (taken := self.groups.take()) is None:
            return
        assert taken.step == step and len(taken.cursors) == self.batch
        for cursor in taken.cursors:
            assert step - 1 - self.oldest[cursor] <= self.staleness, "too old"
            assert self.disk.files[cursor].state == "ready", "not judged"
        reasons = [reason for _, reason in taken.dropped]
        assert not self.patient or "stale" not in reasons
        assert reasons.count("surplus") <= self.spare or step == self.last
        self.disk.lines.append(taken)
        if self.random.random() < 0.9:  # a kill may come before the files are removed
            for cursor in (*taken.cursors, *(at for at, _ in taken.dropped)):
                self.disk.files.pop(cursor, None)
        self.waits = False
        self.after(self.random.random() * self.slow, self.train, step)

    def run(self) -> None:
        while self.trained < self.last:
            self.start()
            if self.waits:
                self.take()
            assert self.events, "a deadlock: nothing will happen any more"
            self.clock, _, event, arguments = heapq.heappop(self.events)
            event(*arguments)
            if self.losses and self.random.random() < 0.02 and len(self.places) > 1:
                self.losses -= 1
                self.lose()
            if self.random.random() < self.deadlines and (sampled := self.groups.all("sampling")):
                self.put_back(self.random.choice(sampled))
            if self.kills and self.random.random() < 0.02:
                self.kills -= 1
                self.staleness = self.random.randint(0, 4) if self.changes else self.staleness
                self.begin()
        ended = self.disk.ended()
        assert not ended.above and ended.floor >= self.last * self.batch, "a prompt was lost"


@pytest.mark.parametrize("first", range(0, SCHEDULES, SCHEDULES // 4))
def test_no_schedule_breaks_a_rule(first):
    for seed in range(first, first + SCHEDULES // 4):
        try:
            Pool(seed).run()
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise


def test_groups_of_a_lost_server_take_no_slots_from_it_when_it_has_returned():
    """One may learn of the loss only then: its call was silent until its time was up."""
    limits = {"batch": 2, "size": 3, "staleness": 3, "spare": 0, "patient": True, "last": 9, "step": 1, "version": 0}
    groups = Groups({0: 3, 1: 3}, **limits, ended=Ended())
    first, second = groups.start()
    assert (first.place, second.place) == (0, 1)
    groups.lose(0)
    groups.update(1, {0: 3, 1: 3})
    (third,) = groups.start()
    assert third.place == 0
    groups.put_back(first.cursor, requests=3, kept=False)
    assert groups.start() == [], "a fourth group has a slot, although each server has three requests"
