"""Tests the gateway with the openai package over a real engine; every recorded row is compared with `transformers`."""

from __future__ import annotations

import openai
import pytest

from moe_rl.gateway.finishing import check_session
from tests.gateway.conftest import ADD, LONGEST


def client_of(running, opened, *, retries=0) -> openai.OpenAI:
    return openai.OpenAI(api_key=opened["key"], base_url=f"{running.url}/v1", max_retries=retries, timeout=60)


def ask(client, messages, tools=(), **more):
    given = {"temperature": 0, "max_tokens": 64} | ({"tools": list(tools)} if tools else {}) | more
    return client.chat.completions.create(model="any", messages=messages, **given)


def told(running, opened):
    """Check a session's digests and records, and return the session."""
    session = running.session(opened)
    check_session(session.finish(), running.store)
    return session


def test_a_dialogue_with_a_tool_is_one_branch(running, router):
    opened = running.open()
    client = client_of(running, opened)
    messages = [{"role": "user", "content": "2+3?"}]
    reply = ask(client, messages, [ADD])
    (choice,) = reply.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "add")
    assert call.function.arguments == '{"a": 2, "b": 3}' and choice.message.reasoning_content.strip() == "add"
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    reply = ask(client, messages, [ADD])
    assert reply.choices[0].message.content.strip() == "5." and reply.choices[0].finish_reason == "stop"
    session = told(running, opened)
    assert [turn.kind for turn in session.turns] == ["first", "continued"] and session.turns[1].continues
    assert reply.usage.prompt_tokens == len(session.prompt(1)) and reply.usage.completion_tokens == 11
    running.agrees(session, router)
    # What both turns have is stored once.
    info = running.store.info(session.turns[1].routes)
    assert info.own_rows == info.rows - session.turns[0].routes.rows
    assert "routes" not in reply.model_dump_json() and "shard" not in reply.model_dump_json()


def test_a_template_that_drops_thinking_gives_a_branch_that_is_counted(running, router):
    """Qwen3 leaves out the thinking of earlier turns once the user says more: its tokens are not what was said."""
    opened, before = running.open(), running.gateway.counts["unstable"]
    client = client_of(running, opened)
    messages = [{"role": "user", "content": "hi"}]
    reply = ask(client, messages)
    assert reply.choices[0].message.content.strip() == "hello you"
    again = ask(client, [*messages, reply.choices[0].message, {"role": "user", "content": "more"}])
    assert again.choices[0].message.content.strip() == "bye"
    session = told(running, opened)
    assert [(turn.kind, turn.parent) for turn in session.turns] == [("first", None), ("rewritten", None)]
    # They part where the thinking was.
    assert session.turns[1].shared == len(session.turns[0].input_ids)
    assert running.gateway.counts["unstable"] == before + 1 and len(session.branches()) == 2
    running.agrees(session, router)


def test_an_edited_history_a_retry_and_a_sub_agent_are_branches(running, router):
    opened = running.open()
    client = client_of(running, opened)
    first = [{"role": "user", "content": "2+3?"}]
    reply = ask(client, first, [ADD]).choices[0].message
    tool = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "5"}
    before = running.gateway.counts["unstable"]
    ask(client, [*first, reply, tool], [ADD], max_tokens=4)
    ask(client, [*first, reply, {**tool, "content": "7"}], [ADD], max_tokens=4)  # another result of the tool
    edited = {"role": "assistant", "content": "I will not."}
    ask(client, [*first, edited, {"role": "user", "content": "why"}], [ADD], max_tokens=4)
    ask(client, [{"role": "system", "content": "Sum up."}, *first], max_tokens=4)  # a compaction, or a sub-agent
    ask(client, first, [ADD], max_tokens=4)  # a retry
    # A client that leaves the reasoning out continues all the same.
    bare = {"role": "assistant", "content": None, "tool_calls": [call.model_dump() for call in reply.tool_calls]}
    ask(client, [*first, bare, {**tool, "content": "9"}], [ADD], max_tokens=4)
    session = told(running, opened)
    kinds = [(turn.parent, turn.kind) for turn in session.turns]
    assert kinds == [
        (None, "first"), (0, "continued"), (0, "forked"), (None, "rewritten"), (None, "forked"), (None, "forked"),
        (0, "forked"),
    ]  # fmt: skip
    assert running.gateway.counts["unstable"] == before
    assert session.turns[3].shared == 460 and session.turns[5].shared == 460
    running.agrees(session, router)


def test_a_truncated_turn_is_continued_with_its_own_tokens(running, router):
    opened = running.open()
    client = client_of(running, opened)
    messages = [{"role": "user", "content": "2+3?"}]
    reply = ask(client, messages, [ADD], max_tokens=30)
    assert reply.choices[0].finish_reason == "length"
    messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": "?"}]
    ask(client, messages, [ADD], max_tokens=4)
    session = told(running, opened)
    assert [turn.kind for turn in session.turns] == ["first", "continued"]
    running.agrees(session, router)


