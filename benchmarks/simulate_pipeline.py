"""Simulates sampling and training side by side on a cluster: `python benchmarks/pipeline.py --simulated`.

A MODEL, NOT A MEASUREMENT. Its costs are in benchmarks/costs/h100_pipeline.yaml, each with its source or "assumed";
sizes of the model come from its config.json. Time passes from event to event: a completion ends, a training step ends.

    decoding   a step of an engine takes  overhead + (weights of the experts that its batch touches, dense weights, and
               keys and values of all its tokens) / memory bandwidth.  It grows with the batch, and with its tokens
    prefill    operations of a group's prompt / rate, once a group, while the engine does not decode
    cache      when it is full, the request that began last waits again, and its tokens are computed once more
    lengths    log-normal and cut at the limit. Half of the variance is the prompt's, half the completion's. Prompt n
               has the same lengths in every mode
    training   (forward, backward and extra forward passes of the batch) / rate + overhead; perfectly even on its ranks
    weights    both sides stand still. Requests in flight keep their keys and values
    not in it  verifiers, routes, evaluation, checkpoints, failures, the effect of staleness on learning

Modes are those of `pipeline.mode`; `async S` allows a staleness of S versions. Which group begins where, and which ones
a step takes, is decided by the run's own code (moe_rl/rollout/groups.py). `shared` is `sync` on GPUs that do both in
turns. In `sync` and `one_step_off` the prompts of a batch are dealt to the engines in turns.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import asdict, dataclass, fields, replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from statistics import fmean, median

import numpy as np
from simulate_cluster import read_costs

from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import parameter_count, read_published
from moe_rl.planning.model_flops import active_matrix_elements, forward_flops
from moe_rl.planning.sampler_memory import kv_bytes_per_token
from moe_rl.rollout.groups import Groups
from moe_rl.tasks.prompt_ledger import Ended

HERE = Path(__file__).parent
COSTS, MODEL = HERE / "costs/h100_pipeline.yaml", HERE.parent / "configs/models/qwen3_30b_a3b.json"
STALENESS = (1, 4, 8)
_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Costs:
    """Holds the numbers of a cost file, which gives their units."""

    memory_bandwidth: float
    kv_bytes: float
    decode_overhead: float
    prefill_rate: float
    training_rate: float
    extra_forwards: float
    step_overhead: float
    weight_sync: float
    switch: float


@dataclass(frozen=True, slots=True)
class Work:
    """Describes what a run samples. Lengths are in tokens; `spread` is the standard deviation of their logarithm."""

    prompts: int = 128
    group: int = 16
    prompt_tokens: int = 256
    median_tokens: float = 2_000.0
    spread: float = 0.9
    longest: int = 8_192
    steps: int = 24
    warmup: int = 8
    seed: int = 0

    @property
    def all_steps(self) -> int:
        return self.warmup + self.steps

    def lengths(self, ahead: int) -> np.ndarray:
        """Draw [groups, completions of a group] for all steps and `ahead` further ones."""
        rng, groups = np.random.default_rng(self.seed), (self.all_steps + ahead) * self.prompts
        normal = rng.standard_normal((groups, 1 + self.group))  # row by row: more groups do not change the first ones
        normal = normal[:, :1] + normal[:, 1:]
        drawn = self.median_tokens * np.exp(normal * self.spread / math.sqrt(2))
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Describes which GPUs do what. `shared`: the same GPUs sample and train, in turns."""

    samplers: int
    trainers: int
    gpus_per_engine: int = 2
    max_concurrent: int = 128
    shared: bool = False

    @property
    def gpus(self) -> int:
        return self.trainers if self.shared else self.samplers + self.trainers


@dataclass(slots=True)
class Result:
    """Holds what a mode came to after the warm-up. Shares are of the time of all GPUs of a side.

    Attributes:
        sampler_idle, trainer_idle: shares of neither working nor taking weights.
        slots: mean share of `max_concurrent` that is in use while an engine works.
        staleness: share of the groups by versions between the first request and the step that trained on them.
        versions: mean number of weight versions that sampled a completion.
    """

    groups_per_second: float
    step_seconds: float
    sampler_idle: float
    trainer_idle: float | None
    slots: float
    staleness: dict[int, float]
    versions: float


@dataclass(slots=True)
class Request:
    """Describes a completion to be sampled.

    Attributes:
        context, tokens: tokens before it, and tokens to sample.
        prefill: how many of the former must be computed first.
        version: that of the weights with which it began; None if it has not.
    """

    group: int
    context: float
    tokens: float
    prefill: float
    version: int | None = None


