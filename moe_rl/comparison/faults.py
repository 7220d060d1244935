"""Plants faults: shows what a wrong trace would do, and which check refuses it.

Three faults, each planted in three places. In the trace: other routes are stored than left the engine, the store, the
validator and the references' sums are asked. Behind it: the trainer exchanges routes after they were read, the
session's checksums are asked. Past every check: the session is given the wrong routes as the truth, so that nothing
refuses, and the numbers must show it.
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
    """Says what became of one fault in one place. where: in words. message: of the check that refused it; None when
    none did."""

    fault: str
    where: str
    message: str | None


def self_test(scorer: Scorer, spec: TraceSpec, version: int, worse: Callable[[Pass], dict[str, Any]]) -> dict[str, Any]:
    """Plant every fault in every place. All ranks call it.

    worse: by how much a pass with wrong routes is farther from the sampler than honest replay, of each number. Returns
    what became of each fault, and as problems those that were not refused where they must be, or made nothing worse.
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
        one, _ = scorer.run("replay", fault, tables=wrong_tables(fault, scorer.tables))
        seen = worse(one)
        forced.append({"fault": fault, **seen})
        for name in ("k3", "set_mismatch"):
            if not seen[name]["worse_by"]["low"] > 0:
                problems.append(f"{fault}: forced past every check it did not make {name} worse: {seen[name]}")
    problems += [f"{one.fault}: {one.where}, and not refused" for one in places if one.message is None]
    places.sort(key=lambda refusal: FAULTS.index(refusal.fault))
    return {"refusals": [asdict(refusal) for refusal in places], "forced": forced, "problems": problems}


def wrong_tables(fault: str, tables: list[MicrobatchRoutes]) -> list[MicrobatchRoutes]:
    """This rank's tables with the fault planted and checksums of what they hold, so that no check sees it."""
    return [
        replace(
            table,
            routes=(routes := _planted(fault, table)),
            checksums={layer: table.fed.chosen(layer, one) for layer, one in routes.items()},
            source=None,
        )
        for table in tables
    ]


def in_the_tables(fault: str, scorer: Scorer) -> Refusal:
    """Exchange routes after they were read and summed up: the session must refuse what was dispatched."""
    tables = [replace(table, routes=_planted(fault, table)) for table in scorer.tables]
    session = scorer.policy.session(tables, mode="replay", name=fault)
    message = ""
    try:
        with session:
            scorer.policy.logprobs(scorer.microbatches, session)
    except MoeRLError as error:
        message = str(error)
    return Refusal(fault, "exchanged in the trainer, after they were read", _first_of_all_ranks(message))


def in_the_trace(store: TraceStore, spec: TraceSpec, sequences: list[Sequence], version: int) -> Iterator[Refusal]:
    """Store wrong routes under the honest sum, in a store of their own, and read them as the trainer does. Rank 0."""
    first = sequences[0]
    if first.routes is None:
        raise ReplayError(describe("there are no routes to plant faults in", where=first.key))
    fed = _fed(first)
    # Where the other one begins with the same tokens its routes are right for them.
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
    """Read one sequence as the trainer does, for a microbatch of its own."""
    here = np.ones(len(fed), bool)
    part = read_routes(store, sequence, spec, layers=spec.moe_layers, fed=fed, here=here, weight_version=version)
    microbatch_routes(
        [part],
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
    return np.array((sequence.prompt_token_ids + sequence.token_ids)[: sequence.forwarded], np.int64)


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
    """routes {layer: [R, K]} with whole rows or whole layers exchanged, so that every set stays valid."""
    layers = sorted(table.routes)
    if fault == PERMUTED:
        return {layer: table.routes[layers[at - 1]] for at, layer in enumerate(layers)}
    source = _sources(fault, table)
    return {layer: table.routes[layer].index_select(0, source) for layer in layers}


def _sources(fault: str, table: MicrobatchRoutes) -> torch.Tensor:
    """int64 [R]: the row that each row takes its routes from."""
    rows = torch.arange(len(table.fed.owner), device=table.fed.owner.device)
    sequences = [rows[table.fed.owner == owner] for owner in range(table.fed.owners) if table.names[owner] != PADDING]
    sequences = [one for one in sequences if len(one)]
    source = rows.clone()
    for at, one in enumerate(sequences):
        if fault == SHIFTED:
            source[one] = one.roll(1)
        else:
            # The next sequence of the microbatch; where it is shorter it begins again.
            other = sequences[(at + 1) % len(sequences)]
            source[one] = other[torch.arange(len(one), device=rows.device) % len(other)]
    return source


def _first_of_all_ranks(message: str) -> str | None:
    """The message of the first rank that has one, on every rank."""
    said = [world.broadcast(message, str, source=rank) for rank in range(dist.get_world_size())]
    return next(filter(None, said), None)


def cannot_be_planted(scorer: Scorer) -> str | None:
    """Why the faults cannot be planted on some rank, the same on every rank; None when they can."""
    why = ""
    if len(scorer.policy.layers) < 2:
        why = describe("layers cannot be permuted", got="one MoE layer on a rank", do="compare with fewer stages")
    elif scorer.tables and max(len(set(table.names) - {PADDING}) for table in scorer.tables) < 2:
        why = describe("sequences cannot be swapped", got="one a microbatch", do="raise train.microbatch_tokens")
    return _first_of_all_ranks(why)
