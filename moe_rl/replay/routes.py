"""From the trace store to what the routers take: read, validate, lay out for one packed microbatch.

Legend: T tokens of one sequence, P rows of the packed microbatch, R of them on this rank, L layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from moe_rl.errors import ReplayError, RouteValidationError, TraceError, describe
from moe_rl.planning.token_layout import padding_experts
from moe_rl.replay.checksum import RowSalts, check_source, expected
from moe_rl.replay.row_places import RowPlaces
from moe_rl.replay.tables import MicrobatchRoutes
from moe_rl.trace import TraceSpec, TraceStore, validate
from moe_rl.trace.source_sum import row_salts, sum_of
from moe_rl.types import Sequence

PADDING = "padding"


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """What is done about tokens without a route, and about routes of older weights. Damaged or wrong ones are refused.

    missing, of tokens without a recorded route: "refuse", or "native", the router chooses. stale, of rows that other
    weights routed than `weight_version`, at most `max_staleness` updates older: "refuse", "replay", or "native".
    """

    missing: Literal["refuse", "native"] = "refuse"
    stale: Literal["refuse", "replay", "native"] = "refuse"
    max_staleness: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRoutes:
    """routes [T, L, K] of one sequence. native bool [T]: rows for which the router chooses, whose routes are made up.
    recorded bool [T]: rows whose recorded route was read. stale bool [T]: those of them that older weights routed.
    prompt: how many of the tokens are the prompt's.
    """

    key: str
    token_ids: np.ndarray
    routes: np.ndarray
    native: np.ndarray
    recorded: np.ndarray
    stale: np.ndarray
    prompt: int = 0

    @classmethod
    def complete(cls, key: str, token_ids: np.ndarray, routes: np.ndarray) -> SequenceRoutes:
        """Make those of a sequence whose rows are all recorded and to be replayed."""
        nothing = np.zeros(len(routes), bool)
        return cls(key, token_ids, routes, native=nothing, recorded=~nothing, stale=nothing)


def missing_rows(sequence: Sequence) -> int:
    """How many forwarded tokens of a sequence have no recorded route, as far as its reference says."""
    ref = sequence.routes
    recorded = 0 if ref is None else max(0, min(ref.start + ref.rows, sequence.forwarded) - ref.start)
    return sequence.forwarded - recorded


def source_sum(sequence: Sequence) -> int:
    """What the rows of a sequence summed up to when they left the sampler's engine, int64; 0 when none has a route.

    Raises TraceError when its reference does not say, or is another sequence's.
    """
    ref = sequence.routes
    if ref is None:
        return 0
    if ref.key != sequence.key:
        raise RouteValidationError(
            describe(
                "a sequence has the reference of another one",
                where=f"sequence {sequence.key}",
                got=f"the routes of {ref.key}",
                expected=f"those of {sequence.key}",
                do="keep every sequence together with the reference that came with it",
            )
        )
    return sum_of(ref)


def read_routes(
    store: TraceStore,
    sequence: Sequence,
    spec: TraceSpec,
    *,
    layers: Seq[int],
    fed: np.ndarray,
    here: np.ndarray,
    weight_version: int,
    policy: RowPolicy = RowPolicy(),  # noqa: B008 - frozen
) -> SequenceRoutes:
    """Routes of one sequence in `layers`, proven to belong to the tokens that will be fed.

    layers [L]: global numbers, increasing. fed [T]: those tokens, taken from the packed microbatch itself rather than
    from the sequence. here bool [T]: the rows that this rank's routers see. Nothing is read of other layers, nor,
    but for short gaps, of other rows. weight_version: of the trainer.
    Raises TraceError (missing, damaged) or RouteValidationError (wrong), both naming the sequence.
    """
    fed = np.asarray(fed)
    ref = sequence.routes
    if missing_rows(sequence) and policy.missing == "refuse":
        raise TraceError(
            describe(
                "tokens of a sequence have no routes",
                where=sequence.key,
                got="no routes" if ref is None else f"routes of tokens {ref.start} to {ref.start + ref.rows - 1}",
                expected=f"routes of all {sequence.forwarded} forwarded tokens",
                do="sample with recording on, or set replay.missing to drop or native",
            )
        )
    source_sum(sequence)  # before anything is read
    routes = padding_routes(len(fed), len(layers), spec, expert_parallel=1)
    missing, recorded, stale = np.ones(len(fed), bool), np.zeros(len(fed), bool), np.zeros(len(fed), bool)
    if ref is not None:
        missing[ref.start : ref.start + ref.rows] = False
        for first, last in _runs(here[ref.start :], ref.rows):
            record = store.read(ref, layers=layers, rows=(first, last))
            rows = slice(ref.start + first, ref.start + last)
            validate(
                record,
                token_ids=fed[rows],
                spec=spec,
                weight_version=weight_version,
                max_staleness=0 if policy.stale == "refuse" else policy.max_staleness,
                ref=ref,
                layers=layers,
            )
            routes[rows], recorded[rows] = record.routes, True
            versions = np.repeat([s.weight_version for s in record.spans], [s.rows for s in record.spans])
            stale[rows] = versions != weight_version
    native = missing | (stale if policy.stale == "native" else False)
    return SequenceRoutes(sequence.key, fed, routes, native, recorded, stale, len(sequence.prompt_token_ids))


def _runs(here: np.ndarray, rows: int, gap: int = 64) -> list[tuple[int, int]]:
    """[first, last) of the runs of wanted rows among the `rows` of a record. Runs at most `gap` apart are read as one:
    a read costs more than some rows. A record of more rows than there are is read whole, for the validator to refuse.
    """
    if len(here) < rows:
        return [(0, rows)]
    wanted = np.flatnonzero(here[:rows])
    runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > gap) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]


def microbatch_routes(
    parts: Seq[SequenceRoutes],
    spec: TraceSpec,
    *,
    layers: Seq[int],
    names: Seq[str],
    fed: Seq[np.ndarray],
    source: Seq[int] | None,
    padded_tokens: int,
    rows: slice | np.ndarray,
    expert_parallel: int,
    device: torch.device,
) -> MicrobatchRoutes:
    """Lay the routes of the packed sequences end to end, fill up with padding routes, cut out this rank's rows.

    parts: in the order of packing. layers [L]: their global numbers. names, fed: keys and token ids of the sequences as
    they lie in the microbatch, what the checksums of `parts` will be held against. source: their sums, as `source_sum`
    gives them; None: `parts` are not a sampler's. padded_tokens: P. rows: those of the P that this rank's routers see,
    in their order: a part under sequence and context parallelism. Tokens are numbered through the sequences, padding
    rows after all of them wherever they lie.

    Raises ReplayError, naming the sequences, for routes that are not those of `source`. A rank that has not all rows
    and layers cannot tell yet: the session does, at its end.
    """
    tokens = sum(map(len, fed))
    if padded_tokens > tokens:
        padding = _padding(padded_tokens - tokens, len(layers), spec, expert_parallel)
        parts, names, fed = [*parts, padding], [*names, PADDING], [*fed, padding.token_ids]
    lengths = [len(ids) for ids in fed]
    if [len(part.routes) for part in parts] != lengths:
        raise ReplayError(
            describe(
                "routes and packed tokens differ in number",
                where=f"microbatch of {', '.join(names)}",
                got=[len(part.routes) for part in parts],
                expected=lengths,
            )
        )

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    ids = np.concatenate([part.routes for part in parts])
    ids = ids if ids.dtype == np.uint8 else ids.astype(np.int16)  # torch indexes with few unsigned types
    salts = np.concatenate([row_salts(name, tokens).view(np.int64) for name, tokens in zip(names, fed, strict=True)])
    native = np.concatenate([part.native for part in parts])[rows]
    recorded = np.concatenate([part.recorded for part in parts])
    real = (np.arange(len(ids)) < tokens)[rows]
    here = np.split(_mask(len(ids), rows), np.cumsum(lengths)[:-1])
    sums, unreplayed = [], []
    for part, mine in zip(parts, here, strict=True):
        sums.append(_checksums(part, mine & ~part.native, layers, spec, device))
        unreplayed.append(_checksums(part, mine & part.native & part.recorded, layers, spec, device).sum())
    table = MicrobatchRoutes(
        names=tuple(names),
        fed=RowSalts(
            on_device(np.concatenate(fed).astype(np.int64)[rows]),
            on_device(salts[rows]),
            on_device(np.repeat(np.arange(len(lengths)), lengths)[rows]),
            len(lengths),
            spec.num_experts,
        ),
        places=RowPlaces.of(fed, [part.prompt for part in parts], recorded, rows),
        routes=dict(zip(layers, on_device(ids[rows].transpose(1, 0, 2)), strict=True)),
        checksums=dict(zip(layers, torch.stack(sums, 1), strict=True)),
        unreplayed=torch.stack(unreplayed),
        source=None if source is None else tuple(source),
        recorded=on_device(np.flatnonzero(recorded[rows])),
        native=on_device(native) if native.any() else None,
        replayed_tokens=int(real.sum()) - int(native.sum()),
        native_tokens=int(native.sum()),
        stale_tokens=int(np.concatenate([part.stale for part in parts])[rows].sum()),
    )
    if table.source is not None and tuple(layers) == spec.moe_layers and _mask(len(ids), rows)[:tokens].all():
        check_source(
            names[: len(table.source)],
            table.read.tolist(),
            table.source,
            where=f"reading a microbatch of {len(table.source)} sequences",
            what="as they were read",
            do="sample the sequences again; look for what changes the trace between the recorder and the trainer",
        )
    return table


def padding_routes(tokens: int, layers: int, spec: TraceSpec, *, expert_parallel: int) -> np.ndarray:
    """Valid routes [tokens, L, K] for padding rows, in every layer the same: see `padding_experts`."""
    row = padding_experts(tokens, spec.num_experts, spec.top_k, expert_parallel)
    return np.repeat(row.astype(np.uint8 if spec.num_experts <= 256 else np.uint16)[:, None], layers, axis=1)


def _padding(rows: int, layers: int, spec: TraceSpec, expert_parallel: int) -> SequenceRoutes:
    nothing = np.zeros(rows, bool)
    routes = padding_routes(rows, layers, spec, expert_parallel=expert_parallel)
    return SequenceRoutes(PADDING, np.zeros(rows, np.int64), routes, nothing, nothing, nothing)


def _mask(count: int, rows: slice | np.ndarray) -> np.ndarray:
    mask = np.zeros(count, bool)
    mask[rows] = True
    return mask


def _checksums(
    part: SequenceRoutes, rows: np.ndarray, layers: Seq[int], spec: TraceSpec, device: torch.device
) -> torch.Tensor:
    """int64 [L] of some rows of a sequence, a mask bool [T], from its own key, tokens and routes."""
    if not rows.any():
        return torch.zeros(len(layers), dtype=torch.int64, device=device)
    routes = part.routes[rows]
    routes = torch.from_numpy(routes if routes.dtype == np.uint8 else routes.astype(np.int16)).to(device)
    salts = torch.from_numpy(row_salts(part.key, part.token_ids)[rows].view(np.int64)).to(device)
    return expected(routes, salts, layers=layers, experts=spec.num_experts)
