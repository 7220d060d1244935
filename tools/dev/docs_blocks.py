"""Runs the blocks of the docs: README.md, CONTRIBUTING.md, docs/ and examples/.

    python -m tools.dev.docs_blocks            # every page, every block: make docs-test
    python -m tools.dev.docs_blocks --quick    # runs only what needs no engine and takes less than about 2 s
    python -m tools.dev.docs_blocks README.md docs/howto/plan.md

The language of a fenced block says what it is: `sh` a command that a reader types, `yaml` a config or keys to put over
a shipped one, `python` Python, `text` output. A fence with another language or none, and an indented block of code,
count as unmarked. Comments on the lines above a fence say what differs:

    needs: gpu, cluster, long or network   is not run; its command lines and configs are checked
    base: configs/NAME.yaml                keys over this config, not over configs/tiny_moe_cpu.yaml
    after: previous                        Python that continues the Python block before it
    file: NAME                             the block is the text of this file, which later blocks of the page use
    sketch                                 is not meant to run

The blocks of a page share a fresh folder that looks like the repository, and the variables that the commands set. A
block of Python or YAML is also written to a file if the paragraph above it says "save this as `NAME.py`", or "put this
into `NAME.yaml`". Such a config is checked at the end of the page, where its files are. Output just below a block of
Python is compared with what that printed; a line `...` stands for any lines.

The result is build/docs_test.json. Exit status: 1 when a block failed or is unmarked, or over 10 are sketches.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import yaml

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "build/docs_test.json"
LANGUAGES = ("sh", "yaml", "python", "text")
NEEDS = ("gpu", "cluster", "long", "network")
MARKS = ("needs", "base", "after", "file", "sketch")
MOST_SKETCHES = 10
SECONDS = 600
"""The longest time that an unmarked block may take on a busy machine. Over a minute on a quiet one is `needs: long`."""
SLEEPER = 20

FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*(\S*)\s*$")
MARK = re.compile(r"^\s*<!--\s*([a-z]+)\s*(?::\s*(.*?))?\s*-->\s*$")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s")
SAVED = re.compile(
    r"\b(?:save|put|write|this)\b[^`]{0,40}?\b(?:as|into|to|in)\s+`([\w./-]+\.(?:py|yaml))`", re.IGNORECASE
)
# Programs that only handle files, and that a quick run may call.
HARMLESS = {
    *("cat", "cd", "chmod", "cp", "date", "echo", "export", "grep", "head", "ls", "mkdir", "mv", "printf", "pwd", "rm"),
    *("sed", "seq", "sort", "source", "tail", "test", "touch", "tr", "true", "wc"),
}
LINKED = (
    *(".venv", "assets", "benchmarks", "examples", "moe_rl", "patches", "requirements", "tests", "tools"),
    *("LICENSE", "Makefile", "README.md", "pyproject.toml", "setup.py"),
)
COPIED = ("configs", "docs")  # commands may write there

Outcome = Literal["run", "checked", "sketch", "failed", "unmarked"]


@dataclass
class Block:
    """One block of a page. language: "" for a fence without one, and for an indented block."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)
    above: str = ""
    """The lines of text between the block before it and this one."""

    @property
    def needs(self) -> str:
        return self.marks.get("needs", "")

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The file that the block is the text of; "" if none."""
        named = SAVED.findall(self.above.strip().split("\n\n")[-1])
        suffix = {"python": ".py", "yaml": ".yaml"}.get(self.language, "-")
        return self.marks.get("file") or next((name for name in named[-1:] if name.endswith(suffix)), "")


@dataclass
class Result:
    """What came of a block."""

    where: str
    language: str
    outcome: Outcome
    seconds: float
    reason: str = ""


def docs() -> list[Path]:
    """Return the pages, in the order of reading."""
    pages = [ROOT / "README.md", ROOT / "docs/README.md", ROOT / "docs/quickstart.md", ROOT / "CONTRIBUTING.md"]
    found = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return [*(page for page in pages if page.exists()), *sorted(page for page in found if page not in pages)]


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a page. page: its name in messages."""
    lines = text.splitlines()
    number, begin, in_list, blank, marks = 0, 0, False, True, {}
    while number < len(lines):
        line = lines[number]
        if fence := FENCE.match(line):
            end = number + 1
            while end < len(lines) and lines[end].strip() != fence[2]:
                end += 1
            body = [one.removeprefix(fence[1]) for one in lines[number + 1 : end]]
            yield Block(page, number + 1, fence[3], "\n".join(body) + "\n", marks, _prose(lines[begin:number]))
            number = begin = end + 1
            marks, blank = {}, False
            continue
        deep = 8 if in_list else 4
        if line.strip() and blank and line.startswith(" " * deep) and not ITEM.match(line):
            end = number
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" " * deep)):
                end += 1
            body = [one[deep:] for one in lines[number:end]]
            yield Block(page, number + 1, "", "\n".join(body).strip() + "\n", {}, _prose(lines[begin:number]))
            number = begin = end
            continue
        if mark := MARK.match(line):
            marks = marks | {mark[1]: mark[2] or ""}
        elif line.strip():
            marks = {}
            in_list = bool(ITEM.match(line)) or (in_list and (not blank or line.startswith(" ")))
        blank = not line.strip()
        number += 1


