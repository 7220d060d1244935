"""Defines a replay pass: which routes one pass over a rank's microbatches must take, and the proof that it took them.

It surrounds one run of Megatron's schedule: one optimizer update, or one pass without gradients. The routers ask it for
the routes of their (microbatch, layer), and the MoE layers report what they dispatch. It counts both.

At the end of the `with` block it checks:

- Every (microbatch, layer) was taken exactly once forward, and once more where its activations are recomputed.
- For every sequence and layer, the dispatched experts have the checksum of the routes that were read.
- For every sequence, over all layers and ranks, they have the checksum of the routes that left the sampler's engine.
- The rows that a dispatch plan sends are those in the dispatched routing map.
- With `Watch.align`, the routes belong to the rows that they are replayed for.

Routes are looked up by key, so no order of the schedule is assumed. The schedule announces each forward, and the pass
checks that the key belongs to these tokens.

Legend: R rows of a microbatch that this rank's routers see, K top-k, E experts, S sequences of a microbatch with the
padding as one more, layer: global decoder layer, 0-based.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from moe_rl.errors import About, ReplayError, after_lr, first_of
from moe_rl.replay import evidence
from moe_rl.replay.alignment import Alignment, AlignmentTest
from moe_rl.replay.plans import LayerPlan
from moe_rl.replay.tables import Compared, MicrobatchRoutes, Tally, totals


@dataclass(slots=True)
class Ledger:
    """Counts for one pass. `verb` is "taken" or "dispatched", for the error message."""

    verb: str
    counts: Counter = field(default_factory=Counter)

    def count(self, microbatch: int, layer: int) -> None:
        """Count one use. Uses with and without gradients enabled are counted separately."""
        self.counts[microbatch, layer, torch.is_grad_enabled()] += 1

    def check(
        self, microbatches: Sequence[int], layers: Sequence[int], recomputed_layers: frozenset[int], where: About
    ) -> tuple[int, int]:
        """Check that each (microbatch, layer) was used once in the forward, and once more if the layer is recomputed.

        Returns:
            (counted, expected), which are equal.

        Raises:
            ReplayError: A (microbatch, layer) was used another number of times, or is not part of the pass.
        """
        known = {(microbatch, layer) for microbatch in microbatches for layer in layers}
        problems = []
        for microbatch, layer in sorted(known):
            without_grad, with_grad = self.counts[microbatch, layer, False], self.counts[microbatch, layer, True]
            # A checkpointed forward runs first without gradients, then with gradients in its recomputation.
            if layer in recomputed_layers:
                got = {"forward": without_grad, "recompute": with_grad}
            else:
                got = {"forward": without_grad + with_grad}
            key = f"microbatch {microbatch} layer {layer}"
            problems += [f"{key} {phase} {n} times" for phase, n in got.items() if n != 1]
        problems += [
            f"microbatch {m} layer {layer} not of this pass" for m, layer, _ in self.counts if (m, layer) not in known
        ]
        expected = len(known) + sum(layer in recomputed_layers for _, layer in known)
        if problems:
            raise ReplayError(
                f"routes were not {self.verb} exactly once",
                where=where,
                got=first_of(problems),
                expected=f"each of {expected} exactly once",
                fault=f"not {self.verb} once",
            )
        return sum(self.counts.values()), expected


Mode = Literal["replay", "observe", "record"]

_open_pass: ReplayPass | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """Says what a pass shows besides the routes that it takes.

    Attributes:
        native: Compare the router's own choice with the record. In replay mode this is the shadow comparison.
        align: Tests that the routes belong to their rows, with the router's own choice as the witness. Needs `native`.
            A test of several passes on the same weights gives its verdict in the last of them.
        align_from: Number of this pass's first microbatch in that test.
        against: The record to compare the router's choice with, if it is not what the pass takes: the same microbatches
            with other routes.
        scores: In mode "record", keep what every router ranks by.
        logits: Keep the logits of every router.
    """

    native: bool = False
    align: AlignmentTest | None = None
    align_from: int = 0
    against: list[MicrobatchRoutes] | None = None
    scores: bool = False
    logits: bool = False


@dataclass(slots=True, eq=False)
class PassSeen:
    """Holds what a pass showed. All is complete once the pass is over.

    Attributes:
        tally: What it counted.
        compared: With `Watch.native`, one per microbatch, over this rank's layers.
        alignment: Result of the alignment test, if this pass ended it.
        recorded: In mode "record", the same microbatches with the routes that the routers chose.
        router_scores: With `Watch.scores`, {(microbatch, layer): [R, E]}.
        router_logits: With `Watch.logits`, {(microbatch, layer): [R, E]}, before scores, bias and groups.
    """

    tally: Tally = field(default_factory=Tally)
    compared: list[Compared] = field(default_factory=list)
    alignment: Alignment | None = None
    recorded: list[MicrobatchRoutes] = field(default_factory=list)
    router_scores: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    router_logits: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ReplayPass:
    """Surrounds one pass of the schedule, as a context manager.

    Attributes:
        microbatches: Routes of each microbatch.
        layers: The MoE layers of this rank.
        mode: "replay" forces the recorded routes. "observe" lets the router choose, and only compares. "record" lets
            the router choose and keeps its choice (R2).
        name, rank: For error messages.
        watch: What else it shows.
        recomputed_layers: Layers that the pass runs a second time, with gradients. Their routes are taken twice.
        any_stage: ORs bool flags [tokens] over the ranks that hold the other layers of the same tokens. Called at most
            once, at exit.
        sum_over_share: Adds int64 [n], modulo 2**64, over the ranks that hold other layers or other rows of the same
            sequences. Called at most once, at exit.
        agreed: Surrounds the checks at exit, and raises on every rank if one of them raises on one.
        lr: Learning rate of the update before this pass, for messages; None before the first update.
        plans: Dispatch plans from `plan_dispatch`, followed in replay mode. For a microbatch without a plan, Megatron's
            dispatcher asks the other ranks in every layer.
        seen: What the pass shows.

    Raises:
        ReplayError: Passes are nested, or this pass is used while it is not open. A router asks for an unknown key, or
            for the key of other tokens. A check at exit fails.
    """

    microbatches: list[MicrobatchRoutes]
    layers: tuple[int, ...]
    mode: Mode
    name: str
    rank: int
    watch: Watch = field(default_factory=Watch)
    recomputed_layers: frozenset[int] = frozenset()
    any_stage: Callable[[torch.Tensor], torch.Tensor] = lambda flags: flags
    sum_over_share: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums
    agreed: Callable[[], AbstractContextManager] = nullcontext
    lr: float | None = None
    plans: list[dict[int, LayerPlan] | None] = field(default_factory=list)
    seen: PassSeen = field(default_factory=PassSeen)
    _forwarding: int | None = None
    _strangers: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    _taken: Ledger = field(default_factory=lambda: Ledger("taken"))
    _dispatched: Ledger = field(default_factory=lambda: Ledger("dispatched"))
    _applied: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    _faded: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    _arrived: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _misplanned: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    _chosen: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _native: dict[tuple[int, int], Compared] = field(default_factory=dict)

    def __enter__(self) -> ReplayPass:
        global _open_pass
        if _open_pass is not None:
            raise ReplayError(
                "a replay pass is already open",
                where={"run": self.name},
                got=_open_pass.name,
                expected="no open pass",
                do="end that pass first: passes cannot be nested",
                fault="nested",
            )
        _open_pass = self
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        global _open_pass
        _open_pass = None
        if error is None:
            self._close()

    def handle(self, microbatch: int) -> MicrobatchHandle:
        """Return the handle that travels with a microbatch through the model."""
        return MicrobatchHandle(self, microbatch)

    def begin_forward(self, microbatch: int, tokens: torch.Tensor) -> None:
        """Announce that the schedule is about to run the forward of this microbatch, and of no other until the next
        call.

        Args:
            tokens: int64 [R], ids in the rows that this rank's routers will see. They are compared, on the device, with
                those that the routes were read for.
        """
        self._forwarding = microbatch
        if microbatch >= len(self.microbatches):
            raise ReplayError(
                "the schedule runs more microbatches than the pass has routes for",
                where={**self.place, "microbatch": microbatch},
                got=f"microbatch {microbatch}",
                expected=f"{len(self.microbatches)} microbatches",
                fault="too many",
            )
        expected = self.microbatches[microbatch].fed.tokens
        if tokens.shape != expected.shape:
            raise ReplayError(
                "routes and tokens differ in number",
                where={**self.place, "microbatch": microbatch},
                got=f"{len(expected)} rows",
                expected=f"{len(tokens)} tokens",
                fault="rows",
            )
        self._strangers.append((microbatch, (tokens != expected).any()))

    def routes(self, microbatch: int, layer: int) -> torch.Tensor:
        """Return the recorded routes [R, K] of one (microbatch, layer)."""
        if _open_pass is not self:
            raise ReplayError(
                "a router asked for routes of a pass that is not open",
                where=self._where(microbatch, layer),
                got="no open pass" if _open_pass is None else _open_pass.name,
                expected=self.name,
                do="look for a router that kept the key of an earlier pass",
                fault="not open",
            )
        try:
            return self.microbatches[microbatch].routes[layer]
        except (IndexError, KeyError):
            raise ReplayError(
                "no routes for this layer",
                where=self._where(microbatch, layer),
                got="none",
                expected=f"layers {sorted(self.microbatches[0].routes) if self.microbatches else []}",
                do="record routes with the same model that is trained",
                fault="no routes",
            ) from None

    def native_rows(self, microbatch: int) -> torch.Tensor | None:
        """Return bool [R], the rows of the microbatch for which the router chooses; None if there are none."""
        return self.microbatches[microbatch].native

    def take(self, microbatch: int, layer: int, tokens: int) -> torch.Tensor:
        """Return the routes int64 [R, K] to force, and count them as taken. `tokens` is the number of rows to route."""
        routes = self._routes_of(microbatch, layer, tokens)
        self._taken.count(microbatch, layer)
        return routes.long()

    def record(self, microbatch: int, layer: int, chosen: torch.Tensor, scores: torch.Tensor) -> None:
        """Keep the router's choice [R, K], made by its scores [R, E], and count it as taken."""
        self._check_whose(microbatch, layer)
        self._taken.count(microbatch, layer)
        self._chosen[microbatch, layer] = chosen.detach().to(torch.int16)
        if self.watch.scores:
            self.seen.router_scores[microbatch, layer] = scores.detach()

    def _recorded(self) -> list[MicrobatchRoutes]:
        """Return the same microbatches with the routes that the routers chose in this pass."""
        return [
            replace(
                microbatch,
                routes={layer: self._chosen[number, layer] for layer in self.layers},
                checksums={layer: microbatch.fed.chosen(layer, self._chosen[number, layer]) for layer in self.layers},
                source=None,
                native=None,
                replayed_tokens=microbatch.replayed_tokens + microbatch.native_tokens,
                native_tokens=0,
            )
            for number, microbatch in enumerate(self.microbatches)
        ]

    def observe_native(self, microbatch: int, layer: int, native: torch.Tensor, scores: torch.Tensor) -> None:
        """Compare the router's own choice [R, K], made by its scores [R, E], with the record. Stays on the device."""
        if not self.watch.native or (microbatch, layer) in self._native:
            return
        self._check_whose(microbatch, layer)
        rows = self.microbatches[microbatch].recorded
        routes = self.routes(microbatch, layer)
        if self.watch.align is not None:
            self.watch.align.observe(self.watch.align_from + microbatch, layer, routes, native, scores)
        if self.watch.against is not None:
            routes = self.watch.against[microbatch].routes[layer]
        self._native[microbatch, layer] = Compared.in_layer(
            routes.index_select(0, rows).long(), native.index_select(0, rows), scores.detach().index_select(0, rows)
        )

    def observe_logits(self, microbatch: int, layer: int, logits: torch.Tensor) -> None:
        """Keep a router's logits, R x E in any shape, if they are watched."""
        if self.watch.logits:
            self._check_whose(microbatch, layer)
            self.seen.router_logits[microbatch, layer] = logits.detach().reshape(-1, logits.shape[-1])

    def plan(self, microbatch: int, layer: int, tokens: int) -> LayerPlan | None:
        """Return the dispatch plan of one (microbatch, layer) for `tokens` rows, or None if there is none.

        Makes the same checks as `take`, because the plan may send rows before the router asks for their routes.
        """
        plans = self.plans[microbatch] if self.plans and self.mode == "replay" else None
        if plans is None:
            return None
        plan, routes = plans[layer], self._routes_of(microbatch, layer, tokens)
        if len(plan.entries) != routes.numel():
            raise ReplayError(
                "a dispatch plan belongs to another microbatch",
                where=self._where(microbatch, layer),
                got=f"{len(plan.entries)} sent rows",
                expected=routes.numel(),
                do="make plans from the tables that the pass replays, in the same order",
                fault="plan",
            )
        return plan

    def check_dispatch(
        self, microbatch: int, layer: int, routing_map: torch.Tensor, faded: torch.Tensor | None = None
    ) -> None:
        """Compare the routing map [R, E] bool with the record, and the rows that the plan sends with the map. Stays on
        the device. faded: bool [], whether a recorded expert's weight is 0, where the dispatcher chooses by weights."""
        if self.mode != "replay":
            return
        plan = self.plan(microbatch, layer, len(routing_map))
        if plan is not None:
            # A plan sends R x K distinct entries. If all of them are in the map, and the map equals the record, the
            # plan sends exactly the map.
            sent = routing_map.reshape(-1).index_select(0, plan.entries)
            self._misplanned.append((microbatch, layer, ~sent.all()))
        self.seen.tally.dispatched += 1
        self.seen.tally.planned += plan is not None
        table = self.microbatches[microbatch]
        applied = table.fed.applied(layer, routing_map, native=table.native)
        self._applied.append((microbatch, layer, applied != table.checksums[layer]))
        if faded is not None:
            self._faded.append((microbatch, layer, faded))
        self._arrived.setdefault((microbatch, layer), applied)  # of the first: a recomputation dispatches the same
        self._dispatched.count(microbatch, layer)
        self.seen.tally.applied_checked += len(table.names)

    def _routes_of(self, microbatch: int, layer: int, tokens: int) -> torch.Tensor:
        """Return the recorded routes [R, K] for these rows, after all checks that need no values from the device."""
        routes = self.routes(microbatch, layer)
        self._check_whose(microbatch, layer)
        if routes.shape[0] != tokens:
            raise ReplayError(
                "routes and tokens differ in number",
                where=self._where(microbatch, layer),
                got=f"{routes.shape[0]} rows",
                expected=f"{tokens} tokens",
                fault="rows",
            )
        return routes

    def _check_whose(self, microbatch: int, layer: int) -> None:
        # A backward pass can run between forwards and recompute a microbatch whose key was checked in its forward.
        recomputation = layer in self.recomputed_layers and torch.is_grad_enabled()
        if microbatch != self._forwarding and not recomputation:
            raise ReplayError(
                "a layer asked for routes of a microbatch that it is not running",
                where={**self.place, "layer": layer},
                got=f"microbatch {microbatch}",
                expected=f"microbatch {self._forwarding}",
                do="look for a router that kept the key of another microbatch",
                fault="another microbatch",
            )

    def _close(self) -> None:
        dispatched, read = self._sums_of_share()
        with self.agreed():
            self._check(dispatched, read)
        if self.seen.compared:
            differs = torch.cat([comparison.differs for comparison in self.seen.compared], 1)
            self.seen.tally.native_token_mismatch = int(self.any_stage(differs.any(0)).sum())

    def _check(self, dispatched: list[int], read: list[int]) -> None:
        """Make the checks and counts that need no other rank."""
        tables, where, seen = self.microbatches, self.place, self.seen
        evidence.refuse_strangers(self._strangers, where)
        if self.mode != "observe":
            seen.tally.consumed, seen.tally.expected = self._check_ledger(self._taken, where)
        if self.mode == "record":
            seen.recorded = self._recorded()
        if self.mode == "replay":
            self._check_ledger(self._dispatched, where)
            wrong = evidence.misapplied(self._applied, tables)
            seen.tally.applied_mismatch = len(wrong)
            evidence.refuse_misapplied(wrong, seen.tally.applied_checked, self._faded, where)
            evidence.refuse_misplanned(self._misplanned, where)
            evidence.refuse_other_sums(tables, read, "read", where)
            evidence.refuse_other_sums(tables, dispatched, "dispatched", where)
        if self.watch.native and tables:
            numbers = range(len(tables))
            evidence.refuse_uncompared(self._native, numbers, self.layers, where)
            seen.compared = [Compared.over_layers([self._native[m, layer] for layer in self.layers]) for m in numbers]
            seen.tally = replace(seen.tally, **totals(seen.compared, [table.lags for table in tables], self.layers))
            if (align := self.watch.align) is not None:
                evidence.refuse_blind_witness(seen.compared, tables, seen.tally.native_margin, self.layers, where)
                for number, table in enumerate(tables, self.watch.align_from):
                    align.compared(number, table.names)
                seen.alignment = align.verdict(where)
                if seen.alignment is not None:
                    evidence.refuse_misaligned(seen.alignment, {**where, **self._conditions(seen.alignment)})

    def _conditions(self, alignment: Alignment) -> About:
        """Return the conditions, besides the routes, that a verdict on them depends on."""
        staleness = max((int(table.lags.max()) for table in self.microbatches if len(table.lags)), default=0)
        return {**after_lr(self.lr), "staleness": staleness, "power": f"{alignment.power:.3f}"}

    def _check_ledger(self, ledger: Ledger, where: About) -> tuple[int, int]:
        return ledger.check(range(len(self.microbatches)), self.layers, self.recomputed_layers, where)

    def _sums_of_share(self) -> list[list[int]]:
        """Return the checksums of the sequences, as dispatched and as read, added over all ranks that share them.

        These ranks communicate here, so this runs before any check that could fail on one rank alone.
        """
        known = [(number, table) for number, table in enumerate(self.microbatches) if table.source is not None]
        if self.mode != "replay" or not known:
            return [[], []]
        dispatched, read = [], [table.read for _, table in known]
        for number, table in known:
            arrived = [self._arrived[number, layer] for layer in self.layers if (number, layer) in self._arrived]
            dispatched.append(torch.stack([table.unreplayed, *arrived]).sum(0)[: len(table.source or ())])
        return self.sum_over_share(torch.stack([torch.cat(dispatched), torch.cat(read)])).tolist()

    @property
    def place(self) -> About:
        """Return the pass and the rank, for messages."""
        return {"run": self.name, "rank": self.rank}

    def _where(self, microbatch: int, layer: int) -> About:
        return {**self.place, "microbatch": microbatch, "layer": layer}


