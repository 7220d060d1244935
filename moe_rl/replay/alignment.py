"""Tests whether recorded routes belong to the rows that they are replayed for, and measures what the test can see.

A record can be well formed and still belong to another token, layer or sequence. The test compares it with a witness:
the scores of the trainer's routers in the replayed forward. These routers see the same tokens with the same weights, so
the recorded experts must score better on their own row than on another, and no worse than noise explains. The measure
is regret (replay/regret.py); bets (replay/claims.py) judge it. Each claim is proven, weak or refused:

    layer        For a sample of rows: the record of a layer fits no other layer better, at tokens up to two places
                 earlier or later (replay/layer_claims.py).
    shift        The same for nearby tokens in the layer itself.
    prompts, completions
                 The rows fit better than the rows at the same place of another sequence, of the same prompt if there is
                 one. Only places after the first token in which the two sequences differ are compared.
    no rows      The record of a layer is not unrelated to its rows (replay/row_claims.py), and records of fresh rows do
                 not fit them far worse than in the run's last steps (replay/claims.py).
    last prompt row, first completion row, every 16th row
                 Rows at such places do not hold the row before.
    stuck rows   Rows in a run of equal records do not fit the first row of the run better than their own.
    pieces       No piece of at most 64 rows of a sequence has rows from elsewhere.
    single ids   The rows do not all have one, two or three wrong ids (replay/id_claims.py).
    some rows    No share of a layer's rows is wrong.
    labels       No two experts of a layer are exchanged.

If a claim is weak, its fault would pass: equal rows cannot be told apart, and a few short sequences show little. Rows
of older weights may have moved, so the claims about single ids are mostly weak for them. Where a weight may have moved
by more than FAR since, no record counts as unrelated to its rows, and all claims that need this are weak.

The bound on false alarms, ALPHA for a pass of a rank, is derived, not measured: it holds if own rows fit at least as
well as others on average, whatever was seen. docs/internals/alignment.md has the measured rates, and what breaks this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe_rl.errors import About, NonFiniteError
from moe_rl.replay import id_claims, row_claims
from moe_rl.replay.claims import CLAIMS, CORE, FAR, Bets, Claim, History, judge
from moe_rl.replay.layer_claims import LayerSample, layer_tests
from moe_rl.replay.regret import FineRows, Kept, RowsSeen, Watched, WholeRows, whole_layers
from moe_rl.replay.row_places import PassRows, RowPlaces


@dataclass(frozen=True, slots=True)
class Alignment:
    """Holds the result of the alignment test of one pass on this rank.

    Attributes:
        claims: One for each of CLAIMS.
        moved: Largest distance of a weight from its value when the oldest row was sampled: learning rate x updates.
    """

    claims: tuple[Claim, ...] = tuple(Claim(name) for name in CLAIMS)
    moved: float = 0.0

    def joined(self, other: Alignment | None) -> Alignment:
        """Return what both results prove."""
        if other is None:
            return self
        claims = [
            replace(min(pair, key=lambda claim: (claim.status == "proven", claim.power)), evidence=evidence)
            for pair in zip(self.claims, other.claims, strict=True)
            for evidence in (max(claim.evidence for claim in pair),)
        ]
        return Alignment(tuple(claims), max(self.moved, other.moved))

    @property
    def faults(self) -> list[str]:
        """Return descriptions of all faults. Layers with the same fault share one."""
        return [text for claim in self.claims for text in _joined(claim.found)]

    @property
    def power(self) -> float:
        """Return the mean power of the core claims."""
        return sum(claim.power for claim in self.claims if claim.name in CORE) / len(CORE)

    @property
    def evidence(self) -> float:
        """Return the largest evidence of a claim, in nats; at most 0 if nothing is refused."""
        return max((claim.evidence for claim in self.claims), default=-math.inf)


class AlignmentTest:
    """Collects what passes on the same weights show on this rank, and judges it once all passes have run.

    Args:
        layers: [L], global layer numbers.
        places: One per microbatch. Microbatches are numbered through all passes.
        groups: Number of groups of experts among which the routers choose first.
        moves: Largest distance that a weight moves from one version to the next: learning rate x updates.
        history: Evidence of earlier passes; None to judge these passes alone.
    """

    def __init__(
        self,
        layers: Seq[int],
        places: Seq[RowPlaces],
        device: torch.device,
        *,
        groups: int = 1,
        moves: float = 0.0,
        history: History | None = None,
    ):
        self._layers, self._groups, self._history = layers, groups, history or History()
        self._watched = Watched.of(PassRows.of(places))
        self._moved = moves * int(self._watched.rows.lag.max(initial=0))
        self._device, self._numbers, self._blocks = device, range(len(places)), self._watched.blocks()
        self._fine = Kept(layers, self._watched.of_microbatches(self._numbers, device, fine=True))
        self._whole_layers: list[int] = []
        self._waiting: dict[range, Kept] = {}
        self._whole: dict[range, WholeRows] = {}
        self._names: dict[int, Seq[str]] = {}
        self._pieces = [placement.pieces for placement in places]

    def observe(self, microbatch: int, layer: int, routes: Tensor, native: Tensor, scores: Tensor) -> None:
        """Keep what the tests need of a layer, on the device.

        Args:
            routes, native: integers [R, K], the record and the router's own choice.
            scores: [R, E], what the router ranks by.
        """
        # Some dozen small calls follow. The CPU back end's mode would double their time, and none names a device.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            layer_rows = (routes, native, scores.detach())
            self._fine.put(microbatch, layer, layer_rows)
            self._whole_layers = self._whole_layers or whole_layers(self._layers, routes.shape[1])
            if layer not in self._whole_layers:
                return
            block = next(numbers for numbers in self._blocks if microbatch in numbers)
            if block not in self._waiting:
                recorded = self._watched.of_microbatches(block, self._device, fine=False)
                self._waiting[block] = Kept(self._whole_layers, recorded)
            if self._waiting[block].put(microbatch, layer, layer_rows):
                ids, choice, of_experts = self._waiting.pop(block).kept
                rows = self._watched.of_block(block, self._device)
                self._whole[block] = WholeRows.of(ids, choice, of_experts, rows, self._groups)

    def compared(self, microbatch: int, names: Seq[str]) -> None:
        """Note that a microbatch was observed in all layers. names: its sequences."""
        self._names[microbatch] = names

    def verdict(self, where: About | None = None) -> Alignment | None:
        """Judge the passes. Returns None until every microbatch was compared. Raises NonFiniteError if a score is NaN
        or +inf. where: of the passes, for the error."""
        if len(self._names) < len(self._numbers):
            return None
        if not self._layers or not len(self._watched.rows.row):
            return Alignment()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            fine, whole = FineRows.of(*self._fine.kept), [self._whole[block] for block in self._blocks]
            seen = RowsSeen(self._watched, self._layers, self._groups, fine, whole, far=self._moved > FAR)
            self._refuse_blind(seen, where or {})
            claims = {tests.name: judge(tests, self._history) for tests in self._tests(seen) if tests is not None}
            regret = float(fine.own.mean())
        if seen.fresh and (usual := self._history.exceeded(regret)) is not None:
            text = f"records fit their rows far worse than in the last steps: regret {regret:.2f}, usually {usual:.3f}"
            claims["no rows"] = replace(claims["no rows"], status="refused", found=(*claims["no rows"].found, text))
        alignment = Alignment(tuple(claims.get(name, Claim(name)) for name in CLAIMS), self._moved)
        if alignment.faults:  # whoever goes on has removed them
            self._history.forget()
        return alignment

    def _tests(self, seen: RowsSeen) -> Iterator[Bets | None]:
        yield from layer_tests(LayerSample.of(seen), self._layers, fresh=seen.fresh)
        yield from row_claims.sequence_tests(seen)
        yield row_claims.no_rows(seen)
        yield from row_claims.special_rows(seen)
        yield row_claims.stuck_rows(seen, self._name)
        yield row_claims.pieces(seen, self._piece)
        ids = id_claims.id_rows(seen)
        yield id_claims.single_ids(seen, *ids)
        yield id_claims.some_rows(seen, *ids)
        yield id_claims.labels(seen, *ids)

    def _refuse_blind(self, seen: RowsSeen, where: About) -> None:
        """Refuse rows with a score that is NaN or +inf, since what they seem to prove is nothing."""
        whole, rows = torch.cat([block.blind for block in seen.by_block], 1), self._watched.rows
        for layers, indices, blind in (
            (self._layers, self._watched.fine, seen.fine.regret.spread.isnan()),
            (self._whole_layers, np.arange(whole.shape[1]), whole),
        ):
            for layer, row in torch.nonzero(blind)[:1].tolist():
                token, sequence = int(rows.position[indices[row]]), int(rows.sequence[indices[row]])
                raise blind_witness({**where, "layer": layers[layer], "request": self._name(sequence), "token": token})

    def _name(self, sequence: int) -> str:
        return self._names[sequence >> 32][sequence & 0xFFFFFFFF]

    def _piece(self, piece: int) -> str:
        number, first, last = self._pieces[piece >> 32][piece & 0xFFFFFFFF]
        return f"{self._names[piece >> 32][number]} has other rows at tokens {first} to {last}"


def blind_witness(where: About) -> NonFiniteError:
    """Return the error that a router's scores are not finite: they say nothing about the routes."""
    return NonFiniteError(
        "scores of the trainer's routers are not finite, so the routes cannot be tested against them",
        where=where,
        do="look for NaN in the trainer's weights, and start from an earlier checkpoint. No weights were updated "
        "with these rows",
    )


def _joined(texts: Seq[str]) -> list[str]:
    """Join the texts of layers that differ only in their numbers."""
    together: dict[str, list[str]] = {}
    for text in texts:
        what = text.split(":")[0].partition(" has ")[2] if text.startswith("layer ") else ""
        together.setdefault(what or text, []).append(text)
    joined = []
    for what, alike in together.items():
        numbers = [text.split()[1].rstrip(":") for text in alike]
        regret = alike[0].partition(": ")[2]
        shared = f"layers {', '.join(numbers)} have {what}: {regret} in layer {numbers[0]}"
        joined.append(alike[0] if len(alike) == 1 else shared)
    return joined
