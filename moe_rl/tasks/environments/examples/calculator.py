"""Lets the model call a calculator. A row has a question and its answer, a number."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from moe_rl.tasks.environments.agent_session import AgentSession, ChatError

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes an expression of numbers with + - * / and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
_MOST_TURNS = 4
_LONGEST = 200
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/\d+)?")


async def run(session: AgentSession, row: dict[str, Any]) -> float:
    """Return 1 if the last number that the model says is the row's answer, else 0."""
    wanted = Fraction(str(row["answer"]))
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    for _ in range(_MOST_TURNS):
        try:
            reply = await session.chat(messages, tools=[TOOL], max_tokens=256)
        except ChatError as error:
            if error.code in ("session_limit", "context_length_exceeded"):
                return 0.0  # the model used up what it has, which is no fault of the environment
            raise
        messages.append(reply)
        if not reply.get("tool_calls"):
            numbers = _NUMBER.findall(reply["content"] or "")
            return float(bool(numbers) and _same(numbers[-1], wanted))
        for call in reply["tool_calls"]:
            result = answer(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return 0.0


def answer(function: dict[str, str]) -> str:
    """Return what the model gets for a call of the tool. What it did wrong is told as text, so that it can mend it."""
    if function["name"] != "calculate":
        return f"error: there is no tool {function['name']}"
    try:
        arguments = json.loads(function["arguments"])
        return str(calculate(arguments["expression"]))
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def calculate(expression: str) -> Fraction:
    """Compute an expression exactly. Nothing but numbers and the four operations is ever run.

    Raises:
        ValueError: it is something else, or too long.
        ZeroDivisionError: it divides by zero.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):  # the last two for too many brackets
        raise ValueError(f"cannot read {expression!r}") from None


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
    raise ValueError(f"cannot compute {ast.unparse(node)!r}")


def _same(said: str, wanted: Fraction) -> bool:
    try:
        return Fraction(said) == wanted
    except (ValueError, ZeroDivisionError):
        return False
