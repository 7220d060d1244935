"""Tests JSON schemas and forced tool calls over a real engine and a real server: what is said, and the support of each
token, which must be exactly what the grammar allows."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import anthropic
import numpy as np
import openai
import pytest
import torch
import xgrammar.testing
from tokenizers import Tokenizer

from moe_rl.errors import RequestRefused
from moe_rl.gateway.answer_grammar import AnswerGrammar, Constraint
from moe_rl.gateway.rendering import ChatRenderer
from moe_rl.objectives.logprobs import Support, token_logprobs
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import Blocking
from moe_rl.train.sampling_support import read_support
from moe_rl.types import GenerateRequest, Sequence
from moe_rl.vllm.sampling import check_grammars
from tests.gateway import test_anthropic, test_openai, test_responses
from tests.gateway.conftest import ADD, VOCAB, chat_tokenizer, start_gateway
from tests.rollout.serving import serving
from tests.support.refusals import refused

pytestmark = pytest.mark.timeout(1500)

HI, SUM, BREAK = ([{"role": "user", "content": text}] for text in ("hi", "2+3?", "break"))
WORDS = {"enum": ["ab", "ac", "b"]}
FORM = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "yes"]}, "good": {"type": "boolean"}},
    "required": ["kind", "good"],
    "additionalProperties": False,
}
# How many tokens any answer of FORM may have at most, with whitespace wherever it may be.
ROOM = 600
STRICT = {"type": "function", "strict": True, **ADD["function"]}
STOPS, THINK, THOUGHT = {320, 322}, 327, 328


@pytest.fixture(scope="module")
def masked(settings, tmp_path_factory):
    """The gateway over an engine that keeps supports."""
    folder = tmp_path_factory.mktemp("masked")
    asked = replace(settings, support=True, trace_root=folder / "trace", log_path=folder / "engine.log")
    with Blocking(VllmEngine(asked)) as engine:
        gateway, stop = start_gateway(engine.sampler, asked, folder)
        yield gateway
        stop()


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def allowed_sets(tokenizer, token_ids):
    """What may come at each token of an answer that is one of WORDS after optional thinking, from texts alone."""
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())}
    said, thinking, words, sets = "", False, [json.dumps(word) for word in WORDS["enum"]], []
    for position, token in enumerate(token_ids):
        if thinking:
            sets.append(set(texts) - STOPS)
        else:
            begun = {t for t, text in texts.items() if text and any(word.startswith(said + text) for word in words)}
            sets.append(begun | ({THINK} if position == 0 else set()) | (STOPS if said in words else set()))
        if token == THOUGHT and thinking:
            thinking, words = False, ["\n\n" + word for word in words]
        elif token == THINK and position == 0:
            thinking = True
        elif not thinking:
            said += texts[token]
    return sets


def check_supports(store, completions, router, tokenizer=None):
    """Compare the supports with `allowed_sets`, and the trainer's log-probabilities over them with the sampler's."""
    compared = 0
    for one in completions:
        trained = Sequence(one.key, one.prompt_token_ids, one.token_ids, one.logprobs, 0.0, one.versions, one.routes)
        support = read_support(store, trained, VOCAB)
        on_cpu = Support.of(support.sets, support.counts, support.ids, torch.device("cpu"))
        kept = ~on_cpu.removed(slice(0, len(one.token_ids)), 0, VOCAB).numpy()
        if tokenizer is not None:
            sets = [set(np.flatnonzero(row).tolist()) for row in kept]
            assert sets == allowed_sets(tokenizer, one.token_ids), tokenizer.decode(one.token_ids)
        computed, first = router([*one.prompt_token_ids, *one.token_ids]), len(one.prompt_token_ids) - 1
        clear = max(computed.clear - first, 0)
        # At a low temperature the taught model is nearly sure, and rounding is divided by the temperature too.
        ours = token_logprobs(computed.logits[first:], torch.tensor(one.token_ids), 0.25, support=on_cpu)
        compared += clear
        np.testing.assert_allclose(ours[:clear], one.logprobs[:clear], rtol=0, atol=4 * 5e-5)
    assert compared > len(completions)


def chat(running, opened, messages, **more):
    given = {"temperature": 0.25, "max_tokens": 80} | more
    return test_openai.client_of(running, opened).chat.completions.create(model="any", messages=messages, **given)


def in_chat(schema):
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


def test_a_support_has_exactly_the_tokens_that_the_grammar_allows(masked, router, tokenizer):
    opened = masked.open()
    reply = chat(masked, opened, HI, response_format=in_chat(WORDS), n=6)
    ended = [choice for choice in reply.choices if choice.finish_reason == "stop"]
    assert len(ended) > 2 and all(json.loads(choice.message.content) in WORDS["enum"] for choice in ended)
    completions = masked.completions(masked.session(opened))
    check_supports(masked.store, completions, router, tokenizer)
    assert any(one.token_ids[0] == THINK for one in completions), "no answer thinks first"


def test_top_p_removes_further_tokens(masked, router, tokenizer):
    opened = masked.open()
    chat(masked, opened, HI, response_format=in_chat(WORDS), n=4, top_p=0.6)
    completions = masked.completions(masked.session(opened))
    check_supports(masked.store, completions, router)
    smaller = 0
    for one in completions:
        trained = Sequence(one.key, one.prompt_token_ids, one.token_ids, one.logprobs, 0.0, one.versions, one.routes)
        support = read_support(masked.store, trained, VOCAB)
        kept = (
            ~Support.of(support.sets, support.counts, support.ids, torch.device("cpu"))
            .removed(slice(0, len(one.token_ids)), 0, VOCAB)
            .numpy()
        )
        for row, allowed in zip(kept, allowed_sets(tokenizer, one.token_ids), strict=True):
            assert set(np.flatnonzero(row).tolist()) <= allowed
            smaller += row.sum() < len(allowed)
    assert smaller


def test_each_dialect_has_its_field_for_a_schema(masked):
    opened = masked.open()
    (choice,) = chat(masked, opened, HI, response_format=in_chat(FORM), temperature=0, max_tokens=ROOM).choices
    assert choice.finish_reason == "stop" and choice.message.reasoning_content.strip() == "hm"
    expected = json.loads(choice.message.content)
    assert expected["kind"] in ("x", "yes") and expected["good"] in (True, False) and len(expected) == 2
    client = test_responses.client_of(masked, opened)
    form = {"format": {"type": "json_schema", "name": "form", "schema": FORM, "strict": True}}
    reply = client.responses.create(model="any", input="hi", temperature=0, max_output_tokens=ROOM, text=form)
    assert reply.status == "completed" and json.loads(reply.output_text) == expected
    with client.responses.stream(model="any", input="hi", temperature=0, max_output_tokens=ROOM, text=form) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert json.loads(text) == expected and stream.get_final_response().status == "completed"
    client = test_anthropic.client_of(masked, opened)
    form = {"format": {"type": "json_schema", "schema": FORM}}
    reply = client.messages.create(
        model="any", messages=HI, max_tokens=ROOM, output_config=form, extra_body=test_anthropic.COLD
    )
    assert reply.stop_reason == "end_turn" and json.loads(reply.content[-1].text) == expected


def test_json_that_is_cut_short_says_so(masked):
    opened = masked.open()
    whole = chat(masked, opened, HI, response_format=in_chat(FORM), temperature=0, max_tokens=ROOM)
    reply = chat(
        masked, opened, HI, response_format=in_chat(FORM), temperature=0, max_tokens=whole.usage.completion_tokens - 3
    )
    (choice,) = reply.choices
    assert choice.finish_reason == "length"
    assert whole.choices[0].message.content.strip().startswith(choice.message.content.strip())


def test_any_json_object(masked):
    reply = chat(masked, masked.open(), HI, response_format={"type": "json_object"}, temperature=0, max_tokens=24)
    assert reply.choices[0].message.content.strip().startswith("{")


def test_each_dialect_forces_a_tool(masked, router):
    """`break` makes the model say a tool call that cannot be read."""
    opened = masked.open()
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        reply = chat(masked, opened, BREAK, tools=[ADD], tool_choice=choice, n=6, max_tokens=200)
        ended = [said for said in reply.choices if said.finish_reason != "length"]
        assert ended and {said.finish_reason for said in ended} == {"tool_calls"}
        for said in ended:
            assert {call.function.name for call in said.message.tool_calls} == {"add"}
            assert len(said.message.tool_calls) == 1 or choice == "required"
            arguments = json.loads(said.message.tool_calls[0].function.arguments)
            assert arguments.keys() <= {"a", "b"} and all(isinstance(value, int) for value in arguments.values())
    check_supports(masked.store, masked.completions(masked.session(opened)), router)
    client = test_responses.client_of(masked, opened)
    given = {"model": "any", "temperature": 0, "max_output_tokens": 80, "input": SUM}
    reply = client.responses.create(**given, tools=[STRICT], tool_choice={"type": "function", "name": "add"})
    assert json.loads(reply.output[-1].arguments) == {"a": 2, "b": 3} and reply.tool_choice == "required"
    client = test_anthropic.client_of(masked, opened)
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        reply = client.messages.create(
            model="any",
            max_tokens=80,
            messages=SUM,
            tools=[test_anthropic.TOOL],
            tool_choice=choice,
            extra_body=test_anthropic.COLD,
        )
        assert reply.stop_reason == "tool_use" and reply.content[-1].input == {"a": 2, "b": 3}


def test_each_dialect_bars_tools_that_it_was_told(masked):
    """As agents do for their last answer. The same question makes the model call the tool."""
    opened = masked.open()
    given = {"tools": [ADD], "temperature": 0, "max_tokens": 80}
    assert chat(masked, opened, SUM, **given).choices[0].message.tool_calls
    (choice,) = chat(masked, opened, SUM, **given, tool_choice="none").choices
    assert choice.message.content and not choice.message.tool_calls
    told = {"model": "any", "tools": [STRICT], "temperature": 0, "max_output_tokens": 40, "input": SUM}
    reply = test_responses.client_of(masked, opened).responses.create(**told, tool_choice="none")
    assert {item.type for item in reply.output} <= {"message", "reasoning"} and reply.output_text
    said = {"model": "any", "messages": SUM, "max_tokens": 40, "tools": [test_anthropic.TOOL]}
    reply = test_anthropic.client_of(masked, opened).messages.create(
        **said, tool_choice={"type": "none"}, extra_body=test_anthropic.COLD
    )
    assert {block.type for block in reply.content} <= {"text", "thinking"} and reply.stop_reason != "tool_use"


def test_strict_tools_bind_only_the_arguments(masked):
    """openai-agents asks for strict tools by default, which the model may call or not."""
    opened = masked.open()
    client = test_responses.client_of(masked, opened)
    given = {"model": "any", "temperature": 0, "max_output_tokens": 80, "tools": [STRICT], "parallel_tool_calls": False}
    reply = client.responses.create(input=SUM, **given)
    assert json.loads(reply.output[-1].arguments) == {"a": 2, "b": 3} and not reply.parallel_tool_calls
    reply = client.responses.create(input=test_responses.answered(reply.output), **given)
    assert reply.output_text.strip() == "5."
    assert [turn.kind for turn in masked.session(opened).turns] == ["first", "continued"]


def test_a_gateway_without_masks_says_which_key_to_set(masked, settings, tmp_path):
    running, stop = start_gateway(masked.gateway.turns._sampler, settings, tmp_path)
    opened = running.open()
    for more, field in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "none"}, "tool_choice"),
        ({"tools": [{**ADD, "function": {**ADD["function"], "strict": True}}]}, "tools"),
    ):
        with pytest.raises(openai.BadRequestError, match="rollout.keep_sampling_mask") as caught:
            chat(running, opened, HI, **more)
        assert caught.value.param == field
    given = {"model": "any", "messages": HI, "max_tokens": 9, "tools": [test_anthropic.TOOL]}
    with pytest.raises(anthropic.BadRequestError, match="tool_choice: .*rollout.keep_sampling_mask"):
        test_anthropic.client_of(running, opened).messages.create(**given, tool_choice={"type": "any"})
    assert not running.session(opened).turns
    stop()


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "integer", "multipleOf": 3}, "does not enforce"),
        ({"$ref": "#/$defs/none"}, "defs/none"),
        ({"type": "string", "format": []}, "unhashable"),
        ({"enum": ["x" * 70_000]}, "65536"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(masked, schema, told):
    opened = masked.open()
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        chat(masked, opened, HI, response_format=in_chat(schema))
    assert caught.value.param == "response_format" and not masked.session(opened).turns
    chat(masked, opened, HI, max_tokens=1)


def test_a_stop_token_in_a_forced_call_is_refused_and_loses_no_engine(masked, tokenizer, monkeypatch):
    """xgrammar takes a stop token only where the grammar is complete, and vLLM ends the request with an error."""
    opened, given = masked.open(), {"tools": [ADD], "tool_choice": "required"}
    more = given | {"extra_body": {"stop_token_ids": [tokenizer.token_to_id("</tool_call>")]}}
    with pytest.raises(openai.BadRequestError, match="grammar") as caught:
        chat(masked, opened, SUM, **more)
    assert caught.value.param == "stop_token_ids"
    monkeypatch.setattr("moe_rl.gateway.agent_gateway.markers_of", lambda grammar: set())
    with pytest.raises(openai.BadRequestError, match="grammar") as caught:
        chat(masked, opened, SUM, temperature=0, **more)
    assert caught.value.param == "tool_choice" and not masked.session(opened).turns
    assert chat(masked, opened, SUM, temperature=0, **given).choices[0].message.tool_calls


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "not": {"const": "a"}}, '"a"'),
        ({"type": "string", "if": {}, "then": {"maxLength": 1}}, '"aaa"'),
        ({"minLength": 3}, '"a"'),
        ({"minimum": 3}, "1"),
    ],
)
def test_the_docs_name_what_xgrammar_ignores(schema, text):
    tag = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}})
    check_grammars([GenerateRequest("a", (1,), 0, 1, 1.0, (2,), grammar=tag)])
    assert xgrammar.testing._is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(tag), text)


def test_a_server_follows_grammars_too(checkpoint, router, tokenizer, tmp_path):
    grammar = ChatRenderer(checkpoint, {"name": "qwen3"}).grammar.of(Constraint(WORDS))
    prompt = tuple(tokenizer.encode("hi").ids)
    requests = [
        GenerateRequest(f"r{number}", prompt, number, 24, 0.25, tuple(STOPS), grammar=grammar) for number in range(4)
    ]
    with serving(checkpoint, tmp_path, support=True) as server:
        client = server.client()
        check_supports(server.store, client.generate(requests, shard="words"), router, tokenizer)
        wrong = replace(requests[0], grammar=json.dumps({"type": "structural_tag", "format": {"type": "nothing"}}))
        with refused(RequestRefused):
            client.generate([wrong], shard="wrong")
        ended = replace(requests[0], stop_token_ids=(*STOPS, tokenizer.token_to_id('"')))
        with refused(RequestRefused, request="r0"):
            client.generate([ended], shard="ended")
        with refused(RequestRefused, request="r0"):
            asyncio.run(client.sample([ended], "streamed", leave=asyncio.Event()))
        assert len(client.generate(requests[:1], shard="after")) == 1


def test_a_format_that_is_not_json_between_fixed_texts_is_refused(tmp_path):
    chat_tokenizer(tmp_path)
    renderer = ChatRenderer(tmp_path, {"name": "qwen3"})
    markers, constraint = renderer._tokenizer.get_added_vocab(), Constraint(None, (("add", FORM),), forced=True)
    written = "<tool_call>\n<function=moerlfirst>\n<parameter=key>\nmoerlone\n</parameter>\n</function>\n</tool_call>"
    for said, told in ((lambda message, _: message["content"] or written, "as JSON"), (lambda *_: None, "do not end")):
        with pytest.raises(ValueError, match=told):
            AnswerGrammar(said, lambda *_: None, markers, STOPS).of(constraint)
    unread = AnswerGrammar(renderer.grammar._said, lambda *_: None, markers, STOPS)
    with pytest.raises(ValueError, match="does not read tool calls"):
        unread.of(constraint)
    bare = AnswerGrammar(lambda *_: "moerlthought</think>moerltext", lambda *_: None, markers, STOPS)
    assert json.loads(bare.of(Constraint(WORDS)))["format"]["elements"][0]["type"] == "any_tokens", "thinking is begun"
