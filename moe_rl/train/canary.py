"""Lets trainer and samplers score the same fixed runs of tokens after every update, and compares the results.

Every sampler scores the runs and publishes the routes that it took, recorded like those of any request. The trainer
scores the runs with routers that choose for themselves. The recorded routes are tested against these routers' choice
and scores, the witness.

Legend for shapes: L MoE layers of the model, S rows (tokens that are fed, of all runs), K top-k experts per token,
E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_rl.errors import WeightSyncError, after_lr
from moe_rl.megatron import world
from moe_rl.megatron.microbatch import Work, pack
from moe_rl.megatron.policy import Policy
from moe_rl.planning.packing import fill_rounds
from moe_rl.replay.claims import ALPHA, RARE, History, judge, log_e
from moe_rl.replay.layer_claims import LayerSample, layer_tests
from moe_rl.replay.regret import Regret
from moe_rl.replay.replay_pass import Watch
from moe_rl.replay.routes import RowPolicy
from moe_rl.replay.row_places import RowPlaces
from moe_rl.rollout.pool_client import PooledRollouts
from moe_rl.rollout.sampler import Blocking
from moe_rl.trace import RouteRecord, TraceSpec, TraceStore, validate
from moe_rl.types import ScoredTokens, Sequence, sampled_by

_SHARD = "canary"
_NATIVE = RowPolicy(missing="native")
# Two experts whose regrets differ by less than this may be exchanged by rounding.
_CLEAR = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Native:
    """Holds the trainer's results for the runs.

    Attributes:
        logprobs: [S].
        chosen: int64 [L, S, K], the routers' own choice.
        scores: float32 [L, S, E], what the routers rank by.
        logits: float32 [L, S, E] of the routers. NaN if nobody asked for them.
    """

    logprobs: np.ndarray
    chosen: np.ndarray
    scores: np.ndarray
    logits: np.ndarray


@dataclass(frozen=True, slots=True)
class Heard:
    """Holds what a sync showed of the sampler whose log-probabilities are farthest from the trainer's.

    difference: mean |log-probability difference| in nats, with both sides routing natively.
    settled: the same mean over fewer tokens. In each run it leaves out the first token that the two sides routed
    differently and all tokens after it: even in float32 the two sides sometimes decide a near tie of two experts
    differently, and then the rest of the run differs. If fewer than half of the tokens remain, it is the mean over
    all of them.
    by: the sampler.
    mismatch: share of (token, layer) positions where the two sides chose different experts.
    power: share of the layers in which unrelated routes would have been noticed. `mismatch` and `power` are None if the
    sampler does not record.
    suspects: what the differing tokens have in common, in words for a message.
    recorded: share of the samplers that recorded the routes they took.
    change: mean |change of a log-probability| since the version before, in nats: the trainer's, the smallest of any
    sampler's, and the name of that sampler. None if no sampler scored another version before.
    """

    difference: float
    settled: float
    by: str
    mismatch: float | None = None
    power: float | None = None
    suspects: str = ""
    recorded: float = 0.0
    change: tuple[float, float, str] | None = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step, see report/metrics.py."""
        return {
            "sync/canary_abs_diff": self.difference,
            "sync/canary_recorded": self.recorded,
            **({} if self.mismatch is None else {"sync/canary_mismatch": self.mismatch}),
            **({} if self.power is None else {"sync/canary_power": self.power}),
            **({} if self.change is None else {"sync/canary_change": self.change[1]}),
            **({} if self.change is None else {"sync/canary_change_trainer": self.change[0]}),
        }


