"""Checks a step's training sequences against the sessions that they came from."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from moe_rl.errors import SessionError
from moe_rl.gateway.finishing import read_session
from moe_rl.gateway.session_sequences import sequences_of
from moe_rl.types import Completion, Sequence


def check_trained(sequences: Iterable[Sequence], folder: Path, part: tuple[int, int] = (0, 1)) -> None:
    """Check the digest chain of every session, and that its sequences are complete, in order and unchanged.

    Args:
        sequences: those of a step's episodes.
        folder: where the session files are.
        part: (index, count): check only this part of the sessions.

    Raises:
        DataError: a session file is missing, cut short or changed.
        SessionError: a turn changed after its session ended, or a sequence does not belong to its session.
    """
    episodes: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        episodes.setdefault(sequence.segment_of, []).append(sequence)
    which, parts = part
    for name, own in islice(episodes.items(), which, None, parts):
        kept = sequences_of(read_session(folder / f"{name}.session"))
        if [one.key for one in own] != (keys := [one.key for one in kept]):
            raise _not_of(name, "Sequences of a session are missing, or belong to another", [o.key for o in own], keys)
        for one, other in zip(own, kept, strict=True):
            differ = [field for field, mine in _fields(one).items() if mine != _fields(other)[field]]
            if differ:
                raise _not_of(name, "A sequence differs from its session", f"other {', '.join(differ)}", one.key)


def _fields(one: Sequence | Completion) -> dict[str, object]:
    logprobs = one.rollout_logprobs if isinstance(one, Sequence) else one.logprobs
    return {
        "prompt": one.prompt_token_ids,
        "tokens": one.token_ids,
        "inserted tokens": one.inserted,
        "log-probabilities": logprobs.tobytes(),
        "versions": one.versions,
        "record": one.routes,
    }


def _not_of(name: str, what: str, got: object, expected: object) -> SessionError:
    return SessionError(
        what, where={"session": name}, got=got, expected=expected, do="sample the step again", fault="chain"
    )
