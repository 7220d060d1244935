"""Reads the recorded sampling supports of a completion from the trace store, and checks them before any pass.

A sampling support is the set of token ids that top-k, top-p and min-p left to sample from. A wrong support silently
gives wrong logprobs: no other check would detect it.
"""

from __future__ import annotations

import numpy as np

from moe_rl.errors import About, SupportError, TraceError, describe
from moe_rl.trace import TraceStore
from moe_rl.types import SamplingSupport, Sequence


def read_support(store: TraceStore, sequence: Sequence, vocabulary: int) -> SamplingSupport:
    """Read the sampling support of each completion token, as `vllm.extras` recorded it with the routes.

    Args:
        vocabulary: Vocabulary size; ids must be below it.

    Raises:
        SupportError: The support was not recorded, belongs to other tokens, has ids out of range or out of order, or
            lacks the sampled token. The message names request and token.
    """
    if sequence.routes is None:
        raise _refused(sequence, "sampling support is missing", fault="missing", got="no record")
    try:
        counts = store.aux(sequence.routes, "support_counts")
        ids = store.aux(sequence.routes, "support_ids")
        held = store.info(sequence.routes).held_rows
    except TraceError as error:
        raise _refused(sequence, "sampling support cannot be read", fault="unreadable", got=error) from error
    tokens = np.asarray(sequence.token_ids, np.int64)
    counts, ids = counts.astype(np.int64), ids.astype(np.int64)
    # The row of position p - 1 gave the token at position p. vLLM may find a stop string late: then more tokens were
    # drawn than the sequence has.
    drawn = sequence.routes.start + held + 1 - len(sequence.prompt_token_ids)
    if len(counts) != drawn or drawn < len(tokens):
        raise _refused(
            sequence,
            "sampling support belongs to other tokens",
            got=f"supports for {len(counts)} tokens",
            fault="tokens",
            expected=max(drawn, len(tokens)),
        )
    if counts.sum() != len(ids):
        raise _refused(
            sequence,
            "sampling support has another number of ids than its counts say",
            fault="counts",
            got=f"{len(ids)} ids",
            expected=int(counts.sum()),
        )
    counts = counts[: len(tokens)]
    ids = ids[: counts.sum()]
    owner = np.repeat(np.arange(len(tokens)), counts)
    beyond = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if beyond.size:
        at = beyond[0]
        raise _refused(
            sequence,
            "sampling support has an id that is not in the vocabulary",
            fault="vocabulary",
            token=owner[at],
            got=ids[at],
            expected=f"0 to {vocabulary - 1}",
        )
    # One number for each (token, id). These numbers ascend exactly when the ids of each token do.
    keys = owner * vocabulary + ids
    unordered = np.flatnonzero(np.diff(keys) <= 0)
    if unordered.size:
        at = unordered[0] + 1
        raise _refused(
            sequence,
            "sampling support is not in ascending order",
            fault="order",
            token=owner[at],
            got=f"id {ids[at]} after {ids[at - 1]}",
        )
    restricted = np.flatnonzero(counts)
    absent = restricted[~np.isin(restricted * vocabulary + tokens[restricted], keys)]
    if absent.size:
        at = absent[0]
        raise _refused(
            sequence,
            "the sampled token is not in its own sampling support",
            fault="absent",
            token=at,
            got=f"token {tokens[at]} and {counts[at]} other ids",
        )
    return SamplingSupport(counts, ids)


def _refused(
    sequence: Sequence, what: str, *, fault: str, token: int | None = None, got: object = None, expected: object = None
) -> SupportError:
    where: About = {"request": sequence.key}
    if token is not None:
        where = {**where, "token": token}
    do = "keep the record and engine.log, and find out what wrote it"
    return SupportError(describe(what, where=where, got=got, expected=expected, do=do, fault=fault))
