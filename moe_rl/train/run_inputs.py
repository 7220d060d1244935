"""Records digests of what a run reads besides its config, so that a resumed run continues with the same inputs.

`inputs.jsonl` in the run folder has a line for each input:

    model/FILE        weights, config.json, tokenizer, chat template and generation config in model.path
    train/SOURCE      the prompts of a source as the run made them, each row with the answer and all other columns
    heldout/SOURCE    the same for held-out prompts; for an endless source, its first items
    reward/NAME/MODULE, environment/MODULE
                      source files of your functions and of the modules that these import: see `tasks.code_files`
    package/NAME      versions of installed packages that give rewards or prompts

Digests cover content only, so a copy in another folder has the same digest. For a file above 64 MiB the digest covers
the size and 4 KiB of each MiB: further training or a merge changes every part, and reading a large checkpoint whole
takes minutes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.disk import write_whole
from moe_rl.errors import About, ConfigError, MoeRLError, Problem, describe, did_you_mean, first_of
from moe_rl.report.json_lines import encode, read_lines
from moe_rl.tasks.code_files import code_of
from moe_rl.tasks.prompts import PromptSet, TaskPrompts
from moe_rl.train.run_folder import RunFolder
from moe_rl.types import Prompt

FILE = "inputs.jsonl"
_OF_MODEL = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken", ".py")
_WHOLE_BYTES, _STRIDE, _BLOCK = 64 << 20, 1 << 20, 4096
_READERS = 8  # files that are read at once
_PACKAGES = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}


@dataclass(frozen=True, slots=True)
class RunInput:
    """Describes one input of a run.

    Attributes:
        digest: its content's digest; for a package, the version.
        rows: for a source of prompts, the digest of each prompt by its id, in order.
    """

    name: str
    digest: str
    rows: dict[str, str] = field(default_factory=dict)


def read_inputs(config: Config, task: TaskPrompts) -> list[RunInput]:
    """Return the inputs of a run as they are now. Runs no code of the user."""
    sections = (("train", task.train), ("heldout", task.heldout))
    rows = [_of_prompts(f"{section}/{source.name}", source) for section, sets in sections for source in sets]
    return [*_of_model(config.model.path), *rows, *_of_code(config)]


def write_inputs(folder: RunFolder, inputs: Sequence[RunInput]) -> None:
    """Write the inputs of a run into its folder."""
    write_whole(folder.path / FILE, encode(inputs), "the inputs of the run")


def changed_inputs(folder: RunFolder | None, config: Config, inputs: Sequence[RunInput]) -> dict[str, tuple[Any, Any]]:
    """Return old and new digest of each input that differs from that of the resumed or replayed run.

    A run that replays another needs only that run's model and prompts. Held-out prompts are not compared if the config
    of a resumed run names different ones.

    Args:
        folder: the resumed run's folder; None for a new run.

    Returns:
        By name. None stands for an input that did not exist then, or does not exist now.

    Raises:
        MoeRLError: the inputs of that run cannot be read.
    """
    if (earlier := _earlier(folder, config)) is None:
        return {}
    return _compared(earlier, _read(earlier), config, {run_input.name: run_input for run_input in inputs})


def _compared(
    earlier: RunFolder, before: Mapping[str, RunInput], config: Config, now: Mapping[str, RunInput]
) -> dict[str, tuple[Any, Any]]:
    left_out: tuple[str, ...] = ()
    if config.run.replays is not None:
        left_out = ("heldout/", "reward/", "environment/", "package/")
    elif load_config(earlier.config).task.heldout != config.task.heldout:
        left_out = ("heldout/",)
    pairs = [(name, before.get(name), now.get(name)) for name in dict.fromkeys([*before, *now])]
    return {
        name: (old and old.digest, new and new.digest)
        for name, old, new in pairs
        if old != new and not name.startswith(left_out)
    }


def input_problems(
    folder: RunFolder | None, config: Config, inputs: Sequence[RunInput], accepted: Sequence[str]
) -> list[Problem]:
    """Say which inputs differ from those of the resumed or replayed run, and were not accepted as changed.

    Args:
        folder: the resumed run's folder; None for a new run.
        accepted: names of inputs, or of groups of them, such as model or train/sums.
    """
    if (earlier := _earlier(folder, config)) is None:
        return []
    now = {run_input.name: run_input for run_input in inputs}
    try:
        before = _read(earlier)
        changed = _compared(earlier, before, config, now)
    except MoeRLError as error:
        return [error.message]
    known = {"/".join(name.split("/")[:end]) for name in (*before, *now) for end in range(1, name.count("/") + 2)}
    problems = [
        describe(
            "there is no such input of the run",
            where={"option": "--accept"},
            got=name,
            expected=f"one of {', '.join(sorted({group.partition('/')[0] for group in known}))}, or a name under it",
            do=did_you_mean(name, known),
        )
        for name in accepted
        if name not in known
    ]
    wrong = [name for name in changed if not any(name == group or name.startswith(f"{group}/") for group in accepted)]
    if wrong:
        where: About = {"folder": earlier.path, "file": FILE}
        changes = [f"{name}: {_told(before.get(name), now.get(name))}" for name in wrong]
        groups = dict.fromkeys(name if name.startswith(("train/", "heldout/")) else name.partition("/")[0]
                               for name in wrong)  # fmt: skip
        problems.append(
            describe(
                "what the run reads has changed since it began",
                where=where,
                got=first_of(changes),
                expected="all of it as it was",
                do="put it back, or start a new run. To continue with the change: "
                + " ".join(f"--accept {group}" for group in groups),
                fault="inputs",
            )
        )
    return problems


def _earlier(folder: RunFolder | None, config: Config) -> RunFolder | None:
    """Return the folder of the run that is resumed or replayed."""
    return RunFolder(config.run.replays) if folder is None and config.run.replays is not None else folder


def _read(folder: RunFolder) -> dict[str, RunInput]:
    if not (folder.path / FILE).exists():
        raise ConfigError(
            "the run has no record of what it reads",
            where={"file": folder.path / FILE},
            got="no such file",
            do="start a new run, with model.from_run to continue with its weights",
            fault="absent",
        )
    return {run_input.name: run_input for run_input in read_lines(folder.path / FILE, RunInput)}


def _told(old: RunInput | None, new: RunInput | None) -> str:
    if old is None or new is None:
        return "new" if old is None else "gone"
    if not (old.rows or new.rows):
        return f"{old.digest} -> {new.digest}"
    before, now = old.rows, new.rows
    if len(before) == len(now) and sorted(before.values()) == sorted(now.values()):
        pairs = zip(before, now, strict=True)
        moved = next((name for name, other in pairs if before[name] != now[other]), None)
        return "the same rows " + ("under other ids" if moved is None else f"in another order, from {moved} on")
    differ = [name for name in before if name in now and before[name] != now[name]]
    lacking, more = [name for name in before if name not in now], [name for name in now if name not in before]
    kinds = ((differ, "changed"), (lacking, "gone"), (more, "more"))
    parts = [f"{len(names)} rows {what} ({first_of(names, separator=', ')})" for names, what in kinds if names]
    return "; ".join(parts) or "its rows are in another order"


def _of_prompts(name: str, source: PromptSet) -> RunInput:
    rows = {prompt.id: _of_row(prompt) for prompt in source.prompts}
    return RunInput(name, xxhash.xxh3_128_hexdigest(json.dumps(list(rows.items())).encode()), rows)


def _of_row(prompt: Prompt) -> str:
    """Return the digest of a prompt without its id, which may be the number of its row."""
    content = [prompt.text, prompt.columns, prompt.messages, prompt.level]
    digest = xxhash.xxh3_64(json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    digest.update(np.asarray(prompt.token_ids, "<i8").tobytes())
    return digest.hexdigest()


def _of_model(folder: Path) -> Iterator[RunInput]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in _OF_MODEL and path.is_file())
    # Subfolders of a checkpoint hold the same weights in other formats; only their templates are new.
    files = [path for path in files if path.parent == folder or path.suffix == ".jinja"]
    with ThreadPoolExecutor(_READERS) as pool:
        for path, digest in zip(files, pool.map(_of_file, files), strict=True):
            yield RunInput(f"model/{path.relative_to(folder)}", digest)


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = xxhash.xxh3_128(b"%d " % size)
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for offset in (*range(0, size, _STRIDE), max(0, size - _BLOCK)):
                digest.update(os.pread(file.fileno(), _BLOCK, offset))
    return digest.hexdigest()


def _of_code(config: Config) -> Iterator[RunInput]:
    task = config.task
    functions = {
        f"reward/{name}": reward.function for name, reward in task.rewards.items() if reward.kind == "function"
    }
    if task.environment is not None:
        functions["environment"] = task.environment.run
    packages: dict[str, str] = {}
    for name, function in functions.items():
        files, imported = code_of(function)
        packages |= imported
        yield from (RunInput(f"{name}/{module}", _of_file(file)) for module, file in sorted(files.items()))
    used = {_PACKAGES.get(reward.kind, "") for reward in task.rewards.values()}
    used |= {_PACKAGES["reasoning_gym"]} if task.generators else set()
    used |= {"renderers"} if task.environment is not None else set()
    for package in filter(None, used):
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[package] = importlib.metadata.version(package)
    yield from (RunInput(f"package/{name}", version) for name, version in sorted(packages.items()))
