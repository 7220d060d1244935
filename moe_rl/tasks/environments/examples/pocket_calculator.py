"""Lets the model call a calculator that computes one operation at a time, so that long questions need several turns.

A row has a question, its answer, and how many calls it needs (0 for a question that the model can answer by itself).
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from moe_rl.tasks.environments.agent_session import AgentSession
from moe_rl.tasks.environments.examples import calculator

TOOL = calculator.tool("Computes one operation on two whole numbers, such as 12*34.")
# A call takes about 25 tokens.
MOST_TOKENS = 48
_CALL_COST = 0.1
_OPERATION = re.compile(r"-?\d+[+*-]-?\d+")


async def run(session: AgentSession, row: dict[str, Any]) -> float:
    """Return 1 for the right answer, less 0.1 for each call that was not needed; else 0."""
    text, calls = await calculator.converse(session, row["question"], TOOL, answer, MOST_TOKENS)
    return reward(text, calls, row)


def reward(said: str, calls: int, row: dict[str, Any]) -> float:
    """Return the reward for the model's final text after some calls."""
    if not calculator.is_right(said, row["answer"]):
        return 0.0
    return max(0.0, 1.0 - _CALL_COST * max(0, calls - row["calls"]))


def answer(function: dict[str, str]) -> str:
    """Return the tool's result for the model."""
    return calculator.answer(function, compute)


def compute(expression: str) -> Fraction:
    """Compute one operation on two whole numbers. Raises ValueError for anything else or too long."""
    if not _OPERATION.fullmatch(expression):
        raise ValueError("expected one operation on two whole numbers")
    return calculator.calculate(expression)
