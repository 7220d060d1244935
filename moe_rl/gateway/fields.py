"""Reads the fields of request bodies. Every refusal names the field."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from moe_rl.errors import did_you_mean
from moe_rl.gateway.answer_grammar import Constraint
from moe_rl.gateway.asking import BadRequest, SamplingWish
from moe_rl.gateway.json_values import carried
from moe_rl.types import LONGEST_STOP_STRING, MOST_STOP_STRINGS

# Bodies are read in threads, and msgspec crashes when two threads are the first to convert to a type.
_CONVERTING = threading.Lock()

_MOST_SAMPLES = 128
# Fields of a part of a message that only concern the provider.
_OF_THE_PROVIDER = {"cache_control", "prompt_cache_breakpoint"}


# A name of a tool.
ToolName = Annotated[str, msgspec.Meta(min_length=1)]
# What a tool takes if its client does not say.
NO_PARAMETERS = {"type": "object", "properties": {}}
_ANY_OBJECT = {"type": "object"}


def checked[T: msgspec.Struct](
    body: bytes, kind: type[T], only: Mapping[str, Sequence[Any]], spoken: Collection[str] = ()
) -> T:
    """Return a JSON body as `kind`, which has the fields that are served.

    Args:
        only: fields that are accepted only with these values, which have no effect.
        spoken: the fields of a message. Packages that send back a whole reply add others, which must be empty.

    Raises:
        BadRequest: it is not a JSON object, or a field is not served or has a wrong value.
    """
    try:
        request = carried(body)
    except ValueError as error:
        raise BadRequest(f"the body is not a JSON object that can be used: {error}", code="invalid_json") from None
    if not isinstance(request, dict):
        raise BadRequest("the body is not a JSON object", code="invalid_json")
    for name, value in request.items():
        if name in only:
            # JSON's true is not 1.
            if not any(value == valid and isinstance(value, bool) == isinstance(valid, bool) for valid in only[name]):
                raise BadRequest(f"this value is not served: {str(value)[:100]}", name, code="unsupported_value")
        elif name not in kind.__struct_fields__:
            hint = did_you_mean(name, kind.__struct_fields__)
            raise BadRequest(f"this field is not served. {hint}".strip(), name[:100], code="unsupported_parameter")
    messages = request.get("messages") if spoken else None
    for message in messages if isinstance(messages, list) else ():
        for name in set(message) - set(spoken) if isinstance(message, dict) else ():
            if name in _OF_THE_PROVIDER or not message[name] or message[name] == {"refusal": None}:
                del message[name]
    try:
        with _CONVERTING:
            return msgspec.convert({name: value for name, value in request.items() if name not in only}, kind)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        lacks = "".join(re.findall("missing required field `(.+)`", text))
        field = re.sub(r"\[(\d+)\]", r".\1", place.strip("`.").replace("[...]", ""))
        raise BadRequest(text, ".".join(filter(None, (field, lacks)))) from None


def plain_text(content: Any, field: str, kinds: Collection[str] = ("text",), beside: Collection[str] = ()) -> str:
    """Return the text of a message's content: a text, or parts of text.

    Args:
        kinds: the types of parts that are text.
        beside: fields of a part that may stand beside its text and are not read.

    Raises:
        BadRequest: content of another kind.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"got {str(content)[:40]!r}, expected text", field)
    return "".join(text_of(part, f"{field}.{index}", kinds, beside) for index, part in enumerate(content))


def text_of(part: Any, field: str, kinds: Collection[str] = ("text",), beside: Collection[str] = ()) -> str:
    """Return the text of a part of a message, see `plain_text`."""
    match part:
        case {"type": str(known), "text": str(text)} if known in kinds:
            refuse_unread(part, ("type", "text", *beside), field)
            return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise BadRequest(f"got {str(kind)[:40]!r}, expected text", field, code="unsupported_value")


def refuse_unread(part: Mapping[Any, Any], known: Collection[str], field: str) -> None:
    """Refuse a part of a message with fields that are not read, such as citations. Raises BadRequest."""
    for name, value in part.items():
        if name not in known and name not in _OF_THE_PROVIDER and value not in (None, "", [], {}):
            text = "this field is not served, and the prompt would not show it"
            raise BadRequest(text, f"{field}.{name[:100]}", code="unsupported_parameter")


