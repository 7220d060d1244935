"""The replay session: what one pass over a rank's microbatches must take, and the proof that it did.

A session belongs to one run of megatron's schedule (one optimizer update, or one forward-only pass). The routers ask it
for the routes of their (microbatch, layer); the MoE layers tell it what was dispatched. It counts both. Leaving the
`with` block without an exception checks the ledger: every (microbatch, layer) taken exactly once forward, and once more
per recomputation when activations are recomputed. Routes are looked up by key, so no order of the schedule is assumed.

Legend: T rows of a microbatch on this rank, padding among them, K top-k, E experts, layer: global decoder layer,
0-based.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from moe_rl.errors import ReplayError, describe

Mode = Literal["replay", "observe"]

_open_session: ReplaySession | None = None


@dataclass(frozen=True, slots=True)
class MicrobatchRoutes:
    """Routes of one packed microbatch, cut to this rank's rows.

    routes: {layer: int64 [T, K]}. real int64 [n]: the rows that are tokens; the others are padding, whose routes are
    made up.
    """

    routes: dict[int, torch.Tensor]
    real: torch.Tensor


@dataclass(slots=True)
class Tally:
    """What a finished session counted. Integers summed over this rank's microbatches.

    consumed, expected: takings of (microbatch, layer), recomputations included.
    applied_mismatch: (token, layer) positions dispatched to another expert set than recorded, of applied_checked.
    native_mismatch: positions where the router's own top-k set differs from the recorded one, of native_positions.
    native_token_mismatch: tokens with at least one such layer, on any pipeline stage, of native_tokens.
    The native counts leave padding out.
    """

    consumed: int = 0
    expected: int = 0
    applied_mismatch: int = 0
    applied_checked: int = 0
    native_mismatch: int = 0
    native_positions: int = 0
    native_token_mismatch: int = 0
    native_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True, eq=False)
class ReplaySession:
    """Context manager around one pass of the schedule.

    mode "replay" forces the recorded routes; "observe" lets the router choose and only compares. compare_native: also
    compare the router's own choice with the record (in replay mode: the shadow comparison). recomputes: a training pass
    that recomputes activations takes each route twice. any_stage: ORs bool flags [tokens] over the ranks that hold the
    other layers of the same tokens; called once, at exit. name and rank go into error messages.
    Raises ReplayError when nested, when asked for an unknown key, and at exit when the ledger is not exact.
    """

    microbatches: list[MicrobatchRoutes]
    layers: tuple[int, ...]
    mode: Mode
    name: str
    rank: int
    compare_native: bool = False
    recomputes: bool = False
    any_stage: Callable[[torch.Tensor], torch.Tensor] = lambda flags: flags
    tally: Tally = field(default_factory=Tally)
    _taken: Counter = field(default_factory=Counter)
    _dispatched: Counter = field(default_factory=Counter)
    _applied_mismatch: torch.Tensor | None = None
    _native: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

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

    def __exit__(self, kind, error, traceback) -> None:
        global _open_session
        _open_session = None
        if error is None:
            self._close()

    def handle(self, microbatch: int) -> MicrobatchHandle:
        """What travels with a microbatch through the model."""
        return MicrobatchHandle(self, microbatch)

    def routes(self, microbatch: int, layer: int) -> torch.Tensor:
        """Recorded routes [T, K] of one (microbatch, layer)."""
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

    def take(self, microbatch: int, layer: int, tokens: int) -> torch.Tensor:
        """The routes [T, K] to force, counted as taken. tokens: rows the router is about to route."""
        routes = self.routes(microbatch, layer)
        if routes.shape[0] != tokens:
            raise ReplayError(
                describe(
                    "routes and tokens differ in number",
                    where=self._where(microbatch, layer),
                    got=f"{routes.shape[0]} rows",
                    expected=f"{tokens} tokens",
                )
            )
        self._taken[microbatch, layer, torch.is_grad_enabled()] += 1
        return routes

    def observe_native(self, microbatch: int, layer: int, native: torch.Tensor) -> None:
        """Compare the router's own choice [T, K] with the record, as sets. Stays on the device."""
        if not self.compare_native or (microbatch, layer) in self._native:
            return
        real = self.microbatches[microbatch].real
        recorded, native = (table.index_select(0, real) for table in (self.routes(microbatch, layer), native))
        self._native[microbatch, layer] = (recorded.sort(-1)[0] != native.sort(-1)[0]).any(-1)

    def check_dispatch(self, microbatch: int, layer: int, routing_map: torch.Tensor) -> None:
        """Compare the map [T, E] bool that goes to the dispatcher with the record. Stays on the device."""
        if self.mode != "replay":
            return
        expected = torch.zeros_like(routing_map).scatter_(1, self.routes(microbatch, layer), True)
        wrong = (expected != routing_map).any(-1).sum()
        self._applied_mismatch = wrong if self._applied_mismatch is None else self._applied_mismatch + wrong
        self._dispatched[microbatch, layer, torch.is_grad_enabled()] += 1
        self.tally.applied_checked += routing_map.shape[0]

    def _close(self) -> None:
        if self.mode == "replay":
            self._check_ledger("taken", self._taken)
            self._check_ledger("dispatched", self._dispatched)
            self.tally.applied_mismatch = 0 if self._applied_mismatch is None else int(self._applied_mismatch)
            if self.tally.applied_mismatch:
                raise ReplayError(
                    describe(
                        "tokens were dispatched to other experts than recorded",
                        where=f"{self.name}, rank {self.rank}",
                        got=f"{self.tally.applied_mismatch} of {self.tally.applied_checked} (token, layer) positions",
                        expected=0,
                        do="look for a router or dispatcher setting that changes the routing map",
                    )
                )
        if self.compare_native and self.microbatches:
            numbers = range(len(self.microbatches))
            missing = [(m, layer) for m in numbers for layer in self.layers if (m, layer) not in self._native]
            if missing:
                raise ReplayError(
                    describe(
                        "a router's own choice was not compared with the record",
                        where=self._where(*missing[0]),
                        got=f"{len(missing)} such layers",
                        expected="every layer of every microbatch compared",
                    )
                )
            wrong = torch.cat([torch.stack([self._native[m, layer] for layer in self.layers]) for m in numbers], 1)
            self.tally.native_mismatch = int(wrong.sum())
            self.tally.native_positions = wrong.numel()
            self.tally.native_token_mismatch = int(self.any_stage(wrong.any(0)).sum())
            self.tally.native_tokens = wrong.shape[1]

    def _check_ledger(self, verb: str, counts: Counter) -> None:
        # A checkpointed forward runs without gradients first and with them when it is recomputed.
        phases = (False, True) if self.recomputes else None
        problems = []
        for microbatch in range(len(self.microbatches)):
            for layer in self.layers:
                if phases is None:
                    got = {"forward": counts[microbatch, layer, False] + counts[microbatch, layer, True]}
                else:
                    got = {"forward": counts[microbatch, layer, False], "recompute": counts[microbatch, layer, True]}
                where = f"microbatch {microbatch} layer {layer}"
                problems += [f"{where} {phase} {n} times" for phase, n in got.items() if n != 1]
        known = {(m, layer) for m in range(len(self.microbatches)) for layer in self.layers}
        problems += [
            f"microbatch {m} layer {layer} not of this pass" for m, layer, _ in counts if (m, layer) not in known
        ]
        expected = len(known) * (2 if self.recomputes else 1)
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise ReplayError(
                describe(
                    f"routes were not {verb} exactly once",
                    where=f"{self.name}, rank {self.rank}",
                    got=shown,
                    expected=f"each of {expected} once",
                )
            )
        if verb == "taken":
            self.tally.consumed, self.tally.expected = sum(counts.values()), expected

    def _where(self, microbatch: int, layer: int) -> str:
        return f"{self.name}, rank {self.rank}, microbatch {microbatch}, layer {layer}"


@dataclass(frozen=True, slots=True)
class MicrobatchHandle:
    """A session and the number of one of its microbatches: the key that routers and MoE layers look up with."""

    session: ReplaySession
    microbatch: int
