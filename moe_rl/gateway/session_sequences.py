"""Turns a finished session into the sequences that a run trains on.

A sequence is a run of turns along a branch, where each turn's record continues the previous turn's. The tokens given to
the model between two turns are inserted between theirs. All tokens before the first turn are the prompt.

    branch 1    prompt | turn 0 | result | turn 1 | result | turn 2      one sequence: turns 0, 1 and 2
    branch 2    prompt | turn 0 | other  | turn 3                        one sequence: turn 3, all before is its prompt

Branches are walked in the order in which they ended, and no turn is taken twice. So each sampled token of a received
turn is in exactly one sequence, after the same tokens as when it was sampled, and each sequence has one record with all
its rows. A turn whose record does not continue its parent's, because the weights changed in between, begins a new
sequence. A turn that the agent never received is in none: it did not affect the reward.

`check_trained` checks a step's training sequences against the sessions that they came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from pathlib import Path

import numpy as np

from moe_rl.errors import SessionError
from moe_rl.gateway.finishing import read_session
from moe_rl.gateway.sessions import FinishedSession, Session, Turn
from moe_rl.types import Completion, InsertedTokens, RewardedTurn, Sequence, merged_spans


def sequences_of(finished: FinishedSession, rewards: Seq[float] = ()) -> list[Completion]:
    """Return the sequences of a session, in the order of their branches. Their keys are those of their records.

    Args:
        rewards: one per received turn, if each turn gets its own advantage.

    Raises:
        SessionError: the digest chain is broken. The message names session and turn.
    """
    session = Session.of(finished)
    earned = dict(zip((turn.number for turn in session.received), rewards, strict=True)) if rewards else {}
    return [_joined(session, turns, earned) for turns in runs_of(session)]


def runs_of(session: Session) -> list[list[Turn]]:
    """Return the runs of turns that form a session's sequences."""
    taken: set[int] = set()
    runs: list[list[Turn]] = []
    for branch in session.branches():
        run: list[Turn] = []
        for turn in branch:
            if turn.number in taken:
                continue
            if run and turn.continues:
                run.append(turn)
            else:
                run = [turn]
                runs.append(run)
            taken.add(turn.number)
    return runs


def _joined(session: Session, turns: Seq[Turn], rewards: Mapping[int, float]) -> Completion:
    """Return the sequence of a run of turns. Its record is the last turn's, which has all rows."""
    first, last = turns[0], turns[-1]
    inserted, sampled = [], len(first.token_ids)
    for turn in turns[1:]:
        if turn.input_ids:
            inserted.append(InsertedTokens(sampled, turn.input_ids))
        sampled += len(turn.token_ids)
    return Completion(
        key=last.routes.key if last.routes is not None else f"{session.name}/{last.number}",
        prompt_token_ids=session.prompt(first.number),
        token_ids=sum((turn.token_ids for turn in turns), ()),
        logprobs=np.concatenate([turn.logprobs for turn in turns]),
        finish_reason=last.finish_reason,
        versions=merged_spans(span for turn in turns for span in turn.versions),
        routes=last.routes,
        inserted=tuple(inserted),
        turns=tuple(
            RewardedTurn(turn.number, turn.parent, len(turn.token_ids), rewards[turn.number])
            for turn in (turns if rewards else ())
        ),
    )


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
    for name, used in islice(episodes.items(), which, None, parts):
        kept = sequences_of(read_session(folder / f"{name}.session"))
        if [sequence.key for sequence in used] != (keys := [completion.key for completion in kept]):
            raise _not_of(name, "Sequences of a session are missing, or belong to another", [o.key for o in used], keys)
        for sequence, other in zip(used, kept, strict=True):
            differ = [field for field, mine in _fields(sequence).items() if mine != _fields(other)[field]]
            if differ:
                raise _not_of(name, "A sequence differs from its session", f"other {', '.join(differ)}", sequence.key)


def _fields(sequence: Sequence | Completion) -> dict[str, object]:
    logprobs = sequence.rollout_logprobs if isinstance(sequence, Sequence) else sequence.logprobs
    return {
        "prompt": sequence.prompt_token_ids,
        "tokens": sequence.token_ids,
        "inserted tokens": sequence.inserted,
        "log-probabilities": logprobs.tobytes(),
        "versions": sequence.versions,
        "record": sequence.routes,
    }


def _not_of(name: str, what: str, got: object, expected: object) -> SessionError:
    return SessionError(
        what, where={"session": name}, got=got, expected=expected, do="sample the step again", fault="chain"
    )
