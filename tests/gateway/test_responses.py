"""Tests the Responses API with the openai package over a real engine, and the reading of its items."""

from __future__ import annotations

import json

import openai
import pytest

from moe_rl.gateway.asking import BadRequest
from moe_rl.gateway.finishing import check_session
from moe_rl.gateway.responses_dialect import read_responses
from tests.gateway.conftest import ADD
from tests.gateway.test_openai import client_of

TOOL = {"type": "function", "strict": False, **ADD["function"]}
FIRST = [{"role": "user", "content": "2+3?"}]
WAIT = {"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}
COLD = {"model": "any", "temperature": 0, "max_output_tokens": 64, "tools": [TOOL]}


def answered(output, result="5") -> list:
    (call,) = [item for item in output if item.type == "function_call"]
    return [*FIRST, *output, {"type": "function_call_output", "call_id": call.call_id, "output": result}]


def test_a_dialogue_with_a_tool_is_one_branch(running, router):
    opened = running.open()
    client = client_of(running, opened)
    reply = client.responses.create(input=FIRST, **COLD)
    assert [item.type for item in reply.output] == ["reasoning", "function_call"] and reply.status == "completed"
    assert reply.output[0].content[0].text.strip() == "add"
    assert (reply.output[1].name, reply.output[1].arguments) == ("add", '{"a": 2, "b": 3}')
    reply = client.responses.create(input=answered(reply.output), **COLD)
    assert reply.output_text.strip() == "5."
    session = running.session(opened)
    assert [turn.kind for turn in session.turns] == ["first", "continued"]
    assert reply.usage.input_tokens == len(session.prompt(1)) and reply.usage.output_tokens == 11
    check_session(session.finish(), running.store)
    running.agrees(session, router)


def test_a_stream_says_the_same(running):
    opened = running.open()
    client = client_of(running, opened)
    with client.responses.stream(input=FIRST, **COLD) as stream:
        kinds = [event.type for event in stream]
        reply = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.function_call_arguments.delta") == kinds.count("response.reasoning_text.delta") == 1
    assert [item.type for item in reply.output] == ["reasoning", "function_call"] and reply.usage.output_tokens == 55
    with client.responses.stream(input=answered(reply.output), **COLD) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text.strip() == stream.get_final_response().output_text.strip() == "5."
    assert [turn.kind for turn in running.session(opened).turns] == ["first", "continued"]


def test_how_a_reply_ended_and_its_logprobs(running):
    client = client_of(running, running.open())
    asked = {"model": "any", "temperature": 0, "input": "hi", "include": ["message.output_text.logprobs"]}
    cut = client.responses.create(**asked, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    whole = client.responses.create(**asked)
    told = whole.output[-1].content[0].logprobs
    assert whole.output_text.strip() == "hello you" and len(told) == whole.usage.output_tokens - 1
    assert all(one.logprob <= 0 for one in told)


def test_items_of_one_turn_are_one_message():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in ("2+3", "?")]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "add"}]},
        {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": [WAIT]},
        {"type": "function_call", "id": "f0", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call", "id": "f1", "call_id": "b", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "5"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "6"}]},
        {"role": "assistant", "content": "5 and 6"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    wish = read_responses(json.dumps({"input": items, "instructions": "Add."}).encode())
    calls = [{"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in "ab"]
    assert list(wish.messages) == [
        {"role": "system", "content": "Add."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "add", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "5"},
        {"role": "tool", "tool_call_id": "b", "content": "6"},
        {"role": "assistant", "content": "5 and 6"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "more"},
    ]
    assert wish.place(4, "tool_call_id") == "input.6.call_id" and wish.place(0, "content") == "instructions.content"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content"),
        ({"input": [*FIRST, {"role": "assistant", "content": "5"}]}, "input.1"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"beams": 3}, "beams"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(more, field):
    with pytest.raises(BadRequest) as caught:
        read_responses(json.dumps({"input": FIRST} | more).encode())
    assert caught.value.field == field


def test_errors_have_the_form_of_openai(running):
    client = client_of(running, running.open())
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="any", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
