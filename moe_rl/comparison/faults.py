"""Plants faults, to show the effect of a wrong trace and which check refuses it.

Each of three faults is planted in three places. In the trace: the stored routes differ from those that left the engine;
the store, the validator or the checksums must refuse them. After reading: the trainer swaps routes; the pass's
checksums must refuse them. Past every check: the pass gets the wrong routes with matching checksums, so that no
check can refuse them, and the measured numbers must get worse.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.comparison.passes import Pass, Scorer
from moe_rl.errors import MoeRLError, ReplayError, describe
from moe_rl.megatron import world
from moe_rl.replay.routes import PADDING, microbatch_routes, read_routes, source_sum
from moe_rl.replay.tables import MicrobatchRoutes
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.trace.record import RouteRecord
from moe_rl.types import Sequence

FAULTS = SHIFTED, PERMUTED, SWAPPED = "routes shifted by one token", "layers permuted", "sequences swapped"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Describes the outcome of one fault in one place.

    Attributes:
        where: The place, in words.
        message: Message of the check that refused the fault; None if no check did.
    """

    fault: str
    where: str
    message: str | None


def self_test(scorer: Scorer, spec: TraceSpec, version: int, worse: Callable[[Pass], dict[str, Any]]) -> dict[str, Any]:
    """Plant every fault in every place. All ranks call this together.

    Args:
        worse: Returns, for each quantity, how much worse a pass with wrong routes is than honest replay.

    Returns:
        The outcome of each fault. "problems" lists faults that were not refused, or that made nothing worse.
    """
    problems: list[str] = []
    places: list[Refusal] = []
    forced: list[dict[str, Any]] = []
    if (why := cannot_be_planted(scorer)) is not None:
        return {"refusals": [], "forced": [], "problems": [f"not run: {why}"]}
    if dist.get_rank() == 0:
        places += in_the_trace(scorer.store, spec, scorer.sequences, version)
    for fault in FAULTS:
        places.append(in_the_tables(fault, scorer))
        wrong_pass, _ = scorer.run("replay", fault, tables=wrong_tables(fault, scorer.tables))
        harm = worse(wrong_pass)
        forced.append({"fault": fault, **harm})
        for name in ("k3", "set_mismatch"):
            if not harm[name]["worse_by"]["low"] > 0:
                problems.append(f"{fault}: when forced past every check, it did not make {name} worse: {harm[name]}")
    problems += [f"{refusal.fault}: {refusal.where}, but not refused" for refusal in places if refusal.message is None]
    places.sort(key=lambda refusal: FAULTS.index(refusal.fault))
    return {"refusals": [asdict(refusal) for refusal in places], "forced": forced, "problems": problems}


def wrong_tables(fault: str, tables: list[MicrobatchRoutes]) -> list[MicrobatchRoutes]:
    """Return this rank's tables with the fault planted and matching checksums, so that no check detects it."""
    return [
        replace(
            table,
            routes=(routes := _planted(fault, table)),
            checksums={layer: table.fed.chosen(layer, layer_routes) for layer, layer_routes in routes.items()},
            source=None,
        )
        for table in tables
    ]


def in_the_tables(fault: str, scorer: Scorer) -> Refusal:
    """Swap routes after reading them and computing their checksums: the pass must refuse the dispatched routes."""
    tables = [replace(table, routes=_planted(fault, table)) for table in scorer.tables]
    work = [replace(item, table=table) for item, table in zip(scorer.work, tables, strict=True)]
    message = ""
    try:
        scorer.policy.score(work, "replay", fault)
    except MoeRLError as error:
        message = str(error)
    return Refusal(fault, "exchanged in the trainer, after they were read", _first_of_all_ranks(message))


def in_the_trace(store: TraceStore, spec: TraceSpec, sequences: list[Sequence], version: int) -> Iterator[Refusal]:
    """Store wrong routes with the honest checksum in a separate store, and read them as the trainer does. Runs on rank
    0."""
    first = sequences[0]
    if first.routes is None:
        raise ReplayError("there are no recorded routes to plant faults in", where={"request": first.key})
    fed = _fed(first)
    # Another sequence with the same first tokens would have the right routes.
    other = next((s for s in sequences if not np.array_equal(_fed(s)[: len(fed)], fed)), None)
    for fault, where, write in _WAYS:
        if other is None and write is _of_the_other:
            continue
        message = None
        with tempfile.TemporaryDirectory() as folder:
            with ShardWriter(Path(folder), "planted", spec) as writer:
                ref = write(
                    writer, store.read(first.routes), store.read(other.routes) if other and other.routes else None
                )
            planted = replace(first, routes=replace(ref, source_sum=first.routes.source_sum))
            try:
                _read(TraceStore(folder), planted, spec, fed, version)
            except MoeRLError as error:
                message = str(error)
        yield Refusal(fault, where, message)


