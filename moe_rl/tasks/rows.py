"""Reads the rows of a prompt source: a JSONL or Parquet file, a data set of the library `datasets`, or a generator.

The same rows give the same values from every source: two changes that tables make to JSON are undone for all sources. A
table gives all objects of a column the same keys and fills missing ones with null, so a null key counts as absent. A
table makes all numbers of a column floats if one is, so a float without a fraction becomes an integer.
"""

from __future__ import annotations

import codecs
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import xxhash

from moe_rl.config.check_files import jsonl_lines
from moe_rl.config.prompt_sources import GENERATOR, PromptSourceConfig
from moe_rl.errors import About, DataError, with_extra

Row = tuple[About, dict[str, Any] | ValueError]
"""The location of a row, and its columns or its fault."""

_INSTALL = {"datasets": "datasets", "pyarrow.parquet": "pyarrow", "reasoning_gym": "reasoning-gym"}
# Generators draw item n from the seed `base + n`, and some take only seeds below 2^32.
_ITEMS = 1 << 31
_NOT_JSON = object()
# The beginnings of files of other kinds, what they are, and what to do.
_OTHER_FILES = (
    (rb"version https://git-lfs", "a pointer of Git LFS", "fetch the file itself: git lfs pull"),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd|PK\x03\x04|BZh|\xfd7zXZ", "a compressed file", "decompress it"),
    (rb"PAR1", "a Parquet file", "name it *.parquet"),
    (rb"\xff\xfe|\xfe\xff", "a text in UTF-16", "convert it to UTF-8"),
    (rb"\s*(\[|\{\s*\n)", "a JSON text of several lines or rows", "write each row as a JSON object on its own line"),
)
# The largest integer that a column of floats holds exactly.
_LARGEST_COUNT = 2**53


def read_rows(source: PromptSourceConfig, key: str, left_out: set[str]) -> Iterator[Row]:
    """Yield the rows of a finite source, in order. key: the source's config key, for messages.

    A column with a non-JSON value, such as an image, is left out, and its name is added to `left_out`.

    Raises:
        DataError: the source cannot be read at all.
    """
    _refuse_other_files(source.data, key)
    if source.kind == "jsonl":
        yield from _jsonl(source, key, left_out)
        return
    number = 0
    for table in _parquet(source, key) if source.kind == "parquet" else _dataset(source, key):
        types = {field.name: field.type for field in table.schema}
        for row in _table_rows(table):
            where: About = {"key": key, "file": source.data, "row": number}
            try:
                yield where, (row if isinstance(row, ValueError) else _columns(row, left_out, types))
            except ValueError as error:
                yield where, error
            number += 1


def _table_rows(table: Any) -> list[dict[str, Any] | ValueError]:
    """Return the rows of an Arrow table. A row with a value that Python cannot hold, such as a text that is not UTF-8,
    is the fault instead."""
    try:
        return list(table.to_pylist(maps_as_pydicts="lossy"))  # lossy: of a map's duplicate keys the last one counts
    except ValueError as error:
        if table.num_rows == 1:
            return [ValueError(f"a value cannot be read: {error}")]
        half = table.num_rows // 2
        return _table_rows(table.slice(0, half)) + _table_rows(table.slice(half))


def _refuse_other_files(data: str, key: str) -> None:
    """Raise DataError for a file that is neither JSONL nor Parquet, with what it is."""
    file = Path(data)
    if not file.is_file():
        return
    with file.open("rb") as stream:
        first = stream.read(64).removeprefix(codecs.BOM_UTF8)
    is_named = file.suffix in (".jsonl", ".parquet")
    if file.suffix == ".parquet" and first.startswith(b"PAR1"):
        return
    kinds = [(pattern, is_, do) for pattern, is_, do in _OTHER_FILES if re.match(pattern, first)]
    if not kinds and is_named:
        return
    kinds.append((b"", f"a file named *{file.suffix}", "convert it"))
    raise DataError(
        "the file does not hold one JSON object a line, and is no Parquet file",
        where={"key": key, "file": data},
        got=kinds[0][1],
        expected=".jsonl or .parquet, or a folder or name that `datasets` loads",
        do=kinds[0][2],
        fault="kind of file",
    )