def require_open(replay: ReplayPass | None) -> None:
    """Raise ReplayError unless `replay` is open; with None, if any pass is open.

    Every run of the schedule calls this first. Outside its pass nothing would be checked, and inside another one it
    would be nested.
    """
    if _open_pass is not replay:
        raise ReplayError(
            "the model was run outside its replay pass",
            where={"run": "natively routed"} if replay is None else replay.place,
            got="no open pass" if _open_pass is None else f"{_open_pass.name} is open",
            expected="no open pass" if replay is None else "its pass open",
            do="run each pass inside its own `with replay_pass(...)` block, and no other pass inside that block",
            fault="outside",
        )


def refuse_lost_key(layer: int) -> None:
    """Raise ReplayError if a pass is open, because then every MoE layer must have the handle of a microbatch.

    A layer without it would ask the other ranks for token counts. They know the counts from their plans and would not
    answer, so all would hang.
    """
    if _open_pass is None:
        return
    recomputes = layer in _open_pass.recomputed_layers and torch.is_grad_enabled()
    microbatch: About = {} if recomputes else {"microbatch": _open_pass._forwarding}
    raise ReplayError(
        "a layer lost the handle to its routes",
        where={**_open_pass.place, **microbatch, "layer": layer},
        got="no handle",
        expected="the handle of the microbatch that the layer is running",
        do="look for code that runs the layer or its router without the packed sequence parameters",
        fault="lost key",
    )


@dataclass(frozen=True, slots=True)
class MicrobatchHandle:
    """Holds a pass and the number of one of its microbatches. Routers and MoE layers look up their routes with
    it."""

    replay: ReplayPass
    microbatch: int
