"""The patch series for the installed vLLM: which state it is in, and how to change that.

A file of the vLLM package is pristine, patched or unknown, and only its sha256 decides which. Files are changed in
memory, compared with the digest that BASE promises, and replaced as a whole: an interrupted run leaves whole files, and
a package cache that hard-links the file keeps its own copy. vLLM is never imported here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from moe_rl.errors import PatchError, describe

PATCHES = Path(__file__).resolve().parents[2] / "patches" / "vllm"
COMMAND = "python tools/apply_patches.py"

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class Target:
    """One file that the series touches. path: relative to the vllm package; sha256 hex before and after."""

    path: str
    pristine: str
    patched: str


@dataclass(frozen=True, slots=True)
class Series:
    """The patches for one vLLM version, in order, and the files they touch."""

    version: str
    patches: tuple[Path, ...]
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class State:
    """What was found under `root`. files: path -> "pristine" | "patched" | "unknown" | "missing".

    series: None when there are no patches for this version; then files is empty.
    """

    root: Path
    version: str
    series: Series | None
    files: dict[str, str]

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
    """Folder of the vllm package that this Python would import. Raises PatchError when there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        raise PatchError(describe("vLLM is not installed", do="install the pinned requirements: make venv"))
    return Path(spec.origin).parent


def inspect(root: Path | None = None) -> State:
    """State of the vLLM package in folder `root` (default: the one that Python would import)."""
    root = find_vllm() if root is None else Path(root)
    version = _version(root)
    series = _read_series(version)
    files = {} if series is None else {target.path: _kind(root / target.path, target) for target in series.targets}
    return State(root, version, series, files)


def check(root: Path | None = None) -> State:
    """The state, when it is fully patched. Raises PatchError naming every file that is not as it must be."""
    state = inspect(root)
    found = _problems(state)
    if found:
        raise PatchError("\n".join(found))
    return state


def apply(root: Path | None = None) -> State:
    """Patch the package and return its new state. Nothing happens when it is patched already.

    Raises PatchError, before anything is written, when a file is neither pristine nor patched, when only some are
    patched, or when there is no series for this version.
    """
    state = inspect(root)
    if state.summary == "patched":
        return state
    if state.summary != "pristine":
        raise PatchError("\n".join(_problems(state)))
    _rewrite(state, reverse=False)
    return check(state.root)


def revert(root: Path | None = None) -> State:
    """Give the package back, byte for byte, as it was installed; a half-patched one too. Returns its new state."""
    state = inspect(root)
    if state.summary in ("unsupported", "unknown"):
        raise PatchError("\n".join(_problems(state)))
    _rewrite(state, reverse=True)
    return inspect(state.root)


def problems(root: Path | None = None) -> list[str]:
    """Why sampling cannot start with the vLLM found: one message a fault, empty when it can."""
    try:
        return _problems(inspect(root))
    except PatchError as error:
        return [str(error)]


def _problems(state: State) -> list[str]:
    if state.series is None:
        supported = ", ".join(sorted(path.name for path in PATCHES.iterdir() if path.is_dir()))
        return [
            describe(
                "vLLM has a version without patches",
                where=str(state.root),
                got=state.version,
                expected=f"one of {supported}",
                do="install the pinned requirements: make venv",
            )
        ]
    if state.summary == "pristine":
        return [describe("vLLM is not patched", where=str(state.root), do=f"run {COMMAND} --apply")]
    messages = []
    for path, kind in state.files.items():
        where = str(state.root / path)
        if kind in ("unknown", "missing"):
            messages.append(
                describe(
                    "A file of vLLM was changed by someone else" if kind == "unknown" else "A file of vLLM is missing",
                    where=where,
                    got=_digest(state.root / path) if kind == "unknown" else None,
                    expected="a digest of patches/vllm/" + state.series.version + "/BASE",
                    do=f"reinstall vLLM {state.series.version}, then run {COMMAND} --apply",
                )
            )
        elif kind == "pristine":
            messages.append(
                describe(
                    "vLLM is half patched",
                    where=where,
                    got="an unpatched file beside patched ones",
                    do=f"run {COMMAND} --revert, then {COMMAND} --apply",
                )
            )
    return messages


