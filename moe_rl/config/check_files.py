"""Checks the files, folders and code that a config names."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from moe_rl.config.load import find_file
from moe_rl.config.reward_arguments import Columns, RewardParameters, argument_problems
from moe_rl.config.reward_kinds import FunctionReward
from moe_rl.config.schema import Config
from moe_rl.errors import ConfigError, Problem, describe
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import (
    checkpoint_tensors,
    decoder_problems,
    read_published,
    tokenizer_vocabulary,
)
from moe_rl.models.safetensors_header import unpacked

# Fields in which published figures may differ from a checkpoint: they say which software wrote it, and how.
NOT_COMPARED = ("fingerprint", "dtype", "eos_token_ids")


def file_problems(config: Config, facts: ModelFacts | None) -> list[Problem]:
    """Return one message for each problem. facts: of the checkpoint, None if they could not be read."""
    return [
        *(_checkpoint_problems(config, facts) if facts is not None else ()),
        *absent_problems(config),
        *prompt_problems(config),
    ]


def absent_problems(config: Config) -> list[Problem]:
    """Return what a config names and this machine lacks: prompt files, reward functions, a folder for runs. The machine
    that runs it may have them."""
    prompts = {"train": config.task.train, "heldout": config.task.heldout}
    return [
        *(
            describe(
                "cannot read the prompt file",
                where={"key": f"task.{key}", "file": path},
                do="give the path of a JSONL file",
            )
            for key, path in prompts.items()
            if count_prompts(path) is None
        ),
        *_reward_problems(config),
        *_folder_problems(config.run.runs_dir),
    ]


def _checkpoint_problems(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    path = config.model.path
    try:
        tensors, packing = unpacked(checkpoint_tensors(path))
        yield from decoder_problems(tensors, facts, {"folder": path})
        if packing:
            yield describe(
                "the checkpoint is packed, and the sampler would not get what the trainer sends",
                where={"key": "model.path", "folder": path},
                got=f"{len(packing)} tensors in {' and '.join(sorted(set(packing.values())))}",
                do=f"unpack it first: moe-rl export --model {path} --out FOLDER",
            )
    except ConfigError as error:
        yield from error.problems
    try:
        vocabulary = tokenizer_vocabulary(path)
        if vocabulary > facts.vocab:
            yield describe(
                "the tokenizer gives ids the model has no embedding for",
                where={"key": "model.path", "folder": path},
                got=f"{vocabulary} ids",
                expected=f"at most vocab_size = {facts.vocab}",
                do="take the tokenizer and the weights from the same checkpoint",
            )
    except ConfigError as error:
        yield from error.problems
    if config.model.published is not None:
        try:
            yield from _other_model(config, facts, read_published(find_file(config.model.published)))
        except ConfigError as error:
            yield from error.problems


def _other_model(config: Config, facts: ModelFacts, published: ModelFacts) -> Iterator[Problem]:
    for field in dataclasses.fields(ModelFacts):
        ours, theirs = getattr(facts, field.name), getattr(published, field.name)
        if field.name not in NOT_COMPARED and ours != theirs:
            yield describe(
                "not the model that model.published has the figures of",
                where={"key": "model.path", "folder": config.model.path, "field": field.name},
                got=ours,
                expected=f"{theirs} as in {config.model.published}",
            )


def prompt_problems(config: Config) -> Iterator[Problem]:
    """Return what is wrong with the prompt files that can be read."""
    task = config.task
    counts = {}
    for key, path in (("train", task.train), ("heldout", task.heldout)):
        counts[key] = count_prompts(path)
        if counts[key] == 0:
            yield describe("the prompt file is empty", where={"key": f"task.{key}", "file": path})
    if counts["train"] is not None and counts["heldout"] is not None and os.path.samefile(task.train, task.heldout):
        yield describe(
            "the same file as task.train",
            where={"key": "task.heldout"},
            got=task.heldout,
            do="give a file with prompts that are never trained on",
        )
    if counts["train"] and task.train_prompts not in (None, counts["train"]):
        yield describe(
            "the file has another number",
            where={"key": "task.train_prompts", "file": task.train},
            got=f"{counts['train']} prompts",
            expected=task.train_prompts,
        )
    if counts["train"] and counts["train"] < config.rollout.prompts_per_step:
        yield describe(
            "more prompts in one step than task.train has",
            where={"key": "rollout.prompts_per_step"},
            got=config.rollout.prompts_per_step,
            expected=f"at most {counts['train']}",
        )
    if counts["heldout"] and counts["heldout"] < config.eval.prompts:
        yield describe(
            "more than task.heldout has",
            where={"key": "eval.prompts", "file": task.heldout},
            got=config.eval.prompts,
            expected=f"at most {counts['heldout']}",
        )


def _reward_problems(config: Config) -> Iterator[Problem]:
    rewards = {}
    for name, reward in config.task.rewards.items():
        if reward.library is not None and importlib.util.find_spec(reward.library[0]) is None:
            yield describe(
                f"the library {reward.library[0]} is not installed",
                where={"key": f"task.rewards.{name}.kind"},
                got=reward.kind,
                do=f"pip install 'moe_rl[{reward.library[1]}]'",
                fault="no library",
            )
        parameters: RewardParameters | str | None
        if isinstance(reward, FunctionReward):
            parameters = dotted_path_problem(reward.function) or parameters_in_source(reward.function)
            if isinstance(parameters, str):
                yield describe(parameters, where={"key": f"task.rewards.{name}.function"}, got=reward.function)
        else:
            parameters = RewardParameters(reward.arguments_named)
        if isinstance(parameters, RewardParameters):
            rewards[name] = parameters
    columns = Columns(dict.fromkeys(("id", "prompt", "answer", "level")))
    yield from argument_problems(rewards, {"task.train": columns})


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


def count_prompts(path: Path) -> int | None:
    """Count the lines of a JSONL file that are not blank; None if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return sum(1 for line in stream if line.strip())
    except OSError:
        return None


