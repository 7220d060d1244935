"""Tests the gateway with a model's own chat template, which renders the whole dialogue anew for each turn."""

from __future__ import annotations

import shutil
from dataclasses import replace

import openai
import pytest

from moe_rl.gateway.finishing import check_session
from tests.gateway.conftest import ADD, start_gateway
from tests.gateway.test_openai import ask, client_of

HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS = TEMPLATE.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")


@pytest.mark.parametrize(("template", "kinds"), [(TEMPLATE, ["first", "continued"]), (DROPS, ["first", "rewritten"])])
def test_a_turn_continues_where_the_template_writes_the_same_tokens(
    engine, settings, router, tmp_path, template, kinds
):
    """One that drops earlier thinking is not prefix-stable: its turns are branches, and counted."""
    shutil.copytree(settings.model_path, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(template)
    place = replace(settings, model_path=tmp_path / "model")
    gateway, stop = start_gateway(engine.sampler, place, tmp_path, renderer={"name": "default"})
    try:
        opened = gateway.open()
        client = client_of(gateway, opened)
        reply = ask(client, HI).choices[0].message
        assert (reply.reasoning_content.strip(), reply.content.strip()) == ("hm", "hello you")
        ask(client, [*HI, reply, {"role": "user", "content": "more"}], max_tokens=5)
        session = gateway.session(opened)
        assert [turn.kind for turn in session.turns] == kinds
        assert gateway.gateway.counts["unstable"] == kinds.count("rewritten")
        check_session(session.finish(), gateway.store)
        gateway.agrees(session, router)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, HI, [ADD])
        assert caught.value.param == "tools", "nothing reads calls of tools here"
    finally:
        stop()
