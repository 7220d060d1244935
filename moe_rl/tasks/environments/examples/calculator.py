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


def tool(description: str) -> dict[str, Any]:
    """Return the tool, in OpenAI's form. description: the model's description of it."""
    return {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }


TOOL = tool("Computes an expression of numbers with + - * / and brackets.")
_MOST_TURNS = 4
_MOST_TOKENS = 256
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
    """Return 1 if the model's last number is the row's answer, else 0."""
    text, _ = await converse(session, row["question"], TOOL, answer, _MOST_TOKENS)
    return float(is_right(text, row["answer"]))


async def converse(
    session: AgentSession,
    question: str,
    offered: dict[str, Any],
    answer_call: Callable[[dict[str, str]], str],
    max_tokens: int,
) -> tuple[str, int]:
    """Let the model call a tool until it answers without a call, at most for a few turns.

    Args:
        offered: the tool.
        answer_call: returns the result of a call.
        max_tokens: maximum tokens per turn.

    Returns:
        The final text, "" if there is none, and the number of calls.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    calls = 0
    for _ in range(_MOST_TURNS):
        try:
            reply = await session.chat(messages, tools=[offered], max_tokens=max_tokens)
        except ChatError as error:
            if error.code in ("session_limit", "context_length_exceeded"):
                break  # the model has used up its limits, which is not a fault of the environment
            raise
        messages.append(reply)
        if not reply.get("tool_calls"):
            return reply["content"] or "", calls
        for call in reply["tool_calls"]:
            result = answer_call(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            calls += 1
    return "", calls


def is_right(said: str, wanted: object) -> bool:
    """Return whether the last number in a text is the wanted one."""
    numbers = _NUMBER.findall(said)
    return bool(numbers) and _same(numbers[-1], Fraction(str(wanted)))


def answer(function: dict[str, str], compute: Callable[[str], Fraction] | None = None) -> str:
    """Return the tool's result for the model. Errors are returned as text, so that the model can correct them.

    compute: computes the expression, as `calculate` does, which is the default.
    """
    if function["name"] != "calculate":
        return f"error: there is no tool {function['name']}"
    try:
        expression = json.loads(function["arguments"])["expression"]
        if not isinstance(expression, str):
            raise TypeError("the expression is not a string")
        return str((compute or calculate)(expression))
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"error: {error}"


def calculate(expression: str) -> Fraction:
    """Compute an expression exactly. Only numbers and the four operations are ever evaluated.

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


def _same(number: str, wanted: Fraction) -> bool:
    try:
        return Fraction(number) == wanted
    except (ValueError, ZeroDivisionError):
        return False
