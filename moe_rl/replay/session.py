"""The replay session: what one pass over a rank's microbatches must take, and the proof that it took it.

A session belongs to one run of Megatron's schedule: one optimizer update, or one pass without gradients. The routers
ask it for the routes of their (microbatch, layer). The MoE layers tell it what was dispatched. It counts both.

At the exit of the `with` block, or in `conclude` before that, it checks:

- Every (microbatch, layer) was taken exactly once forward, and once more where its activations are recomputed.
- For every sequence and layer, the dispatched experts sum up to the checksum of the routes that were read.
- For every sequence, over all layers and ranks, they sum up to what left the sampler's engine.
- The rows that a dispatch plan sends are those of the dispatched map.
- Under `align`, the routes are those of the rows that they are replayed for.

Routes are looked up by key, so no order of the schedule is assumed. The schedule says whose forward it begins, and the
session checks that the key belongs to these tokens.

Legend: R rows of a microbatch that this rank's routers see, K top-k, E experts, S sequences of a microbatch with the
padding as one more, layer: global decoder layer, 0-based.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from moe_rl.errors import ReplayError, describe
from moe_rl.replay.alignment import Alignment, AlignmentTest
from moe_rl.replay.evidence import (
    misapplied,
    refuse_blind_witness,
    refuse_misaligned,
    refuse_misapplied,
    refuse_misplanned,
    refuse_other_sums,
    refuse_strangers,
    refuse_uncompared,
)
from moe_rl.replay.ledger import Ledger
from moe_rl.replay.plans import LayerPlan
from moe_rl.replay.tables import Compared, MicrobatchRoutes, Tally, totals

Mode = Literal["replay", "observe", "record"]

_open_session: ReplaySession | None = None


@dataclass(slots=True, eq=False)
class ReplaySession:
    """Context manager around one pass of the schedule.

    mode "replay" forces the recorded routes; "observe" lets the router choose and only compares; "record" lets it
    choose and keeps the choice, for `recorded_routes` (R2). compare_native: also compare the router's own choice with
    the record (in replay mode: the shadow comparison). recomputed_layers: those that the pass runs a second time, with
    gradients, and whose routes it takes twice. any_stage: ORs bool flags [tokens] over the ranks that hold the other
    layers of the same tokens; sum_over_share: adds int64 [n] up, modulo 2**64, over the ranks that hold other layers or
    other rows of the same sequences; each called at most once, at exit. name and rank go into error messages.
    compare_with: the record that a router's own choice is compared with, where it is not the routes of `microbatches`:
    the same microbatches with other routes. keep_router_logits: keep in `router_logits` what every router computed.
    plans: of the microbatches, from `plan_dispatch`, followed in replay mode; empty: none has one. Without one
    Megatron's dispatcher asks the other ranks in every layer.
    compared: under compare_native, after the exit: of each microbatch, with the layers in the order of `layers`.
    router_logits: {(microbatch, layer): [R, E]}, before scores, bias and groups.
    align: test, with the router's own choice as the witness, that the routes are those of their rows; only with
    compare_native. alignment: what the test found. `conclude` makes all these checks.
    Raises ReplayError when nested, when asked for an unknown key, for the key of other tokens or while not open, and at
    exit when the ledger is not exact.
    """

    microbatches: list[MicrobatchRoutes]
    layers: tuple[int, ...]
    mode: Mode
    name: str
    rank: int
    compare_native: bool = False
    align: bool = False
    recomputed_layers: frozenset[int] = frozenset()
    any_stage: Callable[[torch.Tensor], torch.Tensor] = lambda flags: flags
    sum_over_share: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums
    compare_with: list[MicrobatchRoutes] | None = None
    keep_router_logits: bool = False
    plans: list[dict[int, LayerPlan] | None] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    compared: list[Compared] = field(default_factory=list)
    router_logits: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    alignment: Alignment | None = None
    _forwarding: int | None = None
    _aligned: AlignmentTest | None = None
    _concluded: bool = False
    _strangers: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    _taken: Ledger = field(default_factory=lambda: Ledger("taken"))
    _dispatched: Ledger = field(default_factory=lambda: Ledger("dispatched"))
    _applied: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    _arrived: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _misplanned: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    _chosen: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _native: dict[tuple[int, int], Compared] = field(default_factory=dict)

    def __enter__(self) -> ReplaySession:
        global _open_session
        if _open_session is not None:
            raise ReplayError(
                describe(
                    "a replay session is already open",
                    where=self.name,
                    got=_open_session.name,
                    expected="none",
                    do="close it first: sessions do not nest",
                )
            )
        _open_session = self
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        global _open_session
        _open_session = None
        if error is None:
            self.conclude()

    def conclude(self) -> None:
        """Make all checks, once every forward and recomputation of the pass has run. The exit does it, unless who moves
        weights by what the pass gave has done it before."""
        if not self._concluded:
            self._concluded = True
            self._close()

    def handle(self, microbatch: int) -> MicrobatchHandle:
        """What travels with a microbatch through the model."""
        return MicrobatchHandle(self, microbatch)

    def begin_forward(self, microbatch: int, tokens: torch.Tensor) -> None:
        """The schedule is about to run the forward of this microbatch; until it says so again, of no other.

        tokens int64 [R]: ids in the rows that this rank's routers will see, compared with those that the routes were
        read for. Stays on the device.
        """
        self._forwarding = microbatch
        if microbatch >= len(self.microbatches):
            raise ReplayError(
                describe(
                    "a pass has more microbatches than its session",
                    where=f"{self.name}, rank {self.rank}",
                    got=f"microbatch {microbatch}",
                    expected=f"{len(self.microbatches)} of them",
                )
            )
        expected = self.microbatches[microbatch].fed.tokens
        if tokens.shape != expected.shape:
            raise ReplayError(
                describe(
                    "routes and tokens differ in number",
                    where=f"{self.name}, rank {self.rank}, microbatch {microbatch}",
                    got=f"{len(expected)} rows",
                    expected=f"{len(tokens)} tokens",
                )
            )
        self._strangers.append((microbatch, (tokens != expected).any()))

    def routes(self, microbatch: int, layer: int) -> torch.Tensor:
        """Recorded routes [R, K] of one (microbatch, layer)."""
        if _open_session is not self:
            raise ReplayError(
                describe(
                    "routes were asked of a session that is not open",
                    where=self._where(microbatch, layer),
                    got="none open" if _open_session is None else _open_session.name,
                    expected=self.name,
                    do="look for a router that kept the key of an earlier pass",
                )
            )
        try:
            return self.microbatches[microbatch].routes[layer]
        except (IndexError, KeyError):
            raise ReplayError(
                describe(
                    "no routes for this layer",
                    where=self._where(microbatch, layer),
                    got="none",
                    expected=f"layers {sorted(self.microbatches[0].routes) if self.microbatches else []}",
                    do="record with the model that is trained",
                )
            ) from None

    def native_rows(self, microbatch: int) -> torch.Tensor | None:
        """bool [R]: rows of the microbatch for which the router chooses; None when there are none."""
        return self.microbatches[microbatch].native

    def take(self, microbatch: int, layer: int, tokens: int) -> torch.Tensor:
        """The routes int64 [R, K] to force, counted as taken. tokens: rows the router is about to route."""
        routes = self._routes_of(microbatch, layer, tokens)
        self._taken.count(microbatch, layer)
        return routes.long()

    def record(self, microbatch: int, layer: int, chosen: torch.Tensor) -> None:
        """Keep what the router chose [R, K], counted as taken."""
        self._check_whose(microbatch, layer)
        self._taken.count(microbatch, layer)
        self._chosen[microbatch, layer] = chosen.detach().to(torch.int16)

    def recorded_routes(self) -> list[MicrobatchRoutes]:
        """The same microbatches with the routes that the routers chose, after a pass whose ledger was exact."""
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
        """Compare the router's own choice [R, K], by its scores [R, E], with the record. Stays on the device."""
        if not self.compare_native or (microbatch, layer) in self._native:
            return
        self._check_whose(microbatch, layer)
        rows = self.microbatches[microbatch].recorded
        routes = self.routes(microbatch, layer)
        if self.align:
            if self._aligned is None:
                places = [one.places for one in self.microbatches]
                self._aligned = AlignmentTest(self.layers, places, native.device)
            self._aligned.observe(microbatch, layer, routes, native)
        if self.compare_with is not None:
            routes = self.compare_with[microbatch].routes[layer]
        self._native[microbatch, layer] = Compared.of(
            routes.index_select(0, rows).long(), native.index_select(0, rows), scores.detach().index_select(0, rows)
        )

    def observe_logits(self, microbatch: int, layer: int, logits: torch.Tensor) -> None:
        """Keep a router's logits, R x E in any shape, where they are asked for."""
        if self.keep_router_logits:
            self._check_whose(microbatch, layer)
            self.router_logits[microbatch, layer] = logits.detach().reshape(-1, logits.shape[-1])

    def plan(self, microbatch: int, layer: int, tokens: int) -> LayerPlan | None:
        """How the dispatcher sends the rows of one (microbatch, layer), `tokens` of them; None: it has to find out.

        Refuses what `take` refuses: rows may be sent by the plan before the router asks for their routes.
        """
        plans = self.plans[microbatch] if self.plans and self.mode == "replay" else None
        if plans is None:
            return None
        plan, routes = plans[layer], self._routes_of(microbatch, layer, tokens)
        if len(plan.entries) != routes.numel():
            raise ReplayError(
                describe(
                    "a dispatch plan is of another microbatch",
                    where=self._where(microbatch, layer),
                    got=f"{len(plan.entries)} sent rows",
                    expected=routes.numel(),
                    do="make plans from the tables that the session replays, in their order",
                )
            )
        return plan

    def check_dispatch(self, microbatch: int, layer: int, routing_map: torch.Tensor) -> None:
        """Compare the map [R, E] bool that goes to the dispatcher with the record, and what a plan sends with the map.
        Stays on the device."""
        if self.mode != "replay":
            return
        plan = self.plan(microbatch, layer, len(routing_map))
        if plan is not None:
            # A plan sends R x K distinct entries. If all are in the map, and the map is the record, they are the map.
            sent = routing_map.reshape(-1).index_select(0, plan.entries)
            self._misplanned.append((microbatch, layer, ~sent.all()))
        self.tally.dispatched += 1
        self.tally.planned += plan is not None
        table = self.microbatches[microbatch]
        applied = table.fed.applied(layer, routing_map, native=table.native)
        self._applied.append((microbatch, layer, applied != table.checksums[layer]))
        self._arrived.setdefault((microbatch, layer), applied)  # once: a recomputation dispatches the same rows
        self._dispatched.count(microbatch, layer)
        self.tally.applied_checked += len(table.names)

    def _routes_of(self, microbatch: int, layer: int, tokens: int) -> torch.Tensor:
        """Recorded routes [R, K] for the rows at hand, after every check that needs no value of theirs."""
        routes = self.routes(microbatch, layer)
        self._check_whose(microbatch, layer)
        if routes.shape[0] != tokens:
            raise ReplayError(
                describe(
                    "routes and tokens differ in number",
                    where=self._where(microbatch, layer),
                    got=f"{routes.shape[0]} rows",
                    expected=f"{tokens} tokens",
                )
            )
        return routes

    def _check_whose(self, microbatch: int, layer: int) -> None:
        # Backward passes run in between, and in these recomputation: of a microbatch whose key was checked here before.
        recomputation = layer in self.recomputed_layers and torch.is_grad_enabled()
        if microbatch != self._forwarding and not recomputation:
            raise ReplayError(
                describe(
                    "a layer asked for the routes of another microbatch than runs through it",
                    where=f"{self.name}, rank {self.rank}, layer {layer}",
                    got=f"microbatch {microbatch}",
                    expected=f"microbatch {self._forwarding}",
                    do="look for a router that kept the key of another microbatch",
                )
            )

    def _close(self) -> None:
        tables, where = self.microbatches, f"{self.name}, rank {self.rank}"
        dispatched, read = self._sums_of_share()
        refuse_strangers(self._strangers, where)
        if self.mode != "observe":
            self.tally.consumed, self.tally.expected = self._check_ledger(self._taken, where)
        if self.mode == "replay":
            self._check_ledger(self._dispatched, where)
            wrong = misapplied(self._applied, tables)
            self.tally.applied_mismatch = len(wrong)
            refuse_misapplied(wrong, self.tally.applied_checked, where)
            refuse_misplanned(self._misplanned, where)
            refuse_other_sums(tables, dispatched, read, where)
        if self.compare_native and tables:
            numbers = range(len(tables))
            refuse_uncompared(self._native, numbers, self.layers, where)
            self.compared = [Compared.of_layers([self._native[m, layer] for layer in self.layers]) for m in numbers]
            self.tally = replace(self.tally, **totals(self.compared, self.layers, self.any_stage))
            if self._aligned is not None:
                refuse_blind_witness(self.compared, self.tally.native_margin, self.layers, where)
                shared, names = [one.shared for one in self.compared], [one.names for one in tables]
                self.alignment = self._aligned.verdict(shared, names, tables[0].fed.experts)
                refuse_misaligned(self.alignment, where)

    def _check_ledger(self, ledger: Ledger, where: str) -> tuple[int, int]:
        return ledger.check(range(len(self.microbatches)), self.layers, self.recomputed_layers, where)

    def _sums_of_share(self) -> list[list[int]]:
        """Sums of the sequences, in the microbatches' order: as dispatched, and as read, on all ranks that share them.

        These take part together, so before one of them alone can find anything wrong.
        """
        known = [(number, table) for number, table in enumerate(self.microbatches) if table.source is not None]
        if self.mode != "replay" or not known:
            return [[], []]
        dispatched, read = [], [table.read for _, table in known]
        for number, table in known:
            arrived = [self._arrived[number, layer] for layer in self.layers if (number, layer) in self._arrived]
            dispatched.append(torch.stack([table.unreplayed, *arrived]).sum(0)[: len(table.source or ())])
        return self.sum_over_share(torch.stack([torch.cat(dispatched), torch.cat(read)])).tolist()

    def _where(self, microbatch: int, layer: int) -> str:
        return f"{self.name}, rank {self.rank}, microbatch {microbatch}, layer {layer}"


