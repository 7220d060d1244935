"""From the trace store to what the routers take: read, validate, lay out for one packed microbatch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from moe_rl.errors import TraceError, describe
from moe_rl.replay.session import MicrobatchRoutes
from moe_rl.trace import TraceSpec, TraceStore, validate
from moe_rl.types import Sequence


def read_routes(
    store: TraceStore,
    sequence: Sequence,
    spec: TraceSpec,
    *,
    layers: Seq[int],
    fed: np.ndarray,
    weight_version: int,
) -> np.ndarray:
    """Routes [T, L, K] of one sequence in `layers`, proven to belong to the tokens that will be fed.

    layers [L]: global numbers, increasing; nothing is read of the others. fed [T]: those tokens, taken from the packed
    microbatch itself rather than from the sequence.
    weight_version: the version the sequence must have been sampled with.
    Raises TraceError (missing, damaged) or RouteValidationError (wrong), both naming the sequence.
    """
    if sequence.routes is None or sequence.routes.start:
        raise TraceError(
            describe(
                "a sequence has no routes, or not from its first token on",
                where=sequence.key,
                got="none" if sequence.routes is None else f"routes from token {sequence.routes.start} on",
                expected="routes of all forwarded tokens",
                do="sample with recording on, or set replay.mode: off",
            )
        )
    record = store.read(sequence.routes, layers=layers)
    validate(record, token_ids=fed, spec=spec, weight_version=weight_version, ref=sequence.routes, layers=layers)
    return record.routes


def microbatch_routes(
    parts: Seq[np.ndarray],
    spec: TraceSpec,
    *,
    layers: Seq[int],
    padded_tokens: int,
    rows: slice | np.ndarray,
    expert_parallel: int,
    device: torch.device,
) -> MicrobatchRoutes:
    """Lay the routes of the packed sequences end to end, fill up with padding routes, cut out this rank's rows.

    parts: [T_i, L, K] in the order of packing. layers [L]: their global numbers. padded_tokens: total rows, padding
    included. rows: those of them that this rank's routers see, in their order: a part under sequence and context
    parallelism. Tokens are numbered through the sequences, padding rows after all of them wherever they lie.
    """
    real = sum(len(part) for part in parts)
    padding = padding_routes(padded_tokens - real, len(layers), spec, expert_parallel=expert_parallel)
    table = np.concatenate([*parts, padding])[rows].transpose(1, 0, 2).astype(np.int64)  # [L, T of this rank, K]
    table = torch.from_numpy(table).to(device)
    is_real = np.arange(padded_tokens)[rows] < real
    return MicrobatchRoutes(
        routes=dict(zip(layers, table, strict=True)), real=torch.from_numpy(np.flatnonzero(is_real)).to(device)
    )


def padding_routes(tokens: int, layers: int, spec: TraceSpec, *, expert_parallel: int) -> np.ndarray:
    """Valid routes [tokens, L, K] for padding rows: distinct experts, spread over expert-parallel ranks first.

    Padding routed to one expert, or to one rank, would make that rank the slowest of the step.
    """
    experts = np.arange(spec.num_experts).reshape(expert_parallel, -1).T.ravel()  # expert 0 of each rank, then expert 1
    picks = np.arange(tokens)[:, None] * spec.top_k + np.arange(spec.top_k)
    row = experts[picks % spec.num_experts]
    return np.repeat(row[:, None], layers, axis=1)