def dotted_path_problem(dotted: str) -> str | None:
    """Return why `package.module.function` is no function, or None. Finds and reads the module without importing it."""
    reason, module = _read_module(dotted)
    names = None if module is None else _top_level_names(module)
    _, _, name = dotted.rpartition(".")
    if names is None or name in names:
        return reason
    close = difflib.get_close_matches(name, names, n=1)
    hint = f", did you mean {close[0]}?" if close else ""
    return f"module {dotted.removesuffix(f'.{name}')} has no {name}{hint}"


def parameters_in_source(dotted: str) -> RewardParameters | str | None:
    """Return the parameters of a reward function, read from its source; as a text, why it cannot be one; None if the
    source has no plain definition.
    """
    _, module = _read_module(dotted)
    return None if module is None else _parameters(module, dotted.rpartition(".")[2])


def _read_module(dotted: str) -> tuple[str | None, ast.Module | None]:
    """Return why there is no such module, and its source (None if there is none to read)."""
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
            spec = None if places is None else importlib.machinery.PathFinder.find_spec(module, list(places))
        if spec is None:
            return f"there is no module {module}", None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None, None
    try:
        with open(spec.origin, "rb") as stream:
            return None, ast.parse(stream.read())
    except (OSError, SyntaxError, ValueError) as error:
        return f"module {'.'.join(parts[:-1])} cannot be read: {error}", None


def _parameters(module: ast.Module, name: str) -> RewardParameters | str | None:
    """Return what `parameters_in_source` does, for a name that may also be no function."""
    bound = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    found = [node for node in bound if node.name == name]
    if len(found) != 1 or isinstance(found[0], ast.ClassDef) or found[0].decorator_list:
        return None
    takes = found[0].args
    by_place = [*takes.posonlyargs, *takes.args]
    needed = by_place[: len(by_place) - len(takes.defaults)]
    optional = by_place[len(needed) :]
    for one, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True):
        (needed if default is None else optional).append(one)
    for parameter in takes.posonlyargs:
        if parameter in needed:
            return f"{name} has the parameter {parameter.arg!r}, which cannot be given by name"
    by_name = [one.arg for one in optional if one not in takes.posonlyargs]
    return RewardParameters(tuple(one.arg for one in needed), tuple(by_name))


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
