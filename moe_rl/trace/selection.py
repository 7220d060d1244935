"""The part of a store that a command of tools/trace.py works on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from moe_rl.errors import TraceError, describe
from moe_rl.trace.disk import TMP
from moe_rl.trace.record import check_name
from moe_rl.trace.shard import SUFFIX
from moe_rl.trace.store import TraceStore
from moe_rl.types import RouteRef


@dataclass(frozen=True)
class Selection:
    """Shards of a store that a command works on. whole: they are all that it has."""

    root: str
    store: TraceStore
    shards: tuple[str, ...]
    whole: bool


def select(target: str) -> Selection:
    """The store at a folder or fsspec URL, or the one shard at the path or URL of a .safetensors file.

    Raises TraceError when there is no such folder or file.
    """
    root, whole = str(target).rstrip("/"), True
    if root.endswith(SUFFIX):
        whole = False
        root, _, name = root.rpartition("/")
        shards = (check_name(name.removesuffix(SUFFIX)),)
        root = root or "."
    if "://" not in root and not Path(root).is_dir():
        raise TraceError(describe("there is no such store", where=root, do="give the folder that holds the shards"))
    store = TraceStore(root)
    if whole:
        shards = tuple(store.shards())
    elif shards[0] not in store.shards():
        raise TraceError(describe("there is no such shard", where=root, got=shards[0]))
    return Selection(root, store, shards, whole)


def references(selection: Selection, pattern: str = "*") -> Iterator[RouteRef]:
    """Every record whose key matches a shell pattern, part by part, in the order in which they were written."""
    for shard in selection.shards:
        yield from (ref for ref in selection.store.records(shard) if fnmatchcase(ref.key, pattern))


def unsealed(root: str) -> list[str]:
    """Files of writers that are at work, or that died: `repair` saves their records."""
    return [] if "://" in root else sorted(path.name for path in Path(root).glob(f".*{TMP}"))