def _rewrite(state: State, *, reverse: bool) -> None:
    """Change every file that is not yet as wanted: all are computed and their digests proven before one is written."""
    assert state.series is not None
    have, wanted = ("patched", "pristine") if reverse else ("pristine", "patched")
    texts = {path: (state.root / path).read_bytes() for path, kind in state.files.items() if kind == have}
    patches = [_parse(patch) for patch in state.series.patches]
    for hunks_by_file in reversed(patches) if reverse else patches:
        for path, hunks in hunks_by_file.items():
            if path in texts:
                texts[path] = _patch(texts[path], hunks, path, reverse=reverse)
    for target in state.series.targets:
        if target.path in texts and hashlib.sha256(texts[target.path]).hexdigest() != getattr(target, wanted):
            raise PatchError(
                describe(
                    "The patch series does not give what its BASE promises",
                    where=f"{target.path}, {state.series.patches[0].parent}",
                    do="restore that folder from version control",
                )
            )
    for path, text in texts.items():
        _replace(state.root / path, text)


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
            describe("vLLM cannot be patched", where=str(path), got=error, do="make the folder writable")
        ) from error


def _version(root: Path) -> str:
    """Public version, from the file that vLLM's build writes: metadata would depend on the name of the distribution."""
    path = root / "_version.py"
    found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"+]+)", _text(path), re.MULTILINE)
    if found is None:
        raise PatchError(describe("vLLM does not say its version", where=str(path), do="reinstall vLLM"))
    return found[1]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PatchError(describe("A file cannot be read", where=str(path), got=error.strerror)) from error


def _read_series(version: str) -> Series | None:
    folder = PATCHES / version
    if not (folder / "SERIES").is_file():
        return None
    names = [line for line in _text(folder / "SERIES").splitlines() if line and not line.startswith("#")]
    base = [line.split() for line in _text(folder / "BASE").splitlines() if line and not line.startswith("#")]
    if base[0] != ["version", version]:
        raise PatchError(describe("BASE is for another version", where=str(folder), got=base[0], expected=version))
    targets = tuple(Target(path, pristine, patched) for path, pristine, patched in base[1:])
    return Series(version, tuple(folder / name for name in names), targets)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _kind(path: Path, target: Target) -> str:
    if not path.is_file():
        return "missing"
    return {target.pristine: "pristine", target.patched: "patched"}.get(_digest(path), "unknown")


@dataclass(frozen=True, slots=True)
class _Hunk:
    """old_start, new_start: 0-based line numbers. lines: (" " | "-" | "+", bytes of the line)."""

    old_start: int
    new_start: int
    lines: tuple[tuple[str, bytes], ...]


def _parse(patch: Path) -> dict[str, list[_Hunk]]:
    """Hunks of a unified diff by path in the package. Text before the first file is its header, and skipped."""
    files: dict[str, list[_Hunk]] = {}
    lines = patch.read_bytes().splitlines(keepends=True)
    current: list[_Hunk] | None = None
    at = 0
    while at < len(lines):
        line = lines[at].decode("utf-8")
        at += 1
        if line.startswith("+++ b/vllm/"):
            current = files.setdefault(line.removeprefix("+++ b/vllm/").strip(), [])
        elif current is not None and (found := _HUNK.match(line)):
            old_start, old_count, new_start, new_count = (int(number or 1) for number in found.groups())
            body = []
            while old_count or new_count:
                if at == len(lines) or (mark := chr(lines[at][0])) not in " +-":
                    raise PatchError(describe("A patch is damaged", where=f"{patch}, line {at + 1}"))
                body.append((mark, lines[at][1:]))
                old_count -= mark != "+"
                new_count -= mark != "-"
                at += 1
            current.append(_Hunk(old_start - 1, new_start - 1, tuple(body)))
    return files


def _patch(text: bytes, hunks: list[_Hunk], path: str, *, reverse: bool) -> bytes:
    """Apply (or take back) hunks at exactly their lines: the digests of BASE leave nothing to search for."""
    lines = text.splitlines(keepends=True)
    dropped, added = ("+", "-") if reverse else ("-", "+")
    result: list[bytes] = []
    at = 0
    for hunk in hunks:
        start = hunk.new_start if reverse else hunk.old_start
        result += lines[at:start]
        before = [line for mark, line in hunk.lines if mark != added]
        if lines[start : start + len(before)] != before:
            raise PatchError(describe("A patch does not fit", where=f"{path}, line {start + 1}"))
        result += [line for mark, line in hunk.lines if mark != dropped]
        at = start + len(before)
    return b"".join(result + lines[at:])
