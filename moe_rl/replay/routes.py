"""Reads routes from the trace store, validates them, and lays them out for one packed microbatch.

Legend: T tokens of one sequence, P rows of the packed microbatch, R of them on this rank, L layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from moe_rl.errors import ReplayError, RouteValidationError, TraceError
from moe_rl.objectives.device import to_device
from moe_rl.planning.packing import padding_experts
from moe_rl.replay.checksum import RowSalts, check_source, expected
from moe_rl.replay.row_places import RowPlaces
from moe_rl.replay.tables import MicrobatchRoutes
from moe_rl.trace import MemoryTrace, TraceSpec, TraceStore, validate
from moe_rl.trace.source_sum import row_salts, sum_of
from moe_rl.trace.spans import versions_of_rows
from moe_rl.types import Sequence

PADDING = "padding"


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """Says what to do about tokens without a route, and about routes of older weights. Damaged or wrong routes are
    always refused.

    Attributes:
        missing: For tokens without a recorded route: "refuse", or "native" to let the router choose.
        stale: For rows routed by older weights than `weight_version`: "replay", or "native" to let the router choose.
        max_staleness: How many versions these weights may lag. Rows that lag more are refused.
        keep_keys: The sampler keeps keys over an update, so newer weights attend to keys of older ones.
    """

    missing: Literal["refuse", "native"] = "refuse"
    stale: Literal["replay", "native"] = "replay"
    max_staleness: int = 0
    keep_keys: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRoutes:
    """Holds the routes of one sequence.

    Attributes:
        routes: integers [T, L, K].
        native: bool [T], rows for which the router chooses; their entries in `routes` are placeholders.
        recorded: bool [T], rows whose recorded route was read.
        lags: int64 [T], how many versions the weights that routed each recorded row lag the trainer's; 0 for other
            rows.
        key_lags: int64 [T], the same; if the sampler keeps keys, the largest up to this row.
        versions: int64 [T], the version of these weights; 0 for other rows.
        prompt: Number of prompt tokens.
    """

    key: str
    token_ids: np.ndarray
    routes: np.ndarray
    native: np.ndarray
    recorded: np.ndarray
    lags: np.ndarray
    key_lags: np.ndarray
    versions: np.ndarray
    prompt: int = 0

    @classmethod
    def complete(cls, key: str, token_ids: np.ndarray, routes: np.ndarray) -> SequenceRoutes:
        """Make the routes of a sequence whose rows are all recorded and replayed, routed by weights of version 0."""
        nothing, zeros = np.zeros(len(routes), bool), np.zeros(len(routes), np.int64)
        return cls(key, token_ids, routes, nothing, ~nothing, lags=zeros, key_lags=zeros, versions=zeros)


def missing_rows(sequence: Sequence) -> int:
    """Return how many forwarded tokens of a sequence have no recorded route, according to its route reference."""
    ref = sequence.routes
    recorded = 0 if ref is None else max(0, min(ref.start + ref.rows, sequence.forwarded) - ref.start)
    return sequence.forwarded - recorded


def source_sum(sequence: Sequence) -> int:
    """Return the checksum of a sequence's routes when they left the sampler's engine, int64; 0 if it has no routes.

    Raises:
        TraceError: The route reference has no checksum, or belongs to another sequence.
    """
    ref = sequence.routes
    if ref is None:
        return 0
    if ref.key != sequence.key:
        raise RouteValidationError(
            "a sequence has the route reference of another sequence",
            where={"request": sequence.key},
            got=f"the routes of {ref.key}",
            expected=f"the routes of {sequence.key}",
            do="keep every sequence together with its own route reference",
            fault="another reference",
        )
    return sum_of(ref)


def read_routes(
    store: TraceStore | MemoryTrace,
    sequences: Seq[Sequence],
    spec: TraceSpec,
    *,
    layers: Seq[int],
    fed: Seq[np.ndarray],
    here: Seq[np.ndarray],
    weight_version: int,
    policy: RowPolicy = RowPolicy(),  # noqa: B008 - frozen
) -> list[SequenceRoutes]:
    """Read the routes of sequences in `layers`, and prove that they belong to the tokens that will be fed.

    Other layers are not read; rows of other ranks are read only to bridge short gaps. Rows that sequences share, such
    as a group's prompt, are read once.

    Args:
        layers: [L], global layer numbers, increasing.
        fed: [T] of each sequence, the tokens, taken from the packed microbatch itself rather than from the sequence.
        here: bool [T] of each sequence, the rows that this rank's routers see.
        weight_version: Version of the trainer's weights.

    Raises:
        TraceError: Routes are missing or damaged. The message names the sequence.
        RouteValidationError: Routes are wrong. The message names the sequence.
    """
    sampled, wanted = [], []
    for sequence, mine in zip(sequences, here, strict=True):
        sampled.append(_sampled_versions(sequence))
        ref = sequence.routes
        if missing_rows(sequence) and policy.missing == "refuse":
            raise TraceError(
                "tokens of a sequence have no routes",
                where={"request": sequence.key},
                got="no routes" if ref is None else f"routes of tokens {ref.start} to {ref.start + ref.rows - 1}",
                expected=f"routes of all {sequence.forwarded} forwarded tokens",
                do="turn recording on in the sampler, or set replay.missing to drop or native",
                fault="no routes",
            )
        source_sum(sequence)  # checks the reference before anything is read
        wanted.append([] if ref is None else [(ref, run) for run in _runs(mine[ref.start :], ref.rows)])
    records = iter(store.read_each([item for runs in wanted for item in runs], layers=layers) if any(wanted) else ())
    sequence_routes = []
    for sequence, tokens, expected_versions, runs in zip(sequences, fed, sampled, wanted, strict=True):
        tokens, ref = np.asarray(tokens), sequence.routes
        routes = padding_routes(len(tokens), len(layers), spec, expert_parallel=1)
        missing, recorded = np.ones(len(tokens), bool), np.zeros(len(tokens), bool)
        lags, versions = (np.zeros(len(tokens), np.int64) for _ in range(2))
        if ref is not None:
            missing[ref.start : ref.start + ref.rows] = False
        for ref, (first, last) in runs:
            rows, record = slice(ref.start + first, ref.start + last), next(records)
            validate(
                record,
                token_ids=tokens[rows],
                spec=spec,
                weight_version=weight_version,
                max_staleness=policy.max_staleness,
                ref=ref,
                layers=layers,
            )
            routes[rows], recorded[rows] = record.routes, True
            made = versions_of_rows(record.spans)
            _check_versions(sequence, made, rows.start, expected_versions)
            lags[rows], versions[rows] = weight_version - made, made
        native = missing | ((lags > 0) if policy.stale == "native" else False)
        key_lags = lags
        if policy.keep_keys:  # a sequence knows the versions of its sampled rows, read on this rank or not
            of_sampled = np.where(expected_versions < 0, 0, weight_version - expected_versions)
            key_lags = np.maximum.accumulate(np.maximum(lags, of_sampled))
        prompt = len(sequence.prompt_token_ids)
        sequence_routes.append(
            SequenceRoutes(sequence.key, tokens, routes, native, recorded, lags, key_lags, versions, prompt)
        )
    return sequence_routes


def _sampled_versions(sequence: Sequence) -> np.ndarray:
    """Return the weight version int64 [T] that sampled the token after each forwarded token; -1 if that token is a
    prompt token or an inserted token.

    Raises:
        RouteValidationError: The versions do not match the sequence's tokens, or tokens are not inserted between
            sampled tokens.
    """
    ends = [0, *(insertion.after for insertion in sequence.inserted), len(sequence.token_ids)]
    if sequence.inserted and not all(before < after for before, after in pairwise(ends)):
        raise RouteValidationError(
            "tokens are not inserted between sampled tokens",
            where={"request": sequence.key},
            got=f"after {ends[1:-1]} sampled tokens",
            expected=f"rising numbers from 1 to {len(sequence.token_ids) - 1}",
            do="keep every sequence together with its own inserted tokens",
            fault="inserted tokens",
        )
    tokens = [span.tokens for span in sequence.versions]
    if sum(tokens) != len(sequence.token_ids) or min(tokens, default=1) < 1:
        raise RouteValidationError(
            "the weight versions of a sequence do not match its tokens",
            where={"request": sequence.key},
            got=f"{sum(tokens)} tokens in {len(tokens)} spans",
            expected=f"{len(sequence.token_ids)} sampled tokens, and at least 1 in each span",
            do="keep every sequence together with its own versions",
            fault="versions of tokens",
        )
    versions = np.full(sequence.forwarded, -1, np.int64)
    versions[sequence.positions - 1] = np.repeat([s.weight_version for s in sequence.versions], tokens)
    return versions


def _check_versions(sequence: Sequence, versions: np.ndarray, start: int, sampled: np.ndarray) -> None:
    """Raise RouteValidationError unless the weights that sampled a token made the row before it.

    Args:
        versions: [R], of the rows from `start`.
        sampled: as `_sampled_versions` returns them.
    """
    expected = sampled[start : start + len(versions)]
    wrong = np.flatnonzero((expected >= 0) & (versions != expected))
    if wrong.size:
        row = int(wrong[0])
        raise RouteValidationError(
            "a token was sampled by other weights than those that made its row",
            where={"request": sequence.key, "token": start + row},
            got=f"a row of weight version {versions[row]}, {wrong.size} rows differ",
            expected=f"weight version {expected[row]}, which sampled the next token",
            do="look for what exchanged the versions of the tokens, or for a record of another attempt",
            fault="versions of rows",
        )


def _runs(here: np.ndarray, rows: int, gap: int = 64) -> list[tuple[int, int]]:
    """Return [first, last) of each run of wanted rows among the `rows` of a record.

    Runs at most `gap` rows apart are merged, because another read costs more than a few extra rows. If the record has
    more rows than `here`, it is read whole, and the validator refuses it.
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
    """Lay the routes of packed sequences end to end, add padding routes, and cut out this rank's rows.

    Tokens are numbered through the sequences. Padding rows are numbered after all tokens, wherever they are.

    Args:
        parts: Routes of the sequences, in packing order.
        layers: [L], global layer numbers.
        names, fed: Keys and token ids of the sequences as they are in the microbatch. The checksums of `parts` are
            checked against these.
        source: Checksums from `source_sum`; None if the routes do not come from a sampler.
        padded_tokens: P.
        rows: The rows that this rank's routers see, in their order. Under sequence or context parallelism this is a
            part of the P rows.
        expert_parallel: Number of expert-parallel ranks, over which padding routes are spread.

    Raises:
        ReplayError: The routes do not match `source`. The message names the sequences. A rank that lacks some rows or
            layers cannot check this here; its pass checks it at the end.
    """
    tokens = sum(map(len, fed))
    if padded_tokens > tokens:
        padding = _padding(padded_tokens - tokens, len(layers), spec, expert_parallel)
        parts, names, fed = [*parts, padding], [*names, PADDING], [*fed, padding.token_ids]
    lengths = [len(ids) for ids in fed]
    if [len(part.routes) for part in parts] != lengths:
        raise ReplayError(
            "routes and packed tokens differ in number",
            where={"request": ", ".join(names)},
            got=[len(part.routes) for part in parts],
            expected=lengths,
            fault="rows",
        )

    on_device = partial(to_device, device=device)
    ids = _indices(np.concatenate([part.routes for part in parts]))
    of_rows = zip(names, fed, parts, strict=True)
    salts = np.concatenate([row_salts(name, tokens, part.versions).view(np.int64) for name, tokens, part in of_rows])
    native, recorded = (np.concatenate([getattr(part, name) for part in parts]) for name in ("native", "recorded"))
    owners = np.repeat(np.arange(len(lengths)), lengths)
    lags, key_lags = (np.concatenate([getattr(part, name) for part in parts]) for name in ("lags", "key_lags"))
    real = (np.arange(len(ids)) < tokens)[rows]
    # Each sequence has one checksum of its rows to replay, and one of those that have a record and are not replayed.
    here = np.zeros(len(ids), bool)
    here[rows] = True
    summed = np.flatnonzero(here & (~native | recorded))
    own_salts = np.concatenate([row_salts(part.key, part.token_ids, part.versions).view(np.int64) for part in parts])
    sums, unreplayed = expected(
        on_device(ids[summed]),
        on_device(own_salts[summed]),
        on_device((owners + len(lengths) * native)[summed]),
        2 * len(lengths),
        layers=layers,
        experts=spec.num_experts,
    ).split(len(lengths))
    table = MicrobatchRoutes(
        names=tuple(names),
        fed=RowSalts(
            on_device(np.concatenate(fed).astype(np.int64)[rows]),
            on_device(salts[rows]),
            on_device(owners[rows]),
            len(lengths),
            spec.num_experts,
        ),
        places=RowPlaces.of(fed, [part.prompt for part in parts], recorded, rows, key_lags),
        routes=dict(zip(layers, on_device(ids[rows]).transpose(0, 1).contiguous(), strict=True)),
        checksums=dict(zip(layers, sums.T.contiguous(), strict=True)),
        unreplayed=unreplayed.sum(1),
        source=None if source is None else tuple(source),
        recorded=on_device(np.flatnonzero(recorded[rows])),
        native=on_device(native[rows]) if native[rows].any() else None,
        replayed_tokens=int(real.sum()) - int(native[rows].sum()),
        native_tokens=int(native[rows].sum()),
        lags=on_device(lags[rows][recorded[rows]]),
        stale_tokens=int((lags[rows] > 0).sum()),
    )
    if table.source is not None and tuple(layers) == spec.moe_layers and here[:tokens].all():
        check_source(
            names[: len(table.source)],
            table.read.tolist(),
            table.source,
            where={},
            what="read",
            do="sample these sequences again, and look for what changes the trace between the recorder and the trainer",
        )
    return table


def padding_routes(tokens: int, layers: int, spec: TraceSpec, *, expert_parallel: int) -> np.ndarray:
    """Return valid routes [tokens, L, K] for padding rows, the same in every layer: see `padding_experts`."""
    row = padding_experts(tokens, spec.num_experts, spec.top_k, expert_parallel)
    return np.repeat(row.astype(np.uint8 if spec.num_experts <= 256 else np.uint16)[:, None], layers, axis=1)


def _padding(rows: int, layers: int, spec: TraceSpec, expert_parallel: int) -> SequenceRoutes:
    nothing, zeros = np.zeros(rows, bool), np.zeros(rows, np.int64)
    routes = padding_routes(rows, layers, spec, expert_parallel=expert_parallel)
    return SequenceRoutes(PADDING, zeros, routes, nothing, nothing, lags=zeros, key_lags=zeros, versions=zeros)


def _indices(routes: np.ndarray) -> np.ndarray:
    """Return ids of a type that torch can index with; uint16 is not."""
    return routes if routes.dtype == np.uint8 else routes.astype(np.int16)
