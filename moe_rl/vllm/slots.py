"""Mirrors the KV cache on the host: the experts, token and position computed in each slot.

A KV slot identifies a (request, position) throughout vLLM: cached prefixes, chunked prefill, shared prompts and resumed
requests all point at the slots that already have their rows. The danger is to return the wrong row. So each slot stores
its position, and each block counts its owners; a row is returned only if both match the reader's expectation.

Legend for shapes: S KV slots, T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_rl.errors import About, EngineError
from moe_rl.vllm.recording import RecordingRequest

_ALIGNED = 64
# Smaller arrays come from the allocator.
_SMALL = 1 << 15


class UsedMemory:
    """Lends parts of one block of memory as arrays. A part is returned once its array and all its views are gone.

    One thread borrows; any thread may drop an array.

    Args:
        size: bytes. The constructor writes all of them once.
    """

    def __init__(self, size: int):
        self._memory = bytearray(size)
        np.frombuffer(self._memory, np.uint8)[:] = 0  # touches every page
        self._lent: dict[int, int] = {}  # first byte -> end
        self._returned: deque[int] = deque()  # appended to by threads that drop arrays

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised array in the first gap that is large enough; in new memory if there is none or the
        array is small."""
        size, start = math.prod(shape) * dtype.itemsize, 0
        if size < _SMALL:
            return np.empty(shape, dtype)
        while self._returned:
            del self._lent[self._returned.popleft()]
        room = -(-size // _ALIGNED) * _ALIGNED
        for first, end in sorted(self._lent.items()):
            if first - start >= room:
                break
            start = end
        if start + room > len(self._memory):
            return np.empty(shape, dtype)
        self._lent[start] = start + room
        # Views of this array keep it alive. If the memory were an array, views would keep that array alive instead.
        part = np.frombuffer(self._memory, np.uint8, size, start)
        weakref.finalize(part, self._returned.append, start)
        return part.view(dtype).reshape(shape)


_EMPTY = -1
# Bytes for the routes of requests that wait to be written, enough for 18 requests of 9,216 tokens, 48 layers and top 8.
_COPIES = 64 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """Holds consecutive rows of one sequence.

    Attributes:
        routes: [T, L, K].
        token_ids: [T] int32.
        weight_versions: [T] int64.
        sums: [T] uint64, checksums of the routes as they left the engine's buffer, bound to position, token and
            version, see `placed_rows` in trace.source_sum. They are copied with the rows and never computed again from
            the routes.
    """

    routes: np.ndarray
    token_ids: np.ndarray
    weight_versions: np.ndarray
    sums: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        return self.routes, self.token_ids, self.weight_versions, self.sums

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def first(self, count: int) -> Rows:
        """Return a copy of the first `count` rows."""
        return Rows(*(column[:count].copy() for column in self.columns))

    def then(self, later: Rows) -> Rows:
        """Return these rows followed by the later ones."""
        return Rows(*map(np.concatenate, zip(self.columns, later.columns, strict=True)))


@dataclass(slots=True)
class BlockTable:
    """Lists the KV blocks of one request in order, and each block's owner count when the request got it."""

    blocks: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Recorded:
    """Tracks one running request.

    Attributes:
        ask: what to record; None records nothing, but other requests may still use its rows as a cached prefix.
        number: index in the order of arrival.
        forwarded: tokens computed, including rejected drafts of speculative decoding.
        drafts: how many of the last forwarded tokens are drafts not yet accepted or rejected.
        cached: tokens that were computed before the request arrived.
        kept: rows saved at a preemption, because the request lost its blocks.
        began: weight version when its first token was computed.
    """

    number: int
    ask: RecordingRequest | None
    prompt: np.ndarray
    cached: int
    greedy: bool
    table: BlockTable = field(default_factory=BlockTable)
    forwarded: int = 0
    drafts: int = 0
    kept: Rows | None = None
    began: int = 0


class SlotTable:
    """Holds the rows of blocks x block_size KV slots. `row_shape` is (L, K); `dtype` is that of an expert id."""

    def __init__(self, blocks: int, block_size: int, row_shape: tuple[int, int], dtype: np.dtype):
        slots = blocks * block_size
        self.block_size = block_size
        # `full` touches all pages now. With `zeros`, later steps would wait for the kernel to clear 2 MB pages.
        self._routes = np.full((slots, *row_shape), 0, dtype)
        self._token_ids = np.full(slots, 0, np.int32)
        self._positions = np.full(slots, _EMPTY, np.int32)
        self._weight_versions = np.full(slots, 0, np.int64)
        self._sums = np.full(slots, 0, np.uint64)
        self._owner = np.zeros(blocks, np.int64)
        self._copies = UsedMemory(min(_COPIES, self._routes.nbytes))

    def give(self, blocks: Sequence[int]) -> None:
        """Give blocks to new owners. This erases their rows; a former owner that reads them gets an error."""
        fresh = np.asarray(blocks, np.int64)
        self._owner[fresh] += 1
        self._positions.reshape(-1, self.block_size)[fresh] = _EMPTY

    def extend(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """Append blocks to a request's table: its own, or ones shared with their owner."""
        table.blocks += blocks
        table.owners += self._owner[np.asarray(blocks, np.int64)].tolist()

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first `rows` rows of a block, as vLLM does with the keys of a partial prefix-cache hit."""
        for column in (self._routes, self._token_ids, self._positions, self._weight_versions, self._sums):
            blocks = column.reshape(-1, self.block_size, *column.shape[1:])
            blocks[target, :rows] = blocks[source, :rows]

    def write(
        self,
        slots: np.ndarray,
        positions: np.ndarray,
        token_ids: np.ndarray,
        routes: np.ndarray,
        sums: np.ndarray,
        weight_version: int,
        *,
        may_repeat: bool,
    ) -> None:
        """Store the rows of one step.

        Args:
            slots, positions, token_ids: [T] integers.
            routes: [T, L, K].
            sums: as in `Rows`.
            weight_version: version of the weights that routed these rows.
            may_repeat: whether one owner may write a slot twice, as with rejected tokens of speculative decoding.

        Raises:
            EngineError: slots and positions do not match, or a row was written before.
        """
        wrong = np.flatnonzero((slots < 0) | (slots >= len(self._positions)) | ((slots - positions) % self.block_size))
        if wrong.size:
            token = wrong[0]
            raise EngineError(
                "vLLM's KV slots do not match its positions",
                where={"token": token, "position": positions[token]},
                got=f"slot {slots[token]}",
                expected=f"one that is {positions[token] % self.block_size} modulo {self.block_size}",
                do="check that this vLLM has the version of its patch series",
                fault="slots",
            )
        if not may_repeat:
            before = np.flatnonzero(self._positions[slots] != _EMPTY)
            if before.size or len(np.unique(slots)) != len(slots):
                token = before[0] if before.size else 0
                raise EngineError(
                    "A row was recorded twice",
                    where={"token": token, "position": positions[token], "slot": slots[token]},
                    got=f"a slot that holds position {self._positions[slots[token]]}",
                    expected="a slot not written since its block got its owner",
                    do="look for a step that ran twice",
                    fault="twice",
                )
        self._routes[slots] = routes
        self._token_ids[slots] = token_ids
        self._positions[slots] = positions
        self._weight_versions[slots] = weight_version
        self._sums[slots] = sums

    def read(self, table: BlockTable, start: int, stop: int, who: About) -> Rows:
        """Return rows [start, stop) of the request that owns `table`.

        Raises EngineError, with `who` and the position, if a block was given away or a row was never written.
        """
        positions = np.arange(start, stop)
        block_indices = positions // self.block_size
        if stop > len(table.blocks) * self.block_size:
            raise EngineError(
                "A request has more tokens than its KV blocks hold",
                where=who,
                got=f"{stop} tokens",
                expected=f"at most {len(table.blocks) * self.block_size}",
                fault="blocks",
            )
        blocks = np.asarray(table.blocks, np.int64)[block_indices]
        slots = blocks * self.block_size + positions % self.block_size
        taken = np.flatnonzero(self._owner[blocks] != np.asarray(table.owners, np.int64)[block_indices])
        missing = np.flatnonzero(self._positions[slots] != positions)
        if taken.size or missing.size:
            first = (taken if taken.size else missing)[0]
            raise EngineError(
                "A KV block was reused before its rows were read" if taken.size else "A row was not recorded",
                where={**who, "position": positions[first], "block": blocks[first]},
                got=f"the row of position {self._positions[slots[first]]}"
                if self._positions[slots[first]] != _EMPTY
                else "no row",
                expected=f"the row of position {positions[first]}",
                do="drop the sequence; check that this vLLM has the version of its patch series",
                fault="given away" if taken.size else "absent",
            )
        routes = self._copies.array((len(slots), *self._routes.shape[1:]), self._routes.dtype)
        self._routes.take(slots, 0, routes, "clip")  # several times as fast as indexing; no slot is out of range
        return Rows(routes, *(column.take(slots) for column in (self._token_ids, self._weight_versions, self._sums)))
