"""Speaks OpenAI's Responses API: POST /v1/responses, with the whole dialogue in each request.

The gateway keeps no responses for later requests, so `previous_response_id` and `conversation` are refused. Every other
field that would change the result and is not served is refused by its name too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from moe_rl.gateway.asking import AgentReply, BadRequest, ChatWish
from moe_rl.gateway.fields import (
    NO_PARAMETERS,
    answer_schema,
    checked,
    function_tool,
    plain_text,
    read_constraint,
    read_sampling,
    refuse_prefill,
    refuse_unread,
)
from moe_rl.gateway.openai_dialect import ForProvider, token_logprobs

# Fields that are accepted only with these values, which have no effect.
_ONLY: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning": (None, {}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
# What this API calls the fields.
_NAMES = {
    "tool_call_id": "call_id",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "grammar": "text.format",
}
_ROLES = {"developer": "system", "system": "system", "user": "user"}
_TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text")
# The parts of an assistant's message, in the order of their items.
_ORDER = ("reasoning_content", "content", "tool_calls")


class _Body(ForProvider, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    include: list[str] | None = None
    # These only concern the provider.
    prompt_cache_options: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None


def read_responses(body: bytes) -> ChatWish:
    """Parse a body of /v1/responses. Raises BadRequest."""
    request = checked(body, _Body, _ONLY)
    include = request.include or []
    for index, name in enumerate(include):
        if name not in _INCLUDED:
            raise BadRequest(f"got {name[:80]!r}, expected {' or '.join(_INCLUDED)}", f"include.{index}")
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    if not items:
        raise BadRequest("at least one item is needed", "input")
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if request.instructions:
        messages, places = [{"role": "system", "content": request.instructions}], ["instructions"]
    _read(items, messages, places)
    refuse_prefill(messages[-1]["role"], places[-1])
    form = request.text or {}
    refuse_unread(form, ("format",), "text")
    schema, offered = answer_schema(form.get("format"), "text.format"), request.tools or []
    tools = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(offered))
    strict, single = [tool.get("strict") for tool in offered], request.parallel_tool_calls is False
    return ChatWish(
        model=request.model,
        messages=tuple(messages),
        places=tuple(places),
        names=_NAMES,
        tools=tools,
        constraint=read_constraint(schema, tools, strict, request.tool_choice, single=single),
        sampling=read_sampling(
            _NAMES, temperature=request.temperature, top_p=request.top_p, max_tokens=request.max_output_tokens
        ),
        logprobs=_LOGPROBS in include,
        stream=bool(request.stream),
    )


def responses_body(name: str, model: str, wish: ChatWish, replies: Sequence[AgentReply]) -> dict[str, Any]:
    """Return the body of the only reply."""
    (reply,) = replies
    sampled = len(reply.turn.token_ids)
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if reply.truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.truncated else None,
        "error": None,
        "model": model,
        "output": _output(name, wish, reply),
        "parallel_tool_calls": wish.constraint is None or not wish.constraint.single,
        "tool_choice": "required" if wish.constraint is not None and wish.constraint.forced else "auto",
        "tools": [
            {"type": "function", "strict": wish.constraint is not None, **tool["function"]} for tool in wish.tools
        ],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + sampled,
        },
    }


def responses_events(name: str, model: str, wish: ChatWish, replies: Sequence[AgentReply]) -> Iterator[bytes]:
    """Yield the events of a reply."""
    body, numbers = responses_body(name, model, wish, replies), itertools.count()

    def event(kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": next(numbers), **fields}
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(payload) + b"\n\n"

    begun = body | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(body["output"]):
        place = {"item_id": item["id"], "output_index": index}
        nothing_yet: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event(
            "response.output_item.added", output_index=index, item=item | nothing_yet | {"status": "in_progress"}
        )
        if item["type"] == "function_call":
            text = item["arguments"]
            yield event("response.function_call_arguments.delta", **place, delta=text)
            yield event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            (part,) = item["content"]
            place, kind = place | {"content_index": 0}, part["type"]
            more = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            yield event("response.content_part.added", **place, part=part | {"text": ""})
            yield event(f"response.{kind}.delta", **place, delta=part["text"], **more)
            yield event(f"response.{kind}.done", **place, text=part["text"], **more)
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{body['status']}", response=body)


def _read(items: Sequence[Mapping[str, Any]], messages: list[dict[str, Any]], places: list[str]) -> None:
    """Append the messages of all items. What the assistant says in one turn is one message, of several items."""
    last: int | None = None  # the last part of the assistant's message, which the next item may continue
    for index, item in enumerate(items):
        part, value = _item(item, f"input.{index}")
        order = _ORDER.index(part) if part in _ORDER else None
        if order is None or last is None or order < last or order == last != _ORDER.index("tool_calls"):
            messages.append(value if order is None else {"role": "assistant", "content": ""})
            places.append(f"input.{index}")
        if order is not None:
            messages[-1][part] = [*messages[-1].get(part, ()), value] if part == "tool_calls" else value
        last = order


def _item(item: Mapping[str, Any], field: str) -> tuple[str, Any]:
    """Return ("message", a message of another than the assistant), or a part of the assistant's and its value."""
    match item:
        case {"type": "function_call", "call_id": str(name), "name": str(tool), "arguments": str(arguments)}:
            more = ("caller",) if item.get("caller") == {"type": "direct"} else ()
            refuse_unread(item, ("type", "id", "call_id", "name", "arguments", "status", *more), field)
            return "tool_calls", {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}
        case {"type": "function_call_output", "call_id": str(name), "output": output}:
            refuse_unread(item, ("type", "id", "call_id", "output", "status"), field)
            return "message", {"role": "tool", "tool_call_id": name, "content": _text(output, f"{field}.output")}
        case {"type": "reasoning"}:
            refuse_unread(item, ("type", "id", "summary", "content", "status"), field)
            where = "content" if item.get("content") else "summary"
            return "reasoning_content", _text(item.get(where), f"{field}.{where}")
        case {"role": str(role), "content": content, **rest} if rest.get("type", "message") == "message":
            refuse_unread(item, ("type", "id", "role", "content", "status"), field)
            if role == "assistant":
                return "content", _text(content, f"{field}.content")
            if role not in _ROLES:
                raise BadRequest(f"got {role[:40]!r}, expected assistant, {', '.join(_ROLES)}", f"{field}.role")
            return "message", {"role": _ROLES[role], "content": _text(content, f"{field}.content")}
    kind = str(item.get("type", "message"))[:40]
    known = "a message with role and content, function_call, function_call_output or reasoning"
    raise BadRequest(f"got an item {kind!r}, expected {known}", field, code="unsupported_value")


