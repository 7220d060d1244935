"""What a replay session refuses at its end: one function for each thing that its pass must show.

Each takes what the session gathered and returns nothing, or raises an error that names what is wrong. `where` names the
pass and the rank. Flags are bool tensors on the device: the host waits for the device here, and in no layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from moe_rl.errors import NonFiniteError, ReplayError, describe, first_of
from moe_rl.replay.alignment import Alignment
from moe_rl.replay.checksum import check_source
from moe_rl.replay.tables import Compared, MicrobatchRoutes


def refuse_strangers(flags: Seq[tuple[int, torch.Tensor]], where: str) -> None:
    """Refuse microbatches whose tokens are not those that the routes were read for. flags: (microbatch, it is so)."""
    if wrong := [str(microbatch) for (microbatch,) in _raised(flags)]:
        raise ReplayError(
            describe(
                "a microbatch ran with the routes of other tokens",
                where=where,
                got=f"other tokens in microbatch {', '.join(wrong)}",
                expected="those that the routes were read for",
                do="pass microbatches and routes in the same order",
            )
        )


def refuse_misplanned(flags: Seq[tuple[int, int, torch.Tensor]], where: str) -> None:
    """Refuse dispatch plans that sent rows to other experts than recorded. flags: (microbatch, layer, it is so)."""
    if wrong := [f"microbatch {microbatch} layer {layer}" for microbatch, layer in _raised(flags)]:
        raise ReplayError(
            describe(
                "a dispatch plan sent rows to other experts than recorded",
                where=where,
                got=first_of(wrong),
                expected="the plan that was made of these routes",
                do="make plans from the tables that the session replays, in their order",
            )
        )


def misapplied(flags: Seq[tuple[int, int, torch.Tensor]], tables: Seq[MicrobatchRoutes]) -> list[str]:
    """The (sequence, layer) pairs whose dispatched experts do not sum up to the record's, one text each.

    flags: (microbatch, layer, bool [S]: it is so).
    """
    wrong = torch.cat([flag for *_, flag in flags]).any() if flags else False
    if not wrong:
        return []
    return [
        f"{tables[microbatch].names[i]} layer {layer} (microbatch {microbatch})"
        for microbatch, layer, flag in flags
        for i in flag.nonzero()[:, 0].tolist()
    ]


def refuse_misapplied(pairs: list[str], checked: int, where: str) -> None:
    """Refuse the pairs that `misapplied` found. checked: (sequence, layer) pairs in all."""
    if pairs:
        raise ReplayError(
            describe(
                "tokens were dispatched to other experts than recorded",
                where=where,
                got=f"{len(pairs)} of {checked} (sequence, layer) pairs: {first_of(pairs)}",
                expected="the experts of the record for every token",
                do="look for a router or dispatcher setting that changes the routing map, or for rows out of place",
            )
        )


def refuse_other_sums(tables: Seq[MicrobatchRoutes], dispatched: Seq[int], read: Seq[int], where: str) -> None:
    """Refuse sequences whose routes are not those that left the sampler's engine.

    dispatched, read: the sums of all sequences with a known source, in the order of the tables.
    """
    known = [table for table in tables if table.source is not None]
    names = [name for table in known for name in table.names[: len(table.source or ())]]
    source = [one for table in known for one in table.source or ()]
    for sums, what, do in (
        (read, "as they were read", "look for what changes the trace between the recorder and the trainer"),
        (dispatched, "dispatched", "look at the other ranks of these sequences for what changes the routing map"),
    ):
        check_source(names, sums, source, where=where, what=what, do=do)


def refuse_uncompared(
    compared: Mapping[tuple[int, int], Compared], microbatches: Seq[int], layers: Seq[int], where: str
) -> None:
    """Refuse a pass in which the own choice of a router was not compared with the record."""
    missing = [(m, layer) for m in microbatches for layer in layers if (m, layer) not in compared]
    if missing:
        microbatch, layer = missing[0]
        raise ReplayError(
            describe(
                "a router's own choice was not compared with the record",
                where=f"{where}, microbatch {microbatch}, layer {layer}",
                got=f"{len(missing)} such layers",
                expected="every layer of every microbatch compared",
            )
        )


def refuse_blind_witness(compared: Seq[Compared], margin: float, layers: Seq[int], where: str) -> None:
    """Refuse routers whose scores are not finite: they say nothing of the routes. margin: the sum over all of them."""
    if math.isfinite(margin):
        return
    broken = torch.cat([~one.margin.isfinite() for one in compared], 1).any(1).tolist()
    wrong = ", ".join(str(layer) for layer, is_broken in zip(layers, broken, strict=True) if is_broken)
    raise NonFiniteError(
        describe(
            "scores of the trainer's routers are not finite, so that they cannot vouch for any routes",
            where=where,
            got=f"MoE layers {wrong}",
            do="look for NaN in its weights, and start from an earlier checkpoint. No weight was moved",
        )
    )


def refuse_misaligned(alignment: Alignment, where: str) -> None:
    """Refuse routes that are not those of the rows that they are replayed for."""
    if faults := alignment.faults:
        raise ReplayError(
            describe(
                "recorded routes are not those of the rows that they would be replayed for",
                where=where,
                got=first_of(faults),
                expected="routes that the trainer's routers nearly agree with. No update was made with these",
                do="look at the recorder, and at the weights that the sampler holds. If the routes are meant to be of "
                "other weights or tokens, set guards.alignment=false",
            )
        )


def _raised(flags: Seq[tuple]) -> list[tuple]:
    """The keys, all but the last field, of the flags that are set."""
    values = torch.stack([flag for *_, flag in flags]).tolist() if flags else []
    return [tuple(key) for (*key, _), value in zip(flags, values, strict=True) if value]
