"""Formats the turns of one session: the model's input, its output, and the reward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from moe_rl.config.load import load_config
from moe_rl.errors import DataError, MoeRLError
from moe_rl.gateway.finishing import read_session
from moe_rl.gateway.sessions import Session, Turn
from moe_rl.report.sample_lines import FILE, read_samples
from moe_rl.rollout.kept import SESSION_SUFFIX, KeptRollouts, shard_step
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.trace import TraceStore
from moe_rl.types import VersionSpan


def session_lines(path: Path, name: str | None, model: Path | None) -> Iterator[str]:
    """Yield the lines of a session.

    Args:
        path: session file, or the folder of a run that has kept the session `name`.
        model: folder with the tokenizer; None: that of the run.

    Raises:
        DataError: the file is missing or damaged, or its tokenizer is not known.
        SessionError: a turn is not what it was.
    """
    file = path if name is None else path / "rollouts" / f"{name}{SESSION_SUFFIX}"
    run = file.parent.parent
    session = Session.of(read_session(file))
    codec = TextCodec(_tokenizer(run) if model is None else model, ())
    turns = session.received
    undelivered = len(session.turns) - len(turns)
    yield (
        f"session {session.name} of {session.group}: {len(turns)} turns, {len(session.branches())} branches, "
        + (f"{sum(len(turn.ids) for turn in turns)} tokens, {sum(len(turn.token_ids) for turn in turns)} of them said")
        + (f"; {undelivered} more turns that the agent never received" if undelivered else "")
    )
    yield from _earned(run, session.name)
    for turn in session.turns:
        behind = "" if turn.parent is None else f", after turn {turn.parent}"
        ended = f"ended by {turn.finish_reason}, weights of version {_weights(turn)}"
        lost = "" if turn.received else ", never received, so it is not trained on"
        yield f"turn {turn.number}, {turn.kind}{behind}: {ended}{lost}"
        yield indented("given", codec.decode(turn.input_ids))
        yield indented("said", codec.decode(turn.token_ids))


def indented(name: str, value: str) -> str:
    """Return a text after its name, its lines aligned."""
    first, *rest = value.splitlines() or [""]
    return "\n".join([f"  {name:<11}{first}", *(" " * 13 + line for line in rest)])


def _weights(turn: Turn) -> str:
    def told(span: VersionSpan) -> str:
        return f"{span.weight_version} ({span.tokens} tokens)" if len(turn.versions) > 1 else str(span.weight_version)

    return ", then ".join(map(told, turn.versions))


def _tokenizer(run: Path) -> Path:
    config = run / "config.yaml"
    if not config.is_file():
        raise DataError(
            "the model of the session is not known",
            where={"file": config},
            got="no such file",
            expected="a session of a run",
            do="give --model FOLDER",
        )
    return load_config(config).model.path


def _earned(run: Path, name: str) -> Iterator[str]:
    """Yield a session's reward and samples from the training of its run; nothing if it has no run."""
    if (step := shard_step(name)) is None:
        return
    try:
        batch = KeptRollouts(run / "rollouts", TraceStore(run / "trace")).load(step)
    except MoeRLError:  # not judged yet
        return
    own = [sequence for sequence in batch.sequences if sequence.segment_of == name]
    if not own:
        yield "  not trained on: the episode failed, or its group was not chosen"
        return
    yield f"  step {step}: reward {own[0].reward:g}, trained on as {len(own)} sequences"
    keys = {sequence.key for sequence in own}
    for sample in (one for one in (read_samples(run) if (run / FILE).exists() else []) if one.key in keys):
        advantage = f", {sample.shown_advantages}" if sample.advantages else ""
        apart = "" if math.isnan(sample.mismatch) else f", mismatch {sample.mismatch:.4f} nats/token"
        parts = ", ".join(f"{part} {value:g}" for part, value in sample.parts.items())
        yield f"  {sample.key}: {len(sample.pieces)} tokens said ({parts}){advantage}{apart}"
