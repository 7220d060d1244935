"""Turns replies of other samplers into records: tokens, routes, weight versions and provenance.

A sampler forwards every token except the last sampled one, so P prompt tokens and N sampled tokens have P + N - 1 rows.
The row of position p gave the logits of the token at p + 1. Sampled token i therefore comes from row P - 1 + i, and the
weight version that a reply gives for the token holds for that row. Earlier prompt rows get the first sampled token's
version.

Every function raises RouteValidationError with request, token and layer, or TraceError, if anything does not fit
exactly; nothing is truncated or padded. Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

import numpy as np

from moe_rl.errors import About, RouteValidationError, TraceError
from moe_rl.trace.adapters.envelopes import decode_nemo, decode_sglang, decode_vllm, decoder_layers, take_routes
from moe_rl.trace.record import RouteRecord, TraceSpec, as_token_ids, check_key
from moe_rl.trace.spans import check_spans, cut_spans, spans_of_rows
from moe_rl.types import Provenance, Span

_KINDS: dict[type | UnionType, str] = {
    str: "text",
    list: "a list",
    Mapping: "an object",
}
_ROUTES = str | Mapping | list
_KINDS[_ROUTES] = "text, an object with data, shape and dtype, or nested lists"


def from_vllm(
    choice: Mapping,
    spec: TraceSpec,
    *,
    key: str,
    prompt_token_ids: Sequence[int],
    start: int = 0,
    weight_version: int | None = None,
) -> RouteRecord:
    """Read one choice of a vLLM reply: `token_ids`, `routed_experts`, `finish_reason`, and `weight_versions` if
    present.

    Args:
        choice: the choice as a mapping.
        spec: the model.
        key: key of the record.
        prompt_token_ids: the prompt.
        start: the request's `routed_experts_prompt_start`. If it is not 0, a payload that gives its own start must
            give the same.
        weight_version: version for all rows; None uses the reply's versions.

    The reply does not say which rows came from the prefix cache, so all prompt rows count as prefill.
    """
    where: About = {"request": key}
    payload = _field(choice, "routed_experts", _ROUTES, where)
    start = first_row(payload, start, where)
    reply = _Reply(
        decode_vllm(payload),
        _field(choice, "token_ids", list, where),
        versions=choice.get("weight_versions"),
        aborted=choice.get("finish_reason") == "abort",
    )
    return _sampled(reply, spec, key, prompt_token_ids, start, weight_version)


def from_sglang(
    answer: Mapping,
    spec: TraceSpec,
    *,
    key: str,
    prompt_token_ids: Sequence[int],
    start: int = 0,
    weight_version: int | None = None,
) -> RouteRecord:
    """Read a reply of SGLang's /generate.

    Uses `output_ids`, and from `meta_info` `routed_experts`, `weight_versions` or `weight_version`, `cached_tokens` and
    `finish_reason`.

    Args:
        answer: the reply as a mapping.
        spec: the model.
        key: key of the record.
        prompt_token_ids: the prompt.
        start: the request's `routed_experts_start_len`.
        weight_version: version for all rows; None uses the reply's versions.
    """
    where: About = {"request": key}
    meta = _field(answer, "meta_info", Mapping, where)
    sampled = _field(answer, "output_ids", list, where)
    spans = meta.get("weight_versions")
    if spans is None and "weight_version" in meta:
        spans = [{"version": meta["weight_version"], "start": 0, "end": len(sampled)}]
    finish = meta.get("finish_reason")
    reply = _Reply(
        decode_sglang(_field(meta, "routed_experts", _ROUTES, where), layers=decoder_layers(spec), top_k=spec.top_k),
        sampled,
        versions=spans,
        aborted=isinstance(finish, Mapping) and finish.get("type") == "abort",
        cached=meta.get("cached_tokens", 0),
    )
    return _sampled(reply, spec, key, prompt_token_ids, start, weight_version)


def from_nemo(message: Mapping, spec: TraceSpec, *, key: str, weight_version: int, start: int = 0) -> RouteRecord:
    """Read a message of NeMo-RL: `prompt_token_ids`, `generation_token_ids`, `routed_experts`.

    The filler row of the last sampled token is dropped. Rows that were not captured (-1) are refused, although NeMo-RL
    itself lets the trainer's router choose there.

    Args:
        message: the message as a mapping.
        spec: the model.
        key: key of the record.
        weight_version: version for all rows, which the message does not name.
        start: number of tokens of earlier turns whose rows the envelope omits.
    """
    where: About = {"request": key}
    prompt = _field(message, "prompt_token_ids", list, where)
    sampled = _field(message, "generation_token_ids", list, where)
    array = decode_nemo(_field(message, "routed_experts", _ROUTES, where))
    expected = len(prompt) + len(sampled) - start
    if len(array) != expected:
        raise RouteValidationError(
            "envelope does not have a row for every token",
            where=where,
            got=f"{len(array)} rows",
            expected=f"{expected}: {len(prompt)} prompt and {len(sampled)} sampled tokens from position {start}",
            fault="rows",
        )
    return _sampled(_Reply(array[:-1], sampled), spec, key, prompt, start, weight_version)


def from_array(
    array: np.ndarray, spec: TraceSpec, *, key: str, token_ids: Sequence[int] | np.ndarray, weight_version: int
) -> RouteRecord:
    """Make a record from bare routes, as .npy files and nested lists hold them.

    Args:
        array: [T, layers, K].
        spec: the model.
        key: key of the record.
        token_ids: [T] the forwarded tokens.
        weight_version: version for all rows, which all count as prefill.
    """
    where: About = {"request": check_key(key)}
    ids = as_token_ids(token_ids, where=where)
    routes = take_routes(array, spec, rows=len(ids), where=where)
    spans = [Span(len(ids), weight_version, Provenance.PREFILL)] if len(ids) else []
    return _record(key, routes, ids, check_spans(spans, rows=len(ids), where=where), False, spec, 0)


def first_row(payload: object, start: int, where: About) -> int:
    """Return the position of a payload's first row: the payload's own start, else `start` from its line."""
    first = payload.get("start") if isinstance(payload, Mapping) else None
    if first is None:
        return start
    if type(first) is not int or start not in (0, first):
        raise TraceError(
            "routed_experts begin at another row", where=where, got=repr(first)[:80], expected=start or "a number"
        )
    return first


@dataclass(frozen=True, slots=True)
class _Reply:
    """Holds a sampler's answer to one request: array [T, layers, K], sampled token ids, versions as sent."""

    array: np.ndarray
    sampled: Sequence[int]
    versions: object = None
    aborted: bool = False
    cached: int = 0


