"""Speaks OpenAI's API: POST /v1/chat/completions and /v1/completions.

A field that would change the result and is not served is refused by its name. Fields that only concern the provider,
such as user and metadata, are accepted and have no effect.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec

from moe_rl.gateway.agent_gateway import message_of
from moe_rl.gateway.asking import AgentReply, BadRequest, ChatWish, SaidToken, TextWish
from moe_rl.gateway.fields import (
    NO_PARAMETERS,
    ToolName,
    answer_schema,
    checked,
    function_tool,
    plain_text,
    read_constraint,
    read_sampling,
    refuse_prefill,
    strings,
)

# Fields that are accepted only with these values, which have no effect.
_ONLY: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
    "modalities": (None, ["text"]),
    "functions": (None, []),
    "function_call": (None,),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    # Those of vLLM and SGLang, which their clients send with every request.
    "repetition_penalty": (None, 1),
    "ignore_eos": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template_kwargs": (None, {}),
}
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class _ToolBody(msgspec.Struct, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    function: _ToolBody
    type: str = "function"
    cache_control: dict[str, Any] | None = None


class _Called(msgspec.Struct, forbid_unknown_fields=True):
    name: ToolName
    arguments: str


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: _Called
    type: Literal["function"] = "function"
    # Left in by clients that assemble a stream.
    index: int | None = None


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Stream(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class ForProvider(msgspec.Struct, kw_only=True):
    """Holds the fields of OpenAI's requests that only concern the provider."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class _Asked(ForProvider, kw_only=True):
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _Stream | None = None


class _ChatBody(_Asked, kw_only=True):
    messages: list[_Message] = []
    max_completion_tokens: int | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None


class _TextBody(_Asked, kw_only=True):
    prompt: str | list[int | str | list[int]] = ""
    logprobs: int | None = None
    echo: bool | None = None


def read_chat(body: bytes) -> ChatWish:
    """Parse a body of /v1/chat/completions. Raises BadRequest."""
    request = checked(body, _ChatBody, _ONLY, _Message.__struct_fields__)
    if not request.messages:
        raise BadRequest("at least one message is needed", "messages")
    refuse_prefill(request.messages[-1].role, f"messages.{len(request.messages) - 1}")
    form = request.response_format
    schema = answer_schema(form, "response_format", form and form.get("json_schema"))
    tools = tuple(_tool(index, tool) for index, tool in enumerate(request.tools or []))
    strict, single = [tool.function.strict for tool in request.tools or []], request.parallel_tool_calls is False
    return ChatWish(
        messages=tuple(_message(index, message) for index, message in enumerate(request.messages)),
        places=tuple(f"messages.{index}" for index in range(len(request.messages))),
        tools=tools,
        constraint=read_constraint(schema, tools, strict, request.tool_choice, single=single),
        logprobs=bool(request.logprobs),
        **_in_both(request, {name: getattr(request, name) for name in ("max_tokens", "max_completion_tokens")}),
    )


def read_text(body: bytes) -> TextWish:
    """Parse a body of /v1/completions. Raises BadRequest."""
    request = checked(body, _TextBody, _ONLY)
    prompt: Any = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        raise BadRequest("one prompt per request: a text, or token ids", "prompt", code="unsupported_value")
    if not prompt:
        raise BadRequest("the prompt is empty", "prompt")
    if request.logprobs:
        raise BadRequest(
            "log-probabilities of other tokens are not served: ask for logprobs 0", "logprobs", code="unsupported_value"
        )
    return TextWish(
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        logprobs=request.logprobs is not None,
        echo=bool(request.echo),
        **_in_both(request, {"max_tokens": request.max_tokens}),
    )


def chat_body(name: str, model: str, wish: ChatWish, replies: Sequence[AgentReply]) -> dict[str, Any]:
    """Return the body of a chat's reply."""
    choices = [
        {
            "index": index,
            "message": {"refusal": None, **message_of(reply.answer, reply.use_ids)},
            "logprobs": _chat_logprobs(reply.tokens) if wish.logprobs else None,
            "finish_reason": _finish(reply),
        }
        for index, reply in enumerate(replies)
    ]
    return _head(f"chatcmpl-{name}", "chat.completion", model) | {"choices": choices, "usage": _usage(replies)}


def text_body(name: str, model: str, wish: TextWish, replies: Sequence[AgentReply]) -> dict[str, Any]:
    """Return the body of a completion's reply."""
    choices = [
        {
            "index": index,
            "text": reply.text,
            "logprobs": _text_logprobs(reply) if wish.logprobs else None,
            "finish_reason": _finish(reply),
        }
        for index, reply in enumerate(replies)
    ]
    return _head(f"cmpl-{name}", "text_completion", model) | {"choices": choices, "usage": _usage(replies)}


