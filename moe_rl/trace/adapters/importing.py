"""Imports files of other samplers' output into the store.

Formats vllm, sglang, nemo and lists are JSON lines, one reply a line:

    {"key": "step7/p3", "prompt_token_ids": [...], "response": {...}, "start": 0, "parent": "...", "weight_version": 7}

response  the sampler's answer. vllm: the reply, or one of its choices; several choices become KEY/0, KEY/1, ...
          sglang: the reply of /generate. nemo: a reply or its message, which contains the prompt's tokens. lists: not
          used; the line has "token_ids", the forwarded tokens, and "routed_experts", nested lists.
start     position of the first row, if the request asked for no earlier rows. "parent" is then the key of an earlier
          line whose record has the earlier rows, with the same tokens.
weight_version  version for all rows; needed if the reply does not give one.

Format npy is one .npy file of routes; a second .npy file has the forwarded tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moe_rl.errors import About, TraceError, describe
from moe_rl.trace.adapters.envelopes import (
    MAX_BYTES,
    decode_lists,
    decode_nemo,
    decode_npy,
    decode_sglang,
    decode_vllm,
    decoder_layers,
)
from moe_rl.trace.adapters.lint import Finding, lint
from moe_rl.trace.adapters.replies import from_array, from_nemo, from_sglang, from_vllm
from moe_rl.trace.record import RouteRecord, TraceSpec
from moe_rl.trace.source_sum import rows_of, signed, total
from moe_rl.trace.writer import ShardWriter
from moe_rl.types import RouteRef

FORMATS = ("vllm", "sglang", "nemo", "lists")
# Longest line: nested lists take some twenty times their text in memory, base64 less than twice.
_MAX_LINE = {"vllm": 1 << 28, "sglang": 1 << 28, "nemo": 1 << 28, "lists": 48 << 20}


class _Line(msgspec.Struct):
    key: str
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    routed_experts: list[list[list[int]]] | None = None
    response: dict[str, Any] | None = None
    start: int = 0
    parent: str | None = None
    weight_version: int | None = None


# Created at import time, by one thread: msgspec crashes when two threads are the first to decode a type.
_DECODER = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class _Item:
    """Holds one sequence of a line. `reply` is the object with its routes and tokens."""

    key: str
    prompt: list[int] | None
    reply: Mapping[str, Any]
    line: _Line


def import_lines(path: Path, root: Path, name: str, spec: TraceSpec, form: str) -> list[RouteRef]:
    """Publish the sequences of a file as shard `name` of the store, all or none. `form` is one of FORMATS.

    Raises TraceError with the line and what is wrong with it.
    """
    refs: dict[str, RouteRef] = {}
    tokens: dict[str, np.ndarray] = {}
    sums: dict[str, np.ndarray] = {}
    with ShardWriter(root, name, spec) as writer:
        for where, item in _items(path, form):
            try:
                record = _record(item, spec, form)
                before = _before(item, record, refs, tokens)
                parent = None
                if item.line.parent is not None:
                    earlier = refs[item.line.parent]
                    parent = RouteRef(earlier.key, record.first_row, earlier.parts)
                ref = writer.add(record.key, record.routes, record.token_ids, record.spans, parent=parent)
            except TraceError as error:
                raise TraceError(
                    describe("line cannot be imported", where={**error.about, **where}, got=error)
                ) from error
            own = rows_of(record.routes, record.layers, record.token_ids, record.first_row)
            tokens[ref.key] = record.token_ids if before is None else np.concatenate([before, record.token_ids])
            sums[ref.key] = own if parent is None else np.concatenate([sums[parent.key][: record.first_row], own])
            refs[ref.key] = replace(ref, source_sum=total(ref.key, sums[ref.key]))
            if record.aborted:
                writer.mark_aborted(record.key)
    return list(refs.values())


def import_npy(
    path: Path, tokens: Path, root: Path, name: str, spec: TraceSpec, *, key: str, weight_version: int
) -> list[RouteRef]:
    """Publish a .npy file of routes [T, layers, K] as a shard. `tokens` is a .npy file of the T forwarded token ids."""
    with ShardWriter(root, name, spec) as writer:
        record = from_array(
            decode_npy(_read(path), where={"file": path}),
            spec,
            key=key,
            token_ids=decode_npy(_read(tokens), where={"file": tokens}),
            weight_version=weight_version,
        )
        ref = writer.add(record.key, record.routes, record.token_ids, record.spans)
    return [signed(ref, record.routes, record.layers, record.token_ids)]


def lint_lines(path: Path, spec: TraceSpec, form: str) -> Iterator[tuple[str, list[Finding]]]:
    """Yield, for each sequence of a file, its place and everything wrong with it, including decoding errors."""
    for place, item in _items(path, form):
        where = f"{path}, line {place['line']}, {item.key}"
        try:
            yield where, _lint(item, spec, form)
        except TraceError as error:
            yield where, [Finding("payload", "routed_experts", str(error))]


def lint_npy(path: Path, spec: TraceSpec, tokens: Path | None) -> Iterator[tuple[str, list[Finding]]]:
    """Yield the place of a .npy file of routes and everything wrong with it."""
    try:
        ids = None if tokens is None else decode_npy(_read(tokens), where={"file": tokens})
        yield str(path), lint(decode_npy(_read(path), where={"file": path}), spec, ids)
    except TraceError as error:
        yield str(path), [Finding("payload", "file", str(error))]


def _items(path: Path, form: str) -> Iterator[tuple[About, _Item]]:
    """Yield every sequence of the file with its place. Raises TraceError for an invalid line."""
    limit = _MAX_LINE[form]
    try:
        with open(path, "rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(limit + 1), b""), 1):
                where: About = {"file": path, "line": number}
                if len(text) > limit:
                    raise TraceError(describe("line is too long", where=where, expected=f"at most {limit} bytes"))
                if not text.strip():
                    continue
                try:
                    line = _DECODER.decode(text)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise TraceError(
                        describe(
                            "line is not an import line",
                            where=where,
                            got=str(error)[:200],
                            expected="see --help",
                            fault="no import line",
                        )
                    ) from error
                yield from ((where, item) for item in _split(line, form, where))
    except OSError as error:
        raise TraceError(describe("file cannot be read", where={"file": path}, got=error.strerror)) from error


def _split(line: _Line, form: str, where: About) -> list[_Item]:
    if form == "lists":
        reply = {"token_ids": line.token_ids, "routed_experts": line.routed_experts}
        return [_Item(line.key, None, reply, line)]
    if line.response is None:
        raise TraceError(describe("line has no response", where=where, expected=f"a reply of {form}"))
    choices = line.response.get("choices") if form in ("vllm", "nemo") else None
    if choices is None:
        return [_Item(line.key, line.prompt_token_ids, line.response, line)]
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise TraceError(describe("choices of the reply are not objects", where=where))
    items = []
    for at, choice in enumerate(choices):
        key = line.key if len(choices) == 1 else f"{line.key}/{at}"
        prompt = line.prompt_token_ids or choice.get("prompt_token_ids") or line.response.get("prompt_token_ids")
        items.append(_Item(key, prompt, choice.get("message", choice) if form == "nemo" else choice, line))
    return items


def _record(item: _Item, spec: TraceSpec, form: str) -> RouteRecord:
    line = item.line
    if form == "lists":
        _need(item, "token_ids", "routed_experts")
        array = decode_lists(item.reply["routed_experts"])
        return from_array(
            array, spec, key=item.key, token_ids=item.reply["token_ids"], weight_version=_given_version(item)
        )
    if form == "nemo":
        return from_nemo(item.reply, spec, key=item.key, start=line.start, weight_version=_given_version(item))
    if not isinstance(item.prompt, list):
        raise TraceError(
            describe("the tokens of the prompt are missing", where={"request": item.key}, do="add prompt_token_ids")
        )
    read = from_vllm if form == "vllm" else from_sglang
    return read(
        item.reply,
        spec,
        key=item.key,
        prompt_token_ids=item.prompt,
        start=line.start,
        weight_version=line.weight_version,
    )


def _lint(item: _Item, spec: TraceSpec, form: str) -> list[Finding]:
    """Lint the array as it was sent, against the tokens if they are known."""
    reply = item.reply
    if form == "sglang":
        meta = reply.get("meta_info")
        payload = meta.get("routed_experts") if isinstance(meta, Mapping) else None
        array = decode_sglang(payload, layers=decoder_layers(spec), top_k=spec.top_k)
        sampled = reply.get("output_ids")
    elif form == "nemo":
        array = decode_nemo(reply.get("routed_experts"))
        sampled = reply.get("generation_token_ids")
    elif form == "vllm":
        array = decode_vllm(reply.get("routed_experts"))
        sampled = reply.get("token_ids")
    else:
        return lint(decode_lists(reply["routed_experts"] or []), spec, reply["token_ids"])
    prompt = reply.get("prompt_token_ids") if form == "nemo" else item.prompt
    if not isinstance(prompt, list) or not isinstance(sampled, list):
        return lint(array, spec)
    forwarded = [*prompt, *sampled][item.line.start : -1]
    # NeMo-RL's last row belongs to a token that is never forwarded.
    return lint(array[:-1] if form == "nemo" else array, spec, forwarded)


def _before(
    item: _Item, record: RouteRecord, refs: Mapping[str, RouteRef], tokens: Mapping[str, np.ndarray]
) -> np.ndarray | None:
    """Return the tokens before the record's first row, taken from its parent; None without a parent."""
    start, parent = record.first_row, item.line.parent
    if parent is None and not start:
        return None
    where: About = {"request": record.key}
    if parent is None or parent not in refs:
        raise TraceError(
            describe(
                f"no record has the rows before {start}",
                where=where,
                got=f"parent {parent!r}",
                expected="the key of an earlier line",
                do="import the earlier turns first, or ask the sampler for all rows",
            )
        )
    prompt = item.prompt if item.prompt is not None else item.reply.get("prompt_token_ids") or []
    before = np.asarray(prompt[:start], np.int32)
    known = tokens[parent][:start]
    if not np.array_equal(before, known):
        same = min(len(before), len(known))
        different = np.flatnonzero(before[:same] != known[:same])
        raise TraceError(
            describe(
                "request does not begin with the tokens of its parent",
                where={**where, "token": int(different[0]) if len(different) else same},
                got=f"{len(known)} rows of {parent}",
                expected=f"{start} rows of the same tokens",
            )
        )
    return before


def _given_version(item: _Item) -> int:
    if item.line.weight_version is None:
        raise TraceError(
            describe("the weight version is missing", where={"request": item.key}, do="add weight_version to the line")
        )
    return item.line.weight_version


def _need(item: _Item, *names: str) -> None:
    missing = [name for name in names if item.reply[name] is None]
    if missing:
        raise TraceError(describe(f"line has no {missing[0]}", where={"request": item.key}))


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TraceError(describe("file cannot be read", where={"file": path}, got=error.strerror)) from error
    if len(data) > MAX_BYTES:
        raise TraceError(describe("file is too large", where={"file": path}, expected=f"at most {MAX_BYTES} bytes"))
    return data
