"""Tests what the gateway refuses without asking any model, and that its messages say which field, and no key."""

import asyncio
import json

import aiohttp
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from tokenizers import Tokenizer

from moe_rl.gateway import openai_dialect
from moe_rl.gateway.asking import BadRequest
from moe_rl.gateway.fields import checked
from moe_rl.gateway.web import _OpenBody, _unknown
from tests.gateway.conftest import ADD, chat_tokenizer
from tests.gateway.scripted import OWNER, served


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": 10**30},
        {"tokens": 0},
        {"turns": -1},
        {"turns": 2**31},
        {"seconds": -3},
        {"seconds": 0},
        {"seconds": 1e300},
    ],
)
def test_a_limit_that_is_no_positive_number_of_its_size_is_refused(given):
    with pytest.raises(BadRequest) as told:
        checked(json.dumps(given).encode(), _OpenBody, {})
    assert told.value.field == next(iter(given)) and told.value.status == 400


def test_the_message_of_an_error_names_the_field():
    error = openai_dialect.error_body(BadRequest("this value is not served: 1", "n"))["error"]
    assert (error["message"], error["param"]) == ("n: this value is not served: 1", "n")


ASKS = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": 5}
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BODIES = {
    CHAT: {"messages": ASKS},
    TEXT: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": ASKS, "max_tokens": 3},
    COUNT: {"messages": ASKS},
}
# The route, what is wrong in its body, and the field that the refusal names.
WRONG = [
    (CHAT, {"temperature": 3.5}, "temperature"),
    (TEXT, {"temperature": -1}, "temperature"),
    (RESPONSES, {"temperature": 1e300}, "temperature"),
    (MESSAGES, {"temperature": 0.001}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (MESSAGES, {"top_p": 2}, "top_p"),
    (TEXT, {"top_k": 10**30}, "top_k"),
    (MESSAGES, {"top_k": -2}, "top_k"),
    (CHAT, {"min_p": -0.5}, "min_p"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids"),
    (TEXT, {"prompt": [3, 2**40]}, "prompt"),
    (TEXT, {"prompt": [5] * 70_000}, "prompt"),
    (RESPONSES, {"input": "x" * 70_000}, "input"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 5, "max_tokens": -1}, "max_tokens"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (MESSAGES, {"stop_sequences": ["x" * 201]}, "stop_sequences"),
    (CHAT, {"frequency_penalty": False}, "frequency_penalty"),
    (TEXT, {"best_of": True}, "best_of"),
    (CHAT, {"ignore_eos": 0}, "ignore_eos"),
    (CHAT, {"user": 5}, "user"),
    (MESSAGES, {"metadata": "x"}, "metadata"),
    (COUNT, {"max_tokens": 3}, "max_tokens"),
    (CHAT, {"messages": [{"role": "y" * 5000}, *ASKS]}, "messages.0.role"),
    (CHAT, {"messages": [*ASKS, {"role": "tool", "tool_call_id": "", "content": "5"}]}, "messages.1.tool_call_id"),
    (CHAT, {"tools": [{"function": {"name": ""}}]}, "tools.0.function.name"),
    (CHAT, {"tools": [{"function": {"name": "f", "parameters": SCHEMA}}]}, "tools.0"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": SCHEMA}]}, "tools.0"),
    (COUNT, {"tools": [{"name": "f", "input_schema": SCHEMA}]}, "tools.0"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}, "tools.0"),
    ("/sessions", {"group": None}, "group"),
]


def test_every_refusal_names_the_field_in_the_form_of_its_dialect_and_makes_no_turn(tmp_path):
    chat_tokenizer(tmp_path)

    async def run():
        async with served(tmp_path, "x<|im_end|>") as running, aiohttp.ClientSession() as client:
            opened = running.open()
            for path, wrong, field in WRONG:
                url = running.url + (path if path == "/sessions" else f"/s/{opened.key}{path}")
                body = BODIES.get(path, {}) | wrong
                async with client.post(url, json=body, headers={"Authorization": f"Bearer {OWNER}"}) as answer:
                    told, case = await answer.json(), (path, str(wrong)[:80], field)
                    assert answer.status == 400, (case, told)
                text = told["error"] if path == "/sessions" else told["error"]["message"]
                assert text.startswith(f"{field}: ") and len(text) < 400, (case, text)
                assert path not in (CHAT, TEXT, RESPONSES) or told["error"]["param"] == field, (case, told)
                assert path not in (MESSAGES, COUNT) or told["type"] == "error", (case, told)
            assert not opened.session.turns and not running.sampler.asked

    asyncio.run(run())


def test_a_stop_token_that_a_constrained_answer_needs_is_refused(tmp_path):
    """vLLM ends such an answer with an error: xgrammar takes a stop token only where the grammar is complete."""
    chat_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends, unused = map(tokenizer.token_to_id, ("</tool_call>", "<tool_response>"))
    assert None not in (ends, unused)
    forced = BODIES[CHAT] | {"tools": [ADD], "tool_choice": "required"}

    async def run():
        async with served(tmp_path, "x<|im_end|>") as running, aiohttp.ClientSession() as client:
            opened = running.open()

            async def refused(body) -> str | None:
                url = f"{running.url}/s/{opened.key}{CHAT}"
                async with client.post(url, json=body) as answer:
                    told = await answer.json()
                    assert answer.status in (200, 400), told
                    return told["error"]["param"] if answer.status == 400 else None

            assert await refused(forced | {"stop_token_ids": [unused, ends]}) == "stop_token_ids"
            running.gateway._text_stops = (ends,)  # those of the config
            assert await refused(forced) == "stop_token_ids"
            running.gateway._text_stops = ()
            assert not running.sampler.asked
            for fine in (forced | {"stop_token_ids": [unused]}, BODIES[CHAT] | {"stop_token_ids": [ends]}):
                assert await refused(fine) is None
            assert len(running.sampler.asked) == 2

    asyncio.run(run())


def test_the_smaller_of_two_limits_to_the_tokens_holds():
    limits = [{"max_tokens": 3, "max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 3}]
    for more in limits:
        assert openai_dialect.read_chat(json.dumps(BODIES[CHAT] | more).encode()).sampling.max_tokens == 3


@pytest.mark.parametrize(
    "path", ["/s/secret/v2/none", "//s//secret", "/S/secret/v1", "/proxy/s/secret/v1", "/v1/" + "secret" * 6]
)
def test_an_unknown_route_does_not_repeat_the_key(path):
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "server": ("h", 1)}
    request = Request(scope | {"scheme": "http", "root_path": ""})
    answer = asyncio.run(_unknown(request, HTTPException(404)))
    assert answer.status_code == 404 and b"no such route" in answer.body and b"secret" not in answer.body
