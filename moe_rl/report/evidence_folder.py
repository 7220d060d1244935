"""Writes, lists and reads the evidence that a run keeps when a check ends it, so that `moe-rl explain` can find who was
right.

RUN/evidence/step000002-alignment/
    evidence.json                an `Evidence`
    rows.safetensors             arrays of its sequences, each named `<number of the sequence>/<name in ARRAYS>`
    weights/step-000001          the trainer's weights, of version 1 or some updates later, as a Hugging Face checkpoint
    weights/older/step-000000    weights that sampled, as a Hugging Face checkpoint or as a checkpoint of the run

Legend: T forwarded tokens of a sequence, L MoE layers of the model, K top-k, E experts.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from moe_rl.disk import sync, write_whole
from moe_rl.errors import DataError

FOLDER = "evidence"  # inside the run folder
_FILE, _ROWS, WEIGHTS = "evidence.json", "rows.safetensors", "weights"
ABSENT = 65535
"""Marks unknown experts in `record` and `applied`."""
ARRAYS = {
    "tokens": "int32 [T + 1], token ids",
    "record": "uint16 [T, L, K], the experts that the sampler recorded",
    "sampler_logprobs": "float32 [T], the sampler's of each row's next token, NaN where it sampled none",
    "sampler_logits": "float32 [T, L, E], logits of the sampler's routers, NaN where it did not record them",
    "applied": "uint16 [T, L, K], the experts that the trainer was to replay",
    "chosen": "uint16 [T, L, K], the experts that the trainer's routers choose without replay",
    "trainer_logits": "float32 [T, L, E], the logits of these routers",
    "trainer_logprobs": "float32 [T], the trainer's of each row's next token, in the same pass, at temperature 1",
}
"""Shapes and meaning of the arrays of a sequence. Unknown arrays are left out."""


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """Describes where weights are stored.

    Attributes:
        version: the weights after this step.
        path: relative to the folder of the evidence; that of a published model is absolute.
        published: whether it is a Hugging Face checkpoint; otherwise a checkpoint of the run.
        updates: number of updates made after this version.
    """

    version: int
    path: str
    published: bool
    updates: int = 0


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Names a sequence of the evidence.

    Attributes:
        versions: (weight version, number of its rows), in order of the rows.
        intact: whether the record in the trace has the checksum taken as it left the sampler's engine; None without
            one.
    """

    key: str
    versions: tuple[tuple[int, int], ...]
    intact: bool | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Holds a check's message, its time, and a description of what is kept.

    Attributes:
        step: the step in which the run ended.
        what: name of the fault.
        time: when it ended, in seconds since 1970.
        error, message: type and text of the error.
        version: the trainer's weight version in its passes. updates: number of its updates since.
        lr: learning rate of the last update; None before the first.
        staleness: by how many versions the weights of the oldest row are older than the trainer's.
        power: power of the alignment test; None if it gave no verdict.
        temperature: temperature of the sampler's log-probabilities.
        truncated: whether it sampled from only part of the vocabulary, so that these differ from the trainer's.
        trainer_dtype, sampler_dtype: precisions. sampler_weights: how the sampler stores them, see rollout.weights.
        weights: where they are stored.
        left_out: what is not kept, and why.
        sequences: their arrays are in `read_rows`.
    """

    step: int
    what: str
    error: str
    message: str
    version: int
    updates: int
    lr: float | None
    staleness: int
    power: float | None
    temperature: float
    truncated: bool
    trainer_dtype: str
    sampler_dtype: str
    sampler_weights: str
    time: float = 0.0
    weights: list[KeptWeights] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    sequences: list[KeptRows] = field(default_factory=list)


def folders(run: Path) -> list[Path]:
    """Return the folders with evidence of a run, oldest first."""
    candidates = (file.parent for file in (run / FOLDER).glob(f"*/{_FILE}"))
    return sorted((path for path in candidates if not path.name.startswith(".")), key=_made)


def _made(folder: Path) -> tuple[float, float]:
    """Return when evidence was made, first as it says itself: files of a copied run have other times. Damaged evidence
    counts as oldest."""
    changed = folder.stat().st_mtime
    try:
        return read(folder).time, changed
    except DataError:
        return 0.0, changed


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def name_of(step: int, what: str) -> str:
    """Return the folder name for a finding in a step. what: the finding in words."""
    return f"step{step:06d}-{re.sub('[^a-z0-9]+', '-', what.lower()).strip('-') or 'refused'}"


def begin(run: Path, name: str) -> Path:
    """Make and return a hidden folder to write evidence into. Hidden folders that a killed process left are removed."""
    for left in (run / FOLDER).glob(".*.tmp"):
        abandon(left)
    hidden = run / FOLDER / f".{name}.tmp"
    hidden.mkdir(parents=True)
    return hidden


def abandon(hidden: Path) -> None:
    """Remove a hidden folder."""
    shutil.rmtree(hidden, ignore_errors=True)


def publish(hidden: Path, limit: int) -> Path:
    """Delete the oldest evidence until there is room, then give a hidden folder its final name and return it.

    limit: bytes of all evidence of a run.
    """
    run, needed = hidden.parents[1], size_of(hidden)
    kept = folders(run)
    while kept and sum(map(size_of, kept)) + needed > limit:
        shutil.rmtree(kept.pop(0))
    name = hidden.name.removeprefix(".").removesuffix(".tmp")
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    final = next(path for candidate in names if not (path := hidden.with_name(candidate)).exists())
    sync(hidden)
    hidden.rename(final)
    sync(final.parent)
    return final


def write(folder: Path, evidence: Evidence, rows: Mapping[str, np.ndarray]) -> None:
    """Write and sync the two files of evidence into a folder."""
    from safetensors.numpy import save

    write_whole(folder / _ROWS, save({name: np.ascontiguousarray(array) for name, array in rows.items()}))
    write_whole(folder / _FILE, msgspec.json.format(msgspec.json.encode(evidence)) + b"\n")


def read(folder: Path) -> Evidence:
    """Read the evidence of a check. Raises DataError for a damaged file."""
    file = folder / _FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Evidence)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError("evidence cannot be read", where={"file": file}, got=error) from error


def read_rows(folder: Path, evidence: Evidence) -> list[dict[str, np.ndarray]]:
    """Read the arrays of each sequence, by the names in ARRAYS. Raises DataError for a damaged file."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(folder / _ROWS)
    except (OSError, SafetensorError) as error:
        raise DataError("evidence cannot be read", where={"file": folder / _ROWS}, got=error) from error
    numbers = range(len(evidence.sequences))
    rows = [{what: arrays[name] for what in ARRAYS if (name := f"{number}/{what}") in arrays} for number in numbers]
    for sequence, of in zip(evidence.sequences, rows, strict=True):
        rows_of = {len(array) - (what == "tokens") for what, array in of.items()}
        if "tokens" not in of or len(rows_of) != 1:
            got = ", ".join(f"{what} {array.shape}" for what, array in of.items()) or "no arrays"
            raise DataError(
                "arrays of the evidence are missing or have a wrong length",
                where={"file": folder / _ROWS, "request": sequence.key},
                got=got,
            )
    return rows


def lines(run: Path) -> list[str]:
    """Return a line for each folder with evidence of a run."""
    from moe_rl.report.format import binary

    listed = []
    for path in folders(run):
        try:
            what = read(path).message.splitlines()[0]
        except DataError as error:
            what = str(error)
        listed.append(f"evidence: {path}, {binary(size_of(path))}: {what}")
    return listed
