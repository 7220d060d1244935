"""Lists the complete checkpoints of a run, and publishes a new one atomically.

step-000012             complete: the folder is renamed to this only when all its bytes are on disk
.step-000012.tmp        being written, or left by a process that was killed
step-000012.abandoned   put aside because the run was resumed from an older checkpoint
best                    a link to the checkpoint of the best evaluation, where eval.best names a metric

Only the folder name says whether a checkpoint is complete. Megatron's training scripts also keep the newest step in a
file, `latest_checkpointed_iteration.txt`. Such a file can be wrong: between the two writes, or after someone deletes a
folder, it names a checkpoint that does not exist.
"""

from __future__ import annotations

import errno
import re
import shutil
import time
from pathlib import Path
from typing import Literal

from moe_rl.disk import sync
from moe_rl.errors import CheckpointError

FOLDER = "checkpoints"  # inside the run folder
BEST: Literal["best"] = "best"
_COMPLETE = re.compile(r"step-(\d{6,})")


def name_of(step: int) -> str:
    """Return the name of the checkpoint folder after `step` steps."""
    return f"step-{step:06d}"


def complete(folder: Path) -> list[tuple[int, Path]]:
    """Return (steps done, folder) for every complete checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((int(m[1]), p) for p in folder.iterdir() if (m := _COMPLETE.fullmatch(p.name)))


def step_argument(text: str) -> int | Literal["best"]:
    """Read the option --step of a command. Raises ValueError."""
    return BEST if text == BEST else int(text)


def step_of(path: Path) -> int:
    """Return the number of steps done at a complete checkpoint."""
    return int(path.name.removeprefix("step-"))


def find(folder: Path, step: int | Literal["best"] | None = None) -> Path:
    """Return the complete checkpoint after `step` steps, the best one, or the newest one.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    checkpoints = dict(complete(folder))
    if step is None and checkpoints:
        step = max(checkpoints)
    if step == BEST:
        if (link := folder / BEST).is_symlink() and link.is_dir():
            return folder / link.readlink()
        raise CheckpointError(
            "no checkpoint is the best one",
            where={"folder": folder},
            got="no link named best",
            expected="a run with eval.best in which a trained policy was better than the initial one",
            do="choose a checkpoint by its number",
        )
    if step not in checkpoints:
        raise CheckpointError(
            "there is no such checkpoint" if checkpoints else "the run has no checkpoint",
            where={"folder": folder},
            got="none" if not checkpoints else f"after steps {', '.join(map(str, checkpoints))}",
            expected=f"{name_of(step)}" if step else "step-<number>",
            do="choose one of these with --step"
            if checkpoints
            else "begin the run again in its folder with --step 0, or start a new one",
        )
    return checkpoints[step]


def to_resume_instead(path: Path) -> str:
    """Tell the user what to do when the checkpoint at `path` cannot be read."""
    steps = [step for step, other in complete(path.parent) if other != path]
    begin = f"go on from another checkpoint with --resume {path.parent.parent} --step N"
    return f"{begin}; N may be {', '.join(map(str, steps))}" if steps else f"{begin}; N = 0 starts from the first step"


def sweep(folder: Path) -> None:
    """Remove unfinished checkpoints that killed processes left behind, and old ones that `publish` could not remove."""
    for left in folder.glob(".step-*.tmp"):
        shutil.rmtree(left, onexc=_unless_open)


def _unless_open(_: object, path: str, error: BaseException) -> None:
    """Leave a folder of which a process of this host has a file open: on NFS the file keeps a name until then."""
    if not (isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EBUSY)):
        raise error


def begin(folder: Path, step: int) -> Path:
    """Create and return a new hidden folder to write a checkpoint into. A run writes one checkpoint at a time."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync(folder.parent)  # without this, a power cut could remove the whole folder
    sweep(folder)
    hidden = folder / f".{name_of(step)}.tmp"
    hidden.mkdir()
    return hidden


def hand_in(hidden: Path, rank: int, payload: bytes) -> None:
    """Record in the hidden folder that all files of a rank are on disk. `payload` holds what rank 0 needs from it."""
    unfinished = hidden / f"rank{rank}.tmp"
    unfinished.write_bytes(payload)
    unfinished.rename(hidden / f"rank{rank}.part")


def handed_in(hidden: Path, ranks: int) -> list[Path]:
    """Return the files that the ranks wrote with `hand_in`, in rank order, or [] while one is missing."""
    parts = [hidden / f"rank{rank}.part" for rank in range(ranks)]
    return parts if all(part.exists() for part in parts) else []


def settle(folder: Path, ranks: int, seconds: float) -> None:
    """Wait up to `seconds` for rank 0 to publish a checkpoint that all ranks have handed in.

    A rank that saw another rank die calls this before it reports which checkpoint is the newest.
    """
    limit = time.monotonic() + seconds
    whole = [hidden for hidden in folder.glob(".step-*.tmp") if handed_in(hidden, ranks)]
    while time.monotonic() < limit and any(hidden.exists() for hidden in whole):
        time.sleep(0.05)


def to_go_on(folder: Path) -> str:
    """Tell the user how to resume a run that has ended. `folder` holds its checkpoints."""
    steps = [step for step, _ in complete(folder)]
    if not steps:
        return f"no checkpoint is complete: begin the run again in its folder with --resume {folder.parent} --step 0"
    return f"go on after step {steps[-1]} with --resume {folder.parent}"


def name_best(folder: Path, step: int | None) -> None:
    """Point the link `best` to the checkpoint after `step` steps, or remove the link if there is no such checkpoint."""
    link, place = folder / BEST, folder / f".{BEST}.tmp"
    if link.is_dir() and not link.is_symlink():  # whoever copied the run copied what the link leads to
        shutil.rmtree(link)
    if step is None or not (folder / name_of(step)).is_dir():
        link.unlink(missing_ok=True)
    elif not link.is_symlink() or link.readlink() != Path(name_of(step)):
        place.unlink(missing_ok=True)
        place.symlink_to(name_of(step))
        place.replace(link)
        sync(folder)


def publish(hidden: Path, step: int, *, keep: int | None, best: int | None = None) -> Path:
    """Rename the hidden folder to its final name, and remove all checkpoints but the newest `keep` and the best.

    The caller has synced the files; this function syncs the folders.

    Args:
        keep: None keeps all.
        best: Step of the best checkpoint, this or an earlier one.
    """
    final = hidden.with_name(name_of(step))
    sync(hidden)
    hidden.rename(final)
    sync(final.parent)
    name_best(final.parent, best)
    for done, old in complete(final.parent)[:-keep] if keep else ():
        if done == best:
            continue
        # Rename before deleting: a half-deleted folder must not look complete.
        doomed = old.with_name(f".{old.name}.tmp")
        old.rename(doomed)
        shutil.rmtree(doomed, onexc=_unless_open)
    return final


def abandon_newer(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints newer than `step`, so that the newest one belongs to the resumed run.

    Returns:
        The new paths of the renamed checkpoints.
    """
    aside = []
    for done, path in complete(folder):
        if done > step:
            aside.append(path.with_name(f"{path.name}.abandoned"))
            shutil.rmtree(aside[-1], ignore_errors=True)
            path.rename(aside[-1])
    if aside:
        sync(folder)  # before the ledger is truncated: after a crash no newer checkpoint may reappear
    return aside
