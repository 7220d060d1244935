"""Makes completions for tests of sessions without an engine."""

from __future__ import annotations

import numpy as np

from moe_rl.gateway.sessions import Session, SessionLimits, Turn
from moe_rl.types import Completion, RoutePart, RouteRef, VersionSpan, sampled_by

WIDE = SessionLimits(tokens=10**6, turns=10**4, seconds=1e6)


def said(
    prompt,
    token_ids,
    *,
    key="k",
    version=0,
    versions: tuple[VersionSpan, ...] | None = None,
    finish_reason="stop",
    **more,
) -> Completion:
    """Make a completion whose log-probabilities follow from its tokens."""
    token_ids = tuple(token_ids)
    return Completion(
        key=key,
        prompt_token_ids=tuple(prompt),
        token_ids=token_ids,
        logprobs=-np.asarray(token_ids, np.float32) - 1,
        finish_reason=finish_reason,
        versions=sampled_by(version, len(token_ids)) if versions is None else versions,
        routes=RouteRef(key, len(prompt) + len(token_ids) - 1, (RoutePart("shard", "0" * 16),), 0, "0" * 16),
        **more,
    )


def take(session: Session, prompt, token_ids, **more) -> Turn:
    """Let a session say `token_ids` to a prompt, and its agent receive it unless it was aborted."""
    place = session.begin(prompt, samples=1, max_tokens=len(token_ids), now=0.0)
    turn = session.add(place, said(prompt, token_ids, **more), continues=place.parent is not None)
    session.drop(place)
    session.tell_received([turn.number])
    return session.turns[turn.number]
