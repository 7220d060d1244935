"""The host's mirror of the KV cache: for every slot the experts, the token and the position that were computed there.

The KV slot is the one name of a (request, position) that survives everything vLLM does: cached prefixes, chunked
prefill, shared prompts, resumed requests all point at the slots whose rows are there already. What can go wrong with
that is a row that is not the one asked for; so each slot knows its position, and each block how often it was given to
a new owner. A row is handed out only when both are as the reader expects.

Legend for shapes: S KV slots, T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_rl.errors import About, EngineError, describe
from moe_rl.vllm.recording import RecordingRequest

_EMPTY = -1


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of one sequence. routes [T, L, K]; token_ids [T] int32; weight_versions [T] int64.

    sums [T] uint64: of the routes as they left the engine's buffer, bound to position and token, see `placed_rows` in
    trace.source_sum. They go with a row wherever it goes and are never made again from its routes.
    """

    routes: np.ndarray
    token_ids: np.ndarray
    weight_versions: np.ndarray
    sums: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> Rows:
        """A copy of the first rows."""
        columns = (self.routes, self.token_ids, self.weight_versions, self.sums)
        return Rows(*(column[:count].copy() for column in columns))

    def then(self, later: Rows) -> Rows:
        """These rows and the later ones behind them."""
        return Rows(
            np.concatenate([self.routes, later.routes]),
            np.concatenate([self.token_ids, later.token_ids]),
            np.concatenate([self.weight_versions, later.weight_versions]),
            np.concatenate([self.sums, later.sums]),
        )


@dataclass(slots=True)
class BlockTable:
    """The KV blocks of one request, in order, and the owner number that each had when the request got it."""

    blocks: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Recorded:
    """One request on its way. ask: None when nothing is recorded of it; its rows may be another's cached prefix.

    number: in the order in which requests came. forwarded: tokens computed, rejected drafts of speculative decoding
    included. drafts: of these, the last ones, of which nobody has said yet whether they were accepted. cached: computed
    before it came. kept: rows saved when it was preempted, because its blocks were given away.
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


class SlotTable:
    """Rows of all KV slots. blocks x block_size slots; row_shape (L, K); dtype of an expert id."""

    def __init__(self, blocks: int, block_size: int, row_shape: tuple[int, int], dtype: np.dtype):
        slots = blocks * block_size
        self.block_size = block_size
        self._routes = np.zeros((slots, *row_shape), dtype)
        self._token_ids = np.zeros(slots, np.int32)
        self._positions = np.full(slots, _EMPTY, np.int32)
        self._weight_versions = np.zeros(slots, np.int64)
        self._sums = np.zeros(slots, np.uint64)
        self._owner = np.zeros(blocks, np.int64)

    def give(self, blocks: Sequence[int]) -> None:
        """Blocks go to new owners: what they held is forgotten, and whoever still counts on it will be told."""
        fresh = np.asarray(blocks, np.int64)
        self._owner[fresh] += 1
        self._positions.reshape(-1, self.block_size)[fresh] = _EMPTY

    def extend(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """Append blocks to a request's table, given to it or shared with whom they were given to."""
        table.blocks += blocks
        table.owners += self._owner[np.asarray(blocks, np.int64)].tolist()

    def copy(self, source: int, target: int, rows: int) -> None:
        """vLLM copies the keys of a block that is a hit up to its first `rows` tokens: copy their rows with them."""
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
        """Store the rows of one step. slots, positions, token_ids [T] ints; routes [T, L, K]; sums as in `Rows`.

        may_repeat: whether a slot may be written twice by one owner (rejected tokens of speculative decoding are).
        Raises EngineError when slots and positions cannot belong together or a row was written before.
        """
        wrong = np.flatnonzero((slots < 0) | (slots >= len(self._positions)) | ((slots - positions) % self.block_size))
        if wrong.size:
            at = wrong[0]
            raise EngineError(
                describe(
                    "vLLM's slots do not fit its positions",
                    where={"token": at, "position": positions[at]},
                    got=f"slot {slots[at]}",
                    expected=f"one that is {positions[at] % self.block_size} modulo {self.block_size}",
                    do="check that this vLLM has the version of its patch series",
                    fault="slots",
                )
            )
        if not may_repeat:
            before = np.flatnonzero(self._positions[slots] != _EMPTY)
            if before.size or len(np.unique(slots)) != len(slots):
                at = before[0] if before.size else 0
                raise EngineError(
                    describe(
                        "A row was recorded twice",
                        where={"token": at, "position": positions[at], "slot": slots[at]},
                        got=f"a slot that holds position {self._positions[slots[at]]}",
                        expected="a slot that nothing was written to since its block got its owner",
                        do="look for a step that ran twice",
                        fault="twice",
                    )
                )
        self._routes[slots] = routes
        self._token_ids[slots] = token_ids
        self._positions[slots] = positions
        self._weight_versions[slots] = weight_version
        self._sums[slots] = sums

    def read(self, table: BlockTable, start: int, stop: int, who: About) -> Rows:
        """Rows of positions start to stop of the request that owns `table`. Raises EngineError naming `who` and the
        position when a block was given away, or a row was never written."""
        positions = np.arange(start, stop)
        at = positions // self.block_size
        if stop > len(table.blocks) * self.block_size:
            raise EngineError(
                describe(
                    "A request ran beyond its KV blocks",
                    where=who,
                    got=f"{stop} tokens",
                    expected=f"at most {len(table.blocks) * self.block_size}",
                    fault="blocks",
                )
            )
        blocks = np.asarray(table.blocks, np.int64)[at]
        slots = blocks * self.block_size + positions % self.block_size
        taken = np.flatnonzero(self._owner[blocks] != np.asarray(table.owners, np.int64)[at])
        missing = np.flatnonzero(self._positions[slots] != positions)
        if taken.size or missing.size:
            first = (taken if taken.size else missing)[0]
            raise EngineError(
                describe(
                    "A KV block was given away before its rows were taken" if taken.size else "A row was not recorded",
                    where={**who, "position": positions[first], "block": blocks[first]},
                    got=f"the row of position {self._positions[slots[first]]}"
                    if self._positions[slots[first]] != _EMPTY
                    else "no row",
                    expected=f"the row of position {positions[first]}",
                    do="drop the sequence; check that this vLLM has the version of its patch series",
                    fault="given away" if taken.size else "absent",
                )
            )
        return Rows(self._routes[slots], self._token_ids[slots], self._weight_versions[slots], self._sums[slots])