def value_at(row: dict[str, Any], name: str) -> Any:
    """Return the value of a column, or for a dotted name the value inside it; None if there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, str):
            try:
                value = plain_json(value)
            except ValueError:
                return None
        if isinstance(value, list):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


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
        raise DataError("reasoning-gym has no such task", where=where, got=name, expected=f"one of {', '.join(known)}")
    if taken := {"seed", "size"} & source.options.keys():
        raise DataError(
            "the options set values that the source sets itself",
            where={"key": f"{key}.options"},
            got=", ".join(sorted(taken)),
            do=f"give {key}.seed; a generator has no size",
        )
    try:
        items = gym.create_dataset(name, seed=base, size=1, **source.options)
    except Exception as error:  # the generators check their options with bare assert statements
        raise DataError(
            "reasoning-gym refuses the options of the task",
            where={"key": f"{key}.options"},
            got=f"{source.options}: {type(error).__name__}: {error}",
        ) from error
    try:
        items[_ITEMS - 1]
    except Exception as error:
        raise DataError(
            "the items of this task are a fixed list, but a generator must be endless",
            where=where,
            got=f"{name}: {type(error).__name__}: {error}",
            do="take another task, or write its items to a JSONL file",
        ) from error
    return lambda n: _columns(items[n % _ITEMS], set())


def _columns(row: dict[str, Any], left_out: set[str], types: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the columns of a row that have a JSON value. The names of the others are added to `left_out`.

    Raises:
        ValueError: a JSON text is damaged, or objects are nested too deeply. The text is for the user.
    """
    plain = {name: _as_json(value, (types or {}).get(name)) for name, value in row.items() if value is not None}
    left_out.update(name for name, value in plain.items() if value is _NOT_JSON)
    return {name: value for name, value in plain.items() if value is not _NOT_JSON}


def _jsonl(source: PromptSourceConfig, key: str, left_out: set[str]) -> Iterator[Row]:
    where: About = {"key": key, "file": source.data}
    try:
        for number, line in jsonl_lines(source.data):
            try:
                yield {**where, "line": number}, _columns(_parse(line), left_out)
            except ValueError as error:
                yield {**where, "line": number}, error
    except OSError as error:
        raise DataError("cannot read the prompts", where=where, got=error.strerror, fault="unreadable") from error


