"""Checks command lines and configs of the docs as far as that goes without running them."""

from __future__ import annotations

import argparse
import ast
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_rl.config.check import config_problems, problems
from moe_rl.config.check_files import absent_problems
from moe_rl.config.layout import least_ranks
from moe_rl.config.load import find_config, load_config
from moe_rl.config.schema import Config
from moe_rl.errors import MoeRLError
from moe_rl.models.hf import read_published
from tools.dev.commands_page import parsers

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "train_moe_rl.py": "train",
    "serve_vllm.py": "serve",
    "trace.py": "trace",
    "compare_routing_kl.py": "compare",
    "replay_matrix.py": "prove",
    "apply_patches.py": "patch",
    "export_hf.py": "export",
}
BEFORE = {"do", "else", "if", "nice", "nohup", "sudo", "then", "time", "until", "while", "!"}
AFTER = {"done", "fi", "for", "case", "esac", "in", "}", "{"}
OPEN = re.compile(r"^[a-z_]+(\.\w+)+=.*\$")  # an override with a variable in it
VARIABLE = re.compile(r"\$\{[^}]*\}|\$\w+|\$\([^)]*\)|\$[!?@*]")


def config_faults(
    path: str | Path, overrides: Sequence[str], *, absent: bool, ranks: int | None = None, whole: bool = True
) -> list[str]:
    """Return what a plan would say against a config.

    absent: files that are not here are a fault too. whole: these are all overrides; if not, keys are not compared.
    """
    try:
        config = load_config(path, overrides)
        if not whole:
            return []
        world_size = ranks or (config.cluster.gpus if config.cluster is not None else least_ranks(config.parallel))
        if config.model.published is not None and not config.model.path.is_dir():
            found = config_problems(config, read_published(config.model.published), world_size)
        else:
            found = problems(config, world_size) + (absent_problems(config) if absent else [])
    except MoeRLError as error:
        return [str(error)]
    unique = dict.fromkeys(map(str, found))
    return list(unique) if absent else [one for one in unique if not _is_about_files(one)]


def is_whole(data: dict[str, Any]) -> bool:
    """Whether a config stands for itself: it has every required section, or says what it extends."""
    return "extends" in data or {name for name, one in Config.model_fields.items() if one.is_required()} <= data.keys()


def commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line, without what only wraps it and without redirections."""
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words = list(lexer)
    except ValueError:
        return
    command: list[str] = []
    skip = False
    for word in [*words, ";"]:
        if skip:
            skip = False
        elif re.fullmatch(r"[<>]+&?|&>+", word):
            skip = True
            if command and command[-1].isdigit():
                command.pop()
        elif re.fullmatch(r"[;|&()]+", word):
            if inner := _bare(command):
                yield inner
            command = []
        else:
            command.append(word)


def _bare(words: list[str]) -> list[str]:
    words = list(words)
    while words and (re.match(r"^\w+=", words[0]) or words[0] in BEFORE or (words[0] == "-n") or words[0].isdigit()):
        words.pop(0)
    return [] if not words or words[0] in AFTER or words[0] == "[" else words


def line_faults(line: str) -> list[str]:
    """Return what is wrong with a command line: options, keys, files, targets and modules that do not exist.

    A variable may stand for a number, for a name, or for several words, which are then not looked at.
    """
    return min((list(_line_faults(line, value)) for value in ("1", "name", None)), key=len)


def _is_dropped(before: str, word: str, value: str | None) -> bool:
    return bool(OPEN.search(word)) or (value is None and not before.startswith("-") and bool(VARIABLE.fullmatch(word)))


def _line_faults(line: str, value: str | None) -> Iterator[str]:
    for given in commands(line):
        kept = [word for before, word in pairwise(["", *given]) if not _is_dropped(before, word, value)]
        words = [VARIABLE.sub(value or "1", word) for word in kept or given]
        name, rest, whole = Path(words[0]).name, words[1:], len(kept) == len(given)
        if name == "torchrun":
            name, rest = "python", _after_torchrun(rest)
        if name in ("python", "python3", "python3.12"):
            yield from _python_faults(rest, whole)
        elif name == "moe-rl":
            yield from _verb_faults(rest, whole)
        elif name == "make":
            targets = {word for word in rest if "=" not in word and not word.startswith("-")}
            known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
            yield from (f"the Makefile has no target {target}" for target in targets - known)
        elif name == "pip":
            yield from _pip_faults(rest)
        elif name == "pytest":
            yield from _pytest_faults(rest)
        elif name in ("bash", "sbatch") and rest and not rest[0].startswith("-"):
            yield from _file_faults(rest[0])


def _after_torchrun(words: list[str]) -> list[str]:
    """Return the program that torchrun starts, with its arguments."""
    for at, word in enumerate(words):
        if word == "-m":
            return ["-m", *(one for one in words[at + 1 :][:1] if one != "--"), *words[at + 2 :]]
        if word.endswith(".py"):
            return words[at:]
    return []


def _python_faults(words: list[str], whole: bool) -> Iterator[str]:
    if words[:1] == ["-m"]:
        module, rest = words[1], words[2:]
        if module == "moe_rl":
            yield from _verb_faults(rest, whole)
        elif module == "pytest":
            yield from _pytest_faults(rest)
        elif module == "pip":
            yield from _pip_faults(rest)
        elif module.partition(".")[0] in ("moe_rl", "tests", "tools") and find_spec(module) is None:
            yield f"there is no module {module}"
    elif words and words[0].endswith(".py"):
        yield from _file_faults(words[0])
        if Path(words[0]).parent.name == "tools" and (verb := SCRIPTS.get(Path(words[0]).name)):
            yield from _verb_faults([verb, *words[1:]], whole)


@cache
def _parsers() -> dict[str, argparse.ArgumentParser]:
    return dict(parsers())


def _verb_faults(words: list[str], whole: bool) -> Iterator[str]:
    if not words or words[0] == "--help":
        return
    verb, *rest = words
    parser = _parsers().get(verb)
    if parser is None:
        yield f"moe-rl has no verb {verb}"
        return
    if "--help" in rest:
        return
    cut = rest.index("--") if "--" in rest else len(rest)
    told = io.StringIO()
    try:
        with redirect_stderr(told), redirect_stdout(told):
            given = parser.parse_args(rest[:cut])
    except SystemExit:
        yield f"moe-rl {verb}: {told.getvalue().strip().splitlines()[-1]}"
        return
    if cut < len(rest) and verb != "serve":
        yield f"moe-rl {verb} takes nothing after --"
    overrides = getattr(given, "overrides", [])
    if config := getattr(given, "config", None):
        try:
            file = find_config(config)
        except MoeRLError as error:
            yield str(error)
            return
        ranks = getattr(given, "ranks", None)
        ranks = ranks if isinstance(ranks, int) else None
        yield from config_faults(file, overrides, absent=False, ranks=ranks, whole=whole)
    else:
        yield from (f"{one} is no override a.b=c" for one in overrides if not re.match(r"^[\w.]+=", one))


def _is_about_files(problem: str) -> bool:
    kinds = r"there is no such f|cannot read|does not exist|nothing that prompts are|is not installed|is no file"
    return bool(re.search(kinds, problem))


def _file_faults(name: str) -> Iterator[str]:
    if not Path(name).exists() and not (ROOT / name).exists():
        yield f"there is no file {name}"


def _pip_faults(words: list[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("moe_rl[") or word == "moe_rl":
            yield f"{word} is on no index: install from the checkout with -e ."
        if extras := re.match(r"^\.\[([\w,-]+)\]", word):
            known = re.findall(
                r'^        "([a-z]+)": \[', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE
            )
            yield from (f"setup.py has no extra {extra}" for extra in extras[1].split(",") if extra not in known)


def _pytest_faults(words: list[str]) -> Iterator[str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", dest="word")
    parser.add_argument("-m", dest="mark")
    parser.add_argument("-n", dest="processes")
    parser.add_argument("--seeds")
    given, rest = parser.parse_known_args(words)
    paths = [ROOT / word.partition("::")[0] for word in rest if not word.startswith("-")]
    yield from (f"there is no file {path.relative_to(ROOT)}" for path in paths if not path.exists())
    if given.word and re.fullmatch(r"\w+", given.word):
        files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
        if not any(_selected(given.word, file) for file in files):
            yield f"pytest -k {given.word} selects no test"


def _selected(word: str, file: Path) -> bool:
    names = [file.stem]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            names.append(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.append(node.value[:100])  # it may be the name of a case
    return any(word in name for name in names)