def _prose(lines: list[str]) -> str:
    return "\n".join(line for line in lines if not MARK.match(line))


def mark_fault(block: Block, before: Block | None) -> str:
    """Return what is wrong with the language and the comments of a block; "" if nothing is."""
    if block.language not in LANGUAGES:
        return f"its language is {block.language or 'not given'}, not one of {', '.join(LANGUAGES)}"
    if block.needs not in ("", *NEEDS):
        return f"needs: {block.needs} is not one of {', '.join(NEEDS)}"
    if "base" in block.marks and not (ROOT / block.marks["base"]).is_file():
        return f"base: {block.marks['base']} is no file"
    if block.marks.get("after", "previous") != "previous" or ("after" in block.marks and before is None):
        return "after: previous needs a block of Python before it"
    return ""


def mentions(text: str) -> list[str]:
    """Return the command lines of a block of commands, without comments, continuations joined."""
    text = re.sub(r"<<-?\s*'?(\w+)'?([^\n]*)\n.*?^\1$", r"\2", text, flags=re.DOTALL | re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


class Page:
    """Runs and checks the blocks of one page, in their order, in a folder of its own."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self.folder, self.quick = folder, quick
        self.script = ""  # the Python that `after: previous` continues
        self.printed: str | None = None  # by the block before this one, if that was Python that ran
        self.python: Block | None = None
        self.groups: list[int] = []
        self.scripts: set[str] = set()  # written by blocks; they import nothing but the standard library
        self.skipped = False  # whether a block of commands was only checked
        for name in LINKED:
            if (ROOT / name).exists():
                (folder / name).symlink_to(ROOT / name)
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name)

    def judge(self, block: Block) -> Result:
        """Run or check a block."""
        began = time.monotonic()
        fault = mark_fault(block, self.python)
        outcome: Outcome = "unmarked" if fault else "sketch"
        if not fault and "sketch" not in block.marks:
            printed, self.printed = self.printed, None
            try:
                outcome = getattr(self, f"_{block.language}")(block, printed)
            except Failed as error:
                outcome, fault = "failed", str(error)
        return Result(block.where, block.language, outcome, round(time.monotonic() - began, 2), fault)

    def close(self) -> None:
        """End what the commands have left running."""
        for group in self.groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)
        until = time.monotonic() + SLEEPER
        for group in self.groups:
            with suppress(ProcessLookupError):
                while time.monotonic() < until:
                    os.killpg(group, 0)
                    time.sleep(0.2)
                os.killpg(group, signal.SIGKILL)

    def _text(self, block: Block, printed: str | None) -> Outcome:
        if printed is None or block.above.strip():
            return "checked"
        shown = [line.rstrip() for line in block.text.splitlines() if line.strip() not in ("", "...")]
        have = [line.rstrip() for line in printed.splitlines()]
        at = 0
        for line in shown:
            if line not in have[at:]:
                raise Failed(f"the page shows {line!r}, which the block above it did not print: {have[-20:]}")
            at = have.index(line, at) + 1
        return "run"

    def _python(self, block: Block, printed: str | None) -> Outcome:
        self.script = (self.script if "after" in block.marks else "") + block.text
        self.python = block
        try:
            tree = ast.parse(self.script)
        except SyntaxError as error:
            raise Failed(f"line {error.lineno}: {error.msg}") from None
        if block.file:
            self._write(block.file, block.text)
            if _is_light(tree):
                self.scripts.add(block.file)
        for fault in import_faults(tree, self.folder):
            raise Failed(fault)
        if block.needs or (self.quick and not _is_light(tree)):
            return "checked"
        file = self.folder / f".block-{block.line}.py"
        file.write_text(self.script, encoding="utf-8")
        self.printed = self._call([sys.executable, str(file)], SECONDS)
        return "run"

    def _yaml(self, block: Block, printed: str | None) -> Outcome:
        try:
            data, *more = yaml.safe_load_all(block.text)
        except (yaml.YAMLError, ValueError) as error:
            raise Failed(f"no YAML: {error}") from None
        if more or not isinstance(data, dict) or "apiVersion" in data:
            return "checked"
        from tools.dev.docs_commands import is_whole

        text = block.text
        if not block.file and not is_whole(data):
            text = f"extends: {ROOT / block.marks.get('base', 'configs/tiny_moe_cpu.yaml')}\n{text}"
        self._write(block.file or f".block-{block.line}.yaml", text)
        if not block.file:
            self._check_config(block)
        return "checked" if block.needs else "run"

    def finish(self, block: Block) -> str:
        """Check what can only be checked when every block of the page has run. Return what is wrong; "" if nothing."""
        try:
            if block.language == "yaml" and block.file.endswith(".yaml") and "sketch" not in block.marks:
                self._check_config(block)
        except Failed as error:
            return str(error)
        return ""

    def _check_config(self, block: Block) -> None:
        from tools.dev.docs_commands import config_faults

        with chdir(self.folder), _importing_from(self.folder):
            absent = not block.needs and not self.skipped
            faults = config_faults(block.file or f".block-{block.line}.yaml", [], absent=absent)
        if faults:
            raise Failed("\n".join(faults))

    def _sh(self, block: Block, printed: str | None) -> Outcome:
        found = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        if found.returncode:
            raise Failed(f"no shell: {found.stderr.strip()}")
        from tools.dev.docs_commands import commands, line_faults

        lines = mentions(block.text)
        calls = [words for line in lines for words in commands(line)]
        runs = all(map(self._is_harmless, calls)) if self.quick else "make" not in [words[0] for words in calls]
        if block.needs or not runs:
            self.skipped = True
            with chdir(self.folder), _importing_from(self.folder):
                faults = [fault for line in lines for fault in line_faults(line)]
            if faults:
                raise Failed("\n".join(faults))
            return "checked"
        state = self.folder / ".state"
        text = f"[ ! -f {state} ] || . {state}\nset -eo pipefail\n{block.text}\nexport -p > {state}\n"
        try:
            self._call(["bash", "-c", text], SECONDS)
        except Failed:
            if not self.skipped:
                raise
            return "checked"  # it may need what a command left that was not run
        return "run"

    def _is_harmless(self, words: list[str]) -> bool:
        name = Path(words[0]).name
        return name in HARMLESS or (name == "python" and len(words) > 1 and words[1] in self.scripts)

    def _write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def _call(self, command: list[str], seconds: float) -> str:
        """Run a program in the page's folder. Return what it printed."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        # What a block leaves running in the background keeps the file open, and would keep a pipe open.
        with tempfile.TemporaryFile("w+") as out:
            called = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            self.groups.append(called.pid)
            try:
                status: int | str = called.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(called.pid, signal.SIGKILL)
                called.wait()
                status = f"none after {seconds} s"
            out.seek(0)
            text = out.read()
        if status != 0:
            raise Failed(f"exit status {status}: {text[-1500:].strip()}")
        return text


class Failed(Exception):
    """A block does not do what the page says."""


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Find modules in a folder too, as PYTHONPATH=$PWD does."""
    sys.path.insert(0, str(folder))
    invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def import_faults(tree: ast.Module, folder: Path) -> Iterator[str]:
    """Yield the modules of moe_rl, and the names in it, that a block imports and that do not exist."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "moe_rl":
            spec = find_spec(str(node.module))
            if spec is None or spec.origin is None:
                yield f"there is no module {node.module}"
                continue
            source = Path(spec.origin).read_text(encoding="utf-8")
            for name in node.names:
                if not re.search(rf"\b{name.name}\b", source) and find_spec(f"{node.module}.{name.name}") is None:
                    yield f"{node.module} has no {name.name}"


def _is_light(tree: ast.Module) -> bool:
    """Whether a block imports only the standard library."""
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").partition(".")[0])
    return roots <= sys.stdlib_module_names


def judge_page(path: Path, *, quick: bool, tell: Callable[[Result], object] = lambda result: None) -> list[Result]:
    """Run and check the blocks of one page."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    found = list(blocks(name, path.read_text(encoding="utf-8")))
    if not found:
        return []
    results = []
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        page = Page(Path(folder), quick=quick)
        try:
            for block in found:
                results.append(page.judge(block))
            for block, result in zip(found, results, strict=True):
                if result.outcome in ("run", "checked") and (fault := page.finish(block)):
                    result.outcome, result.reason = "failed", fault
                tell(result)
        finally:
            page.close()
    return results


def summary(results: list[Result]) -> dict[str, int]:
    """Count the blocks by what came of them."""
    count = {
        outcome: sum(one.outcome == outcome for one in results) for outcome in ("run", "checked", "failed", "unmarked")
    }
    return {"blocks": len(results), **count, "sketches": sum(one.outcome == "sketch" for one in results)}


def main() -> int:
    """Judge the pages, print what is wrong, write the result. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.dev.docs_blocks", description="Run the blocks of the docs.")
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="pages (default: all)")
    parser.add_argument("--quick", action="store_true", help="run only what is quick, check the rest")
    parser.add_argument(
        "--json", type=Path, default=RESULT, metavar="FILE", help=f"default: {RESULT.relative_to(ROOT)}"
    )
    options = parser.parse_args()

    def tell(one: Result) -> None:
        if one.reason:
            print(f"{one.where}: {one.outcome}: {one.reason}", flush=True)
        elif one.seconds > SLEEPER:
            print(f"{one.where}: {one.outcome} in {one.seconds:.0f} s", flush=True)

    pages = [page.resolve() for page in options.pages] or docs()
    results = [one for page in pages for one in judge_page(page, quick=options.quick, tell=tell)]
    counts = summary(results)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    document = counts | {"of_blocks": [asdict(one) for one in results]}
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(", ".join(f"{number} {name}" for name, number in counts.items()), f"- {options.json}")
    return int(bool(counts["failed"] or counts["unmarked"] or counts["sketches"] > MOST_SKETCHES))


if __name__ == "__main__":
    sys.exit(main())
