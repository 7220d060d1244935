"""Reads a patch series from patches/vllm/VERSION: its patches in order, their digests and their hunks. The folder cpu
in it, of the same form, has the patches that only the CPU build of vLLM needs as well.

SERIES   version X       the vLLM release that the series is for
         ran TEXT        how the patches were run on that release; without this line no engine starts
         NAME.patch      one line per patch, in order
BASE     PATCH PATH SHA256 SHA256    for every file that a patch changes: its digest before and after
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moe_rl.errors import PatchError
from moe_rl.shipped import shipped

if TYPE_CHECKING:
    from unidiff import PatchedFile

PATCHES = shipped("patches") / "vllm"
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Change:
    """Describes what one patch does to one file: path in the vllm package, sha256 hex before and after."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Patch:
    """Describes one patch file and everything it changes."""

    file: Path
    changes: tuple[Change, ...]

    @property
    def name(self) -> str:
        return self.file.name


@dataclass(frozen=True, slots=True)
class Series:
    """Lists the patches for one vLLM version in order. `ran` says how they were run; None if they never were. `on_cpu`
    is the whole series of its CPU build."""

    version: str
    ran: str | None
    patches: tuple[Patch, ...]
    on_cpu: Series | None = None

    @property
    def stages(self) -> dict[str, tuple[str, ...]]:
        """Map each path to the sha256 of the released file and of the file after each patch that changes it."""
        digests: dict[str, tuple[str, ...]] = {}
        for patch in self.patches:
            for change in patch.changes:
                digests[change.path] = (*digests.get(change.path, (change.before,)), change.after)
        return digests


def read_hunks(patch: Path, package: str) -> dict[str, PatchedFile]:
    """Return the hunks of every file that a patch changes, by its path in `package`.

    Raises PatchError, with the line, if a hunk does not match its line counts.
    """
    # Imported late: every engine inspects its vLLM at the start, for which digests suffice.
    from unidiff import PatchSet, UnidiffParseError

    with open(patch, encoding="utf-8", newline="\n") as file:
        lines = list(file)
    unread = iter(lines)
    try:
        return {file.path.removeprefix(f"{package}/"): file for file in PatchSet(unread)}
    except UnidiffParseError as error:
        line = len(lines) - operator.length_hint(unread)
        raise PatchError("A patch is damaged", where={"file": patch, "line": line}, got=error) from error


def read_all(folder: Path) -> list[Series]:
    """Return every series below `folder`, by version. Raises PatchError if one contradicts itself."""
    all_series = []
    for file in sorted(folder.glob("*/SERIES")):
        series = _read(file.parent, file.parent.name)
        if (file.parent / CPU).is_dir():
            more = _read(file.parent / CPU, series.version)
            on_cpu = replace(more, patches=(*series.patches, *more.patches))
            _check_chains(on_cpu, file.parent / CPU)
            series = replace(series, on_cpu=on_cpu)
        all_series.append(series)
    return all_series


def _read(folder: Path, version: str) -> Series:
    fields: dict[str, str] = {}
    names: list[str] = []
    for line in _lines(folder / "SERIES"):
        word, _, rest = line.partition(" ")
        if rest:
            fields[word] = rest
        else:
            names.append(word)
    if fields.keys() - {"ran"} != {"version"} or fields["version"] != version or not names:
        raise PatchError(
            "A patch series is damaged",
            where={"file": folder / "SERIES"},
            got=f"{', '.join(fields) or 'nothing'} and {len(names)} patches",
            expected=f"version {version}, what ran, and its patches",
            do="restore that folder from version control",
        )
    changes: dict[str, list[Change]] = {name: [] for name in names}
    for line in _lines(folder / "BASE"):
        if len(words := line.split()) != 4:
            raise _damaged_base(folder, repr(line))
        name, path, before, after = words
        if name not in changes:
            raise _damaged_base(folder, f"{name}, which SERIES does not list")
        changes[name].append(Change(path, before, after))
    series = Series(
        version, fields.get("ran"), tuple(Patch(folder / name, tuple(of_patch)) for name, of_patch in changes.items())
    )
    _check_chains(series, folder)
    return series


def _check_chains(series: Series, folder: Path) -> None:
    """Check that every patch changes something, and starts from each file as the previous patch left it."""
    left: dict[str, str] = {}
    for patch in series.patches:
        if not patch.changes:
            raise _damaged_base(folder, f"nothing for {patch.name}")
        for change in patch.changes:
            if left.get(change.path, change.before) != change.before:
                raise _damaged_base(folder, f"{patch.name} on another {change.path} than the patch before it leaves")
            left[change.path] = change.after


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise PatchError("A patch series is damaged", where={"file": file}, got=error.strerror) from error
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _damaged_base(folder: Path, got: str) -> PatchError:
    return PatchError(
        "A patch series is damaged",
        where={"file": folder / "BASE"},
        got=got,
        do="restore that folder from version control",
    )
