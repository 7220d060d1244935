"""Every fault of a store: verification.py's of each shard, and what only a look at the whole shows."""

from __future__ import annotations

from moe_rl.errors import TraceError
from moe_rl.trace.manifest import MANIFEST
from moe_rl.trace.selection import Selection
from moe_rl.trace.store import TraceStore
from moe_rl.trace.validator import validate
from moe_rl.trace.verification import verify


def faults(selection: Selection) -> list[str]:
    """Everything that is wrong with the shards and, of a whole store, with its manifest; empty when all is well.

    Besides every checksum: routes that no router gives (the validator's rules), shards that the manifest lists and the
    folder lacks, damaged lines of the manifest.
    """
    problems = []
    if selection.whole:
        manifest = selection.store.manifest()
        problems += [f"{MANIFEST}, line {line}: damaged" for line in manifest.damaged]
        gone = [name for name in manifest.published if name not in selection.shards]
        problems += [f"shard {name} was published and is not there" for name in gone]
    for shard in selection.shards:
        found = verify(selection.store, shard)
        problems += found or _not_routes(selection.store, shard)
    return problems


def _not_routes(store: TraceStore, shard: str) -> list[str]:
    """The records of an undamaged shard that the validator refuses even with their own tokens and weights."""
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
