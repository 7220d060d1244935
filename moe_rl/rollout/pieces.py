"""Describes completions in pieces, one per request. Each request continues the previous one, which was aborted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from moe_rl.types import Completion, VersionSpan

Pieces = Sequence[Sequence[Completion]]
"""The completions of a group, each as its pieces in order. A completion not yet begun has none."""


def all_pieces(pieces: Pieces) -> Iterable[Completion]:
    """Return the pieces of all completions."""
    return (piece for parts in pieces for piece in parts)


def unfinished(pieces: Pieces) -> list[int]:
    """Return the numbers of the unfinished completions."""
    return [at for at, parts in enumerate(pieces) if not parts or parts[-1].finish_reason == "abort"]


def sampled_tokens(pieces: Pieces) -> int:
    """Return the number of sampled tokens."""
    return sum(len(piece.token_ids) for piece in all_pieces(pieces))


def joined(pieces: Sequence[Completion]) -> Completion:
    """Return these pieces as one completion, with the routes of the last piece, which continues the others."""
    if len(pieces) == 1:
        return pieces[0]
    spans: list[VersionSpan] = []
    for span in (span for piece in pieces for span in piece.versions):
        if spans and spans[-1].weight_version == span.weight_version:
            span = replace(span, tokens=spans.pop().tokens + span.tokens)
        spans.append(span)
    return replace(
        pieces[-1],
        key=pieces[0].key,
        prompt_token_ids=pieces[0].prompt_token_ids,
        token_ids=sum((piece.token_ids for piece in pieces), ()),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        versions=tuple(spans),
        seal="",  # the seal is for the whole
    )
