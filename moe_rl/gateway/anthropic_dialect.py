"""Speaks Anthropic's API: POST /v1/messages, and /v1/messages/count_tokens.

A field that would change the result and is not served is refused by its name. Fields that only concern the provider,
such as hints for caches, are accepted and have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from moe_rl.gateway.asking import AgentReply, BadRequest, ChatWish, SamplingWish
from moe_rl.gateway.fields import (
    ToolName,
    answer_schema,
    checked,
    function_tool,
    plain_text,
    read_constraint,
    read_sampling,
    refuse_prefill,
    refuse_unread,
    strings,
    text_of,
)
from moe_rl.gateway.rendering import read_arguments

# Fields that are accepted only with these values, which have no effect.
_ONLY: dict[str, tuple[Any, ...]] = {
    "thinking": (None, {"type": "disabled"}, {"type": "adaptive"}),
    "container": (None,),
    "context_management": (None, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "mcp_servers": (None, []),
}
# What this API calls the fields.
_NAMES = {
    "reasoning_content": "thinking",
    "tool_calls": "tool_use",
    "tool_call_id": "tool_use_id",
    "stop": "stop_sequences",
    "grammar": "output_config.format",
}
# Prefix of the system prompt's first line with the provider's billing data, which differs with each request.
_BILLING = "x-anthropic-billing-header:"
# Templates have no error results, so the text marks the error.
_FAILED = "Error: "
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class _Spoken(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]]


class _Offered(msgspec.Struct, forbid_unknown_fields=True):
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None


class _CountedBody(msgspec.Struct, kw_only=True):
    messages: list[_Spoken]
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[_Offered] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    # These only concern the provider.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    diagnostics: Any = None


class _MessagesBody(_CountedBody, kw_only=True):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False


def read_messages(body: bytes) -> ChatWish:
    """Parse a body of /v1/messages. Raises BadRequest."""
    request = checked(body, _MessagesBody, _ONLY)
    sampling = read_sampling(
        _NAMES,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        max_tokens=request.max_tokens,
        stop=strings(request.stop_sequences),
    )
    return replace(_read(request), sampling=sampling, stream=request.stream)


def read_counted(body: bytes) -> ChatWish:
    """Parse a body of /v1/messages/count_tokens. Raises BadRequest."""
    return _read(checked(body, _CountedBody, _ONLY))


def _read(request: _CountedBody) -> ChatWish:
    if not request.messages:
        raise BadRequest("at least one message is needed", "messages")
    refuse_prefill(request.messages[-1].role, f"messages.{len(request.messages) - 1}")
    refuse_unread(request.output_config or {}, ("format",), "output_config")
    schema = answer_schema((request.output_config or {}).get("format"), "output_config.format")
    tools = tuple(_tool(index, tool) for index, tool in enumerate(request.tools or []))
    strict = [tool.strict for tool in request.tools or []]
    single = bool((request.tool_choice or {}).get("disable_parallel_tool_use"))
    system = _system(request.system)
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
    places = ["system"] if system else []
    for index, message in enumerate(request.messages):
        if message.role not in ("user", "assistant"):
            raise BadRequest(f"got {message.role[:40]!r}, expected user or assistant", f"messages.{index}.role")
        blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
        read = _heard if message.role == "user" else _said
        messages += read(blocks, f"messages.{index}.content")
        places += [f"messages.{index}"] * (len(messages) - len(places))
    return ChatWish(
        model=request.model,
        messages=tuple(messages),
        places=tuple(places),
        names=_NAMES,
        tools=tools,
        constraint=read_constraint(schema, tools, strict, request.tool_choice, single=single),
        sampling=SamplingWish(),
    )


def messages_body(name: str, model: str, wish: ChatWish, replies: Sequence[AgentReply]) -> dict[str, Any]:
    """Return the body of the only reply."""
    (reply,) = replies
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(reply),
        "stop_reason": _reason(reply),
        "stop_sequence": reply.stop,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.turn.token_ids)},
    }


def messages_events(name: str, model: str, wish: ChatWish, replies: Sequence[AgentReply]) -> Iterator[bytes]:
    """Yield the events of a reply."""
    body = messages_body(name, model, wish, replies)
    usage, blocks = body["usage"], body["content"]
    nothing_yet = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield _event("message_start", {"message": body | nothing_yet})
    for index, block in enumerate(blocks):
        empty, delta = _in_two(block)
        yield _event("content_block_start", {"index": index, "content_block": empty})
        yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    end = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield _event("message_delta", {"delta": end, "usage": {"output_tokens": usage["output_tokens"]}})
    yield _event("message_stop", {})


def error_body(error: BadRequest) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.told}}


def _system(system: str | list[dict[str, Any]] | None) -> str:
    """Return the system prompt without a first line that only concerns the provider."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    if blocks and str(text := blocks[0].get("text")).startswith(_BILLING):
        blocks = [{**blocks[0], "text": str(text).partition("\n")[2].lstrip("\n")}, *blocks[1:]]
    return plain_text(blocks, "system")


