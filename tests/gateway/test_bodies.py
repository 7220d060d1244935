"""Any body is a wish or a refusal that a client understands."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.gateway.anthropic_dialect import read_messages
from moe_rl.gateway.asking import BadRequest
from moe_rl.gateway.openai_dialect import read_chat, read_text
from moe_rl.gateway.responses_dialect import read_responses
from tests.gateway.conftest import ADD

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.sampled_from(["text", "tool_use", "user", "tool"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "function", "id", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHAT = {
    "model": "m", "n": 1, "max_tokens": 3, "max_completion_tokens": 3, "temperature": 1.0, "top_p": 1, "top_k": 3,
    "min_p": 0, "seed": 1, "stop": ["x"], "stop_token_ids": [1], "stream": False, "logprobs": True, "tools": [ADD],
    "stream_options": {"include_usage": True}, "tool_choice": "auto",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ],
}  # fmt: skip
TEXT = {"model": "m", "prompt": [1, 2], "logprobs": 0, "echo": True, "suffix": None, "best_of": 1}
MESSAGES = {
    "model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "x"}],
    "tools": [{"name": "add", "input_schema": {}}],
    "stop_sequences": ["x"], "temperature": 1.0, "tool_choice": {"type": "auto"},
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": ""},
                                          {"type": "tool_use", "id": "c", "name": "add", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}]},
    ],
}  # fmt: skip
RESPONSES = {
    "model": "m", "instructions": "x", "max_output_tokens": 3, "temperature": 1.0, "top_p": 1, "stream": False,
    "include": ["message.output_text.logprobs"], "tools": [{"type": "function", "strict": False, **ADD["function"]}],
    "text": {"format": {"type": "text"}}, "tool_choice": "auto",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ],
}  # fmt: skip
USUAL = ((read_chat, CHAT), (read_text, TEXT), (read_messages, MESSAGES), (read_responses, RESPONSES))


def places(value, path=()):
    """Yield the path of every value in a body."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    made = dict(value) if isinstance(value, dict) else list(value)
    made[path[0]] = changed(value[path[0]], path[1:], new)
    return made


@st.composite
def bodies(draw):
    read, usual = draw(st.sampled_from(USUAL))
    body = changed(usual, draw(st.sampled_from(list(places(usual)))), draw(VALUES))
    return read, body


@settings(max_examples=1000)
@given(bodies())
def test_every_value_of_every_field_may_be_anything(asked):
    read, body = asked
    try:
        wish = read(msgspec.json.encode(body))
    except BadRequest as refusal:
        assert refusal.status == 400 and str(refusal) and refusal.code
    else:
        assert hash(wish.sampling) and wish.sampling.samples >= 1


@pytest.mark.parametrize("body", [b'{"prompt": "\\ud800"}', b'{"prompt": [true]}'])
def test_what_json_can_say_and_text_cannot(body):
    with pytest.raises(BadRequest):
        read_text(body)


def test_the_usual_bodies_are_wishes():
    for read, body in USUAL:
        assert read(msgspec.json.encode(body)).model == "m"


@pytest.mark.parametrize(
    ("read", "body", "field"),
    [
        (read_messages, {"messages": MESSAGES["messages"]}, "max_tokens"),
        (read_messages, {"max_tokens": 3, "messages": [{"role": "user"}]}, "messages.0.content"),
        (read_responses, {}, "input"),
        (read_chat, {"messages": [{"content": "x"}]}, "messages.0.role"),
    ],
)
def test_a_field_that_is_missing_is_named(read, body, field):
    with pytest.raises(BadRequest) as caught:
        read(msgspec.json.encode(body))
    assert caught.value.field == field


def test_a_last_message_of_the_assistant_is_refused():
    asks, says = {"role": "user", "content": "Count to three."}, {"role": "assistant", "content": "1, 2"}
    for read, more in ((read_chat, {}), (read_messages, {"max_tokens": 3})):
        with pytest.raises(BadRequest) as caught:
            read(msgspec.json.encode({"messages": [asks, says], **more}))
        assert caught.value.field == "messages.1"


def test_what_anthropics_messages_say_becomes_text():
    result = {"type": "tool_result", "tool_use_id": "c", "content": "No such file.", "is_error": True}
    thoughts = [{"type": "thinking", "thinking": text, "signature": ""} for text in ("a", "b")]
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [*thoughts, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]
    wish = read_messages(msgspec.json.encode({"messages": messages, "max_tokens": 3, "system": "s"}))
    assert [one["content"] for one in wish.messages] == ["s", "x", "", "Error: No such file.", "Go on."]
    assert wish.messages[2]["reasoning_content"] == "ab"
    assert wish.places == ("system", "messages.0", "messages.1", "messages.2", "messages.2")
    assert wish.place(2, "tool_calls") == "messages.1.tool_use" and wish.place(None, "tools.0") == "tools.0"


