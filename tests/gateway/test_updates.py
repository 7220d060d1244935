"""Tests new weights that go in between the turns of a session, and in the middle of one, against `transformers`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from moe_rl.gateway.finishing import check_session
from moe_rl.trace.spans import versions_of_rows
from tests.gateway.test_openai import ask, client_of
from tests.gateway.test_web import left_while_sampled
from tests.rollout.in_flight import Change, forwarded
from tests.support.independent import Independent
from tests.weights.sending import by_disk

TOOL = {"role": "tool", "tool_call_id": "x", "content": "5"}
FIRST = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def others(checkpoint):
    """The model's weights with other routers and attention."""
    torch.manual_seed(3)
    weights = load_file(checkpoint / "model.safetensors")
    return {
        name: tensor + 0.2 * tensor.std() * torch.randn_like(tensor)
        if ".gate.weight" in name or "_proj" in name
        else tensor
        for name, tensor in weights.items()
    }


@pytest.fixture(scope="module")
def other_router(checkpoint, others, tmp_path_factory) -> Independent:
    import shutil

    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("others")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(checkpoint / name, folder)
    save_file(others, folder / "model.safetensors", metadata={"format": "pt"})
    return Independent(folder)


@pytest.fixture
def flight(running, engine, checkpoint, others, tmp_path):
    """Sends the other weights, and the model's own again after the test."""
    groups, turns = engine.sampler, running.gateway.turns
    sent = []

    async def change(tensors) -> None:
        await groups.pause()
        update = by_disk(tmp_path, tensors, version=turns.version + 1, replaces=turns.version)
        await groups.take_weights(update)
        await groups.resume()
        turns.version += 1

    async def send() -> None:
        sent.append(True)
        await change(others)

    yield SimpleNamespace(send=send, groups=groups, old=turns.version)
    if sent:
        asyncio.run(change(load_file(checkpoint / "model.safetensors")))


def test_a_turn_under_new_weights_has_the_rows_that_it_attended_to(running, flight, other_router, router):
    opened, anew = running.open(), running.gateway.turns.counts["recorded_anew"]
    client = client_of(running, opened)
    messages = list(FIRST)

    def say() -> None:
        messages.extend([ask(client, messages, temperature=1, max_tokens=20).choices[0].message, TOOL])

    say()
    asyncio.run(flight.send())
    say()
    say()
    session = running.session(opened)
    assert [turn.kind for turn in session.turns] == ["first", "continued", "continued"]
    # The record of the second turn has the whole prompt again, and the third one continues it.
    assert [turn.continues for turn in session.turns] == [False, False, True]
    assert running.gateway.turns.counts["recorded_anew"] == anew + 1
    check_session(session.finish(), running.store)
    change = Change(router, other_router, atol=5e-5)
    for completion, version in zip(running.completions(session), (0, 1, 1), strict=True):
        record = running.store.read(completion.routes)
        assert set(versions_of_rows(record.spans)) == {flight.old + version}
        change.check(completion, record, 0 if version else len(record.token_ids))


def test_a_turn_that_sees_an_update_keeps_its_keys_and_values(running, engine, flight, other_router, router):
    async def meanwhile() -> None:
        await flight.send()
        await forwarded(flight.groups, 40)

    opened = running.open()
    session = left_while_sampled(running, opened, engine, meanwhile)
    (turn,) = session.turns
    assert [span.weight_version for span in turn.versions] == [flight.old, flight.old + 1]
    ask(client_of(running, opened), [{"role": "user", "content": "ab"}], max_tokens=3)
    check_session(running.session(opened).finish(), running.store)
    first, second = running.completions(session)
    record = running.store.read(first.routes)
    change = Change(router, other_router, atol=5e-5)
    change.check(first, record, int((versions_of_rows(record.spans) == flight.old).sum()))
    assert session.rows_version(0) is None and session.rows_version(1) == flight.old + 1