def _heard(blocks: Sequence[Mapping[str, Any]], field: str) -> list[Mapping[str, Any]]:
    """Split a user's message: one message per tool result, and one for the text."""
    messages: list[Mapping[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(text_of(block, f"{field}.{index}"))
            continue
        if texts:
            raise BadRequest("results of tools must come before text", f"{field}.{index}")
        name = block.get("tool_use_id")
        if not isinstance(name, str):
            raise BadRequest("a tool's result must name the call that it answers", f"{field}.{index}.tool_use_id")
        refuse_unread(block, ("type", "tool_use_id", "content", "is_error"), f"{field}.{index}")
        content = plain_text(block.get("content"), f"{field}.{index}.content")
        if block.get("is_error"):
            content = f"{_FAILED}{content}"
        messages.append({"role": "tool", "tool_call_id": name, "content": content})
    if texts or not messages:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages


def _said(blocks: Sequence[Mapping[str, Any]], field: str) -> list[Mapping[str, Any]]:
    """Return the assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls, texts = [], []
    for index, block in enumerate(blocks):
        match block:
            case {"type": "thinking", "thinking": str(thought)}:
                refuse_unread(block, ("type", "thinking", "signature"), f"{field}.{index}")
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case {"type": "tool_use", "id": str(name), "name": str(tool), "input": dict(arguments)} if tool:
                # A direct call by the model is the default.
                more = ("caller",) if block.get("caller") == {"type": "direct"} else ()
                refuse_unread(block, ("type", "id", "name", "input", *more), f"{field}.{index}")
                text = json.dumps(arguments, ensure_ascii=False)
                calls.append({"id": name, "type": "function", "function": {"name": tool, "arguments": text}})
            case {"type": "text"}:
                texts.append(text_of(block, f"{field}.{index}"))
            case _:
                kind = str(block.get("type"))[:40]
                known = "text, thinking, or tool_use with id, name and input"
                raise BadRequest(f"got {kind!r}, expected {known}", f"{field}.{index}", code="unsupported_value")
    message["content"] = "".join(texts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tool(index: int, tool: _Offered) -> Mapping[str, Any]:
    if tool.type not in (None, "custom"):
        raise BadRequest(f"got {tool.type[:40]!r}, expected custom", f"tools.{index}.type", code="unsupported_value")
    return function_tool(tool.name, tool.description, tool.input_schema)


def _blocks(reply: AgentReply) -> list[dict[str, Any]]:
    answer = reply.answer
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for name, use in zip(reply.use_ids, answer.uses, strict=True):
        blocks.append({"type": "tool_use", "id": name, "name": use.name, "input": read_arguments(use.arguments)})
    return blocks


def _in_two(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a block without its content, and the content as one delta."""
    if block["type"] == "tool_use":
        arguments = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
    part = block["type"]
    return {**block, part: ""}, {"type": f"{part}_delta", part: block[part]}


def _reason(reply: AgentReply) -> str:
    if reply.truncated:
        return "max_tokens"
    if reply.answer.uses:
        return "tool_use"
    return "stop_sequence" if reply.stop is not None else "end_turn"


def _event(kind: str, body: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **body}) + b"\n\n"