def chat_events(name: str, model: str, wish: ChatWish, replies: Sequence[AgentReply]) -> Iterator[bytes]:
    """Yield the events of a chat's reply."""
    head = _head(f"chatcmpl-{name}", "chat.completion.chunk", model)

    def event(choices: list[dict[str, Any]], usage: object = None) -> bytes:
        return _event(head | {"choices": choices} | ({"usage": usage} if wish.usage else {}))

    for index, reply in enumerate(replies):
        message = message_of(reply.answer, reply.use_ids)
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{part: message[part]} for part in ("reasoning_content", "content") if message.get(part)]
        deltas += [{"tool_calls": [call]} for call in calls]
        for delta in deltas:
            yield event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
        logprobs = _chat_logprobs(reply.tokens) if wish.logprobs else None
        yield event([{"index": index, "delta": {}, "logprobs": logprobs, "finish_reason": _finish(reply)}])
    if wish.usage:
        yield event([], _usage(replies))
    yield b"data: [DONE]\n\n"


def text_events(name: str, model: str, wish: TextWish, replies: Sequence[AgentReply]) -> Iterator[bytes]:
    """Yield the events of a completion's reply."""
    body = text_body(name, model, wish, replies)
    usage = body.pop("usage")
    for choice in body["choices"]:
        yield _event(body | {"choices": [choice]} | ({"usage": None} if wish.usage else {}))
    if wish.usage:
        yield _event(body | {"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def error_body(error: BadRequest) -> dict[str, Any]:
    """Return the body of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.told, "type": kind, "param": error.field or None, "code": error.code}}


def _message(index: int, message: _Message) -> Mapping[str, Any]:
    if message.role not in _ROLES:
        raise BadRequest(f"got {message.role[:40]!r}, expected {', '.join(_ROLES)}", f"messages.{index}.role")
    fields: dict[str, Any] = {
        "role": _ROLES[message.role],
        "content": plain_text(message.content, f"messages.{index}.content"),
    }
    if message.role == "tool" and not message.tool_call_id:
        raise BadRequest("a tool's message must name the call that it answers", f"messages.{index}.tool_call_id")
    reasoning = message.reasoning_content or message.reasoning
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", reasoning),
        ("tool_calls", [_call(call) for call in message.tool_calls or ()]),
    ):
        if value:
            fields[name] = value
    return fields


def _call(call: _ToolCall) -> Mapping[str, Any]:
    return {"id": call.id, "function": msgspec.to_builtins(call.function), "type": call.type}


def _tool(index: int, tool: _Tool) -> Mapping[str, Any]:
    if tool.type != "function":
        raise BadRequest(f"got {tool.type[:40]!r}, expected function", f"tools.{index}.type", code="unsupported_value")
    return function_tool(tool.function.name, tool.function.description, tool.function.parameters or NO_PARAMETERS)


def _in_both(request: _Asked, counts: Mapping[str, int | None]) -> dict[str, Any]:
    """Return the fields of a wish that both routes share. counts: fields that limit the tokens; all of them hold."""
    limits = [(most, name) for name, most in counts.items() if most is not None]
    longest, name = min(limits, default=(None, "max_tokens"))
    names = {
        "max_tokens": name,
        "grammar": "response_format",
        "messages": "messages" if "messages" in request.__struct_fields__ else "prompt",
    }
    return {
        "model": request.model,
        "names": names,
        "sampling": read_sampling(
            names,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            max_tokens=longest,
            seed=request.seed,
            stop=strings(request.stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            samples=request.n,
        ),
        "stream": bool(request.stream),
        "usage": request.stream_options is not None and request.stream_options.include_usage,
    }


def _finish(reply: AgentReply) -> str:
    return "length" if reply.truncated else "tool_calls" if reply.answer.uses else "stop"


def _usage(replies: Sequence[AgentReply]) -> dict[str, int]:
    prompt, sampled = replies[0].prompt_tokens, sum(len(reply.turn.token_ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(name: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def token_logprobs(tokens: Sequence[SaidToken]) -> list[dict[str, Any]]:
    """Return the log-probabilities of the sampled tokens in the form of chats and responses."""
    return [
        {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes), "top_logprobs": []}
        for token in tokens
    ]


def _chat_logprobs(tokens: Sequence[SaidToken]) -> dict[str, Any]:
    return {"content": token_logprobs(tokens), "refusal": None}


def _text_logprobs(reply: AgentReply) -> dict[str, Any]:
    texts, logprobs = [token.text for token in reply.tokens], [token.logprob for token in reply.tokens]
    # All tokens of a split character have the offset of its start.
    read = codecs.getincrementaldecoder("utf-8")("replace").decode
    offsets = [*accumulate((len(read(token.bytes)) for token in reply.tokens), initial=reply.echoed)][:-1]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
