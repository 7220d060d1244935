"""Lists the complete checkpoints of a run, and makes a new one appear whole or not at all.

step-000012             complete: it got this name when every byte of it was on disk
.step-000012.tmp        being written, or left by a process that was killed
step-000012.abandoned   put aside: the run was told to go on from an older one

The name is the only mark. A file beside the folders that names the newest, as Megatron's training scripts keep in
`latest_checkpointed_iteration.txt`, would be a second truth: between the two writes, or after a folder was removed by
hand, it names a checkpoint that is not there.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from moe_rl.disk import sync
from moe_rl.errors import CheckpointError, describe

FOLDER = "checkpoints"  # of a run's folder
_COMPLETE = re.compile(r"step-(\d{6,})")


def name_of(step: int) -> str:
    """The folder of the checkpoint after so many steps."""
    return f"step-{step:06d}"


def complete(folder: Path) -> list[tuple[int, Path]]:
    """(steps done, folder) of every complete checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((int(m[1]), p) for p in folder.iterdir() if (m := _COMPLETE.fullmatch(p.name)))


def find(folder: Path, step: int | None = None) -> Path:
    """The complete checkpoint after so many steps, by default the newest. Raises CheckpointError if there is none."""
    found = dict(complete(folder))
    if step is None and found:
        step = max(found)
    if step not in found:
        raise CheckpointError(
            describe(
                "there is no such checkpoint" if found else "the run has no checkpoint",
                where=str(folder),
                got="none" if not found else f"after steps {', '.join(map(str, found))}",
                expected=f"{name_of(step)}" if step else "step-<number>",
                do="choose one of these with --step"
                if found
                else "begin the run again in its folder with --step 0, or start a new one",
            )
        )
    return found[step]


def to_resume_instead(path: Path) -> str:
    """What to do about a checkpoint that cannot be read."""
    steps = [step for step, other in complete(path.parent) if other != path]
    begin = f"go on from another checkpoint with --resume {path.parent.parent} --step N"
    return f"{begin}: there are those after steps {', '.join(map(str, steps))}" if steps else f"{begin}, N = 0: anew"


def sweep(folder: Path) -> None:
    """Remove what processes that were killed had begun."""
    for left in folder.glob(".step-*.tmp"):
        shutil.rmtree(left)


def begin(folder: Path, step: int) -> Path:
    """A new hidden folder to write the checkpoint into; a run has one at a time."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync(folder.parent)  # else a power cut could take all of them
    sweep(folder)
    hidden = folder / f".{name_of(step)}.tmp"
    hidden.mkdir()
    return hidden


def hand_in(hidden: Path, rank: int, payload: bytes) -> None:
    """Say, in the hidden folder, that all files of a rank are whole on disk. payload: what rank 0 must know of them."""
    unfinished = hidden / f"rank{rank}.tmp"
    unfinished.write_bytes(payload)
    unfinished.rename(hidden / f"rank{rank}.part")


def handed_in(hidden: Path, ranks: int) -> list[Path]:
    """What the ranks handed in, by rank; [] while one has not."""
    parts = [hidden / f"rank{rank}.part" for rank in range(ranks)]
    return parts if all(part.exists() for part in parts) else []


def settle(folder: Path, ranks: int, seconds: float) -> None:
    """Wait, where all ranks have handed in their parts, until rank 0 has published the checkpoint or the time is over:
    before a rank that saw another one die says which checkpoint stands."""
    limit = time.monotonic() + seconds
    whole = [hidden for hidden in folder.glob(".step-*.tmp") if handed_in(hidden, ranks)]
    while time.monotonic() < limit and any(hidden.exists() for hidden in whole):
        time.sleep(0.05)


def to_go_on(folder: Path) -> str:
    """How a run that has ended is gone on with. folder: of its checkpoints."""
    steps = [step for step, _ in complete(folder)]
    if not steps:
        return f"no checkpoint is complete: begin the run again in its folder with --resume {folder.parent} --step 0"
    return f"go on after step {steps[-1]} with --resume {folder.parent}"


def publish(hidden: Path, step: int, *, keep: int) -> Path:
    """Give the checkpoint its name, and remove all but the newest `keep`. Its files are on disk; their names need not
    be yet."""
    final = hidden.with_name(name_of(step))
    sync(hidden)
    hidden.rename(final)
    sync(final.parent)
    for _, old in complete(final.parent)[:-keep]:
        # Out of sight first: what is half removed must not look complete.
        doomed = old.with_name(f".{old.name}.tmp")
        old.rename(doomed)
        shutil.rmtree(doomed)
    return final


def abandon_newer(folder: Path, step: int) -> list[Path]:
    """Put the checkpoints after more than `step` steps aside, so that the newest is of the run that goes on; returns
    where they are now."""
    aside = []
    for done, path in complete(folder):
        if done > step:
            aside.append(path.with_name(f"{path.name}.abandoned"))
            shutil.rmtree(aside[-1], ignore_errors=True)
            path.rename(aside[-1])
    if aside:
        sync(folder)  # the ledger is cut next: a newer checkpoint must not come back
    return aside
