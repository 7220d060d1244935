"""Tests whether recorded routes belong to the rows that they are replayed for.

A record can be well formed and still belong to another token, layer or sequence. The test compares it with a witness:
the experts that the trainer's routers would choose themselves in the replayed forward. These routers see the same
tokens with the same weights, so their choice should agree with the record of the same row more than with the record of
another row. No test has a threshold tuned to a model. Each test compares the record's agreement with its own row of the
witness to its agreement with another row:

    layers       For a sample of rows: compare the record of a layer with the witness of every other layer of this rank,
                 of tokens one or two places earlier or later, and of an unrelated token.
    neighbours   For a sample of prompts and one of completions: compare with the row at the same place of another
                 sequence. For a completion, this is a completion of the same prompt where there is one.
    sequences    For all rows, in pieces of at most 64 rows, prompt and completion apart: the agreement of a piece must
                 be closer to the batch's agreement with its own rows than to its agreement with rows of other tokens.

All bounds are Chernoff bounds for a mean of n values in [0, 1] (Hoeffding 1963, theorem 1): the mean is below m by
chance with probability at most exp(-n KL(m || mean)). A healthy pass is refused with probability at most FALSE_ALARM. A
pass is healthy if a record agrees with its own row at least as well as with a row of another layer or position, and
better than with a row of an unrelated token in nine cases of ten; errors of rows are assumed independent. If the sample
is too small to detect any fault at this rate, nothing is refused, and `Alignment.power` shows it.

Legend: L MoE layers of this rank, S sampled rows, N rows with a record, K top-k, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from moe_rl.replay.row_places import SAMPLED_ROWS, Pairs, RowPlaces, windows

FALSE_ALARM = 1e-6
"""Upper bound on the probability that one pass of a rank is refused although its routes are right."""

_SHIFTS = (0, -2, -1, 1, 2)
# A record that belongs to another row wins half of its comparisons. A healthy record wins at least the share _HEALTHY.
# With this threshold a false alarm and a missed fault are equally likely. _SEEN: -log of that probability, in nats, for
# one comparison.
_HEALTHY = 0.9
_THRESHOLD = math.log(0.5 / (1 - _HEALTHY)) / (math.log(0.5 / (1 - _HEALTHY)) + math.log(_HEALTHY / 0.5))


def divergence(mean: float, expected: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli means, in nats. `n` times it is -log of the Chernoff
    bound."""
    parts = ((mean, expected), (1 - mean, 1 - expected))
    return sum(p * math.log(p / q) if q > 0 else math.inf for p, q in parts if p > 0)


