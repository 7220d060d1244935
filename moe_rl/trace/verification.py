"""What can be wrong with a shard, said in words: every checksum, and what follows from the decoded routes."""

from __future__ import annotations

import numpy as np

from moe_rl.errors import TraceError
from moe_rl.trace.frame import count_experts
from moe_rl.trace.record import check_name
from moe_rl.trace.store import TraceStore
from moe_rl.types import RouteRef


def verify(store: TraceStore, shard: str) -> list[str]:
    """Read all that is in a shard, and what its records continue; return what is wrong, nothing when all is well.

    A shard that the manifest does not list is reported too, though readers accept it: it was brought there by other
    means, or its line is damaged.
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