def function_tool(name: str, description: str | None, parameters: dict[str, Any]) -> Mapping[str, Any]:
    """Return a tool in OpenAI's form."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def answer_schema(form: Any, field: str, described: Any = None) -> Mapping[str, Any] | None:
    """Return the JSON schema that the format of an answer asks for; None for any text. Raises BadRequest.

    described: the object with the schema, where that is not the format itself.
    """
    match described or form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object", **rest}:
            refuse_unread(rest, (), field)
            return _ANY_OBJECT
        case {"schema": dict(schema), **rest} if form.get("type") == "json_schema":
            refuse_unread(rest, ("type", "name", "description", "strict"), field)
            return schema
    text = f"got {str(form)[:80]!r}, expected text, json_object, or json_schema with a schema"
    raise BadRequest(text, field, code="unsupported_value")


def read_constraint(
    schema: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    strict: Sequence[bool | None],
    choice: Any,
    *,
    single: bool,
) -> Constraint | None:
    """Return what an answer must be; None if anything. Raises BadRequest.

    Args:
        schema: the JSON schema of its text; None: any text.
        tools: in OpenAI's form.
        strict: for each tool, whether its arguments must follow its schema. None: they do if anything is constrained.
        choice: says which of them must be called, as any of the dialects says it; None: none must.
        single: whether at most one may be called.
    """
    name, forced = "", True
    match choice:
        case None | "auto" | {"type": "auto"}:
            forced = False
        case "none" | {"type": "none"}:
            barred = tuple((tool["function"]["name"], _ANY_OBJECT) for tool in tools)
            return Constraint(schema, barred if schema is None else (), barred=True) if schema or barred else None
        case "required" | {"type": "any"}:
            pass
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function" | "tool", "name": str(name)}:
            single = True
        case _:
            text = f"got {str(choice)[:80]!r}, expected auto, none, that any tool must be called, or a tool by its name"
            raise BadRequest(text, "tool_choice", code="unsupported_value")
    schemas = {
        tool["function"]["name"]: _ANY_OBJECT if told is False else tool["function"]["parameters"]
        for tool, told in zip(tools, strict, strict=True)
    }
    wanted = tuple((tool, taken) for tool, taken in schemas.items() if name in ("", tool))
    if forced and not wanted:
        raise BadRequest(f"got {str(choice)[:80]!r}, and no such tool in this request", "tool_choice")
    if schema is None and not forced and not (tools and (single or any(strict))):
        return None
    return Constraint(schema, wanted, forced, single)


def refuse_prefill(role: str, field: str) -> None:
    """Refuse an assistant's message in last place. Raises BadRequest."""
    if role == "assistant":
        text = (
            "the last message is the assistant's. Its text would have to be the beginning of the answer, which is not "
            "served: end with a message of a user or a tool, or continue a text with /v1/completions"
        )
        raise BadRequest(text, field, code="unsupported_value")


def strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return one text or several as a tuple, without empty ones."""
    return tuple(text for text in ([value] if isinstance(value, str) else value or ()) if text)


def read_sampling(names: Mapping[str, str], **given: Any) -> SamplingWish:
    """Return the sampling parameters that a client has set, not None, or raise BadRequest for a count out of range.

    The sampler checks the rest.

    Args:
        names: as in Wish.
        given: the fields of SamplingWish; top_k -1 means 0.
    """
    wish = SamplingWish(**{field: value for field, value in given.items() if value is not None})
    wish = replace(wish, top_k=0) if wish.top_k == -1 else wish
    longest_stop = max(map(len, wish.stop), default=0)
    for field, got, most in (
        ("n", wish.samples, _MOST_SAMPLES),
        ("stop", len(wish.stop), MOST_STOP_STRINGS),
        ("stop", longest_stop, LONGEST_STOP_STRING),
    ):
        if got > most:
            raise BadRequest(f"got {got}, expected at most {most}", names.get(field, field))
    if wish.samples < 1:
        raise BadRequest(f"got {wish.samples}, expected at least 1", "n")
    if wish.max_tokens is not None and wish.max_tokens < 1:
        raise BadRequest(f"got {wish.max_tokens}, expected at least 1", names.get("max_tokens", "max_tokens"))
    return wish
