"""`moe-rl explain RUN`: say who was right when a check ended a run.

    moe-rl explain RUN                               the newest evidence
    moe-rl explain RUN --evidence step000002-canary  this evidence; `moe-rl show RUN` lists all

When a check ends a run, the run keeps weights, tokens, and both engines' routes and scores in RUN/evidence. This
command runs the tokens through a third engine, `transformers` in float32, and compares. The verdict is one of

    recorder    the sampler computes correctly, and its record is wrong
    weights     the sampler, or both engines, compute with other weights than the kept ones
    trainer     the trainer differs from the other two engines, or was given another record to replay
    check       both engines are right up to near ties: the check was wrong. Please report it
    training    the run has collapsed, and no engine is at fault
    undecided   the run did not keep enough to decide

It needs memory for one copy of the model in float32, and for another copy if an engine is less precise.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from moe_rl.commands.export import write_weights
from moe_rl.config.layout import on_one_rank
from moe_rl.config.load import load_config
from moe_rl.disk import write_json
from moe_rl.errors import DataError
from moe_rl.models.hf import read_model
from moe_rl.report import evidence_folder
from moe_rl.report.evidence_folder import Evidence
from moe_rl.train import run_folder

if TYPE_CHECKING:
    from moe_rl.proof.explanation import Explanation, Side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe-rl explain`."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.epilog = "Exit status: 0 with a verdict, 1 if it is undecided, 2 an error with an explanation."
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--evidence", metavar="NAME", help="folder in RUN/evidence (default: the newest)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to this file")


def run(options: argparse.Namespace) -> int:
    """Explain. Return the exit status."""
    folder = _folder(run_folder.existing(options.run, "RUN").path, options.evidence)
    evidence = evidence_folder.read(folder)
    rows = evidence_folder.read_rows(folder, evidence)
    print("\n".join(_about(folder, evidence)), flush=True)
    # torch and transformers are imported only here, so that mistakes in the options show at once.
    from moe_rl.proof.explanation import explain

    with _published(options.run, folder, evidence) as (weights, trained):
        explanation = explain(evidence, rows, weights, trained)
    print("\n".join(_lines(explanation)))
    if options.json:
        write_json(options.json, {"evidence": str(folder), **asdict(evidence), **asdict(explanation)})
    return int(explanation.verdict == "undecided")


def _folder(run: Path, name: str | None) -> Path:
    known = evidence_folder.folders(run)
    if not known:
        expected = "a run that a check has ended, with guards.evidence_mib above 0"
        raise DataError("the run has no evidence", where={"folder": run}, expected=expected)
    by_name = {folder.name: folder for folder in known}
    if name is not None and name not in by_name:
        expected = ", ".join(by_name)
        raise DataError("the run has no such evidence", where={"option": "--evidence"}, got=name, expected=expected)
    return known[-1] if name is None else by_name[name]


@contextmanager
def _published(run: Path, folder: Path, evidence: Evidence) -> Iterator[tuple[dict[int, Path], Path | None]]:
    """Yield the weights of each version as Hugging Face folders, and the trainer's weights.

    Weights kept as a checkpoint of the run are converted, into folders that are removed after the body.
    """
    weights: dict[int, Path] = {}
    trained: Path | None = None
    with tempfile.TemporaryDirectory(prefix="moe-rl-explain-") as spare:
        for kept in evidence.weights:
            path = folder / kept.path  # an absolute path stays as it is
            if not path.exists():
                print(f"  weights of version {kept.version} are gone: {path}")
                continue
            if not kept.published:
                config, checkpoint = on_one_rank(load_config(run_folder.RunFolder(run).config)), path
                path = Path(spare) / f"version{kept.version}"
                write_weights(checkpoint, path, config, read_model(config.model.path), config.train.dtype)
            if kept.version == evidence.version and kept.updates == evidence.updates:
                trained = path
            if not kept.updates:
                weights[kept.version] = path
        yield weights, trained


def _about(folder: Path, evidence: Evidence) -> list[str]:
    """Format the check's message and the state of the run."""
    lr = "before the first update" if evidence.lr is None else f"learning rate {evidence.lr:g}"
    power = "" if evidence.power is None else f", power {evidence.power:.3f}"
    return [
        f"{folder}",
        f"  step {evidence.step}, {evidence.what}: {lr}, staleness {evidence.staleness}{power}",
        f"  {evidence.error}: {evidence.message}",
        f"  kept: {len(evidence.sequences)} sequences; weights of "
        + (", ".join(f"version {kept.version}" for kept in evidence.weights) or "no version"),
        *(f"  not kept: {what}" for what in evidence.left_out),
    ]


def _lines(answer: Explanation) -> list[str]:
    """Format the comparisons and the verdict."""
    sides = [("sampler", side) for side in answer.sampler] + ([("trainer", answer.trainer)] if answer.trainer else [])
    header = "  engine   weights  choices  near ties  beyond  largest margin / near tie   nats / explained by rounding"
    lines = [header, *(_line(name, side) for name, side in sides)]
    for name, side in sides:
        if side.differ and side.where:
            key, row, layer = side.where
            layers = ", ".join(f"{layer} {share:.0%}" for layer, share in side.by_layer.items() if share >= 0.005)
            lines.append(
                f"  {name}: most in {key}, row {row}, layer {layer}" + (f"; by layer: {layers}" if layers else "")
            )
    if answer.moved is not None:
        lines.append(
            f"  older weights made the record: {answer.moved:.1%} of its choices differ under the trainer's weights"
        )
    return [*lines, f"verdict: {answer.verdict}: {answer.why}"]


def _line(name: str, side: Side) -> str:
    margin = "impossible" if side.worst is None else f"{side.worst:.3g}"
    nats = "-" if side.nats is None else f"{side.nats:.3g} / {side.allowed:.3g}"
    choices = f"{side.choices:>7}  {side.near:>9}  {side.differ:>6}  {f'{margin} / {side.tie:.3g}':>26}"
    return f"  {name:<7}  version {side.version}  {choices}   {nats:>29}"
