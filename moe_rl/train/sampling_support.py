"""Reads the recorded parts of the sampler's distributions from the trace store, and checks them before any pass.

A sampling support is the set of token ids that a grammar, top-k, top-p and min-p left to sample from. A wrong support
silently gives wrong logprobs: no other check would detect it. A head is the sampler's likeliest tokens, with their
logprobs.
"""

from __future__ import annotations

from itertools import accumulate

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
    pieces = _drawn(store, sequence, "support_sets", "support_counts", "support_ids")
    before = accumulate((len(counts) for _, counts, _ in pieces), initial=0)
    numbered = [(own + first, *rest) for (own, *rest), first in zip(pieces, before, strict=False)]
    sets, counts, ids = (np.concatenate(arrays).astype(np.int64) for arrays in zip(*numbered, strict=True))
    tokens, listed = np.asarray(sequence.token_ids, np.int64), np.abs(counts)
    if listed.sum() != len(ids) or (sets >= len(counts)).any():
        raise _refused(
            sequence,
            "the number of ids of a sampling support differs from its counts",
            fault="counts",
            got=f"{len(ids)} ids in {len(counts)} sets",
            expected=int(listed.sum()),
        )
    owner = np.repeat(np.arange(len(counts)), listed)
    beyond = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if beyond.size:
        first = beyond[0]
        raise _refused(
            sequence,
            "sampling support has an id that is not in the vocabulary",
            fault="vocabulary",
            token=_first_token(sets, owner[first]),
            got=ids[first],
            expected=f"0 to {vocabulary - 1}",
        )
    # One number for each (set, id). These numbers ascend exactly when the ids of each set do.
    keys = owner * vocabulary + ids
    unordered = np.flatnonzero(np.diff(keys) <= 0)
    if unordered.size:
        first = unordered[0] + 1
        raise _refused(
            sequence,
            "sampling support is not in ascending order",
            fault="order",
            token=_first_token(sets, owner[first]),
            got=f"id {ids[first]} after {ids[first - 1]}",
        )
    absent = np.flatnonzero(np.isin(sets * vocabulary + tokens, keys) != (counts[sets] > 0))
    if absent.size:
        first = absent[0]
        listed_as = "could" if counts[sets[first]] > 0 else "could not"
        raise _refused(
            sequence,
            "the sampled token is not in its own sampling support",
            fault="absent",
            token=first,
            got=f"token {tokens[first]}, and {listed[sets[first]]} ids that {listed_as} be drawn",
        )
    return SamplingSupport(sets, counts, ids)


def _first_token(sets: np.ndarray, number: int) -> int | None:
    """Return the first token with the set of this number."""
    return next(iter(np.flatnonzero(sets == number)), None)


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
    pieces = _drawn(store, sequence, "head_ids", "head_logprobs")
    cut = [(ids, of_ids[: len(ids)]) for ids, of_ids in pieces]
    ids, logprobs = (np.concatenate(arrays) for arrays in zip(*cut, strict=True))
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


def _drawn(store: TraceStore, sequence: Sequence, first: str, *others: str) -> list[tuple[np.ndarray, ...]]:
    """Return recorded arrays of each record of a sequence, after a check that the first has an entry for each token
    drawn. It is cut to the sequence's tokens; the others are whole."""
    if sequence.routes is None:
        raise _refused(sequence, f"{first} is missing", fault="missing", got="no record")
    pieces: list[tuple[np.ndarray, ...]] = []
    ref, positions, end = sequence.routes, sequence.positions, len(sequence.token_ids)
    while True:
        try:
            array, rest, info = store.aux(ref, first), [store.aux(ref, name) for name in others], store.info(ref)
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
        pieces.insert(0, (array[:own_tokens], *rest))  # without what was drawn late
        if info.parent is None or not before:
            return pieces
        ref, end = info.parent, before


def _refused(
    sequence: Sequence, what: str, *, fault: str, token: int | None = None, got: object = None, expected: object = None
) -> SupportError:
    where: About = {"request": sequence.key}
    if token is not None:
        where = {**where, "token": token}
    do = "keep the record and engine.log, and find out what wrote it"
    return SupportError(what, where=where, got=got, expected=expected, do=do, fault=fault)