def test_samples_of_a_prompt_are_turns_that_share_it(running, router):
    opened = running.open()
    reply = ask(client_of(running, opened), [{"role": "user", "content": "ab"}], n=3, temperature=1, max_tokens=12,
                logprobs=True, seed=7)  # fmt: skip
    session = told(running, opened)
    assert [turn.kind for turn in session.turns] == ["first", "forked", "forked"]
    assert len({turn.token_ids for turn in session.turns}) > 1 and [one.index for one in reply.choices] == [0, 1, 2]
    for choice, turn in zip(reply.choices, session.turns, strict=True):
        said = [one.logprob for one in choice.logprobs.content]
        assert said == pytest.approx(turn.logprobs.tolist()[: len(said)]) and len(said) >= len(turn.token_ids) - 1
    running.agrees(session, router)
    again = running.open()
    ask(client_of(running, again), [{"role": "user", "content": "ab"}], n=3, temperature=1, max_tokens=12, seed=7)
    assert [turn.token_ids for turn in running.session(again).turns] == [turn.token_ids for turn in session.turns]


def test_a_stop_string_ends_the_text_before_it(running):
    opened = running.open()
    reply = ask(client_of(running, opened), [{"role": "user", "content": "hi"}], stop=["you"])
    assert (reply.choices[0].message.content.strip(), reply.choices[0].finish_reason) == ("hello", "stop")
    told(running, opened)


def test_a_tool_call_that_cannot_be_read_is_text_and_counted(running):
    opened, before = running.open(), running.gateway.counts["unreadable"]
    reply = ask(client_of(running, opened), [{"role": "user", "content": "break"}], [ADD]).choices[0]
    assert "{name: add}" in reply.message.content and reply.message.tool_calls is None
    assert reply.finish_reason == "stop" and running.gateway.counts["unreadable"] == before + 1


def test_a_stream_says_the_same(running):
    opened = running.open()
    client = client_of(running, opened)
    messages = [{"role": "user", "content": "2+3?"}]
    chunks = list(ask(client, messages, [ADD], stream=True, stream_options={"include_usage": True}, logprobs=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a": 2, "b": 3}')
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas).strip() == "add"
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == ["tool_calls"] and chunks[-1].usage.completion_tokens == 55 and not chunks[-1].choices
    message = {"role": "assistant", "content": None, "tool_calls": [{**call.model_dump(exclude={"index"})}]}
    tool = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    with client.chat.completions.stream(model="any", messages=[*messages, message, tool], tools=[ADD], temperature=0,
                                        max_tokens=64) as stream:  # fmt: skip
        assert stream.get_final_completion().choices[0].message.content.strip() == "5."
    assert [turn.kind for turn in told(running, opened).turns] == ["first", "continued"]


def test_completions_take_text_and_token_ids(running, router):
    opened = running.open()
    client = client_of(running, opened)
    one = client.completions.create(model="any", prompt="ab", max_tokens=5, temperature=0, logprobs=0, echo=True)
    session = running.session(opened)
    assert one.choices[0].text.startswith("ab") and one.choices[0].finish_reason == "length"
    said = one.choices[0].logprobs
    assert [one.choices[0].text[at] for at in said.text_offset] == [token[0] for token in said.tokens]
    assert said.token_logprobs == pytest.approx(session.turns[0].logprobs.tolist())
    ids = [*session.ids(0), 9]
    chunks = list(client.completions.create(model="any", prompt=ids, max_tokens=5, temperature=0, stream=True))
    assert len(chunks) == 1 and [turn.kind for turn in session.turns] == ["first", "continued"]
    assert session.prompt(1) == tuple(ids)
    running.agrees(told(running, opened), router)


WRONG = [
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_value"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_value"),
    ({"tool_choice": "never", "tools": [ADD]}, "tool_choice", "unsupported_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [ADD]}, "tool_choice",
     "invalid_value"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format",
     "unsupported_value"),
    ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format.schema",
     "unsupported_parameter"),
    ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "unsupported_value"),
    ({"extra_body": {"guided_json": {}}}, "guided_json", "unsupported_parameter"),
    ({"n": 0}, "n", "invalid_value"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": "five"}, "max_tokens", "invalid_value"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "invalid_value"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0", "unsupported_value"),
    ({"messages": [{"role": "user", "content": "x" * 4 * LONGEST}]}, "messages", "context_length_exceeded"),
]  # fmt: skip


def test_what_is_not_served_is_refused_by_name(running):
    opened = running.open()
    client = client_of(running, opened)
    for more, param, code in WRONG:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **({"messages": [{"role": "user", "content": "hi"}]} | more))
        assert (caught.value.param, caught.value.code) == (param, code), caught.value
    assert running.session(opened).turns == [] and not running.session(opened).busy
    accepted = {"user": "u", "metadata": {"a": "b"}, "parallel_tool_calls": True, "tool_choice": "auto", "top_p": 1.0}
    for choice in ("auto", "none"):  # both are the default without tools
        ask(client, [{"role": "user", "content": "hi"}], max_tokens=1, **accepted | {"tool_choice": choice})