def _read(store: TraceStore, sequence: Sequence, spec: TraceSpec, fed: np.ndarray, version: int) -> None:
    """Read one sequence as the trainer does, for a microbatch with this sequence only."""
    here = np.ones(len(fed), bool)
    parts = read_routes(store, [sequence], spec, layers=spec.moe_layers, fed=[fed], here=[here], weight_version=version)
    microbatch_routes(
        parts,
        spec,
        layers=spec.moe_layers,
        names=[sequence.key],
        fed=[fed],
        source=[source_sum(sequence)],
        padded_tokens=len(fed),
        rows=slice(0, len(fed)),
        expert_parallel=1,
        device=torch.device("cpu"),
    )


def _fed(sequence: Sequence) -> np.ndarray:
    return np.array(sequence.ids[: sequence.forwarded], np.int64)


def _rows_late(writer: ShardWriter, record: RouteRecord, other: RouteRecord | None):
    return writer.add(record.key, np.roll(record.routes, 1, 0), np.roll(record.token_ids, 1), record.spans)


def _routes_late(writer: ShardWriter, record: RouteRecord, other: RouteRecord | None):
    return writer.add(record.key, np.roll(record.routes, 1, 0), record.token_ids, record.spans)


def _layers_moved(writer: ShardWriter, record: RouteRecord, other: RouteRecord | None):
    return writer.add(record.key, np.roll(record.routes, 1, 1), record.token_ids, record.spans)


def _of_the_other(writer: ShardWriter, record: RouteRecord, other: RouteRecord):
    rows = np.resize(np.arange(len(other.routes)), len(record.routes))
    return writer.add(record.key, other.routes[rows], other.token_ids[rows], record.spans)


_WAYS: tuple[tuple[str, str, Callable], ...] = (
    (SHIFTED, "stored with their tokens, one row late", _rows_late),
    (SHIFTED, "stored one row late under the right tokens", _routes_late),
    (PERMUTED, "stored under the next layer's number", _layers_moved),
    (SWAPPED, "stored under another request's key", _of_the_other),
)


def _planted(fault: str, table: MicrobatchRoutes) -> dict[int, torch.Tensor]:
    """Return routes {layer: [R, K]} with whole rows or layers swapped, so that every expert set stays valid."""
    layers = sorted(table.routes)
    if fault == PERMUTED:
        return {layer: table.routes[layers[index - 1]] for index, layer in enumerate(layers)}
    source = _sources(fault, table)
    return {layer: table.routes[layer].index_select(0, source) for layer in layers}


def _sources(fault: str, table: MicrobatchRoutes) -> torch.Tensor:
    """Return int64 [R], the row that each row takes its routes from."""
    rows = torch.arange(len(table.fed.owner), device=table.fed.owner.device)
    sequences = [rows[table.fed.owner == owner] for owner in range(table.fed.owners) if table.names[owner] != PADDING]
    sequences = [sequence for sequence in sequences if len(sequence)]
    source = rows.clone()
    for index, sequence in enumerate(sequences):
        if fault == SHIFTED:
            source[sequence] = sequence.roll(1)
        else:
            # Take the next sequence of the microbatch, repeated from its start if it is shorter.
            other = sequences[(index + 1) % len(sequences)]
            source[sequence] = other[torch.arange(len(sequence), device=rows.device) % len(other)]
    return source


def _first_of_all_ranks(message: str) -> str | None:
    """Return, on every rank, the first non-empty message in rank order; None if all are empty."""
    messages = [world.broadcast(message, str, source=rank) for rank in range(dist.get_world_size())]
    return next(filter(None, messages), None)


def cannot_be_planted(scorer: Scorer) -> str | None:
    """Return why the faults cannot be planted on some rank, the same on every rank; None if they can."""
    why = ""
    if len(scorer.policy.layers) < 2:
        why = describe("layers cannot be permuted", got="one MoE layer on a rank", do="use fewer pipeline stages")
    elif scorer.tables and max(len(set(table.names) - {PADDING}) for table in scorer.tables) < 2:
        why = describe(
            "sequences cannot be swapped", got="one sequence per microbatch", do="raise train.microbatch_tokens"
        )
    return _first_of_all_ranks(why)