def _sampled(
    reply: _Reply, spec: TraceSpec, key: str, prompt: Sequence[int], start: int, weight_version: int | None
) -> RouteRecord:
    """Make a record of a reply. `weight_version` is for all rows; None uses the reply's versions."""
    where: About = {"request": check_key(key)}
    versions = _versions(reply.versions, where) if weight_version is None else weight_version
    cached, rows = reply.cached, len(prompt) + len(reply.sampled) - 1
    if not (isinstance(start, int) and 0 <= start <= max(0, min(rows, len(prompt)))):
        raise TraceError("first row is not in the prompt", where=where, got=start, expected=f"0 to {len(prompt)}")
    if not (isinstance(cached, int) and 0 <= cached <= len(prompt)):
        raise TraceError("cached tokens are impossible", where=where, got=cached, expected=f"0 to {len(prompt)}")
    ids = as_token_ids([*prompt, *reply.sampled][: rows if rows > 0 else 0], where=where)[start:]
    routes = take_routes(reply.array, spec, rows=len(ids), where=where)
    of_rows = np.empty(max(0, rows), np.int64)
    of_rows[:] = _version_of_rows(versions, rows, len(prompt), where)
    spans = cut_spans(spans_of_rows(of_rows, cached=cached, prompt=len(prompt)), start, rows)
    return _record(key, routes, ids, spans, reply.aborted, spec, start)


def _record(
    key: str, routes: np.ndarray, ids: np.ndarray, spans: tuple[Span, ...], aborted: bool, spec: TraceSpec, start: int
) -> RouteRecord:
    routes.flags.writeable = ids.flags.writeable = False
    return RouteRecord(key, routes, ids, spans, aborted, spec, start, spec.moe_layers)


def _versions(spans: object, where: About) -> list[tuple[int, int]]:
    """Return pairs (number of sampled tokens, version) in order, from the spans in a reply."""
    wrong = TraceError(
        "weight versions of the reply cannot be used",
        where=where,
        got=repr(spans)[:120],
        expected="a list of {version, start, end} without gaps, each version a number",
        do="give the weight version of the request",
        fault="weight version",
    )
    if not isinstance(spans, list) or not spans:
        raise wrong
    pairs, end = [], 0
    for span in spans:
        if not isinstance(span, Mapping) or span.get("start") != end or not isinstance(span.get("end"), int):
            raise wrong
        version = str(span.get("version"))
        if not (version.isascii() and version.isdigit() and len(version) <= 18 and span["end"] >= end):
            raise wrong
        pairs.append((span["end"] - end, int(version)))
        end = span["end"]
    return pairs


def _version_of_rows(versions: int | list[tuple[int, int]], rows: int, prompt: int, where: About) -> int | np.ndarray:
    if isinstance(versions, int):
        return versions
    sampled, covered = rows + 1 - prompt, sum(count for count, _ in versions)
    if covered != sampled or not sampled:
        raise TraceError(
            "weight versions do not cover the sampled tokens",
            where=where,
            got=f"{covered} tokens",
            expected=sampled or "at least one sampled token",
            do="give the weight version of the request",
        )
    of_sampled = np.repeat([version for _, version in versions], [count for count, _ in versions])
    return of_sampled[np.maximum(0, np.arange(rows) - (prompt - 1))]


def _field(source: object, name: str, kind: type | UnionType, where: About) -> Any:
    value = source.get(name) if isinstance(source, Mapping) else None
    if not isinstance(value, kind):
        raise TraceError(
            f"reply has no {name}" if value is None else f"{name} of the reply cannot be read",
            where=where,
            got="nothing" if value is None else type(value).__name__,
            expected=_KINDS[kind],
            do="ask the sampler to return token ids and routed experts",
        )
    return value
