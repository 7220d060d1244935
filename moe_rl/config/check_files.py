"""Checks the files, folders and code that a config names."""

from __future__ import annotations

import ast
import codecs
import dataclasses
import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_rl.config.prompt_sources import PromptSourceConfig
from moe_rl.config.reward_kinds import FunctionReward
from moe_rl.config.schema import Config
from moe_rl.errors import About, ConfigError, Problem, describe, did_you_mean, with_extra
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import read_published, tokenizer_vocabulary
from moe_rl.models.weight_files import read_checkpoint

# Fields in which published figures may differ from a checkpoint: they say which software wrote it, and how.
NOT_COMPARED = ("fingerprint", "dtype", "eos_token_ids")


def file_problems(config: Config, facts: ModelFacts | None, samples: bool = True) -> list[Problem]:
    """Return one message for each problem. facts: the checkpoint's, None if they could not be read. samples: see
    `check.problems`."""
    of_checkpoint = [*(_checkpoint_problems(config, facts) if facts is not None else ())]
    return [*of_checkpoint, *absent_problems(config), *prompt_problems(config)] if samples else of_checkpoint


def absent_problems(config: Config) -> list[Problem]:
    """Return what a config names and this machine lacks: prompt files, reward functions, a folder for runs. The machine
    that runs it may have them."""
    return [
        *_absent_sources("train", config.task.train),
        *_absent_sources("heldout", config.task.heldout),
        *_reward_problems(config),
        *_folder_problems(config.run.runs_dir),
    ]


def _absent_sources(key: str, sources: Sequence[PromptSourceConfig]) -> Iterator[Problem]:
    for index, source in enumerate(sources):
        if source.kind == "generator" or source.may_be_on_the_hub:
            continue
        if not (os.path.isdir if source.kind == "dataset" else os.path.isfile)(source.data):
            where: About = {"key": f"task.{key}.{index}.data", "file": source.data}
            if source.kind != "dataset":
                yield describe("there is no such file", where=where, do="correct the path")
            else:
                kinds = "a .jsonl file, a .parquet file, a data set's folder or hub name, or reasoning_gym:TASK"
                yield describe("prompts cannot be read from this", where=where, expected=kinds)


