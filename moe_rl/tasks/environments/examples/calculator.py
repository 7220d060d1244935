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
    """Return the tool, in OpenAI's form. description: what the model is told of it."""
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
    """Return 1 if the last number that the model says is the row's answer, else 0."""
    said, _ = await converse(session, row["question"], TOOL, answer, _MOST_TOKENS)
    return float(is_right(said, row["answer"]))


async def converse(
    session: AgentSession,
    question: str,
    offered: dict[str, Any],
    answer_call: Callable[[dict[str, str]], str],
    max_tokens: int,
) -> tuple[str, int]:
    """Let the model call a tool until it says something without a call, at most for a few turns.

    Args:
        offered: the tool.
        answer_call: returns what the model gets for a call.
        max_tokens: most tokens of a turn.

    Returns:
        What it says in the end, "" if it comes to no end; and how many calls it made.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    calls = 0
    for _ in range(_MOST_TURNS):
        try:
            reply = await session.chat(messages, tools=[offered], max_tokens=max_tokens)
        except ChatError as error:
            if error.code in ("session_limit", "context_length_exceeded"):
                break  # the model used up what it has, which is no fault of the environment
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
    """Return what the model gets for a call of the tool. What it did wrong is told as text, so that it can mend it.

    compute: computes the expression, as `calculate` does, which is the default.
    """
    if function["name"] != "calculate":
        return f"error: there is no tool {function['name']}"
    try:
        arguments = json.loads(function["arguments"])
        return str((compute or calculate)(arguments["expression"]))
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
