"""Plants one fault at a time into a copy of the checkout, and runs the tests that should see it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from tests.mutants.faults import Mutant

ROOT = Path(__file__).resolve().parents[2]
# What pytest selects when the long tests run too.
WITH_LONG_TESTS = "not gpu and not chaos"
# A fault may make a test wait for ever. The longest test that kills a fault takes a minute.
_TEST_SECONDS = 300
_FAILED, _NOTHING_COLLECTED = 1, 5


class StaleEntry(Exception):
    """A mutant's text is not in its file exactly once, or the file with the fault is no Python."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant. killer: id of the first test that failed, "" when none did. seconds: of CPU time,
    of all tests that ran for it."""

    mutant: Mutant
    killer: str
    seconds: float


def with_fault(mutant: Mutant, root: Path = ROOT) -> str:
    """Return the mutant's file with its fault. Raises StaleEntry naming the mutant."""
    text = (root / mutant.file).read_text(encoding="utf-8")
    found = text.count(mutant.old)
    if found != 1:
        raise StaleEntry(f"{mutant.name}: {mutant.old!r} is {found} times in {mutant.file}, expected once")
    changed = text.replace(mutant.old, mutant.new)
    try:
        compile(changed, mutant.file, "exec")
    except SyntaxError as error:
        raise StaleEntry(f"{mutant.name}: {mutant.file} is no Python with the fault: {error}") from error
    if changed == text:
        raise StaleEntry(f"{mutant.name}: the fault changes nothing")
    return changed


def copy_checkout(target: Path) -> None:
    """Copy every file that git tracks, or would track, to a folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_file():  # a file may be removed and not yet committed
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)


def judge(mutant: Mutant, copy: Path, *, all_tests: bool) -> Outcome:
    """Plant a mutant in a copy of the checkout, run its tests until one fails, and take the fault out again."""
    changed, file, killer, before = with_fault(mutant, copy), copy / mutant.file, "", _cpu_seconds()
    _replace(file, changed.encode())
    try:
        for tests in ((*mutant.tests,), (mutant.folder,)):
            # The files that are named first are the most likely to see it; then comes everything else of the room.
            if tests and not killer:
                killer = _killer(copy, tests, all_tests=all_tests)
    finally:
        _replace(file, (ROOT / mutant.file).read_bytes())
    return Outcome(mutant, killer, _cpu_seconds() - before)


def _cpu_seconds() -> float:
    """What the tests took so far: unlike time by the clock, it does not depend on what else the machine does."""
    times = os.times()
    return times.children_user + times.children_system


def _killer(copy: Path, tests: Sequence[str], *, all_tests: bool) -> str:
    """Id of the first test that fails twice, "" when none does: on a busy machine a test may fail for want of time."""
    passed_again: list[str] = []
    while found := _run(copy, tests, all_tests=all_tests, first=True, without=passed_again):
        if _run(copy, found, all_tests=all_tests, first=True):
            return found[0]
        passed_again += found
    return ""


def failing(copy: Path, tests: Sequence[str], *, all_tests: bool) -> list[str]:
    """Run these tests on a copy without a fault; return those that fail, which therefore prove nothing."""
    wrong: list[str] = []
    for start in range(0, len(tests), 50):
        wrong += _run(copy, tests[start : start + 50], all_tests=all_tests, first=False)
    return wrong


def _run(copy: Path, tests: Sequence[str], *, all_tests: bool, first: bool, without: Sequence[str] = ()) -> list[str]:
    """Ids of the tests that fail. first: stop at the first one. without: tests that are left out."""
    cache, output = copy / ".pytest_cache", copy / "pytest.log"
    shutil.rmtree(cache, ignore_errors=True)
    arguments = ["-q", "--tb=no", f"--timeout={_TEST_SECONDS}", "-o", f"cache_dir={cache}"]
    arguments += ["-x"] if first else []
    arguments += ["-m", WITH_LONG_TESTS] if all_tests else []
    arguments += [part for test in without for part in ("--deselect", test)]
    child = os.fork()
    if not child:
        _become_pytest(copy, output, [*arguments, *tests])
    try:
        _, ended = os.waitpid(child, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what its tests have left, or all of it if this process is to end
    status = os.waitstatus_to_exitcode(ended)
    failed = cache / "v/cache/lastfailed"
    if failed.exists() and status:
        return list(json.loads(failed.read_text()))
    if status not in (0, _NOTHING_COLLECTED):
        raise RuntimeError(f"pytest ended with status {status}: {output.read_text()[-2000:]}")
    return []


def preload() -> None:
    """Import what most tests import, but for moe_rl: processes that are forked from this one need not do it again."""
    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported
    for name in ("numpy", "torch", "hypothesis", "pydantic", "pytest"):
        importlib.import_module(name)


def _become_pytest(copy: Path, output: Path, arguments: list[str]) -> NoReturn:
    """Run pytest in this process, which was just forked, on a copy of the checkout; never return."""
    status: int = 1
    try:
        os.setsid()
        with output.open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("moe_rl", "tests")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


def _replace(file: Path, content: bytes) -> None:
    """Write a file, and remove the bytecode of what it was: a change within a second may keep its length."""
    file.write_bytes(content)
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
