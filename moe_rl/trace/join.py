"""What a reference stands for: the records of its parts, one per pipeline stage, checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_rl.errors import TraceError, describe
from moe_rl.trace.library import Reading, Segment
from moe_rl.trace.read_plan import Plan
from moe_rl.trace.record import MAX_ROWS, TraceSpec, check_key
from moe_rl.trace.spans import cut_spans, merge_spans
from moe_rl.types import RoutePart, RouteRef, Span


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's share. layers: that the shard has. segments: the rows of the reference, oldest first."""

    part: RoutePart
    layers: tuple[int, ...]
    segments: list[Segment]


@dataclass(frozen=True, slots=True)
class Joined:
    """The parts of a reference that are needed for some layers. columns: of these layers in an array of theirs."""

    parts: list[Part]
    layers: tuple[int, ...]
    columns: dict[int, int]
    spec: TraceSpec
    spans: tuple[Span, ...]
    aborted: bool


def join(
    reading: Reading, refs: Sequence[RouteRef], layers: tuple[int, ...] | None, *, complete: bool = True
) -> list[Joined]:
    """Find what the references name. layers: increasing global numbers; None: all of the model, or all that there are
    when not `complete`.

    Raises TraceError when a record is missing or damaged, when a layer is in no part or in two, and when the parts are
    not of the same sequence. Parts without a wanted layer are not looked at.
    """
    shares = [_parts_of(reading, ref, layers, complete) for ref in refs]
    reading.find((part, _where(ref, part)) for ref, (parts, _) in zip(refs, shares, strict=True) for part in parts)
    return [_join(reading, ref, *share) for ref, share in zip(refs, shares, strict=True)]


def tokens_of(reading: Reading, part: Part, rows: tuple[int, int]) -> np.ndarray:
    """Token ids int32 [T] of rows [first, last)."""
    ids = np.empty(rows[1] - rows[0], "<i4")
    plan = Plan(reading)
    plan.tokens(part.segments, rows, ids)
    plan.run()
    return ids


def _parts_of(
    reading: Reading, ref: RouteRef, layers: tuple[int, ...] | None, complete: bool
) -> tuple[list[RoutePart], tuple[int, ...]]:
    """The parts with a wanted layer, and the wanted layers."""
    check_key(ref.key)
    if not ref.parts or not (isinstance(ref.rows, int) and 0 <= ref.rows <= MAX_ROWS):
        raise TraceError(
            describe(
                "reference is impossible",
                where=f"record {ref.key}",
                got=f"{ref.rows} rows in {len(ref.parts)} shards",
                expected=f"0 to {MAX_ROWS} rows in at least one",
            )
        )
    owner: dict[int, RoutePart] = {}
    for part in ref.parts:
        header = reading.shard(part.shard, _where(ref, part)).header
        first = reading.shard(ref.parts[0].shard, _where(ref, part)).header
        if (header.spec, header.keep_order) != (first.spec, first.keep_order):
            raise TraceError(
                describe(
                    "parts of a record are of different models or orders",
                    where=f"record {ref.key}",
                    got=f"shards {first.name} and {header.name}",
                )
            )
        for layer in header.layers:
            if layer in owner:
                raise TraceError(
                    describe(
                        "two parts of a record have the same layer",
                        where=f"record {ref.key}, layer {layer}",
                        got=f"shards {owner[layer].shard} and {part.shard}",
                        do="give every pipeline stage its own layers",
                    )
                )
            owner[layer] = part
    if layers is None:
        layers = first.spec.moe_layers if complete else tuple(sorted(owner))
    missing = [layer for layer in layers if layer not in owner]
    if missing or list(layers) != sorted(set(layers)):
        raise TraceError(
            describe(
                f"layer {missing[0]} is in no part of the record" if missing else "layers are not increasing",
                where=f"shard {', '.join(part.shard for part in ref.parts)}, record {ref.key}",
                got=f"layers {str(list(layers))[:80]}",
                expected=f"some of {str(sorted(owner))[:80]}",
                do="join the parts of all pipeline stages, and ask for MoE layers by their global number",
            )
        )
    wanted = {owner[layer] for layer in layers}
    return [part for part in ref.parts if part in wanted] or [ref.parts[0]], layers


def _join(reading: Reading, ref: RouteRef, parts: list[RoutePart], layers: tuple[int, ...]) -> Joined:
    shares = []
    for part in parts:
        found = reading.tip(part)
        if found.frame.key != ref.key:
            raise TraceError(
                describe(
                    "reference names another request than its record",
                    where=_where(ref, part),
                    got=f"record of {found.frame.key}",
                    do="sample the sequence again",
                )
            )
        shares.append(Part(part, found.shard.header.layers, reading.chain(part, ref.rows, _where(ref, part))))
    one = shares[0]
    for other in shares[1:]:
        for what, differ in (
            ("spans", _spans(one) != _spans(other)),
            ("tokens", not _same_tokens(reading, one, other, ref.rows)),
        ):
            if differ:
                raise TraceError(
                    describe(
                        f"parts of a record have different {what}",
                        where=f"record {ref.key}",
                        got=f"shards {one.part.shard} and {other.part.shard}",
                        do="join only what the stages of one engine recorded of one request",
                    )
                )
    return Joined(
        parts=shares,
        layers=layers,
        columns={layer: column for column, layer in enumerate(layers)},
        spec=reading.tip(parts[0]).shard.header.spec,
        spans=_spans(one),
        aborted=any(reading.tip(part).aborted for part in parts),
    )


def _spans(part: Part) -> tuple[Span, ...]:
    return merge_spans(
        span for segment in part.segments for span in cut_spans(segment.found.frame.spans, 0, segment.rows)
    )


def _same_tokens(reading: Reading, one: Part, other: Part, rows: int) -> bool:
    """By their digests where the parts are cut alike, as those of one engine are; else token by token."""

    def cut(part: Part) -> list:
        return [
            (s.first, s.rows, s.found.shard.header.token_block, [block.checksum for block in s.found.frame.tokens])
            for s in part.segments
        ]

    return cut(one) == cut(other) or np.array_equal(
        tokens_of(reading, one, (0, rows)), tokens_of(reading, other, (0, rows))
    )


def _where(ref: RouteRef, part: RoutePart) -> str:
    return f"shard {part.shard}, record {ref.key}"
