"""The recorded sampling supports of a completion, read back from the trace store and checked before any pass.

A support that is wrong gives logprobs that are wrong without a sign of it: nothing but these checks would tell.
"""

from __future__ import annotations

import numpy as np

from moe_rl.errors import SupportError, TraceError, describe
from moe_rl.trace import TraceStore
from moe_rl.types import SamplingSupport, Sequence


def read_support(store: TraceStore, sequence: Sequence, vocabulary: int) -> SamplingSupport:
    """What each completion token of `sequence` was drawn from, as `rollout.extras` recorded it with the routes.

    vocabulary: its size. Raises SupportError, which names request and token, for a support that was not recorded, is of
    other tokens, has ids that are out of range or not in ascending order, or lacks the token that was drawn from it.
    """
    if sequence.routes is None:
        raise _refused(sequence, "sampling support is missing", got="no record")
    try:
        counts = store.aux(sequence.routes, "support_counts")
        ids = store.aux(sequence.routes, "support_ids")
    except TraceError as error:
        raise _refused(sequence, "sampling support cannot be read", got=error) from error
    tokens = np.asarray(sequence.token_ids, np.int64)
    counts, ids = counts.astype(np.int64), ids.astype(np.int64)
    if len(counts) != len(tokens):
        raise _refused(
            sequence,
            "sampling support is not of these tokens",
            got=f"that of {len(counts)} tokens",
            expected=len(tokens),
        )
    if counts.sum() != len(ids):
        raise _refused(
            sequence, "sampling support is not what its counts say", got=f"{len(ids)} ids", expected=int(counts.sum())
        )
    owner = np.repeat(np.arange(len(tokens)), counts)
    beyond = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if beyond.size:
        at = beyond[0]
        raise _refused(
            sequence,
            "sampling support has an id that is not in the vocabulary",
            token=owner[at],
            got=ids[at],
            expected=f"0 to {vocabulary - 1}",
        )
    # One number for each (token, id): ascending exactly when the ids of each token are.
    keys = owner * vocabulary + ids
    unordered = np.flatnonzero(np.diff(keys) <= 0)
    if unordered.size:
        at = unordered[0] + 1
        raise _refused(
            sequence,
            "sampling support is not in ascending order",
            token=owner[at],
            got=f"id {ids[at]} behind {ids[at - 1]}",
        )
    restricted = np.flatnonzero(counts)
    absent = restricted[~np.isin(restricted * vocabulary + tokens[restricted], keys)]
    if absent.size:
        at = absent[0]
        raise _refused(
            sequence,
            "the sampled token is not in its own sampling support",
            token=at,
            got=f"token {tokens[at]} and {counts[at]} other ids",
        )
    return SamplingSupport(counts, ids)


def _refused(
    sequence: Sequence, what: str, *, token: int | None = None, got: object = None, expected: object = None
) -> SupportError:
    where = f"request {sequence.key}" + ("" if token is None else f", completion token {token}")
    do = "keep the record and engine.log, and find out what wrote it"
    return SupportError(describe(what, where=where, got=got, expected=expected, do=do))
