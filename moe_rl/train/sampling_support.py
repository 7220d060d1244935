"""Reads the recorded parts of the sampler's distributions from the trace store, and checks them before any pass.

A sampling support is the set of token ids that top-k, top-p and min-p left to sample from. A wrong support silently
gives wrong logprobs: no other check would detect it. A head is the sampler's likeliest tokens, with their logprobs.
"""

from __future__ import annotations

import numpy as np

from moe_rl.errors import About, SupportError, TraceError
from moe_rl.trace import TraceStore
from moe_rl.types import SamplerHead, SamplingSupport, Sequence


def read_support(store: TraceStore, sequence: Sequence, vocabulary: int) -> SamplingSupport:
    """Read the sampling support of each completion token, as `vllm.extras` recorded it with the routes.

    Args:
        vocabulary: Vocabulary size; ids must be below it.

    Raises:
        SupportError: The support was not recorded, belongs to other tokens, has ids out of range or out of order, or
            lacks the sampled token. The message names request and token.
    """
    counts, ids = _drawn(store, sequence, "support_counts", "support_ids")
    tokens = np.asarray(sequence.token_ids, np.int64)
    counts, ids = counts.astype(np.int64), ids.astype(np.int64)
    if counts.sum() != len(ids):
        raise _refused(
            sequence,
            "the number of ids of a sampling support differs from its counts",
            fault="counts",
            got=f"{len(ids)} ids",
            expected=int(counts.sum()),
        )
    counts = counts[: len(tokens)]
    ids = ids[: counts.sum()]
    owner = np.repeat(np.arange(len(tokens)), counts)
    beyond = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if beyond.size:
        first = beyond[0]
        raise _refused(
            sequence,
            "sampling support has an id that is not in the vocabulary",
            fault="vocabulary",
            token=owner[first],
            got=ids[first],
            expected=f"0 to {vocabulary - 1}",
        )
    # One number for each (token, id). These numbers ascend exactly when the ids of each token do.
    keys = owner * vocabulary + ids
    unordered = np.flatnonzero(np.diff(keys) <= 0)
    if unordered.size:
        first = unordered[0] + 1
        raise _refused(
            sequence,
            "sampling support is not in ascending order",
            fault="order",
            token=owner[first],
            got=f"id {ids[first]} after {ids[first - 1]}",
        )
    restricted = np.flatnonzero(counts)
    absent = restricted[~np.isin(restricted * vocabulary + tokens[restricted], keys)]
    if absent.size:
        first = absent[0]
        raise _refused(
            sequence,
            "the sampled token is not in its own sampling support",
            fault="absent",
            token=first,
            got=f"token {tokens[first]} and {counts[first]} other ids",
        )
    return SamplingSupport(counts, ids)


def read_head(store: TraceStore, sequence: Sequence, vocabulary: int, size: int) -> SamplerHead:
    """Read the sampler's likeliest tokens at each completion token, as `vllm.extras` recorded them with the routes.

    Args:
        vocabulary: Vocabulary size; ids must be below it.
        size: Number of tokens K that must have been recorded, or the vocabulary if that is smaller.

    Raises:
        SupportError: The head was not recorded, belongs to other tokens, has another size, has ids out of range or
            twice, has logprobs that form no distribution, or gives the sampled token a logprob that differs from the
            completion's. The message names request and token.
    """
    ids, logprobs = (array[: len(sequence.token_ids)] for array in _drawn(store, sequence, "head_ids", "head_logprobs"))
    wanted = (len(sequence.token_ids), min(size, vocabulary))
    if ids.shape != wanted or logprobs.shape != wanted:
        raise _refused(
            sequence,
            "sampler head has another size",
            fault="size",
            got=f"ids {ids.shape}, logprobs {logprobs.shape}",
            expected=wanted,
        )
    ordered = np.sort(ids, 1)
    sampled = ids == np.asarray(sequence.token_ids)[:, None]
    apart = np.abs(np.where(sampled, logprobs, 0).sum(1) - np.where(sampled.any(1), sequence.rollout_logprobs, 0))
    for fault, what, wrong in (
        ("vocabulary", "has an id that is not in the vocabulary", (ids < 0) | (ids >= vocabulary)),
        ("twice", "has an id twice", ordered[:, 1:] == ordered[:, :-1]),
        ("probability", "has logprobs of no distribution", ~(np.exp(logprobs.astype(np.float64)).sum(1) < 1 + 1e-4)),
        ("sampled", "gives the sampled token another logprob than the completion", ~(apart < 1e-3)),
    ):
        if wrong.any():
            row = int(np.flatnonzero(wrong.reshape(len(ids), -1).any(1))[0])
            raise _refused(sequence, f"sampler head {what}", fault=fault, token=row, got=f"ids {ids[row][:8].tolist()}")
    return SamplerHead(ids, logprobs)


def _drawn(store: TraceStore, sequence: Sequence, first: str, second: str) -> tuple[np.ndarray, np.ndarray]:
    """Return two recorded arrays of a sequence, after a check that the first has an entry for each token drawn."""
    if sequence.routes is None:
        raise _refused(sequence, f"{first} is missing", fault="missing", got="no record")
    ones: list[np.ndarray] = []
    others: list[np.ndarray] = []
    ref, positions, end = sequence.routes, sequence.positions, len(sequence.token_ids)
    while True:
        try:
            array, other, info = store.aux(ref, first), store.aux(ref, second), store.info(ref)
        except TraceError as error:
            raise _refused(sequence, f"{first} cannot be read", fault="unreadable", got=error) from error
        # A record that continues another has entries only for its own tokens. Those of earlier tokens are in the
        # parent, unless the tokens belong to the prompt.
        before = 0
        if info.parent is not None and not (
            # A record may share only the prompt of another completion, all of it: then nothing was drawn before. If the
            # parent has one of our tokens, this record has one entry fewer.
            end > 0 and positions[0] == info.parent.rows and len(array) == info.held_rows + ref.start + 1 - positions[0]
        ):
            before = int(np.searchsorted(positions[:end], info.parent.rows + 1))
        # The row of position p - 1 gave the token at position p. vLLM may find a stop string late: then more tokens
        # were drawn than the sequence has.
        begin = positions[before] if before < end else len(sequence.prompt_token_ids) + before
        drawn, own_tokens = info.held_rows + ref.start + 1 - begin, end - before
        if len(array) != drawn or drawn < own_tokens:
            raise _refused(
                sequence,
                f"{first} belongs to other tokens",
                got=f"an entry for {len(array)} tokens",
                fault="tokens",
                expected=max(drawn, own_tokens),
            )
        if ones:  # drop what was drawn late, after an earlier turn
            ids = int(array[:own_tokens].sum()) if first == "support_counts" else own_tokens
            array, other = array[:own_tokens], other[:ids]
        ones.insert(0, array)
        others.insert(0, other)
        if info.parent is None or not before:
            return np.concatenate(ones), np.concatenate(others)
        ref, end = info.parent, before


def _refused(
    sequence: Sequence, what: str, *, fault: str, token: int | None = None, got: object = None, expected: object = None
) -> SupportError:
    where: About = {"request": sequence.key}
    if token is not None:
        where = {**where, "token": token}
    do = "keep the record and engine.log, and find out what wrote it"
    return SupportError(what, where=where, got=got, expected=expected, do=do, fault=fault)
