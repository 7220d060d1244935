"""Defines the checks that a replay pass makes at its end, one function each.

Each takes what the pass collected, and raises an error if it proves a fault. `where` names the pass and the rank.
Flags are bool tensors on the device; the host waits for the device only here, not in the layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Literal

import torch

from moe_rl.errors import About, ReplayError, first_of
from moe_rl.replay.alignment import Alignment, blind_witness
from moe_rl.replay.checksum import check_source
from moe_rl.replay.tables import Compared, MicrobatchRoutes


def refuse_strangers(flags: Seq[tuple[int, torch.Tensor]], where: About) -> None:
    """Refuse microbatches whose tokens differ from those that the routes were read for.

    Args:
        flags: (microbatch, whether its tokens differ).
    """
    if wrong := [str(microbatch) for (microbatch,) in _raised(flags)]:
        raise ReplayError(
            "a microbatch ran with the routes of other tokens",
            where=where,
            got=f"other tokens in microbatch {', '.join(wrong)}",
            expected="the tokens that the routes were read for",
            do="pass microbatches and routes in the same order",
            fault="other tokens",
        )


def refuse_misplanned(flags: Seq[tuple[int, int, torch.Tensor]], where: About) -> None:
    """Refuse dispatch plans that sent rows to other experts than recorded.

    Args:
        flags: (microbatch, layer, whether it did).
    """
    if wrong := [f"microbatch {microbatch} layer {layer}" for microbatch, layer in _raised(flags)]:
        raise ReplayError(
            "a dispatch plan sent rows to other experts than recorded",
            where=where,
            got=first_of(wrong),
            expected="the plan that was made from these routes",
            do="make plans from the tables that the pass replays, in the same order",
            fault="plan",
        )


def misapplied(flags: Seq[tuple[int, int, torch.Tensor]], tables: Seq[MicrobatchRoutes]) -> list[str]:
    """Name the (sequence, layer) pairs whose dispatched experts have another checksum than the record.

    Args:
        flags: (microbatch, layer, bool [S] whether it differs).
    """
    wrong = torch.cat([flag for *_, flag in flags]).any() if flags else False
    if not wrong:
        return []
    return [
        f"{tables[microbatch].names[i]} layer {layer} (microbatch {microbatch})"
        for microbatch, layer, flag in flags
        for i in flag.nonzero()[:, 0].tolist()
    ]


def refuse_misapplied(pairs: list[str], checked: int, faded: Seq[tuple[int, int, torch.Tensor]], where: About) -> None:
    """Refuse the pairs that `misapplied` found, out of `checked` (sequence, layer) pairs.

    faded: (microbatch, layer, bool [] whether the weight of a recorded expert is 0) where a dispatcher chooses experts
        by their weights.
    """
    zero = [f"layer {layer} (microbatch {microbatch})" for microbatch, layer, flag in faded if flag] if pairs else []
    if zero:
        raise ReplayError(
            "a recorded expert's weight underflowed to 0, and the dispatcher exchanged another expert",
            where=where,
            got=f"{len(pairs)} of {checked} (sequence, layer) pairs: {first_of(pairs)}; 0 in {first_of(zero)}",
            expected="the experts of the record for every token",
            do="use the all-to-all dispatcher or HybridEP, which take experts by the routing map",
            fault="underflow",
        )
    if pairs:
        raise ReplayError(
            "tokens were dispatched to other experts than recorded",
            where=where,
            got=f"{len(pairs)} of {checked} (sequence, layer) pairs: {first_of(pairs)}",
            expected="the experts of the record for every token",
            do="look for a router or dispatcher setting that changes the routing map, or for rows out of place",
            fault="misapplied",
        )


def refuse_other_sums(
    tables: Seq[MicrobatchRoutes], sums: Seq[int], what: Literal["read", "dispatched"], where: About
) -> None:
    """Refuse sequences whose routes differ from those that left the sampler's engine.

    Args:
        sums: Sums of all sequences that have a known source, in the order of the tables, over all ranks that share
            them.
        what: What the routes were when they were summed.
    """
    known = [table for table in tables if table.source is not None]
    names = [name for table in known for name in table.names[: len(table.source or ())]]
    source = [checksum for table in known for checksum in table.source or ()]
    do = {
        "read": "look for what changes the trace between the recorder and the trainer",
        "dispatched": "look on the other ranks that share these sequences for what changes the routing map",
    }
    check_source(names, sums, source, where=where, what=what, do=do[what])


def refuse_uncompared(
    compared: Mapping[tuple[int, int], Compared], microbatches: Seq[int], layers: Seq[int], where: About
) -> None:
    """Refuse a pass in which some router's own choice was not compared with the record."""
    missing = [(m, layer) for m in microbatches for layer in layers if (m, layer) not in compared]
    if missing:
        microbatch, layer = missing[0]
        raise ReplayError(
            "a router's own choice was not compared with the record",
            where={**where, "microbatch": microbatch, "layer": layer},
            got=f"{len(missing)} layers without a comparison",
            expected="every layer of every microbatch compared",
            fault="uncompared",
        )


def refuse_blind_witness(
    compared: Seq[Compared], tables: Seq[MicrobatchRoutes], margin: float, layers: Seq[int], where: About
) -> None:
    """Refuse router scores that are not finite. Name their layers, and the first of their tokens.

    Args:
        compared, tables: One for each microbatch.
        margin: Sum of the margins of all comparisons.
    """
    if math.isfinite(margin):
        return
    broken = [~comparison.margin.isfinite() for comparison in compared]
    wrong = [str(layer) for layer, is_broken in zip(layers, torch.cat(broken, 1).any(1), strict=True) if is_broken]
    table, rows = next((table, of.any(0)) for table, of in zip(tables, broken, strict=True) if of.any())
    row = int(table.recorded[rows][0])
    request, token = table.names[table.places.sequence[row]], int(table.places.position[row])
    raise blind_witness({**where, "layers": ", ".join(wrong), "request": request, "token": token})


def refuse_misaligned(alignment: Alignment, where: About) -> None:
    """Refuse routes that do not belong to the rows that they are replayed on."""
    if faults := alignment.faults:
        raise ReplayError(
            "recorded routes belong to other rows than they would be replayed on",
            where=where,
            got=first_of(faults),
            expected="routes that the trainer's routers nearly agree with. No weights were updated with them",
            do="check the recorder, and the weights that the sampler holds. If the routes come from other weights "
            "or tokens on purpose, set guards.alignment=false",
            fault="alignment",
        )


def _raised(flags: Seq[tuple]) -> list[tuple]:
    """Return the keys (all fields but the last) of the flags that are set."""
    values = torch.stack([flag for *_, flag in flags]).tolist() if flags else []
    return [tuple(key) for (*key, _), value in zip(flags, values, strict=True) if value]
