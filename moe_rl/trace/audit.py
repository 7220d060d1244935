"""Reports everything wrong with a store: checksums, impossible routes, and differences from the manifest."""

from __future__ import annotations

import time

import numpy as np

from moe_rl.errors import TraceError
from moe_rl.trace.inspection import Selection
from moe_rl.trace.manifest import MANIFEST
from moe_rl.trace.ranked import count_experts
from moe_rl.trace.record import check_name
from moe_rl.trace.store import TraceStore
from moe_rl.trace.validator import validate
from moe_rl.types import RouteRef

_REMOVING_SECONDS = 0.2


def verify(store: TraceStore, shard: str) -> list[str]:
    """Read everything in a shard, and all records that its records continue. Returns the problems found, [] if none.

    A shard that the manifest does not list is a problem too, although readers accept it: someone copied it there, or
    its manifest line is damaged.
    """
    problems = []
    if check_name(shard) not in store.manifest().published:
        problems.append(f"shard {shard} is not in the manifest")
    try:
        refs = store.records(shard)
    except TraceError as error:
        return [*problems, str(error)]
    for ref in refs:
        try:
            problems += _record(store, ref)
        except TraceError as error:
            problems.append(str(error))
    return problems


def _record(store: TraceStore, ref: RouteRef) -> list[str]:
    info = store.info(ref)
    for name in info.aux:
        store.aux(ref, name)
    record = store.read(ref, layers=info.layers)
    if not np.array_equal(store.expert_counts(ref), count_experts(record.routes, info.spec.num_experts)):
        return [f"shard {ref.parts[0].shard}, record {ref.key}: the stored expert counts are not those of its routes"]
    return []


def faults(selection: Selection) -> list[str]:
    """Return everything wrong with the shards and, for a whole store, with its manifest; [] if nothing is.

    This covers every checksum, routes that no router produces (the validator's rules), shards that the manifest lists
    but the folder lacks, and damaged lines of the manifest. The run may still be running: a shard that it removes
    meanwhile is no fault.
    """
    store, problems = selection.store, []
    before = store.manifest()
    if selection.whole:
        problems += [f"{MANIFEST}, line {line}: damaged" for line in before.damaged]
    for shard in selection.shards:
        shard_problems = verify(store, shard)
        try:
            shard_problems = shard_problems or _not_routes(store, shard)
        except TraceError as error:
            shard_problems = [str(error)]
        if shard_problems and not _removed(store, shard):
            problems += shard_problems
    if selection.whole:
        # A writer adds its line before its shard, which may have appeared meanwhile.
        there = {*selection.shards, *store.shards()}
        gone = [name for name in before.published if name not in there and not _removed(store, name)]
        problems += [f"shard {name} was published and is not there" for name in gone]
    return problems


def _removed(store: TraceStore, shard: str) -> bool:
    """Return whether a shard that was present or listed a moment ago has been removed: it is now neither."""
    if shard in store.shards():
        return False
    if shard in store.manifest().published:
        time.sleep(_REMOVING_SECONDS)  # files go first, and then their lines
    return shard not in store.manifest().published


def _not_routes(store: TraceStore, shard: str) -> list[str]:
    """Return the records of an intact shard that the validator refuses even with their own tokens and weights."""
    problems = []
    for ref in store.records(shard):
        record = store.read(ref, layers=store.info(ref).layers)
        newest = max((span.weight_version for span in record.spans), default=0)
        try:
            validate(
                record,
                token_ids=record.token_ids,
                spec=record.spec,
                weight_version=newest,
                max_staleness=newest,
                ref=ref,
                layers=record.layers,
            )
        except TraceError as error:
            problems.append(f"shard {shard}: {error}")
    return problems
