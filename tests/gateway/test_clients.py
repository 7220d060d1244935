"""Tests what real clients do with connections, and the errors that they read. No engine is needed."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import aiohttp
import pytest

from moe_rl.errors import SessionError
from tests.gateway.conftest import ADD, CALL, chat_tokenizer
from tests.gateway.scripted import LONGEST, OWNER, served
from tests.support.refusals import refused

HI = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer(made)
    return made


class LeapingLoop(asyncio.SelectorEventLoop):
    """Has a clock that a test can put forward."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


@pytest.mark.parametrize(("kept", "idle"), [(15.0, 14.5), (75.0, 74.5), (600.0, 599.0)])
def test_an_idle_connection_lives_longer_than_clients_keep_it(folder, kept, idle):
    loop = LeapingLoop()

    async def run():
        made = []

        async def count(*_):
            made.append(1)

        tracing, connector = aiohttp.TraceConfig(), aiohttp.TCPConnector(keepalive_timeout=kept)
        tracing.on_connection_create_end.append(count)
        async with aiohttp.ClientSession(connector=connector, trace_configs=[tracing]) as client:
            async with served(folder, "hello<|im_end|>") as running:
                url = f"{running.url}/s/{running.open().key}/v1/chat/completions"
                for _ in range(3):
                    async with client.post(url, json=HI) as answer:
                        assert answer.status == 200 and await answer.json()
                    loop.ahead += idle
                    await asyncio.sleep(0.05)
                assert len(made) == 1, "the gateway closed it"
                began = time.monotonic()
            assert time.monotonic() - began < 10.0, "an idle connection holds the gateway"

    asyncio.Runner(loop_factory=lambda: loop).run(run())