@pytest.mark.parametrize("text", ["You are an agent.", ""])
def test_a_block_for_the_providers_bill_is_not_for_the_model(text):
    blocks = [{"type": "text", "text": f"x-anthropic-billing-header: v=1; cch={text};"}, {"type": "text", "text": text}]
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    wish = read_messages(msgspec.json.encode(asked | {"system": blocks}))
    assert wish == read_messages(msgspec.json.encode(asked | {"system": text}))
    for one in (f"{blocks[0]['text']}\n\n{text}", [{"type": "text", "text": f"{blocks[0]['text']}\n{text}"}]):
        assert wish == read_messages(msgspec.json.encode(asked | {"system": one}))
    later = read_messages(msgspec.json.encode(asked | {"system": blocks[::-1]}))
    assert "billing" in later.messages[0]["content"]


CITED = {"type": "text", "text": "x", "citations": [{"type": "char_location", "cited_text": "y"}]}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "5"}
USE = {"type": "tool_use", "id": "c", "name": "add", "input": {}}


@pytest.mark.parametrize(
    ("role", "content", "field"),
    [
        ("assistant", [CITED], "messages.1.content.0.citations"),
        ("user", [CITED], "messages.1.content.0.citations"),
        ("user", [RESULT | {"content": [CITED]}], "messages.1.content.0.content.0.citations"),
        ("user", [RESULT | {"toolset_name": "t"}], "messages.1.content.0.toolset_name"),
        ("assistant", [USE | {"caller": {"type": "code", "tool_id": "t"}}], "messages.1.content.0.caller"),
        ("assistant", [{"type": "thinking", "thinking": "x", "signature": "s", "x": 1}], "messages.1.content.0.x"),
        ("assistant", [USE, CITED], "messages.1.content.1.citations"),
        ("user", [RESULT, CITED], "messages.1.content.1.citations"),
    ],
)
def test_what_a_block_says_and_no_prompt_shows_is_refused(role, content, field):
    asks = {"role": "user", "content": "x"}
    body = {"messages": [asks, {"role": role, "content": content}, asks], "max_tokens": 3}
    with pytest.raises(BadRequest) as caught:
        read_messages(msgspec.json.encode(body))
    assert (caught.value.field, caught.value.code) == (field, "unsupported_parameter")


def test_citations_of_the_systems_text_are_refused():
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "system": [CITED]}
    with pytest.raises(BadRequest) as caught:
        read_messages(msgspec.json.encode(body))
    assert caught.value.field == "system.0.citations"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"content": "x", "annotations": [{"type": "url_citation"}]}, "messages.1"),
        ({"content": "x", "refusal": "no"}, "messages.1"),
        ({"content": "x", "reasoning_details": [{"text": "y"}]}, "messages.1"),
        ({"content": [{"type": "text", "text": "x", "more": 1}]}, "messages.1.content.0.more"),
        ({"tool_calls": [CALL | {"extra_content": {"x": 1}}]}, "messages.1.tool_calls.0"),
        ({"tool_calls": [CALL | {"type": "custom"}]}, "messages.1.tool_calls.0.type"),
    ],
)
def test_what_an_assistants_message_says_and_no_prompt_shows_is_refused(more, field):
    asks = {"role": "user", "content": "x"}
    with pytest.raises(BadRequest) as caught:
        read_chat(msgspec.json.encode({"messages": [asks, {"role": "assistant", **more}, asks]}))
    assert caught.value.field == field


def test_what_the_packages_send_back_and_providers_read_is_no_matter():
    """Empty fields, hints for caches, who called a tool when it was the model, and the number of a streamed call."""
    hint = {"cache_control": {"type": "ephemeral"}}
    asks = {"role": "user", "content": [{"type": "text", "text": "x", **hint}]}
    text = {"type": "text", "text": "x", "citations": None}
    use = USE | {"caller": {"type": "direct"}, "toolset_name": None}
    messages = [asks, {"role": "assistant", "content": [text, use]}, {"role": "user", "content": [RESULT]}]
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    wish = read_messages(msgspec.json.encode({"messages": messages, "max_tokens": 3, "context_management": kept}))
    assert [one["role"] for one in wish.messages] == ["user", "assistant", "tool"]
    says = {"role": "assistant", "content": "x", "annotations": [], "tool_calls": [CALL | {"index": 0}]}
    says |= {"provider_specific_fields": {"refusal": None}, "thinking_blocks": None, "reasoning_details": [], **hint}
    tools = [{"type": "function", "function": {"name": "f"}, **hint}]
    usual = {"repetition_penalty": 1.0, "skip_special_tokens": True, "ignore_eos": False, "chat_template_kwargs": {}}
    asked = [asks, says, {"role": "tool", "tool_call_id": "c", "content": "5"}]
    chat = read_chat(msgspec.json.encode({"messages": asked, "tools": tools, **usual}))
    assert chat.messages[1]["tool_calls"] == [CALL]