class Canary:
    """Lets trainer and samplers score the same tokens, and compares the results. All ranks call it together."""

    def __init__(self, runs: Seq[tuple[int, ...]], store: TraceStore, spec: TraceSpec):
        """runs: token ids, at least 2 in each run, the same on all ranks."""
        self.runs, self.store, self.spec = tuple(runs), store, spec
        self._sequences = [_sequence(f"canary/{index}", run) for index, run in enumerate(self.runs)]
        self._fed = [np.array(run[:-1], np.int64) for run in self.runs]
        self._work: list[Work] = []
        # The samplers' scores of the runs, and the records that each sampler published, by its name.
        self.scored: list[ScoredTokens] = []
        self.records: dict[str, list[RouteRecord]] = {}
        self._lr: float | None = None  # of the update before the version that was scored
        # The last version that was scored: the trainer's log-probabilities [S], and those of each sampler.
        self._last: tuple[int, np.ndarray, dict[str, np.ndarray]] | None = None

    def compare(
        self, own: Native, sampler: Blocking | PooledRollouts | None, version: int, *, exact: float = 0.0
    ) -> Heard:
        """Let the sampler score the token sequences, and compare. All ranks get the same result.

        own: what `natively` returned for this version. sampler: given on rank 0 only. version: of the weights that both
        sides hold. exact: the message names the experts common to all tokens that differ by more than this many nats; 0
        skips that.
        Raises WeightSyncError naming sampler and layer when a layer's routes are not those of the trainer's layer. The
        trace then keeps these routes. Raises TraceError or RouteValidationError for damaged or malformed routes.
        """
        if sampler is not None:
            self.score(sampler, version)
        with world.agreed("canary"):
            heard = None if sampler is None else self._heard(own, version, exact)
        return world.broadcast(heard, Heard)

    def score(self, sampler: Blocking | PooledRollouts, version: int) -> None:
        """Let the sampler score the token sequences, and keep the scores until it scores the next version."""
        self.store.remove(*self._shards())  # left by a run that ended during a comparison
        self.scored, self.records = sampler.score(self.runs, shard=f"{_SHARD}-version{version:06d}"), {}

    def _heard(self, own: Native, version: int, exact: float) -> Heard:
        heard, scores = [], dict[str, np.ndarray]()
        for scored in self.scored:
            scores[scored.by] = np.concatenate(scored.logprobs)
            apart = np.abs(own.logprobs - scores[scored.by])
            suspects = self._suspects(apart, own.chosen, exact) if exact else ""
            if scored.routes:
                heard.append(self._align(scored, apart, own, version, suspects))
            else:
                heard.append(Heard(float(apart.mean()), float(apart.mean()), scored.by, suspects=suspects))
        self.store.remove(*self._shards())
        worst = max(heard, key=lambda result: math.inf if math.isnan(result.settled) else result.settled)
        recorded = sum(result.mismatch is not None for result in heard) / len(heard)
        return replace(worst, recorded=recorded, change=self._change(version, own.logprobs, scores))

    def _change(self, version: int, ours: np.ndarray, scores: dict[str, np.ndarray]) -> tuple[float, float, str] | None:
        """Return the change since the version before, as in Heard, and remember this version."""
        last, self._last = self._last, (version, ours, scores)
        if last is None or last[0] == version or not (known := scores.keys() & last[2].keys()):
            return None
        least, by = min((float(np.abs(scores[by] - last[2][by]).mean()), by) for by in known)
        return float(np.abs(ours - last[1]).mean()), least, by

    def _shards(self) -> list[str]:
        return [name for name in self.store.shards() if name.startswith(f"{_SHARD}-")]

    def natively(self, policy: Policy, version: int, *, logits: bool = False) -> Native:
        """Return the trainer's results for the runs, over all ranks. All ranks call it with the weights of this
        version. logits: also those of the routers."""
        self._lr = policy.lr
        self._work = self._work or self._packed(policy, version)
        watch = Watch(scores=True, logits=logits)
        own_pass = policy.score(self._work, "record", f"canary of version {version}", watch, temperature=1.0)
        logprobs, seen = own_pass.logprobs[0], own_pass.seen
        chosen, rows = seen.recorded[0].routes, self._work[0].microbatch.routed_rows
        tokens = sum(map(len, self._fed))
        here = np.flatnonzero(rows < tokens)
        own = _Chosen([], [], b"", b"", b"")
        if world.data_parallel()[0] == 0:  # the others route the same tokens
            mine = np.stack([chosen[layer].cpu().numpy()[here] for layer in policy.layers]).astype(np.int16)
            ranked, kept = (
                b"".join(of[0, layer].float().cpu().numpy()[here].tobytes() for layer in policy.layers if of)
                for of in (seen.router_scores, seen.router_logits)
            )
            own = _Chosen(list(policy.layers), rows[here].tolist(), mine.tobytes(), ranked, kept)
        layers = len(self.spec.moe_layers)
        witness = np.full((layers, tokens, self.spec.top_k), -1, np.int64)
        scores, scored = np.full((2, layers, tokens, self.spec.num_experts), np.nan, np.float32)
        for part in world.gather(own, _Chosen):
            places = np.ix_([self.spec.moe_layers.index(layer) for layer in part.layers], part.rows)
            shape = (len(part.layers), len(part.rows), -1)
            if part.rows:
                witness[places] = np.frombuffer(part.chosen, np.int16).reshape(shape)
                scores[places] = np.frombuffer(part.scores, np.float32).reshape(shape)
            if part.logits:
                scored[places] = np.frombuffer(part.logits, np.float32).reshape(shape)
        if (witness < 0).any():
            layer, row, _ = np.argwhere(witness < 0)[0].tolist()
            raise WeightSyncError(
                "no rank routed a token of the canary", where={"token": row, "layer": self.spec.moe_layers[layer]}
            )
        return Native(logprobs.cpu().numpy(), witness, scores, scored)

    def _packed(self, policy: Policy, version: int) -> list[Work]:
        """Pack all runs into one microbatch, which serves every version: the runs have no routes to read. Interleaved
        stages get empty microbatches after it."""
        (plan,) = fill_rounds([[list(range(len(self._sequences)))]], world.microbatches_in_a_round())
        work = []
        for indices in plan:
            packed = [self._sequences[i] for i in indices]
            microbatch = pack(
                self._sequences, indices, world.device(), world.context_parallel(), multiple=policy.row_multiple
            )
            table = microbatch.read_routes(
                self.store, packed, self.spec, weight_version=version, layers=policy.layers, policy=_NATIVE
            )
            work.append(Work(microbatch, table, microbatch.rollout_logprobs))
        return work

    def _align(self, scored: ScoredTokens, apart: np.ndarray, own: Native, version: int, suspects: str) -> Heard:
        """Return what one sampler's scores and routes show. Raises WeightSyncError for a layer with wrong routes.

        apart [S]: |log-probability difference| of each token.
        """
        records = self.records[scored.by] = [self.store.read(ref) for ref in scored.routes]
        for record, fed, ref in zip(records, self._fed, scored.routes, strict=True):
            validate(record, token_ids=fed, spec=self.spec, weight_version=version, ref=ref)
        routes = np.concatenate([record.routes for record in records]).transpose(1, 0, 2).astype(np.int64)
        problems, power = compare_routes(routes, own.chosen, own.scores, self._fed, self.spec.moe_layers)
        if problems:
            raise WeightSyncError(
                "sampler and trainer route the canary differently",
                where={"version": version, "sampler": scored.by, **after_lr(self._lr)},
                got="; ".join(problems),
                expected="in each layer the experts that the trainer's routers choose",
                do="look at the export of these layers, starting with the first: its router and all before it; "
                f"then at the recorder. The trace keeps the routes in shard {scored.routes[0].parts[0].shard}",
            )
        differs = (np.sort(routes, -1) != np.sort(own.chosen, -1)).any(-1)
        ends = np.cumsum(list(map(len, self._fed)))[:-1]
        before = np.concatenate([np.cumsum(run) == 0 for run in np.split(differs.any(0), ends)])
        settled = apart[before] if before.mean() >= 0.5 else apart
        return Heard(
            float(apart.mean()), float(settled.mean()), scored.by, float(differs.mean()), power, suspects=suspects
        )

    def _suspects(self, apart: np.ndarray, witness: np.ndarray, limit: float) -> str:
        """Name the experts that would explain all tokens that differ by more than `limit`.

        Such an expert is taken by the first differing token of each run, and by no token before it. Later tokens say
        nothing: they may differ only because they attend to earlier ones.
        """
        differs = ~(apart <= limit)
        if not differs.any():
            return ""
        layers, experts = len(witness), self.spec.num_experts
        guilty, cleared = np.ones((layers, experts), bool), np.zeros((layers, experts), bool)
        start = 0
        for fed in self._fed:
            run = slice(start, start + len(fed))
            first = int(np.argmax(differs[run])) if differs[run].any() else len(fed)
            for row in range(start, start + first):
                np.put_along_axis(cleared, witness[:, row], True, 1)
            if first < len(fed):
                taken = np.zeros((layers, experts), bool)
                np.put_along_axis(taken, witness[:, start + first], True, 1)
                guilty &= taken
            start = run.stop
        suspects = np.argwhere(guilty & ~cleared).tolist()
        if not cleared.any():
            return "every token differs: look at what they all pass through, embeddings, norms, attention, the head"
        if not suspects:
            return f"{int(differs.sum())} of {len(apart)} tokens differ, which no single expert explains"
        named = [f"expert {expert} of layer {self.spec.moe_layers[layer]}" for layer, expert in suspects[:4]]
        more = f" or {len(suspects) - 4} others" if len(suspects) > 4 else ""
        return f"the tokens that differ are those that take {' or '.join(named)}{more}"