def _parse(line: bytes) -> dict[str, Any]:
    """Parse one line. Raises ValueError with a message for the user."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from error
    record = _json(text)
    if not isinstance(record, dict):
        raise ValueError(f"not an object: {type(record).__name__}")
    return record


def _json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError with a message for the user."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
    except ValueError as error:
        raise ValueError("an integer has too many digits" if "digits" in str(error) else str(error)) from error
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("half of a surrogate pair, which is not valid text") from error
    return value


def plain_json(text: str) -> Any:
    """Return the value of a JSON text from a column, in the common form of all row values.

    Raises:
        ValueError: it is not JSON. The text is for the user.
    """
    value = _as_json(_json(text))
    if value is _NOT_JSON:
        raise ValueError("a number that is not valid JSON, such as NaN")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a key occurs twice")
    return record


def _parquet(source: PromptSourceConfig, key: str) -> Iterator[Any]:
    """Yield Arrow tables."""
    parquet = _library("pyarrow.parquet", source, key)
    try:
        with parquet.ParquetFile(source.data) as file:
            if len(set(file.schema_arrow.names)) < len(file.schema_arrow.names):
                raise ValueError("a column occurs twice")
            yield from file.iter_batches()
    except (OSError, ValueError) as error:
        raise DataError(
            "cannot read the prompts", where={"key": key, "file": source.data}, got=error, fault="unreadable"
        ) from error


def _dataset(source: PromptSourceConfig, key: str) -> Iterator[Any]:
    """Yield Arrow tables."""
    datasets = _library("datasets", source, key)
    where: About = {"key": key, "file": source.data}
    saved = (Path(source.data) / "dataset_info.json").is_file() or (Path(source.data) / "dataset_dict.json").is_file()
    try:
        if saved:
            loaded = datasets.load_from_disk(source.data)
        else:
            loaded = datasets.load_dataset(source.data, source.config, split=source.split)
            split = next(iter(loaded.values())) if isinstance(loaded, dict) else loaded
            if split.info.builder_name == "csv":  # a cell is text: the library makes 7 of 007, and null of NA
                texts = datasets.Features(dict.fromkeys(split.column_names, datasets.Value("string")))
                how = {"features": texts, "keep_default_na": False, "na_values": [""]}
                loaded = datasets.load_dataset(source.data, source.config, split=source.split, **how)
    except Exception as error:  # the library passes on errors of other libraries
        do = "correct the name, the configuration or the files"
        if source.may_be_on_the_hub:
            do = (
                f"correct the name; on a machine without network, fetch it elsewhere with: hf download --repo-type "
                f"dataset {source.data} --local-dir FOLDER, and give the folder"
            )
        raise DataError(
            "the data set cannot be loaded",
            where=where,
            got=" ".join(f"{type(error).__name__}: {error} {error.__cause__ or ''}".split())[:400],
            do=do,
            fault="data set",
        ) from error
    if isinstance(loaded, dict):
        if source.split not in loaded:
            raise DataError(
                "the data set has no such split",
                where={**where, "key": f"{key}.split"},
                got=source.split or "none given",
                expected=f"one of {', '.join(loaded)}",
            )
        loaded = loaded[source.split]
    elif saved and source.split is not None:
        raise DataError(
            "the folder has only one split",
            where={**where, "key": f"{key}.split"},
            got=source.split,
            do="remove it",
        )
    # The Arrow format decodes no image or sound.
    yield from loaded.with_format("arrow").iter(batch_size=1000)


def _library(module: str, source: PromptSourceConfig, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"the library {_INSTALL[module]} is not installed, or a part of it is missing",
            where={"key": f"{key}.data"},
            got=f"{source.data}: {error}",
            do=with_extra("tasks"),
            fault="library",
        ) from error


def _as_json(value: Any, arrow_type: Any = None) -> Any:
    try:
        return _plain(value, arrow_type)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error


def _plain(value: Any, arrow_type: Any = None) -> Any:
    """Return a value in the common form of all sources, or _NOT_JSON.

    arrow_type: the value's type, None outside tables. `datasets` stores values of mixed types as JSON text with its own
    type, which may occur inside lists and objects.
    """
    if isinstance(value, str) and getattr(arrow_type, "extension_name", "") == "arrow.json":
        return _plain(_json(value))
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            return _NOT_JSON
        return int(value) if -_LARGEST_COUNT <= value <= _LARGEST_COUNT and value == int(value) else float(value)
    if isinstance(value, list | tuple):
        inner = getattr(arrow_type, "value_type", None)
        items = [_plain(item, inner) for item in value]
        return _NOT_JSON if any(item is _NOT_JSON for item in items) else items
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        types = _field_types(arrow_type, value)
        held = {name: _plain(item, types.get(name)) for name, item in value.items() if item is not None}
        return _NOT_JSON if any(item is _NOT_JSON for item in held.values()) else held
    return _NOT_JSON


def _field_types(arrow_type: Any, value: dict[str, Any]) -> dict[str, Any]:
    """Return the types of the fields of an object in a table."""
    if arrow_type is None:
        return {}
    if hasattr(arrow_type, "item_type"):  # a map
        return dict.fromkeys(value, arrow_type.item_type)
    return {field.name: field.type for field in arrow_type.fields}
