"""Imports files of other samplers' output into the store.

Formats vllm, sglang, nemo and lists are JSON lines, one reply per line:

    {"key": "step7/p3", "prompt_token_ids": [...], "response": {...}, "start": 0, "parent": "...", "weight_version": 7}

response  the sampler's answer. vllm: the reply, or one of its choices; several choices become KEY/0, KEY/1, ...;
          `routed_experts` may also be SkyRL's or prime-rl's object, or lists. sglang: the reply of /generate. nemo: a
          reply or its message, which contains the prompt's tokens. lists: not used; the line has "token_ids", the
          forwarded tokens, and "routed_experts", nested lists.
start     position of the first row, if the request asked for no earlier rows. "parent" is then the key of an earlier
          line whose record has the earlier rows, with the same tokens. lists: refused; the line has all rows.
weight_version  version for all rows; needed if the reply does not give one as a number.

Formats npy and megatron hold only the routes of one sequence; a .npy file (--token-ids) has the forwarded tokens.

npy       one .npy file of routes [tokens, layers, k].
megatron  megatron-core's router_trace_rankN.jsonl, a line for each layer of each forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from moe_rl.errors import About, TraceError
from moe_rl.trace.adapters import envelopes
from moe_rl.trace.adapters.bounded_lines import decoded_lines
from moe_rl.trace.adapters.lint import Finding, lint
from moe_rl.trace.adapters.megatron_trace import decode_megatron
from moe_rl.trace.adapters.replies import first_row, from_array, from_nemo, from_sglang, from_vllm
from moe_rl.trace.record import RouteRecord, TraceSpec
from moe_rl.trace.source_sum import rows_of, signed, total
from moe_rl.trace.spans import versions_of_rows
from moe_rl.trace.writer import ShardWriter
from moe_rl.types import RouteRef

FORMATS = ("vllm", "sglang", "nemo", "lists")
ARRAY_FORMATS = ("npy", "megatron")
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
    weight_version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None


# Created at import time, by one thread: msgspec crashes when two threads decode a new type at the same time.
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

    Raises TraceError with the line and its fault.
    """
    refs: dict[str, RouteRef] = {}
    tokens: dict[str, np.ndarray] = {}
    sums: dict[str, np.ndarray] = {}
    with ShardWriter(root, name, spec) as writer:
        for where, item in _items(path, form):
            try:
                record = _record(item, spec, form)
                before = _before(item, record, tokens)
                parent = None
                if item.line.parent is not None:
                    earlier = refs[item.line.parent]
                    parent = RouteRef(earlier.key, record.first_row, earlier.parts)
                ref = writer.add(record.key, record.routes, record.token_ids, record.spans, parent=parent)
            except TraceError as error:
                raise TraceError("line cannot be imported", where={**error.about, **where}, got=error) from error
            versions = versions_of_rows(record.spans)
            placed = rows_of(record.routes, record.layers, record.token_ids, record.first_row, versions=versions)
            tokens[ref.key] = record.token_ids if before is None else np.concatenate([before, record.token_ids])
            sums[ref.key] = placed if parent is None else np.concatenate([sums[parent.key][: record.first_row], placed])
            refs[ref.key] = replace(ref, source_sum=total(ref.key, sums[ref.key]))
            if record.aborted:
                writer.mark_aborted(record.key)
    return list(refs.values())


def import_array(
    path: Path, tokens: Path, root: Path, name: str, spec: TraceSpec, form: str, *, key: str, weight_version: int
) -> list[RouteRef]:
    """Publish a file of one sequence's routes as a shard. `form` is one of ARRAY_FORMATS.

    Args:
        tokens: a .npy file of the T forwarded token ids.
    """
    with ShardWriter(root, name, spec) as writer:
        record = _array_record(path, tokens, spec, form, key, weight_version)
        ref = writer.add(record.key, record.routes, record.token_ids, record.spans)
    versions = versions_of_rows(record.spans)
    return [signed(ref, record.routes, record.layers, record.token_ids, versions=versions)]


