"""Reads the rows of a prompt source: a JSONL or Parquet file, a data set of the library `datasets`, or a generator."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from moe_rl.config.prompt_sources import GENERATOR, PromptSourceConfig
from moe_rl.errors import About, DataError, describe

Row = tuple[About, dict[str, Any] | ValueError]
"""Where a row stands, and its columns or what is wrong with it."""

_INSTALL = {"datasets": "datasets", "pyarrow.parquet": "pyarrow", "reasoning_gym": "reasoning-gym"}
# Generators draw item n from the seed `base + n`, and some take only seeds below 2^32.
_ITEMS = 1 << 31
_NOT_JSON = object()


def read_rows(source: PromptSourceConfig, key: str, left_out: set[str]) -> Iterator[Row]:
    """Yield the rows of a finite source, in its order. key: of the source in the config, for messages.

    A column with a value that JSON does not have, such as an image, is left out, and its name goes into `left_out`.

    Raises:
        DataError: the source cannot be read at all.
    """
    if source.kind == "jsonl":
        yield from _jsonl(source, key)
        return
    rows = _parquet(source, key) if source.kind == "parquet" else _dataset(source, key)
    for number, row in enumerate(rows):
        plain = {name: _plain(value) for name, value in row.items()}
        left_out.update(name for name, value in plain.items() if value is _NOT_JSON)
        columns = {name: value for name, value in plain.items() if value is not _NOT_JSON}
        yield {"key": key, "file": source.data, "row": number}, columns


def open_generator(source: PromptSourceConfig, key: str) -> Callable[[int], dict[str, Any]]:
    """Return the function that makes item n of an endless source, a pure function of (options, seed, n).

    Raises:
        DataError: there is no such task, its options are wrong, or its items are a fixed list.
    """
    name = source.data.removeprefix(GENERATOR)
    where: About = {"key": f"{key}.data"}
    gym = _library("reasoning_gym", source, key)
    base = xxhash.xxh3_64_intdigest(str(source.seed).encode()) >> 33
    known = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    if name not in known:
        raise DataError(
            describe("reasoning-gym has no such task", where=where, got=name, expected=f"one of {', '.join(known)}")
        )
    if taken := {"seed", "size"} & source.options.keys():
        raise DataError(
            describe(
                "the options set what the source itself sets",
                where={"key": f"{key}.options"},
                got=", ".join(sorted(taken)),
                do=f"give {key}.seed; a generator has no size",
            )
        )
    try:
        items = gym.create_dataset(name, seed=base, size=1, **source.options)
    except Exception as error:  # the generators check their options with bare assertions
        raise DataError(
            describe(
                "reasoning-gym refuses the options of the task",
                where={"key": f"{key}.options"},
                got=f"{source.options}: {type(error).__name__}: {error}",
            )
        ) from error
    try:
        items[_ITEMS - 1]
    except Exception as error:
        raise DataError(
            describe(
                "the items of this task are a fixed list, and a generator must be endless",
                where=where,
                got=f"{name}: {type(error).__name__}: {error}",
                do="take another task, or write its items to a JSONL file",
            )
        ) from error
    return lambda n: _columns(items[n % _ITEMS])


def _columns(item: dict[str, Any]) -> dict[str, Any]:
    plain = {name: _plain(value) for name, value in item.items()}
    return {name: value for name, value in plain.items() if value is not _NOT_JSON}


def _jsonl(source: PromptSourceConfig, key: str) -> Iterator[Row]:
    where: About = {"key": key, "file": source.data}
    try:
        data = Path(source.data).read_bytes()
    except OSError as error:
        raise DataError(
            describe("cannot read the prompts", where=where, got=error.strerror, fault="unreadable")
        ) from error
    # splitlines() would also split at U+2028 and similar characters, which JSON strings may contain.
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n") if data else [], start=1):
        try:
            yield {**where, "line": number}, _parse(line)
        except ValueError as error:
            yield {**where, "line": number}, error


def _parse(line: bytes) -> dict[str, Any]:
    """Parse one line. Raises ValueError with a message for the user."""
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"not an object: {type(record).__name__}")
    if b"\\u" in line:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("half of a surrogate pair, which is not valid text") from error
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key occurs twice")
    return record


def _parquet(source: PromptSourceConfig, key: str) -> Iterator[dict[str, Any]]:
    parquet = _library("pyarrow.parquet", source, key)
    try:
        with parquet.ParquetFile(source.data) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(
            describe("cannot read the prompts", where={"key": key, "file": source.data}, got=error, fault="unreadable")
        ) from error


def _dataset(source: PromptSourceConfig, key: str) -> Iterator[dict[str, Any]]:
    datasets = _library("datasets", source, key)
    where: About = {"key": key, "file": source.data}
    saved = (Path(source.data) / "dataset_info.json").is_file() or (Path(source.data) / "dataset_dict.json").is_file()
    try:
        if saved:
            found = datasets.load_from_disk(source.data)
        else:
            found = datasets.load_dataset(source.data, source.config, split=source.split)
    except Exception as error:  # the library raises errors of many libraries
        do = "correct the name, the configuration or the files"
        if source.may_be_on_the_hub:
            do = (
                f"correct the name; on a machine without network, fetch it elsewhere with: hf download --repo-type "
                f"dataset {source.data} --local-dir FOLDER, and give the folder"
            )
        raise DataError(
            describe(
                "the data set cannot be loaded",
                where=where,
                got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                do=do,
                fault="data set",
            )
        ) from error
    if isinstance(found, dict):
        if source.split not in found:
            raise DataError(
                describe(
                    "the data set has no such split",
                    where={**where, "key": f"{key}.split"},
                    got=source.split or "none given",
                    expected=f"one of {', '.join(found)}",
                )
            )
        found = found[source.split]
    elif saved and source.split is not None:
        raise DataError(
            describe(
                "the folder holds a single split",
                where={**where, "key": f"{key}.split"},
                got=source.split,
                do="remove it",
            )
        )
    # In Arrow's own form no image or sound is decoded.
    for batch in found.with_format("arrow").iter(batch_size=1000):
        yield from batch.to_pylist()


def _library(module: str, source: PromptSourceConfig, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            describe(
                f"the library {_INSTALL[module]} is not installed, or a part of it is missing",
                where={"key": f"{key}.data"},
                got=f"{source.data}: {error}",
                do="install it: pip install 'moe_rl[tasks]'",
                fault="library",
            )
        ) from error


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, or _NOT_JSON."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_JSON
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _NOT_JSON if any(item is _NOT_JSON for item in items) else items
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        held = {name: _plain(item) for name, item in value.items()}
        return _NOT_JSON if any(item is _NOT_JSON for item in held.values()) else held
    return _NOT_JSON