def require_open(session: ReplaySession | None) -> None:
    """Raise ReplayError unless `session` is the one that is open; None: unless none is. A pass of the model asks first:
    outside of its session nothing would be checked, and inside another one it is the start of a nested pass."""
    if _open_session is not session:
        raise ReplayError(
            describe(
                "a pass of the model outside of its session",
                where="natively routed" if session is None else f"{session.name}, rank {session.rank}",
                got="none open" if _open_session is None else f"{_open_session.name} is open",
                expected="none open" if session is None else "its session open",
                do="run each pass inside its own `with session:`, and no other pass in there",
            )
        )


def refuse_lost_key(layer: int) -> None:
    """Raise ReplayError when a session is open: its layers each have the key of a microbatch. One that lost it would
    ask the other ranks for counts, which these, knowing them, do not answer."""
    if _open_session is None:
        return
    session, microbatch = _open_session, f"microbatch {_open_session._forwarding}"
    if layer in session.recomputed_layers and torch.is_grad_enabled():
        microbatch = "the recomputation of a microbatch"
    raise ReplayError(
        describe(
            "a layer lost the key to its routes",
            where=f"{session.name}, rank {session.rank}, {microbatch}, layer {layer}",
            got="no key",
            expected="that of the microbatch which runs through it",
            do="look for what runs the layer or its router without the packed sequence parameters",
        )
    )


@dataclass(frozen=True, slots=True)
class MicrobatchHandle:
    """A session and the number of one of its microbatches: the key that routers and MoE layers look up with."""

    session: ReplaySession
    microbatch: int