_SEEN = divergence(_THRESHOLD, 0.5)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Holds rows of one microbatch or sequence in all layers. Rows that are neighbours in a sequence are neighbours
    here.

    Attributes:
        record, witness: integers [L, S, K], the recorded experts and the router's own.
        owner, position: int64 [S], the sequence of each row and its place there.
    """

    record: Tensor
    witness: Tensor
    owner: Tensor
    position: Tensor

    @classmethod
    def of_sequence(cls, record: Tensor, witness: Tensor) -> Sample:
        """Make a sample of all rows [L, S, K] of one sequence."""
        rows = torch.arange(record.shape[1], device=record.device)
        return cls(record, witness, torch.zeros_like(rows), rows)


@dataclass(frozen=True, slots=True)
class Misplaced:
    """Describes a layer whose record belongs to other rows.

    Attributes:
        match: What the record agrees with instead; "" if nothing that was tried.
        own: Share of the recorded experts that are also in the record's own row of the witness.
        other: Share of the recorded experts that are also in the matching row.
    """

    layer: int
    match: str
    own: float
    other: float

    def __str__(self) -> str:
        if self.match:
            agree = f"{self.other:.2f} of the experts agree, {self.own:.2f} with its own"
            return f"layer {self.layer} has {self.match}: {agree}"
        return f"layer {self.layer} has rows that match nothing that was tried: {self.own:.2f} agree with its own"


@dataclass(frozen=True, slots=True)
class Alignment:
    """Holds the result of the alignment test of one pass on this rank.

    Attributes:
        layers: The layers whose records belong to other rows.
        sequences: One text for each prompt, completion or piece of a sequence with wrong routes.
        power: Share of the (row, layer) positions at which the test could have detected a fault, by layer and by piece.
        margin: How much larger a layer's agreement is with its own row of the witness than with the best other row; the
            worst layer's value.
    """

    layers: tuple[Misplaced, ...] = ()
    sequences: tuple[str, ...] = ()
    power: float = 0.0
    margin: float = math.inf

    @property
    def faults(self) -> list[str]:
        """Return descriptions of all faults. A fault that all layers share is described once."""
        matches = {fault.match for fault in self.layers}
        texts = [str(fault) for fault in self.layers]
        if len(self.layers) > 1 and len(matches) == 1 and "layer" not in (match := matches.pop()):
            own, other = (sum(getattr(f, name) for f in self.layers) / len(self.layers) for name in ("own", "other"))
            numbers = ", ".join(str(fault.layer) for fault in self.layers)
            agree = f": {other:.2f} of the experts agree, {own:.2f} with their own" if match else f": {own:.2f} agree"
            texts = [f"layers {numbers} have {match or 'rows that match nothing that was tried'}{agree}"]
        return texts + list(self.sequences)


@dataclass(slots=True)
class _Sums:
    """Counts over the sampled rows. In the [shifts, L, L] tensors, record layer i meets witness layer j.

    Attributes:
        rows: [shifts, L, L], comparisons in which the two witness rows differ.
        score: [shifts, L, L], those of them that the own row won; a tie counts half.
        shared: [shifts, L, L], experts in both the record and the compared row.
        compared: [shifts], rows that have a neighbour at this shift.
        own: [L], experts shared with the own row.
        unrelated_rows, unrelated_score, unrelated_shared: [L], the same as rows, score and shared, for comparisons
            with the row of an unrelated token.
        varies: [L], above 0 if the record is not the same in all rows.
        sampled: Number of sampled rows.
    """

    rows: Tensor
    score: Tensor
    shared: Tensor
    compared: Tensor
    own: Tensor
    unrelated_rows: Tensor
    unrelated_score: Tensor
    unrelated_shared: Tensor
    varies: Tensor
    sampled: int = 0

    def add(self, other: _Sums) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def misplaced_layers(
    samples: Seq[Sample], layers: Seq[int], experts: int
) -> tuple[tuple[Misplaced, ...], float, float]:
    """Test the layers on these samples. The host waits for the device once.

    Args:
        layers: [L], global layer numbers.
        experts: Number of experts in each layer.

    Returns:
        The layers with wrong records, the share of layers that could be judged, and the margin (see `Alignment`).
    """
    with torch._C.DisableTorchFunction():  # see AlignmentTest.verdict
        sums = _sum(samples, experts)
        found, judged, margin = _judge(sums, layers, samples[0].record.shape[2])
    return found, sum(judged) / len(layers), margin


class AlignmentTest:
    """Collects what passes on the same weights show on this rank, and judges it once all of them have run.

    Args:
        layers: [L], global layer numbers.
        places: One per microbatch of the passes, which together have a number for each.
    """

    def __init__(self, layers: Seq[int], places: Seq[RowPlaces], device: torch.device):
        self._layers, self._places = layers, places
        self._pairs = Pairs.of(places)
        count = max(32, SAMPLED_ROWS // max(1, len(places)))
        self._windows = [windows(np.flatnonzero(one.recorded), count) for one in places]
        paired = [self._pairs.row[self._pairs.microbatch == number] for number in range(len(places))]
        self._rows = [_on(device, np.concatenate(both)) for both in zip(self._windows, paired, strict=True)]
        self._seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._compared: dict[int, tuple[Tensor, Seq[str]]] = {}

    def observe(self, microbatch: int, layer: int, routes: Tensor, native: Tensor) -> None:
        """Keep the sampled rows of a layer, on the device.

        Args:
            routes, native: integers [R, K], the record and the router's own choice.
        """
        rows = self._rows[microbatch]
        self._seen[microbatch, layer] = (routes.index_select(0, rows).long(), native.index_select(0, rows))

    def compared(self, microbatch: int, shared: Tensor, names: Seq[str]) -> None:
        """Keep what became of a microbatch that was observed in all layers.

        Args:
            shared: int64 [L, N], the number of experts in both the record and the router's choice, for its rows with a
                record.
            names: The names of its sequences.
        """
        self._compared[microbatch] = (shared, names)

    def verdict(self, experts: int) -> Alignment | None:
        """Judge the passes; None as long as some microbatch was not compared."""
        if len(self._compared) < len(self._places):
            return None
        shared, names = zip(*(self._compared[number] for number in range(len(self._places))), strict=True)
        # Hundreds of small calls follow, and none names a device. The CPU back end's mode would double their time.
        with torch._C.DisableTorchFunction():
            return self._verdict(shared, names, experts)

    def _verdict(self, shared: Seq[Tensor], names: Seq[Seq[str]], experts: int) -> Alignment:
        seen = [
            tuple(torch.stack([self._seen[number, layer][side] for layer in self._layers]) for side in (0, 1))
            for number in range(len(self._places))
            if self._layers
        ]
        if not sum(one.shape[1] for one, _ in seen):
            return Alignment()
        samples, pairs = [], []
        for (record, witness), place, rows in zip(seen, self._places, self._windows, strict=True):
            count = len(rows)
            pairs.append((record[:, count:], witness[:, count:]))
            if count:
                where = (_on(record.device, of[rows]) for of in (place.sequence, place.position))
                samples.append(Sample(record[:, :count], witness[:, :count], *where))
        sums = _sum(samples, experts)
        top_k = samples[0].record.shape[2]
        found, judged, margin = _judge(sums, self._layers, top_k)
        unrelated = float(sums.unrelated_shared.sum()) / max(1.0, float(sums.unrelated_rows.sum())) / top_k
        wrong, seen_rows = _pieces(shared, self._places, names, top_k, unrelated)
        wrong = self._neighbours(pairs, experts) + wrong
        return Alignment(found, wrong, sum(judged) / len(self._layers) * seen_rows, margin)

    def _neighbours(self, pairs: Seq[tuple[Tensor, Tensor]], experts: int) -> tuple[str, ...]:
        """Describe prompts or completions whose rows agree no better with their own witness than with another
        sequence's.

        A row counts once, with the mean over its layers, because the errors of its layers are correlated.
        """
        if not len(self._pairs.row):
            return ()
        record, witness = (
            one_hot(torch.cat([pair[side] for pair in pairs], 1).long(), experts).sum(2).float() for side in (0, 1)
        )  # [L, M, E]
        # The pairs are ordered by kind, the rows by microbatch.
        order = np.argsort(self._pairs.microbatch, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        partner = _on(record.device, rank[self._pairs.partner[order]])
        completion = _on(record.device, self._pairs.completion[order])
        top_k = float(witness[0, 0].sum())
        other = witness[:, partner]
        own, both, alike = (record * witness).sum(2), (record * other).sum(2), (witness * other).sum(2)
        told = (alike < top_k).double()  # [L, M]
        layers = told.sum(0).clamp(min=1)
        score = (((own > both).double() + 0.5 * (own == both)) * told).sum(0) / layers
        shares = ((own * told).sum(0) / layers / top_k, (both * told).sum(0) / layers / top_k)
        counted = torch.stack([told.any(0).double(), score, *shares])  # [4, M]
        totals = [(counted * kind).sum(1) for kind in (~completion, completion)]
        found, needed = [], math.log(2 / FALSE_ALARM)
        for what, (rows, won, mine, theirs) in zip(
            ("prompts", "completions"), torch.stack(totals).tolist(), strict=True
        ):
            if rows * _SEEN >= needed and won < _THRESHOLD * rows:
                agree = f"{theirs / rows:.2f} of the experts agree with the same place in another sequence"
                found.append(f"{what} have the rows of other {what}: {agree}, {mine / rows:.2f} with their own")
        return tuple(found)


def _on(device: torch.device, values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def _sum(samples: Seq[Sample], experts: int) -> _Sums:
    total: _Sums | None = None
    for sample in samples:
        one = _sums_of(sample, experts)
        if total is None:
            total = one
        else:
            total.add(one)
    assert total is not None
    # Copy everything to the host at once.
    names = [name for name in _Sums.__slots__ if name != "sampled"]
    flat = torch.cat([getattr(total, name).double().flatten() for name in names]).cpu()
    pieces = flat.split([getattr(total, name).numel() for name in names])
    for name, piece in zip(names, pieces, strict=True):
        setattr(total, name, piece.view(getattr(total, name).shape))
    return total


def _sums_of(sample: Sample, experts: int) -> _Sums:
    """Compare the rows of one sample in all layers, and count."""
    layers, rows, top_k = sample.record.shape
    record, witness = (
        one_hot(choice.long(), experts).sum(2).float().transpose(0, 1) for choice in (sample.record, sample.witness)
    )  # [S, L, E]
    own = (record * witness).sum(2)  # [S, L]
    here = torch.arange(rows, device=own.device)
    counted: list[tuple[Tensor, ...]] = []
    for shift in _SHIFTS:
        there = (here - shift).clamp(0, rows - 1)
        valid = (sample.owner[there] == sample.owner) & (sample.position - sample.position[there] == shift)
        others = witness[there].transpose(1, 2)  # [S, E, L]
        both, alike = record @ others, witness @ others  # [S, L, L]
        told = ((alike < top_k) & valid[:, None, None]).float()
        score = (own[:, :, None] > both).float() + 0.5 * (own[:, :, None] == both)
        counted.append((told.sum(0), (score * told).sum(0), (both * valid[:, None, None]).sum(0), valid.sum().float()))
    # A token elsewhere in the sample serves as the unrelated token.
    other = (here + rows // 2) % rows
    both, alike = (record * witness[other]).sum(2), (witness * witness[other]).sum(2)
    told = (alike < top_k).float()
    score = (own > both).float() + 0.5 * (own == both)
    by_shift = [torch.stack([one[part] for one in counted]) for part in range(4)]
    return _Sums(
        rows=by_shift[0],
        score=by_shift[1],
        shared=by_shift[2],
        compared=by_shift[3],
        own=own.sum(0),
        unrelated_rows=told.sum(0),
        unrelated_score=(score * told).sum(0),
        unrelated_shared=(both * told).sum(0),
        varies=(record != record[:1]).any(2).any(0).float(),
        sampled=rows,
    )


def _judge(sums: _Sums, layers: Seq[int], top_k: int) -> tuple[tuple[Misplaced, ...], list[bool], float]:
    """Return the layers with wrong records, for each layer whether it could be judged, and the smallest margin."""
    needed = math.log(len(layers) * (len(_SHIFTS) * len(layers) + 1) / FALSE_ALARM)
    # Lists, since to read one element of a tensor takes as long as to read a thousand of a list.
    won, could_win, shared, compared = (one.tolist() for one in (sums.score, sums.rows, sums.shared, sums.compared))
    own_shared, unrelated_won, unrelated = (
        one.tolist() for one in (sums.own, sums.unrelated_score, sums.unrelated_rows)
    )
    found, judged, margin = [], [], math.inf
    for i, layer in enumerate(layers):
        own = own_shared[i] / sums.sampled / top_k
        rivals = []
        for at, shift in enumerate(_SHIFTS):
            for j, other in enumerate(layers):
                if (shift, j) == (0, i) or not compared[at]:
                    continue
                rows, score = could_win[at][i][j], won[at][i][j]
                agree = shared[at][i][j] / compared[at] / top_k
                margin = min(margin, own - agree)
                if score < rows / 2 and rows * divergence(score / rows, 0.5) >= needed:
                    rivals.append((agree, _whose(layer, other, shift)))
        rows, score = unrelated[i], unrelated_won[i]
        judged.append(rows * _SEEN >= needed)
        if rivals:
            agree, match = max(rivals)
            found.append(Misplaced(layer, match, own, agree))
        elif judged[-1] and score < _THRESHOLD * rows:
            match, agree = ("", 0.0) if sums.varies[i] else ("the same experts for every token", own)
            found.append(Misplaced(layer, match, own, agree))
    return tuple(found), judged, margin


def _whose(layer: int, other: int, shift: int) -> str:
    """Describe the rows that the record agrees with."""
    rows = "its own rows" if other == layer else f"the rows of layer {other}"
    if not shift:
        return rows
    return f"{rows.replace('its own rows', 'rows')} {abs(shift)} token{'s' if abs(shift) > 1 else ''} " + (
        "too late" if shift > 0 else "too early"
    )


def _pieces(
    shared: Seq[Tensor],
    places: Seq[RowPlaces],
    names: Seq[Seq[str]],
    top_k: int,
    unrelated: float,
) -> tuple[tuple[str, ...], float]:
    """Return descriptions of the wrong pieces of sequences, and the share of rows in pieces where a fault was
    detectable.

    Args:
        unrelated: Share of a record's experts that are also in a row of an unrelated token.
    """
    sums = []
    for one, place in zip(shared, places, strict=True):
        agree = one.double() / top_k
        token = agree.mean(0)
        columns = torch.stack([torch.ones_like(token), token, token**2, (agree**2).mean(0)], 1)
        empty = columns.new_zeros(len(place.pieces), 4)
        sums.append(empty.index_add_(0, _on(one.device, place.piece[place.recorded]), columns))
    table = torch.cat(sums).cpu().numpy()  # columns: rows, agreement, its square by token, its square by position
    named = [
        (name[number], first, last)
        for name, place in zip(names, places, strict=True)
        for number, first, last in place.pieces
    ]
    rows, layers = table[:, 0], shared[0].shape[0]
    present = rows > 0
    if not present.any():
        return (), 0.0
    mean = np.divide(table[:, 1], rows, out=np.ones_like(rows), where=present)
    # Estimate the batch's agreement without suspicious pieces, so that they do not influence their own threshold.
    level = float(np.median(np.repeat(mean[present], rows[present].astype(int))))
    sound = present & (mean >= (level + unrelated) / 2)
    if not sound.any():  # the whole batch agrees less than unrelated rows do
        return (), 0.0
    count, total, by_token, by_position = table[sound].sum(0)
    level = min(total / count, 1 - 0.5 / (count * layers))
    between = (level + unrelated) / 2
    spread, spread_of_tokens = (max(0.0, squares / count - (total / count) ** 2) for squares in (by_position, by_token))
    # The errors of one token's layers are correlated: this many layers count as one.
    together = min(max(layers * spread_of_tokens / spread, 1.0), layers) if spread > 0 else 1.0
    needed = math.log(present.sum() / FALSE_ALARM)
    told = present & (rows * layers / together * divergence(between, level) >= needed) & (between < level)
    wrong = [
        f"{named[i][0]} has other rows at tokens {named[i][1]} to {named[i][2]}: {mean[i]:.2f} of the experts agree, "
        f"{level:.2f} in the batch"
        for i in np.flatnonzero(told & (mean < between))
    ]
    return tuple(wrong), float(rows[told].sum() / rows.sum())
