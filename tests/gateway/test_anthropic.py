"""Tests the gateway with the anthropic package over a real engine."""

from __future__ import annotations

import anthropic
import pytest

from moe_rl.gateway.finishing import check_session
from tests.gateway.conftest import ADD

TOOL = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}
# The package has no argument for it any more.
COLD = {"temperature": 0}
FIRST = [{"role": "user", "content": "2+3?"}]


def client_of(running, opened) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key=opened["key"], base_url=running.url, max_retries=0, timeout=60)


def ask(client, messages, **more):
    given = {"max_tokens": 64, "tools": [TOOL]} | more
    given["extra_body"] = COLD | given.get("extra_body", {})
    return client.messages.create(model="any", messages=messages, **given)


def answered(reply, result="5") -> list:
    (call,) = [block for block in reply.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": result}
    return [*FIRST, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]


def test_a_dialogue_with_a_tool_is_one_branch(running, router):
    opened = running.open()
    client = client_of(running, opened)
    reply = ask(client, FIRST)
    assert [block.type for block in reply.content] == ["thinking", "tool_use"] and reply.stop_reason == "tool_use"
    assert reply.content[0].thinking.strip() == "add" and reply.content[1].input == {"a": 2, "b": 3}
    reply = ask(client, answered(reply))
    assert reply.content[-1].text.strip() == "5." and reply.stop_reason == "end_turn"
    session = running.session(opened)
    assert [turn.kind for turn in session.turns] == ["first", "continued"]
    assert reply.usage.input_tokens == len(session.prompt(1)) and reply.usage.output_tokens == 11
    check_session(session.finish(), running.store)
    running.agrees(session, router)


def test_a_stream_says_the_same(running):
    opened = running.open()
    client = client_of(running, opened)
    given = {"model": "any", "max_tokens": 64, "tools": [TOOL], "extra_body": COLD}
    with client.messages.stream(messages=FIRST, **given) as stream:
        reply = stream.get_final_message()
    assert [block.type for block in reply.content] == ["thinking", "tool_use"] and reply.stop_reason == "tool_use"
    assert reply.content[1].input == {"a": 2, "b": 3} and reply.usage.output_tokens == 55
    with client.messages.stream(messages=answered(reply), **given) as stream:
        assert "".join(stream.text_stream).strip() == "5."
    assert [turn.kind for turn in running.session(opened).turns] == ["first", "continued"]


def test_both_dialects_speak_of_the_same_session(running):
    """A dialogue that began with one package goes on with the other."""
    from tests.gateway.test_openai import ask as openai_ask
    from tests.gateway.test_openai import client_of as openai_client

    opened = running.open()
    reply = openai_ask(openai_client(running, opened), FIRST, [ADD]).choices[0].message
    (call,) = reply.tool_calls
    said = [{"type": "tool_use", "id": call.id, "name": "add", "input": {"b": 3, "a": 2}}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
    messages = [*FIRST, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    assert ask(client_of(running, opened), messages).content[-1].text.strip() == "5."
    assert [turn.kind for turn in running.session(opened).turns] == ["first", "continued"]


def test_how_a_reply_ended_is_told(running):
    client = client_of(running, running.open())
    hi = [{"role": "user", "content": "hi"}]
    assert ask(client, hi, max_tokens=2, tools=[]).stop_reason == "max_tokens"
    reply = ask(client, hi, stop_sequences=["you"], tools=[])
    assert (reply.stop_reason, reply.stop_sequence, reply.content[-1].text.strip()) == ("stop_sequence", "you", "hello")
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    ask(client, hi, system=system, max_tokens=2, tools=[], metadata={"user_id": "u"})


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"extra_body": {"beams": 3}}, "beams"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"output_config": {"effort": "low"}}, "output_config"),
        ({"tool_choice": {"type": "never"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_what_is_not_served_is_refused_by_name(running, more, field):
    client = client_of(running, running.open())
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, **({"messages": FIRST} | more))
    assert (
        caught.value.body["error"]["type"] == "invalid_request_error" and field in caught.value.body["error"]["message"]
    )


def test_a_wrong_key_is_an_error_of_authentication(running):
    with pytest.raises(anthropic.AuthenticationError):
        ask(client_of(running, {"key": "s000000.x"}), FIRST)