def lint_lines(path: Path, spec: TraceSpec, form: str) -> Iterator[tuple[str, list[Finding]]]:
    """Yield the place of each sequence in a file and everything wrong with it, including what the import would
    refuse."""
    tokens: dict[str, np.ndarray] = {}
    for place, item in _items(path, form):
        where = f"{path}, line {place['line']}, {item.key}"
        findings = []
        try:
            findings = _lint(item, spec, form)
            record = _record(item, spec, form)
            before = _before(item, record, tokens)
            if record.key in tokens:
                raise TraceError("two sequences have one key", where={"request": record.key})
            tokens[record.key] = record.token_ids if before is None else np.concatenate([before, record.token_ids])
        except TraceError as error:
            findings += _unless_known(error, findings)
        yield where, findings


def lint_array(
    path: Path,
    spec: TraceSpec,
    form: str,
    *,
    tokens: Path | None = None,
    key: str | None = None,
    weight_version: int | None = None,
) -> Iterator[tuple[str, list[Finding]]]:
    """Yield the path of a file of one sequence's routes and everything wrong with it. A missing key or version is not
    checked."""
    findings: list[Finding] = []
    try:
        ids = None if tokens is None else envelopes.decode_npy(_read(tokens), where={"file": tokens})
        findings = lint(_decode_array(path, spec, form), spec, ids)
        if tokens is not None:
            _array_record(path, tokens, spec, form, key or "checked", weight_version or 0)
    except TraceError as error:
        findings += _unless_known(error, findings)
    yield str(path), findings


def _unless_known(error: TraceError, findings: list[Finding]) -> list[Finding]:
    """Return the error that stopped the import as a finding, unless the linter has found the cause."""
    return [] if any(finding.certain for finding in findings) else [Finding("import", "sequence", str(error))]


def _array_record(path: Path, tokens: Path, spec: TraceSpec, form: str, key: str, weight_version: int) -> RouteRecord:
    array, ids = _decode_array(path, spec, form), envelopes.decode_npy(_read(tokens), where={"file": tokens})
    return from_array(array, spec, key=key, token_ids=ids, weight_version=weight_version)


def _decode_array(path: Path, spec: TraceSpec, form: str) -> np.ndarray:
    """Return the routes of a file, [T, layers, K]."""
    return envelopes.decode_npy(_read(path), where={"file": path}) if form == "npy" else decode_megatron(path, spec)


def _items(path: Path, form: str) -> Iterator[tuple[About, _Item]]:
    """Yield every sequence of the file with its place. Raises TraceError for an invalid line."""
    expected = "the form that `moe-rl trace import --help` shows"
    for where, line in decoded_lines(
        path, _DECODER, limit=_MAX_LINE[form], wrong="line is not an import line", expected=expected
    ):
        yield from ((where, item) for item in _split(line, form, where))


def _split(line: _Line, form: str, where: About) -> list[_Item]:
    if form == "lists":
        reply = {"token_ids": line.token_ids, "routed_experts": line.routed_experts}
        return [_Item(line.key, None, reply, line)]
    if line.response is None:
        raise TraceError("line has no response", where=where, expected=f"a reply of {form}")
    given = None if form == "nemo" else line.prompt_token_ids  # a message is read with the prompt that it contains
    # vLLM's own class, RequestOutput, calls them outputs.
    choices = line.response.get("choices", line.response.get("outputs")) if form in ("vllm", "nemo") else None
    if choices is None:
        if form == "vllm":
            given = given or line.response.get("prompt_token_ids")
        return [_Item(line.key, given, line.response, line)]
    if form == "nemo" and isinstance(choices, list):
        choices = [choice.get("message", choice) if isinstance(choice, dict) else choice for choice in choices]
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise TraceError("choices of the reply are not objects", where=where)
    items = []
    for index, choice in enumerate(choices):
        key = line.key if len(choices) == 1 else f"{line.key}/{index}"
        prompt = given or choice.get("prompt_token_ids") or line.response.get("prompt_token_ids")
        items.append(_Item(key, prompt, choice, line))
    return items