PATHS = [
    ("GET", "/v1/messages", 405, "not_found_error"),
    ("POST", "/v1/messages/count_tokens", 400, "invalid_request_error"),
    ("GET", "/v1/messages/count_tokens", 405, "not_found_error"),
    ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ("POST", "/v1/messages", 400, "invalid_request_error"),
    ("POST", "/v1/messages?beta=true", 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("method", "path", "status", "kind"), PATHS)
@pytest.mark.parametrize("key_in_path", [True, False])
def test_errors_of_messages_have_the_form_of_anthropic(folder, method, path, status, kind, key_in_path):
    async def run():
        async with served(folder, "x") as running, aiohttp.ClientSession() as client:
            opened = running.open()
            before = f"/s/{opened.key}" if key_in_path else ""
            headers = {} if key_in_path else {"x-api-key": opened.key}
            async with client.request(
                method, running.url + before + path, data=b"{", headers=headers | {"content-type": "application/json"}
            ) as answer:
                told = await answer.json()
                assert (answer.status, told["type"], told["error"]["type"]) == (status, "error", kind)
                assert told["error"]["message"]
                assert status != 405 or "POST" in answer.headers["Allow"]

    asyncio.run(run())


async def told(client, url, **more):
    async with client.post(url, **more) as answer:
        return answer.status, await answer.json()


def test_the_tokens_of_a_prompt_are_counted_as_they_would_be_sampled(folder):
    """Also those of a later turn, whose earlier tokens are the model's own."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    tool = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}

    async def run():
        async with served(folder, call, "5.<|im_end|>") as running, aiohttp.ClientSession() as client:
            opened = running.open()
            url = f"{running.url}/s/{opened.key}/v1/messages"
            asked = {"model": "any", "system": "Be brief.", "tools": [tool], "messages": list(HI["messages"])}
            for turn in range(2):
                status, counted = await told(client, f"{url}/count_tokens", json=asked)
                assert status == 200 and len(running.sampler.asked) == len(opened.session.turns) == turn
                _, reply = await told(client, url, json=asked | {"max_tokens": 64})
                assert counted == {"input_tokens": reply["usage"]["input_tokens"]}
                assert counted["input_tokens"] == len(running.sampler.asked[turn][0].prompt_token_ids)
                (use,) = [block for block in reply["content"] if block["type"] == "tool_use"] or [{"id": "-"}]
                result = {"type": "tool_result", "tool_use_id": use["id"], "content": "5"}
                asked["messages"] += [
                    {"role": "assistant", "content": reply["content"]},
                    {"role": "user", "content": [result]},
                ]
            for wrong, field in (
                ({"stream": True}, "stream"),
                ({"max_tokens": 5}, "max_tokens"),
                ({"messages": []}, "message"),
            ):
                status, refusal = await told(client, f"{url}/count_tokens", json=asked | wrong)
                assert status == 400 and field in refusal["error"]["message"]
            status, _ = await told(client, f"{running.url}/v1/messages/count_tokens", json=asked)
            assert status == 401

    asyncio.run(run())


def test_faults_keys_and_bodies_are_told_in_the_form_of_each_dialect(folder):
    """Also a fault of the gateway itself."""

    async def run():
        async with served(folder, "x", longest=2000) as running, aiohttp.ClientSession() as client:
            opened = running.open()

            def broken(*_):
                raise ZeroDivisionError

            running.gateway._prompt = broken
            for path, form in (("/v1/messages", "type"), ("/v1/chat/completions", "param")):
                kinds = []
                for status, key, more in (
                    (401, "s0.x", {"json": HI}),
                    (413, opened.key, {"json": " " * 2000}),
                    (500, opened.key, {"json": HI}),
                ):
                    got, body = await told(client, f"{running.url}/s/{key}{path}", **more)
                    assert got == status and (body if form == "type" else body["error"])[form] in ("error", None)
                    kinds.append(body["error"]["type"])
                if form == "type":
                    assert kinds == ["authentication_error", "request_too_large", "api_error"]
            headers = {"anthropic-version": "2023-06-01"}
            async with client.get(f"{running.url}/v1/models", headers=headers) as answer:
                assert (answer.status, (await answer.json())["type"]) == (401, "error")
            async with client.get(f"{running.url}/v1/nothing") as answer:
                assert (await answer.json())["error"]["code"] == "not_found"

    asyncio.run(run())


UNREADABLE = {
    "half a pair": r'{"a": "\ud99c"}',
    "the other half": r'{"a": "\udc00x"}',
    "half a pair as a name": r'{"\ud99c": 1}',
    "digits": '{"a": ' + "7" * 5000 + "}",
    "nesting": '{"a": ' + "[" * 3000 + "]" * 3000 + "}",
    "nesting that some read": '{"a": ' + "[" * 300 + "]" * 300 + "}",
    "nesting that the body with it would exceed": '{"a": ' + "[" * 97 + "]" * 97 + "}",
    "NaN": '{"a": NaN, "b": 1}',
    "infinity": '{"a": -Infinity}',
    "beyond floats": '{"a": 1e999}',
    "a list": "[1, 2]",
    "a text": '"x"',
    "a number": "5",
}
READABLE = {
    "a long integer": ('{"a": ' + "7" * 30 + "}", {"a": int("7" * 30)}),
    "a name twice": ('{"a": 1, "a": 2}', {"a": 2}),
    "NUL": (r'{"a": "\u0000"}', {"a": "\0"}),
    "a whole pair": (r'{"a": "\ud83d\ude00"}', {"a": "\U0001f600"}),
    "a long text": ('{"a": "' + "x" * 5000 + '"}', {"a": "x" * 5000}),
    "a name like ours": ('{"arguments": "x"}', {"arguments": "x"}),
    "nesting": ('{"a": ' + "[" * 78 + "]" * 78 + "}", {"a": json.loads("[" * 78 + "]" * 78)}),
    "nothing": ("{}", {}),
    "null": ("null", {}),
}


async def dialogue(folder, arguments: str, path: str):
    """Let the model call a tool in that way, and go on with what the client got. Returns that, and the session."""
    said = '<tool_call>\n{"name": "add", "arguments": ' + arguments + "}\n</tool_call><|im_end|>"
    async with served(folder, said, "ok<|im_end|>") as running, aiohttp.ClientSession() as client:
        opened = running.open()
        url = f"{running.url}/s/{opened.key}{path}"
        messages = [*HI["messages"]]
        ours = {"tools": [ADD] if "chat" in path else [{"name": "add", "input_schema": {"type": "object"}}]}
        status, first = await told(client, url, json=HI | ours)
        assert status == 200, first
        reply = first["choices"][0]["message"] if "choices" in first else {k: first[k] for k in ("role", "content")}
        if "choices" in first:
            uses = reply.get("tool_calls") or []
            results = [{"role": "tool", "tool_call_id": one["id"], "content": "5"} for one in uses]
        else:
            uses = [one for one in reply["content"] if one["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": one["id"], "content": "5"} for one in uses]
            results = [{"role": "user", "content": results}] if uses else []
        messages += [reply, *(results or [{"role": "user", "content": "more"}])]
        status, second = await told(client, url, json=HI | ours | {"messages": messages})
        assert status == 200, second
        kinds = [one.kind for one in opened.session.received]
        # Behind a message of the user, Qwen3's template may write what was said otherwise.
        assert len(kinds) == 2 and (kinds[1] == "continued" or not uses)
        return reply, uses, running.gateway.counts["unreadable"]


PATHS_OF_CHATS = ("/v1/chat/completions", "/v1/messages")


@pytest.mark.parametrize("path", PATHS_OF_CHATS)
@pytest.mark.parametrize("what", UNREADABLE)
def test_a_call_that_json_does_not_carry_is_text(folder, what, path):
    reply, uses, unreadable = asyncio.run(dialogue(folder, UNREADABLE[what], path))
    text = reply["content"] if "chat" in path else "".join(one["text"] for one in reply["content"])
    assert not uses and unreadable == 1 and UNREADABLE[what] in text


@pytest.mark.parametrize("path", PATHS_OF_CHATS)
@pytest.mark.parametrize("what", READABLE)
def test_a_call_that_json_carries_is_a_call(folder, what, path):
    arguments, value = READABLE[what]
    _, uses, unreadable = asyncio.run(dialogue(folder, arguments, path))
    got = [json.loads(one["function"]["arguments"]) if "chat" in path else one["input"] for one in uses]
    assert got == [value] and unreadable == 0


WRONG = {
    "half a pair at the end": (r'"x\ud99c"', "half a surrogate pair"),
    "half a pair": (r'"\ud99cx"', "half a surrogate pair"),
    "the other half": (r'"\udc00"', "half a surrogate pair"),
    "digits": ('[{"type": "text", "text": "x", "n": ' + "7" * 5000 + "}]", "out of range"),
    "nesting": ("[" * 3000 + "]" * 3000, "nested deeper than 100"),
    "nesting that some read": ("[" * 300 + "]" * 300, "nested deeper than 100"),
    "beyond floats": ("1e999", "out of range"),
    "NaN": ("NaN", "invalid character"),
}


@pytest.mark.parametrize("path", PATHS_OF_CHATS)
@pytest.mark.parametrize("what", WRONG)
def test_what_json_does_not_carry_is_refused_before_anything_is_sampled(folder, what, path):
    async def run():
        content, problem = WRONG[what]
        body = '{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": ' + content + "}]}"
        async with served(folder, "x") as running, aiohttp.ClientSession() as client:
            opened = running.open()
            headers = {"content-type": "application/json"}
            url = f"{running.url}/s/{opened.key}{path}"
            status, answer = await told(client, url, data=body, headers=headers)
            assert status == 400 and problem in answer["error"]["message"], answer
            assert not running.sampler.asked and not opened.session.busy

    asyncio.run(run())


def test_the_bytes_of_log_probabilities_are_the_text(folder):
    """Parts of a character have bytes of their own, in both of OpenAI's routes."""

    async def run():
        async with served(folder, "café 😊<|im_end|>") as running, aiohttp.ClientSession() as client:
            url = f"{running.url}/s/{running.open().key}/v1"
            _, chat = await told(client, f"{url}/chat/completions", json=HI | {"logprobs": True})
            (choice,) = chat["choices"]
            tokens = choice["logprobs"]["content"]
            assert choice["message"]["content"] == "café 😊" and len(tokens) > 6
            assert bytes(byte for one in tokens for byte in one["bytes"]).decode() == "café 😊"
            _, text = await told(client, f"{url}/completions", json={"prompt": "x", "logprobs": 0})
            (choice,) = text["choices"]
            offsets = choice["logprobs"]["text_offset"]
            assert offsets == sorted(offsets) and offsets[-1] <= len(choice["text"].removesuffix("<|im_end|>")), choice

    asyncio.run(run())


OBSERVED = {"stop": ["\nObservation:"]}
STOPPED = [
    ("the plan\nObservation:", OBSERVED, "the plan", None, 0),
    ("the plan\n---\n", {"stop": ["\n---\n"]}, "the plan", None, 0),
    ("<think>\nso\n</think>\n\nObservation:", OBSERVED, None, "so", 0),
    ("<think>\nI look\nObservation:", OBSERVED, None, "\nI look", 0),
    ("the plan</tool_response>", {"stop_token_ids": ["</tool_response>"]}, "the plan", None, 0),
    (f"{CALL}\nObservation:", OBSERVED, None, None, 1),
    (CALL, {"stop": ["</tool_call>"]}, None, None, 1),
    (CALL, {"stop_token_ids": ["</tool_call>"]}, None, None, 1),
    ("the plan<|im_end|>", {"stop_token_ids": ["<|im_end|>"]}, "the plan", None, 0),
]


@pytest.mark.parametrize(("said", "stops", "content", "reasoning", "calls"), STOPPED)
def test_what_stops_a_message_is_no_part_of_it(folder, said, stops, content, reasoning, calls):
    """But a call that it ends is whole."""

    async def run():
        async with served(folder, said) as running, aiohttp.ClientSession() as client:
            ids = [running.sampler.codec.encode(token)[0] for token in stops.get("stop_token_ids", ())]
            url = f"{running.url}/s/{running.open().key}/v1/chat/completions"
            _, reply = await told(client, url, json=HI | stops | {"stop_token_ids": ids, "tools": [ADD]})
            message = reply["choices"][0]["message"]
            got = message["content"], message.get("reasoning_content"), len(message.get("tool_calls", ()))
            assert got == (content, reasoning, calls), message

    asyncio.run(run())


class Slow:
    """Is a renderer that writes a long chat only once the others have been answered, as more tokens than fit."""

    def __init__(self, renderer):
        self._renderer, self.others, self.waited, self.began = renderer, threading.Event(), [], 0

    def __getattr__(self, name):
        return getattr(self._renderer, name)

    def render(self, messages, tools, **more):
        if len(messages[0]["content"]) > 1000:
            self.began += 1
            self.waited.append(self.others.wait(20))
            return (1,) * (LONGEST + 1)
        return self._renderer.render(messages, tools, **more)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_others_are_answered_while_large_chats_are_rendered(folder, path):
    large = {**HI, "messages": [{"role": "user", "content": "hi " * 100_000}]}

    async def run():
        async with served(folder, "hello<|im_end|>") as running, aiohttp.ClientSession() as client:
            running.gateway._renderer = slow = Slow(running.gateway._renderer)

            async def ask(body):
                async with client.post(f"{running.url}/s/{running.open().key}{path}", json=body) as answer:
                    return answer.status

            waiting = [asyncio.create_task(ask(large)) for _ in range(40)]
            while not slow.began:
                await asyncio.sleep(0.01)
            assert [await ask(HI) for _ in range(3)] == [200] * 3 and not any(one.done() for one in waiting)
            slow.others.set()
            assert await asyncio.gather(*waiting) == [400] * 40, "they are longer than the model takes"
            assert all(slow.waited)

    asyncio.run(run())


def test_a_session_is_busy_while_its_chat_is_rendered(folder):
    async def run():
        async with served(folder, "hello<|im_end|>") as running, aiohttp.ClientSession() as client:
            running.gateway._renderer = slow = Slow(running.gateway._renderer)
            opened = running.open()
            large = {**HI, "messages": [{"role": "user", "content": "hi " * 10_000}]}
            asked = asyncio.create_task(client.post(f"{running.url}/s/{opened.key}/v1/chat/completions", json=large))
            while not slow.began:
                await asyncio.sleep(0.01)
            with refused(SessionError, fault="busy"):
                running.gateway.end(opened.session)
            slow.others.set()
            assert (await asked).status == 400
            running.gateway.end(opened.session)

    asyncio.run(run())


def test_more_messages_than_the_model_takes_tokens_are_refused_unrendered(folder):
    chat = {**HI, "messages": [{"role": "user", "content": ""}] * (LONGEST + 1)}

    async def run():
        async with served(folder, "hello<|im_end|>", longest=4 << 20) as running, aiohttp.ClientSession() as client:
            running.gateway._renderer = None  # so rendering would be a fault of the gateway, status 500
            async with client.post(f"{running.url}/s/{running.open().key}/v1/chat/completions", json=chat) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (400, "context_length_exceeded")
                assert str(LONGEST) in error["message"] and str(LONGEST + 1) in error["message"]

    asyncio.run(run())


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1:1", "[::1]:99"])
def test_the_address_of_a_session_is_the_gateways_own(folder, host):
    async def run():
        async with served(folder, "hello<|im_end|>") as running, aiohttp.ClientSession() as client:
            headers = {"Host": host, "X-Forwarded-Proto": "https", "Authorization": f"Bearer {OWNER}"}
            async with client.post(f"{running.url}/sessions", headers=headers, json={}) as answer:
                opened = await answer.json()
            assert opened["url"] == f"{running.url}/s/{opened['key']}"
            assert opened["base_url"] == f"{opened['url']}/v1"

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_systems_text_that_changes_with_each_request_is_counted(folder, path):
    """Only what would continue a turn otherwise counts, and the owner sees where the texts part."""

    def body(system, *more):
        messages = [*HI["messages"], *more]
        if path == "/v1/messages":
            return HI | {"system": system, "messages": messages}
        return HI | {"messages": [{"role": "system", "content": system}, *messages]}

    more = ({"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"})

    async def run():
        async with served(folder, "hello<|im_end|>") as running, aiohttp.ClientSession() as client:
            opened = running.open()
            for asked in (body("at 1"), body("at 1", *more), body("at 2"), body("at 3", *more), body("at 4", *more)):
                status, _ = await told(client, f"{running.url}/s/{opened.key}{path}", json=asked)
                assert status == 200
            async with client.get(f"{running.url}/sessions", headers={"Authorization": f"Bearer {OWNER}"}) as answer:
                listed = await answer.json()
            (session,) = listed["sessions"]
            assert listed["counts"]["other_system"] == opened.session.other_system == 2
            assert session["kinds"] == {"first": 1, "continued": 1, "forked": 3} and "'4" in session["other_system"]

    asyncio.run(run())