def compare_routes(
    routes: np.ndarray, chosen: np.ndarray, scores: np.ndarray, fed: Seq[np.ndarray], layers: Seq[int]
) -> tuple[list[str], float]:
    """Return which layers have wrong routes, in words, and the share of layers in which unrelated routes would have
    been noticed.

    Args:
        routes, chosen: int64 [L, S, K], the record and the routers' own choice.
        scores: float32 [L, S, E], what the routers rank by.
        fed: Token ids of each run.
        layers: [L], global numbers.
    """
    places = RowPlaces.of(fed, [len(ids) for ids in fed], np.ones(routes.shape[1], bool), slice(None))
    sample = LayerSample.of_choice(routes, chosen, scores.shape[2], places)
    claims = [judge(tests, History()) for tests in layer_tests(sample, layers, fresh=True)]
    problems = [text for claim in claims for text in claim.found]
    return problems or wrong_ids(routes, chosen, scores, places.context, layers), min(claim.power for claim in claims)


def wrong_ids(
    routes: np.ndarray, chosen: np.ndarray, scores: np.ndarray, context: np.ndarray, layers: Seq[int]
) -> list[str]:
    """Name the pairs of experts that have each other's place in most rows. If there are none, name the layers with
    wrong ids in most rows.

    One expert is clearly worse than another if its regret is larger by _CLEAR. A row counts for a pair if the trainer
    chose one of the two and the other is clearly worse. It is a hit if the record has the other instead: noise does
    this in at most RARE of such rows. Both directions need hits in most rows, because the scores of one expert alone
    may have drifted. A row has a wrong id if it names an expert that is clearly worse than all that the trainer chose:
    noise does this in fewer than half of the rows. Rows with the same last four tokens count as one. Each of the two
    tests names something in a healthy canary with a probability of at most ALPHA (see `claims`).

    Args:
        routes, chosen, scores, layers: As in `compare_routes`.
        context: [S], equal for rows with the same last four tokens.
    """
    regret = Regret.of(torch.from_numpy(chosen), torch.from_numpy(scores)).each().numpy()
    _, rows, experts = regret.shape
    _, cluster, size = np.unique(context, return_inverse=True, return_counts=True)
    needed = math.log(len(layers) * experts * (experts - 1) / 2 / ALPHA)
    pairs, wrong = [], []
    for index, layer in enumerate(layers):
        here = regret[index]
        theirs, ours = (np.zeros((rows, experts), bool) for _ in range(2))
        np.put_along_axis(theirs, routes[index], True, 1)
        np.put_along_axis(ours, chosen[index], True, 1)
        # [E, E]: rows where only the trainer took the first expert, and only the sampler the second
        moved = (ours & ~theirs).astype(np.float32).T @ (theirs & ~ours)
        for pair in np.argwhere(np.triu((moved > 0) & (moved.T > 0), 1)).tolist():
            first, second = np.array([pair, pair[::-1]]).T  # both directions
            clear = ours[:, first] & ~ours[:, second] & (here[:, second] - here[:, first] >= _CLEAR)  # [S, 2]
            hit = clear & theirs[:, second] & ~theirs[:, first]
            x = np.bincount(cluster, ((0.5 / RARE) * hit - 0.5 * clear).sum(1)) / size
            if (2 * hit.sum(0) > clear.sum(0)).all() and np.log1p(x).sum() >= needed:
                told = f"in {hit.sum()} of {clear.sum()} rows"
                pairs.append(f"layer {layer} has experts {pair[0]} and {pair[1]} exchanged: {told}")
        worst = np.where(ours, here, -np.inf).max(1)
        bad = (theirs & ~ours & (here >= worst[:, None] + _CLEAR)).any(1)
        x = torch.from_numpy(np.bincount(cluster, 1 - 2.0 * bad) / size)
        if float(log_e(x)) >= math.log(len(layers) / ALPHA):
            wrong.append(f"layer {layer} has experts that its router would not choose in {bad.sum()} of {rows} rows")
    return pairs or wrong


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Holds what one rank's routers chose in its layers [l] and rows [s].

    chosen: the bytes of int16 [l, s, K]. scores: those of float32 [l, s, E]. logits: the same, or none.
    """

    layers: list[int]
    rows: list[int]
    chosen: bytes
    scores: bytes
    logits: bytes


def _sequence(key: str, run: tuple[int, ...]) -> Sequence:
    return Sequence(
        key=key,
        prompt_token_ids=run[:1],
        token_ids=run[1:],
        rollout_logprobs=np.zeros(len(run) - 1, np.float32),
        reward=0.0,
        versions=sampled_by(0, len(run) - 1),
        routes=None,
    )