def _checkpoint_problems(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    path = config.model.path
    try:
        if packing := read_checkpoint(path, facts).packing:
            yield describe(
                "the checkpoint is packed, and the sampler would not get what the trainer sends",
                where={"key": "model.path", "folder": path},
                got=f"{len(packing)} tensors in {' and '.join(sorted(set(packing.values())))}",
                do=f"unpack it first: moe-rl export --model {path} --out FOLDER",
            )
    except ConfigError as error:
        yield from error.problems
    try:
        if (path / "tokenizer.json").is_file():  # the ids of other tokenizers are counted when they are loaded
            yield from vocabulary_problems(config, facts, tokenizer_vocabulary(path))
    except ConfigError as error:
        yield from error.problems
    if config.model.published is not None:
        try:
            yield from _other_model(config, facts, read_published(config.model.published))
        except ConfigError as error:
            yield from error.problems


def vocabulary_problems(config: Config, facts: ModelFacts, vocabulary: int) -> Iterator[Problem]:
    """Yield a problem if the tokenizer gives more ids than the model has."""
    if vocabulary > facts.vocab:
        yield describe(
            "the tokenizer gives ids the model has no embedding for",
            where={"key": "model.path", "folder": config.model.path},
            got=f"{vocabulary} ids",
            expected=f"at most vocab_size = {facts.vocab}",
            do="take the tokenizer and the weights from the same checkpoint",
        )


def _other_model(config: Config, facts: ModelFacts, published: ModelFacts) -> Iterator[Problem]:
    names = [field.name for field in dataclasses.fields(ModelFacts) if field.name not in NOT_COMPARED]
    differ = [name for name in names if getattr(facts, name) != getattr(published, name)]
    if differ:
        got, wanted = (", ".join(f"{name} {getattr(model, name)}" for name in differ) for model in (facts, published))
        yield describe(
            "not the model whose figures model.published has",
            where={"key": "model.path", "folder": config.model.path, "field": ", ".join(differ)},
            got=got,
            expected=f"{wanted} as in {config.model.published}",
            do="give that model's checkpoint; or set model.published=null for another model, such as a base model: "
            "then nothing checks that this is the model that the layout was planned for, and a plan needs the "
            "checkpoint itself",
        )


def prompt_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of the prompt files that can be read."""
    task = config.task
    train, heldout = count_prompts(task.train), count_prompts(task.heldout)
    for key, sources, counts in (("train", task.train, train), ("heldout", task.heldout, heldout)):
        for index, (source, count) in enumerate(zip(sources, counts, strict=True)):
            if count == 0:
                yield describe("the prompt file is empty", where={"key": f"task.{key}.{index}", "file": source.data})
    for index, heldout_source in enumerate(task.heldout):
        if same := next((source.name for source in task.train if _same_prompts(source, heldout_source)), ""):
            yield describe(
                f"the same prompts as source {same} of task.train",
                where={"key": f"task.heldout.{index}"},
                got=heldout_source.data,
                do="give prompts that are never trained on",
            )
    yield from number_problems(config, together(train), heldout)


def number_problems(config: Config, train: int | None, heldout: Sequence[int | None]) -> Iterator[Problem]:
    """Yield the problems with the number of prompts of all training sources, and of each held-out source.

    None: not known, or endless. 0 prompts are another problem.
    """
    task = config.task
    if train and task.train_prompts not in (None, train):
        yield describe(
            "the sources of task.train have another number of prompts",
            where={"key": "task.train_prompts"},
            got=f"{train} prompts",
            expected=task.train_prompts,
        )
    if train and train < config.rollout.prompts_per_step:
        yield describe(
            "more prompts in one step than task.train has",
            where={"key": "rollout.prompts_per_step"},
            got=config.rollout.prompts_per_step,
            expected=f"at most {train}",
        )
    for index, (source, count) in enumerate(zip(task.heldout, heldout, strict=True)):
        wanted = config.eval.prompts if source.prompts is None else source.prompts
        if count and count < wanted:
            yield describe(
                f"more than the source {source.name} of task.heldout has",
                where={
                    "key": f"task.heldout.{index}.prompts" if source.prompts else "eval.prompts",
                    "file": source.data,
                },
                got=wanted,
                expected=f"at most {count}",
            )


def _same_prompts(source: PromptSourceConfig, other: PromptSourceConfig) -> bool:
    if source.kind in ("generator", "dataset") or other.kind != source.kind:
        fields = ("data", "split", "config", "options", "seed")
        return all(getattr(source, field) == getattr(other, field) for field in fields)
    return os.path.isfile(source.data) and os.path.isfile(other.data) and os.path.samefile(source.data, other.data)


def _reward_problems(config: Config) -> Iterator[Problem]:
    if (environment := config.task.environment) is not None:
        if environment.python is not None:  # the environment may be one of its packages
            if not os.access(environment.python, os.X_OK):
                yield describe(
                    "this is no program",
                    where={"key": "task.environment.python"},
                    got=environment.python,
                    expected="an interpreter",
                )
        elif wrong := dotted_path_problem(environment.run):
            yield describe(wrong, where={"key": "task.environment.run"}, got=environment.run)
        if importlib.util.find_spec("uvicorn") is None:
            yield describe(
                "the library uvicorn, through which environments call the model, is not installed",
                where={"key": "task.environment"},
                got=environment.run,
                do=with_extra("serve"),
                fault="no library",
            )
    for name, reward in config.task.rewards.items():
        if reward.library is not None and importlib.util.find_spec(reward.library[0]) is None:
            yield describe(
                f"the library {reward.library[0]} is not installed",
                where={"key": f"task.rewards.{name}.kind"},
                got=reward.kind,
                do=with_extra(reward.library[1]),
                fault="no library",
            )
        if isinstance(reward, FunctionReward):
            wrong = dotted_path_problem(reward.function)
            if wrong:
                yield describe(wrong, where={"key": f"task.rewards.{name}.function"}, got=reward.function)


def _folder_problems(runs_dir: Path) -> Iterator[Problem]:
    parent = existing_folder(runs_dir)
    if not parent.is_dir():
        yield describe("not a folder", where={"key": "run.runs_dir", "folder": runs_dir}, got=parent)
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield describe("no permission to write there", where={"key": "run.runs_dir", "folder": runs_dir}, got=parent)


def existing_folder(path: Path) -> Path:
    """Return `path`, or its closest parent that exists."""
    path = path.absolute()
    while not os.path.lexists(path):
        path = path.parent
    return path


def jsonl_lines(file: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a JSONL file that are not blank, each with its number from 1. Raises OSError.

    A byte order mark at the beginning is left out. Lines end with a line feed only: JSON strings may contain U+2028 and
    similar characters.
    """
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if content := (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
                yield number, content


def count_prompts(sources: Sequence[PromptSourceConfig]) -> list[int | None]:
    """Count the lines of each source that are not blank; None for a source that cannot be read, drops rows or is not a
    JSONL file."""
    return [None if source.kind != "jsonl" or source.drop else _count_lines(source.data) for source in sources]


def together(counts: Sequence[int | None]) -> int | None:
    """Return the sum of numbers of prompts; None if one is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _count_lines(file: str) -> int | None:
    try:
        return sum(1 for _ in jsonl_lines(file))
    except OSError:
        return None


def dotted_path_problem(dotted: str) -> str | None:
    """Return why `package.module.function` is not a function, or None. Reads the module without importing it."""
    reason, module = _read_module(dotted)
    names = None if module is None else _top_level_names(module)
    _, _, name = dotted.rpartition(".")
    if names is None or name in names:
        return reason
    lacks = f"module {dotted.removesuffix(f'.{name}')} has no {name}"
    return ", ".join(filter(None, [lacks, did_you_mean(name, names)]))


def _read_module(dotted: str) -> tuple[str | None, ast.Module | None]:
    """Return why there is no such module, and its source (None if it cannot be read)."""
    parts = dotted.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return "not a dotted path such as package.module.function", None
    if parts[0] == "__main__":
        return "__main__ is the running command, which a verifier process would not import", None
    spec = None
    for depth, name in enumerate(parts[:-1], start=1):
        module = ".".join(parts[:depth])
        if spec is None:
            # importlib.util.find_spec would import the parents of a dotted name. The first name has no parent.
            spec = importlib.util.find_spec(name)
        else:
            places = spec.submodule_search_locations
            # By its full name, PathFinder looks up the parent of a folder without __init__.py, which is not imported.
            spec = None if places is None else importlib.machinery.PathFinder.find_spec(name, list(places))
        if spec is None:
            return f"there is no module {module}", None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None, None
    try:
        with open(spec.origin, "rb") as stream:
            return None, ast.parse(stream.read())
    except (OSError, SyntaxError, ValueError) as error:
        return f"module {'.'.join(parts[:-1])} cannot be read: {error}", None


def _top_level_names(module: ast.Module) -> set[str] | None:
    """Return the names that a module may bind; None if this cannot be known without running it."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            if node.name == "*":
                return None
            names.add(node.asname or node.name.partition(".")[0])
    return None if "__getattr__" in names else names
