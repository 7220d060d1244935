"""Tests what real clients do with connections, and the errors that they read. No engine is needed."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from tests.gateway.conftest import chat_tokenizer
from tests.gateway.scripted import served

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
            assert time.monotonic() - began < 2.0, "an idle connection holds the gateway"

    asyncio.Runner(loop_factory=lambda: loop).run(run())


PATHS = [
    ("GET", "/v1/messages", 405, "not_found_error"),
    ("POST", "/v1/messages/count_tokens", 404, "not_found_error"),
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
