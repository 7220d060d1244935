"""`moe-rl show RUN`: print sequences of a run, and the tokens where sampler and trainer differ most.

    moe-rl show RUN                     samples of the last step
    moe-rl show RUN --step 3 --best     samples of step 3, highest reward first
    moe-rl show RUN --mismatch          samples of all steps, largest difference of the engines first
    moe-rl show RUN --session NAME      the turns of an episode, such as step000003-p0-c1
    moe-rl show RUN --profile           the recorded profiles of steps, see report.profile
    moe-rl show FILE.session            the turns of a session that a gateway has kept

The run keeps report.samples_per_step sequences of each step in samples.jsonl, and the sessions of the steps whose
rollouts it keeps. If a check has ended the run, its evidence is listed first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from moe_rl.config.load import load_config
from moe_rl.disk import write_json
from moe_rl.errors import About, ConfigError, DataError, MoeRLError
from moe_rl.gateway.finishing import read_session
from moe_rl.gateway.sessions import Session
from moe_rl.report import evidence_folder
from moe_rl.report.format import binary
from moe_rl.report.sample_lines import FILE, SampleLine, read_samples, versions_text
from moe_rl.rollout.kept import SESSION_SUFFIX, KeptRollouts, shard_step
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.trace import TraceStore
from moe_rl.train.run_folder import RunFolder


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
    run = file.absolute().parent.parent
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
        ended = f"ended by {turn.finish_reason}, weights of version {versions_text(turn.versions)}"
        lost = "" if turn.received else ", never received, so it is not trained on"
        yield f"turn {turn.number}, {turn.kind}{behind}: {ended}{lost}"
        yield indented("given", codec.decode(turn.input_ids))
        yield indented("said", codec.decode(turn.token_ids))


def indented(name: str, value: str) -> str:
    """Return a text after its name, its lines aligned."""
    first, *rest = value.splitlines() or [""]
    return "\n".join([f"  {name:<11}{first}", *(" " * 13 + line for line in rest)])


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
    sequences = [sequence for sequence in batch.sequences if sequence.segment_of == name]
    if not sequences:
        yield "  not trained on: the episode failed, or its group was not chosen"
        return
    yield f"  step {step}: reward {sequences[0].reward:g}, trained on as {len(sequences)} sequences"
    keys = {sequence.key for sequence in sequences}
    for sample in (line for line in (read_samples(run) if (run / FILE).exists() else []) if line.key in keys):
        advantage = f", {sample.shown_advantages}" if sample.advantages else ""
        apart = "" if math.isnan(sample.mismatch) else f", mismatch {sample.mismatch:.4f} nats/token"
        parts = ", ".join(f"{part} {value:g}" for part, value in sample.parts.items())
        yield f"  {sample.key}: {len(sample.pieces)} tokens said ({parts}){advantage}{apart}"


_TOKENS = 5  # tokens that are listed for each sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe-rl show`."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run, or a session file")
    add("--session", metavar="NAME", help="an episode of the run")
    add("--profile", action="store_true", help="list the recorded profiles of steps")
    add("--model", type=Path, metavar="FOLDER", help="tokenizer for a session file without a run")
    add("--step", type=int, metavar="N", help="the step (default: the last one, or all with an order)")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="highest reward first")
    order.add_argument("--worst", action="store_true", help="lowest reward first")
    order.add_argument("--mismatch", action="store_true", help="largest difference of the engines first")
    add("--count", type=int, default=4, metavar="N", help="samples to print (default: 4)")
    add("--json", type=Path, metavar="FILE", help="write the printed samples to this file")


def run(options: argparse.Namespace) -> int:
    """Print the samples. Returns the exit status: 2 if there are none."""
    if not options.run.exists():
        do = "give the run folder that the run printed, or a session file"
        raise DataError("there is no such folder or file", where={"folder": options.run}, do=do)
    session = options.session is not None or options.run.suffix == SESSION_SUFFIX
    if options.json and (options.profile or session):
        raise ConfigError("only samples are written", where={"option": "--json"}, got=options.json, do="leave it out")
    if options.profile:
        print("\n".join(_profile_lines(options.run)))
        return 0
    if session:
        print("\n".join(session_lines(options.run, options.session, options.model)))
        return 0
    if kept := evidence_folder.lines(options.run):
        print("\n".join([*kept, f"moe-rl explain {options.run} says who was right", ""]))
    samples = read_samples(options.run)
    chosen = choose(samples, options) if samples or not kept else []  # a check may end the first step
    print("\n\n".join(text(sample) for sample in chosen))
    if options.json:
        write_json(options.json, {"samples": [asdict(sample) for sample in chosen]})
    return 0


def _profile_lines(run: Path) -> list[str]:
    folder = RunFolder(run).profiles
    files = sorted(folder.glob("step*"))
    if not files:
        do = "set report.profile, such as report.profile.steps=[3]; a resumed run may set it too"
        raise DataError("the run has recorded no step", where={"folder": folder}, do=do)
    lines = [f"{binary(path.stat().st_size):>10}  {path}" for path in files]
    return [*lines, "open .json.gz in Perfetto or chrome://tracing, and .pickle in PyTorch's memory viewer"]


def choose(samples: list[SampleLine], options: argparse.Namespace) -> list[SampleLine]:
    """Return the samples that the options ask for, in their order. Raises DataError when there are none."""
    if not samples:
        expected = "the folder of a run with report.samples_per_step above 0 that has ended a step"
        raise DataError("the run has no samples", where={"file": options.run / FILE}, expected=expected)
    steps = sorted({sample.step for sample in samples})
    step = options.step
    if step is None and not (options.best or options.worst or options.mismatch):
        step = steps[-1]
    if step is not None:
        samples = [sample for sample in samples if sample.step == step]
        if not samples:
            got, expected = f"--step {step}", f"{steps[0]} to {steps[-1]}"
            where: About = {"file": options.run / FILE}
            raise DataError("the run has no samples of this step", where=where, got=got, expected=expected)
    if options.best or options.worst:
        samples = sorted(samples, key=lambda sample: sample.reward, reverse=options.best)
    elif options.mismatch:
        samples = sorted(
            samples, key=lambda sample: -math.inf if math.isnan(sample.mismatch) else sample.mismatch, reverse=True
        )
    return samples[: max(1, options.count)]


def text(sample: SampleLine) -> str:
    """Format one sample: its reward, the prompt, the completion, and the tokens that differ most."""
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.parts.items())
    advantage = sample.shown_advantages or "not trained on"
    mismatch = "not compared" if math.isnan(sample.mismatch) else f"mismatch {sample.mismatch:.4f} nats/token"
    lines = [
        f"step {sample.step}, {sample.key}: reward {sample.reward:g} ({parts}), {advantage}, {mismatch}",
        f"  {sample.prompt_tokens} + {len(sample.pieces)} tokens, ended by {sample.finish_reason}, "
        f"weights of version {sample.weights}",
        indented("prompt", sample.prompt),
        *([indented("completion", sample.completion)] if not sample.inserted else _turns(sample)),
    ]
    return "\n".join([*lines, *_largest(sample)])


def _turns(sample: SampleLine) -> Iterable[str]:
    """Yield the texts that the model sampled and those that it was given, in turn."""
    done = 0
    for insertion in sample.inserted:
        yield indented("said", "".join(sample.pieces[done : insertion.after]))
        yield indented("given", insertion.text)
        done = insertion.after
    yield indented("said", "".join(sample.pieces[done:]))


def _largest(sample: SampleLine) -> Iterable[str]:
    """Yield a line for each token whose log-probabilities differ most, or whose routers differ."""
    differences = sample.differences
    if not differences:
        return
    yield "  token     text             sampler  trainer  difference layers that differ"
    sizes = [math.inf if math.isnan(value) else abs(value) for value in differences]
    for position in sorted(sorted(range(len(sizes)), key=lambda index: -sizes[index])[:_TOKENS]):
        layers = sample.layers_at(position)
        logprobs = f"{_number(sample.sampler_logprobs[position]):>8} {_number(sample.trainer_logprobs[position]):>8}"
        apart = f"{differences[position]:>+11.4f} {'-' if layers is None else layers}"
        yield f"  {position:<9} {sample.pieces[position]!r:<15} {logprobs} {apart}"


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.3f}"