class Engine:
    """Decodes a batch that completions join and leave. Its time stands still between events: see `advance`.

    Attributes:
        end: when its next completion ends, or its cache is full.
        busy, occupied: seconds of work, and the same times the share of the slots that were in use.
    """

    def __init__(self, costs: Costs, facts: ModelFacts, cluster: Cluster):
        gpus, count = cluster.gpus_per_engine, parameter_count(facts)
        self.slots = cluster.max_concurrent
        per_token = kv_bytes_per_token(facts, "bfloat16", gpus)
        self.cache = int(costs.kv_bytes // per_token)
        self.per_token = per_token / costs.memory_bandwidth
        rate = gpus * costs.memory_bandwidth / _BYTES
        untouched = 1 - facts.top_k / facts.num_experts  # chance that a token leaves an expert alone
        self.step_seconds = [
            costs.decode_overhead + (count.dense + count.expert * (1 - untouched**batch)) / rate
            for batch in range(self.slots + 1)
        ]
        self.prefill = 2 * active_matrix_elements(facts) / (gpus * costs.prefill_rate)  # seconds a token
        self.waiting: deque[Request] = deque()
        self.running: list[tuple[float, int, Request]] = []  # tick of its end, when it began in order, request
        self.end, self.now, self.ticks, self.stalled = math.inf, 0.0, 0.0, 0.0
        self.held, self.began = 0.0, 0  # tokens in the cache; requests that have begun
        self.busy = self.occupied = 0.0

    def seconds(self, batch: int, held: float, ticks: float) -> float:
        """Return the seconds of this many decoding steps of a batch that holds `held` tokens at first."""
        return ticks * (self.step_seconds[batch] + self.per_token * (held + batch * ticks / 2))

    def start(self, version: int) -> None:
        """Let waiting requests join, in order, while there are slots and room. Find when something happens next."""
        while self.waiting and len(self.running) < self.slots:
            one = self.waiting[0]
            if self.running and self.held + one.context + len(self.running) + 1 > self.cache:
                break
            self.waiting.popleft()
            if one.version is None:
                one.version = version
            self.stalled += one.prefill * self.prefill
            self.began += 1
            heappush(self.running, (self.ticks + one.tokens, self.began, one))
            self.held += one.context
        self.end = math.inf
        if batch := len(self.running):
            ticks = min(self.running[0][0] - self.ticks, max(0.0, self.cache - self.held) / batch)
            self.end = self.now + self.stalled + self.seconds(batch, self.held, ticks)

    def advance(self, until: float) -> list[Request]:
        """Let time pass, up to `end` at most. Return the requests that ended. If the cache is full, the request that
        began last has to wait again.
        """
        elapsed, batch = until - self.now, len(self.running)
        self.now = until
        if not batch:
            return []
        self.busy += elapsed
        self.occupied += elapsed * batch / self.slots
        waited = min(elapsed, self.stalled)
        self.stalled -= waited
        growth, first = self.per_token * batch, self.step_seconds[batch] + self.per_token * self.held
        ticks = (math.sqrt(first * first + 2 * growth * (elapsed - waited)) - first) / growth  # seconds() turned round
        self.ticks += ticks
        self.held += batch * ticks
        ended: list[Request] = []
        if until < self.end:
            return ended
        while self.running and self.running[0][0] - self.ticks < 1e-4:
            ended.append(heappop(self.running)[2])
            self.held -= ended[-1].context + ended[-1].tokens
        if not ended and self.held > self.cache - 1:
            self._preempt()
        return ended

    def _preempt(self) -> None:
        """Let the request that began last wait again. What it has is computed once more."""
        last = max(self.running, key=lambda entry: entry[1])
        self.running.remove(last)
        heapify(self.running)
        end, _, one = last
        left = end - self.ticks
        has = one.context + one.tokens - left
        self.held -= has
        self.waiting.appendleft(Request(one.group, has, left, prefill=has, version=one.version))


class Pool:
    """Holds the engines, and counts what is left of each group."""

    def __init__(self, engines: list[Engine], lengths: np.ndarray, prompt_tokens: int):
        self.engines, self.lengths, self.prompt_tokens = engines, lengths, prompt_tokens
        self.left: dict[int, int] = {}
        self.versions: list[int] = []  # number of those that sampled each completion that ended

    def submit(self, group: int, engine: Engine, now: float, version: int) -> None:
        """Send a group to an engine now, which is not after the next end."""
        tokens = self.lengths[group].tolist()
        self.left[group] = len(tokens)
        for place, one in enumerate(tokens):  # the completions of a group share what was computed of their prompt
            engine.waiting.append(Request(group, self.prompt_tokens, one, prefill=0 if place else self.prompt_tokens))
        engine.advance(now)
        engine.start(version)

    def next_end(self) -> float:
        return min(engine.end for engine in self.engines)

    def advance(self, until: float, version: int) -> list[tuple[int, int]]:
        """Let completions end that end now. Return the group of each, and how many are left of it."""
        found = []
        for engine in self.engines:
            if engine.end > until:
                continue
            for one in engine.advance(until):
                assert one.version is not None
                self.versions.append(version - one.version + 1)
                self.left[one.group] -= 1
                found.append((one.group, self.left[one.group]))
            engine.start(version)
        return found

    def pause(self, now: float, seconds: float) -> None:
        """Let all engines stand still for some seconds from now on."""
        for engine in self.engines:
            engine.advance(now)
            engine.now += seconds
            engine.end += seconds


class Run:
    """Simulates one mode on one cluster, and keeps what each step came to."""

    def __init__(self, costs: Costs, facts: ModelFacts, cluster: Cluster, work: Work, ahead: int):
        self.costs, self.facts, self.cluster, self.work = costs, facts, cluster, work
        engines = [Engine(costs, facts, cluster) for _ in range(cluster.samplers // cluster.gpus_per_engine)]
        self.pool = Pool(engines, work.lengths(ahead), work.prompt_tokens)
        self.trained = 0.0
        self.ends: list[tuple[float, float, float, float]] = []  # after a step: time, training, sampling, slots
        self.lags: list[list[int]] = []

    def batch(self, number: int) -> range:
        return range(number * self.work.prompts, (number + 1) * self.work.prompts)

    def train_seconds(self, groups: list[int] | range) -> float:
        lengths = (self.pool.lengths[list(groups)] + self.work.prompt_tokens).ravel().tolist()
        operations = (3 + self.costs.extra_forwards) * forward_flops(self.facts, lengths)
        seconds = self.costs.step_overhead + operations / (self.cluster.trainers * self.costs.training_rate)
        self.trained += seconds
        return seconds

    def step_ended(self, now: float, lags: list[int]) -> None:
        engines = self.pool.engines
        self.ends.append((now, self.trained, sum(e.busy for e in engines), sum(e.occupied for e in engines)))
        self.lags.append(lags)
        if len(self.ends) == self.work.warmup:
            self.pool.versions.clear()

    def result(self) -> Result:
        """Sum up the steps after the warm-up."""
        costs, work, engines = self.costs, self.work, len(self.pool.engines)
        before, after = self.ends[work.warmup - 1], self.ends[-1]
        seconds, trained, busy, occupied = (late - early for early, late in zip(before, after, strict=True))
        lags = Counter(lag for lags in self.lags[work.warmup :] for lag in lags)
        weights = work.steps * costs.weight_sync
        elsewhere = trained + work.steps * costs.switch if self.cluster.shared else 0.0
        return Result(
            groups_per_second=work.steps * work.prompts / seconds,
            step_seconds=seconds / work.steps,
            sampler_idle=max(0.0, 1 - (busy / engines + weights + elsewhere) / seconds),
            trainer_idle=None if self.cluster.shared else max(0.0, 1 - (trained + weights) / seconds),
            slots=occupied / busy,
            staleness={lag: lags[lag] / lags.total() for lag in sorted(lags)},
            versions=fmean(self.pool.versions),
        )


def simulate(costs: Costs, facts: ModelFacts, cluster: Cluster, work: Work, mode: str) -> Result:
    """Simulate `sync`, `one_step_off` or `async S`."""
    if mode in ("sync", "async 0", "one_step_off"):  # async 0 calls what sync calls
        return _in_batches(Run(costs, facts, cluster, work, 1), one_ahead=mode == "one_step_off")
    staleness = int(mode.removeprefix("async "))
    return _asynchronous(Run(costs, facts, cluster, work, staleness + 1), staleness)


def _in_batches(run: Run, *, one_ahead: bool) -> Result:
    """Simulate the modes that sample whole batches."""
    costs, shared = run.costs, run.cluster.shared
    now = _sample(run, 0, 0.0)
    for step in range(run.work.all_steps):
        if shared:
            now += costs.switch
        trained = now + run.train_seconds(run.batch(step))
        if one_ahead:
            now = max(trained, _sample(run, step + 1, now)) + costs.weight_sync
            run.step_ended(now, [min(step, 1)] * run.work.prompts)
        else:
            run.step_ended(trained + costs.weight_sync, [0] * run.work.prompts)
            now = _sample(run, step + 1, trained + costs.weight_sync)
    return run.result()


def _sample(run: Run, number: int, now: float) -> float:
    """Sample a batch from `now` on. Return when its last completion ends."""
    pool, left = run.pool, run.work.prompts * run.work.group
    for place, group in enumerate(run.batch(number)):
        pool.submit(group, pool.engines[place % len(pool.engines)], now, 0)
    while left:
        now = pool.next_end()
        left -= len(pool.advance(now, 0))
    return now


def _asynchronous(run: Run, staleness: int) -> Result:
    """Simulate `async` with this bound on the staleness of a group when it is taken."""
    pool, work = run.pool, run.work
    places = {place: engine.slots for place, engine in enumerate(pool.engines)}
    groups = Groups(
        places,
        batch=work.prompts,
        size=work.group,
        staleness=staleness,
        spare=0,
        patient=True,
        last=work.all_steps + staleness,  # the run does not end within the simulated steps
        step=1,
        version=0,
        ended=Ended(),
    )
    now, training, news = 0.0, math.inf, True
    oldest: dict[int, int] = {}
    lags: list[int] = []
    while len(run.ends) < work.all_steps:
        for group in groups.start():
            assert group.place is not None
            oldest[group.cursor] = group.oldest
            pool.submit(group.cursor, pool.engines[group.place], now, groups.version)
        if news and training == math.inf and (taken := groups.take()) is not None:
            lags = [groups.version - oldest.pop(cursor) for cursor in taken.cursors]
            training = now + run.train_seconds(taken.cursors)
        now = min(pool.next_end(), training)
        news = now == training
        for cursor, left in pool.advance(now, groups.version):
            groups.requests_ended(cursor, 1)
            if not left:
                groups.sampled(cursor)
                groups.judged(cursor)
                news = True
        if now == training:
            pool.pause(now, run.costs.weight_sync)
            now, training = now + run.costs.weight_sync, math.inf
            groups.update(groups.version + 1, places)
            run.step_ended(now, lags)
    return run.result()


def simulated(*, ranks: int, seeds: int, steps: int) -> dict[str, object]:
    """Run all simulations, print their tables and return what they show."""
    name, costs = read_costs(COSTS, Costs)
    facts, work = read_published(MODEL), Work(steps=steps)
    lengths = work.lengths(0)
    print(
        f"A model, not a measurement: {ranks} {name}, Qwen3-30B-A3B in bfloat16, {work.prompts} prompts x {work.group} "
        f"a step. Completions: median {np.median(lengths):,.0f} tokens, mean {lengths.mean():,.0f}, 90% below "
        f"{np.percentile(lengths, 90):,.0f}, {(lengths == work.longest).mean():.1%} cut at {work.longest:,}. {steps} "
        f"steps after {work.warmup}; medians of {seeds} seeds.\n"
    )
    return {
        "assumptions": {"costs": {one.name: getattr(costs, one.name) for one in fields(costs)}, "work": asdict(work)},
        "decoding": _decoding(costs, facts),
        "modes": _modes(costs, facts, work, ranks, seeds),
        "tails": _tails(costs, facts, work, ranks),
        "published": _published(costs, facts, steps),
    }


def _decoding(costs: Costs, facts: ModelFacts) -> list[dict[str, float]]:
    engine, held = Engine(costs, facts, Cluster(0, 0)), 2_000
    print(f"| requests of an engine, {held:,} tokens each | tokens/s of a request | of the engine |\n|---|---|---|")
    rows = []
    for batch in (1, 8, 32, 128):
        each = 1 / engine.seconds(batch, batch * held, 1)
        print(f"| {batch} | {each:,.0f} | {batch * each:,.0f} |")
        rows.append({"requests": batch, "tokens_per_second": batch * each})
    return rows


def _modes(costs: Costs, facts: ModelFacts, work: Work, ranks: int, seeds: int) -> list[dict[str, object]]:
    """Simulate every mode on every split. Rows give medians over seeds, and the ratios' smallest and largest."""
    print(
        "\n| samplers : trainers | mode | groups/s | s a step | ratio to sync | to shared | samplers idle | "
        "trainers idle | slots in use | staleness of groups | versions of a completion |\n" + "|---" * 11 + "|"
    )
    works = [replace(work, seed=seed) for seed in range(seeds)]
    whole = Cluster(ranks, ranks, shared=True)
    shared = [simulate(costs, facts, whole, one, "sync") for one in works]
    rows = [_row(f"{ranks} shared", "sync", shared, shared, shared)]
    for samplers in range(ranks // 4, ranks * 3 // 4 + 1, ranks // 8):
        cluster = Cluster(samplers, ranks - samplers)
        sync = None
        for mode in ("sync", "one_step_off", *(f"async {staleness}" for staleness in STALENESS)):
            found = [simulate(costs, facts, cluster, one, mode) for one in works]
            sync = sync or found
            rows.append(_row(f"{samplers} : {ranks - samplers}", mode, found, sync, shared))
    return rows


def _row(split: str, mode: str, found: list[Result], sync: list[Result], shared: list[Result]) -> dict[str, object]:
    middle = {one.name: median(getattr(result, one.name) or 0.0 for result in found)
              for one in fields(Result) if one.name != "staleness"}  # fmt: skip
    ratios = [
        [one.groups_per_second / other.groups_per_second for one, other in zip(found, others, strict=True)]
        for others in (sync, shared)
    ]
    stale = found[0].staleness
    mode = "sync, async 0" if mode == "sync" and split.count(":") else mode
    print(
        f"| {split} | {mode} | {middle['groups_per_second']:.2f} | {middle['step_seconds']:.0f} | "
        f"{median(ratios[0]):.2f} ({min(ratios[0]):.2f} - {max(ratios[0]):.2f}) | {median(ratios[1]):.2f} | "
        f"{middle['sampler_idle']:.0%} | {'-' if found[0].trainer_idle is None else f'{middle["trainer_idle"]:.0%}'} | "
        f"{middle['slots']:.0%} | {', '.join(f'{lag}: {share:.0%}' for lag, share in stale.items())} | "
        f"{middle['versions']:.2f} |",
        flush=True,
    )
    return {"split": split, "mode": mode, **middle, "staleness": stale, "ratio_to_sync": ratios[0],
            "ratio_to_shared": ratios[1]}  # fmt: skip


def _tails(costs: Costs, facts: ModelFacts, work: Work, ranks: int) -> list[dict[str, object]]:
    """Simulate lengths of about the same mean with shorter and longer tails, on halves."""
    modes = ("one_step_off", *(f"async {staleness}" for staleness in STALENESS))
    print(f"\n| spread | median | mean | 99% below | {' | '.join(modes)} |\n" + "|---" * (4 + len(modes)) + "|")
    rows = []
    for spread in (0.3, 0.6, 0.9, 1.2):
        other = replace(work, spread=spread, median_tokens=3_000 * math.exp(-(spread**2) / 2))
        lengths, cluster = other.lengths(0), Cluster(ranks // 2, ranks // 2)
        sync, *found = (simulate(costs, facts, cluster, other, mode).groups_per_second for mode in ("sync", *modes))
        ratios = [rate / sync for rate in found]
        print(
            f"| {spread} | {np.median(lengths):,.0f} | {lengths.mean():,.0f} | {np.percentile(lengths, 99):,.0f} | "
            f"{' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"
        )
        rows.append({"spread": spread, "ratio_to_sync": dict(zip(modes, ratios, strict=True))})
    return rows


def _published(costs: Costs, facts: ModelFacts, steps: int) -> list[dict[str, object]]:
    """Simulate what others have published of the same model, as far as their pages describe it."""
    # NeMo-RL: 2,048 sequences a step of 3,154 tokens on average, 4,096 at most.
    work = Work(prompts=64, group=32, prompt_tokens=150, median_tokens=3_800, longest=3_946, steps=steps)
    print(f"\nSequences of {work.lengths(0).mean() + work.prompt_tokens:,.0f} tokens on average, as NeMo-RL's:\n")
    print("| published | GPUs | mode | s a step, simulated | published | ratio |\n" + "|---" * 6 + "|")
    rows = []
    for source, cluster, mode, seconds in (
        ("NeMo-RL v0.6", Cluster(32, 32, 4, 256, shared=True), "sync", 192.0),
        ("NeMo-RL v0.6", Cluster(16, 16, 2, 256), "one_step_off", 152.0),
        ("NeMo-RL v0.6", Cluster(96, 96, 2, 256), "async 8", 34.5),
    ):
        got = simulate(costs, facts, cluster, work, mode).step_seconds
        print(f"| {source} | {cluster.gpus} | {mode} | {got:.0f} | {seconds:g} | {got / seconds:.2f} |")
        rows.append({"source": source, "gpus": cluster.gpus, "mode": mode, "simulated": got, "published": seconds})
    return rows
