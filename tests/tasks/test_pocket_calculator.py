"""Tests the environment of the tool demo: a calculator for one operation at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from moe_rl.tasks.environments.agent_session import AgentSession
from moe_rl.tasks.environments.examples import pocket_calculator
from tests.tasks.model_stub import ModelStub


def calls(*expressions):
    """Return what a model says that calls the calculator with each expression, and then repeats the last result."""

    def says(body):
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if len(results) == len(expressions):
            return {"content": f"It is {results[-1]}." if results else "7"}
        function = {"name": "calculate", "arguments": json.dumps({"expression": expressions[len(results)]})}
        return {"tool_calls": [{"id": f"c{len(results)}", "type": "function", "function": function}]}

    return says


@pytest.mark.parametrize(
    ("expressions", "row", "reward"),
    [
        ([], {"question": "3+4?", "answer": "7", "calls": 0}, 1.0),
        (["3+4"], {"question": "3+4?", "answer": "7", "calls": 0}, 0.9),
        (["17*23", "391-400"], {"question": "17*23-400?", "answer": "-9", "calls": 2}, 1.0),
        (["17*23", "391*1", "391-400"], {"question": "17*23-400?", "answer": "-9", "calls": 2}, 0.9),
        (["17*23-400"], {"question": "17*23-400?", "answer": "-9", "calls": 2}, 0.0),
        (["1+1", "1+1", "1+1", "7*1"], {"question": "3+4?", "answer": "7", "calls": 0}, 0.0),
    ],
)
def test_the_right_answer_pays_and_calls_that_are_not_needed_cost(expressions, row, reward):
    with contextlib.closing(ModelStub(calls(*expressions))) as stub:
        found = asyncio.run(pocket_calculator.run(AgentSession(stub.access, 5), row))
    assert found == pytest.approx(reward)
    assert len(stub.bodies) == min(4, len(expressions) + 1), "at most four turns"
    assert stub.bodies[0]["tools"] == [pocket_calculator.TOOL]


def test_a_call_computes_one_operation():
    for expression, result in [("12*34", "408"), ("3-10", "-7"), ("-3--10", "7"), ("99999+1", "100000")]:
        arguments = json.dumps({"expression": expression})
        assert pocket_calculator.answer({"name": "calculate", "arguments": arguments}) == result
    for expression in ("12", "1+2+3", "(1+2)", "4/2", "1.5+1", "2**9", "1*" + "9" * 200, 7):
        arguments = json.dumps({"expression": expression})
        assert pocket_calculator.answer({"name": "calculate", "arguments": arguments}).startswith("error: ")