def _record(item: _Item, spec: TraceSpec, form: str) -> RouteRecord:
    line = item.line
    if form == "lists":
        for name in ("token_ids", "routed_experts"):
            if item.reply[name] is None:
                raise TraceError(f"line has no {name}", where={"request": item.key})
        if unused := [name for name in ("prompt_token_ids", "start", "parent") if getattr(line, name)]:
            do = "leave them out, and give the tokens and routes of all rows"
            where: About = {"request": item.key}
            raise TraceError("line has fields that lists do not use", where=where, got=", ".join(unused), do=do)
        array = envelopes.decode_lists(item.reply["routed_experts"])
        return from_array(
            array, spec, key=item.key, token_ids=item.reply["token_ids"], weight_version=_given_version(item)
        )
    if form == "nemo":
        return from_nemo(item.reply, spec, key=item.key, start=line.start, weight_version=_given_version(item))
    if not isinstance(item.prompt, list):
        raise TraceError("the tokens of the prompt are missing", where={"request": item.key}, do="add prompt_token_ids")
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
    if form == "lists":
        return lint(envelopes.decode_lists(reply["routed_experts"] or []), spec, reply["token_ids"])
    if form == "sglang":
        meta = reply.get("meta_info")
        payload = meta.get("routed_experts") if isinstance(meta, Mapping) else None
        array = envelopes.decode_sglang(payload, layers=envelopes.decoder_layers(spec), top_k=spec.top_k)
    else:
        array = (envelopes.decode_nemo if form == "nemo" else envelopes.decode_vllm)(reply.get("routed_experts"))
    sampled = reply.get({"sglang": "output_ids", "nemo": "generation_token_ids", "vllm": "token_ids"}[form])
    prompt = reply.get("prompt_token_ids") if form == "nemo" else item.prompt
    if not isinstance(prompt, list) or not isinstance(sampled, list):
        return lint(array, spec)
    start = first_row(reply.get("routed_experts"), item.line.start, {"request": item.key})
    forwarded = [*prompt, *sampled][start:-1]
    # NeMo-RL's last row belongs to a token that is never forwarded.
    return lint(array[:-1] if form == "nemo" else array, spec, forwarded)


def _before(item: _Item, record: RouteRecord, tokens: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return the tokens before the record's first row, taken from its parent; None without a parent."""
    start, parent = record.first_row, item.line.parent
    if parent is None and not start:
        return None
    where: About = {"request": record.key}
    if parent is None or parent not in tokens:
        raise TraceError(
            f"no record has the rows before {start}",
            where=where,
            got=f"parent {parent!r}",
            expected="the key of an earlier line",
            do="import the earlier turns first, or ask the sampler for all rows",
        )
    prompt = item.prompt if item.prompt is not None else item.reply.get("prompt_token_ids") or []
    before = np.asarray(prompt[:start], np.int32)
    known = tokens[parent][:start]
    if not np.array_equal(before, known):
        same = min(len(before), len(known))
        different = np.flatnonzero(before[:same] != known[:same])
        raise TraceError(
            "request does not begin with the tokens of its parent",
            where={**where, "token": int(different[0]) if len(different) else same},
            got=f"{len(known)} rows of {parent}",
            expected=f"{start} rows of the same tokens",
        )
    return before


def _given_version(item: _Item) -> int:
    if item.line.weight_version is None:
        raise TraceError(
            "the weight version is missing", where={"request": item.key}, do="add weight_version to the line"
        )
    return item.line.weight_version


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(envelopes.MAX_BYTES + 1)
    except OSError as error:
        raise TraceError("file cannot be read", where={"file": path}, got=error.strerror) from error
    if len(data) > envelopes.MAX_BYTES:
        raise TraceError("file is too large", where={"file": path}, expected=f"at most {envelopes.MAX_BYTES} bytes")
    return data