def _text(content: Any, field: str) -> str:
    return plain_text(content, field, _TEXTS, ("logprobs",))


def _tool(tool: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    match tool:
        case {"type": "function", "name": str(name)} if name:
            pass
        case _:
            kind = str(tool.get("type"))[:40]
            raise BadRequest(f"got {kind!r}, expected a function with a name", field, code="unsupported_value")
    refuse_unread(tool, ("type", "name", "description", "parameters", "strict"), field)
    return function_tool(name, tool.get("description"), tool.get("parameters") or NO_PARAMETERS)


def _output(name: str, wish: ChatWish, reply: AgentReply) -> list[dict[str, Any]]:
    answer, status = reply.answer, "incomplete" if reply.truncated else "completed"
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = {"type": "reasoning_text", "text": answer.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [thought], "status": status})
    if answer.content or not (answer.uses or items):
        logprobs = token_logprobs(reply.tokens) if wish.logprobs else []
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": logprobs}
        message = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [text], "status": status}
        items.append(message)
    for index, (call_id, use) in enumerate(zip(reply.use_ids, answer.uses, strict=True)):
        call = {"type": "function_call", "id": f"fc_{name}{index}", "call_id": call_id, "status": status}
        items.append(call | {"name": use.name, "arguments": use.arguments})
    return items
