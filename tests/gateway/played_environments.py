"""Provides environments for tests of `moe-rl play`. Episodes import them. They know what the tiny model has learnt."""

from __future__ import annotations

import asyncio
import os
import random

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


async def adds(session, row):
    """Let the model add with its tool. Return a reward for each turn, or do what the row says instead."""
    messages = [{"role": "user", "content": row["question"]}]
    reply = await session.chat(messages, tools=[ADD], temperature=0, max_tokens=64)
    match row.get("fault"):
        case "raise":
            raise KeyError("planted")
        case "one_reward_too_few":
            return []
        case "die_while_it_asks":
            asyncio.get_running_loop().call_later(0.3, os._exit, 7)

            async def ask():
                while True:  # an answer may be short
                    await session.chat([{"role": "user", "content": "ab"}], max_tokens=100)

            await asyncio.gather(ask(), ask(), ask())
    (call,) = reply["tool_calls"]
    messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": str(row["answer"])}]
    reply = await session.chat(messages, tools=[ADD], temperature=0, max_tokens=64)
    return [0.0, float(reply["content"].strip() == f"{row['answer']}.")]


def tool_says(reply, text):
    """Return the answer to the first tool call of a reply; to none, if it has none."""
    calls = reply.get("tool_calls") or [{"id": "none"}]
    return {"role": "tool", "tool_call_id": calls[0]["id"], "content": text}


async def branches(session, row):
    """Hold a dialogue of three turns with a tool, and try another result of the tool behind the first turn."""
    if row.get("fault") == "raise":
        raise KeyError("planted")
    asked = [{"role": "user", "content": row["question"]}]
    first = await session.chat(asked, tools=[ADD], max_tokens=64)
    told = [*asked, first, tool_says(first, str(row["answer"]))]
    second = await session.chat(told, tools=[ADD], max_tokens=32)
    told += [second, tool_says(second, "6")]
    await session.chat(told, tools=[ADD], max_tokens=12)
    await session.chat([*asked, first, tool_says(first, "7")], tools=[ADD], max_tokens=12)
    return float((second["content"] or "").strip() == f"{row['answer']}.")


async def chatters(session, row, **more):
    """Ask three times, whatever the model says. It earns the share of its characters that are no spaces."""
    messages = [{"role": "user", "content": row["question"]}]
    said = ""
    for turn in range(3):
        reply = await session.chat(messages, tools=[ADD], max_tokens=40, **more)
        said += reply["content"] or ""
        messages += [reply, tool_says(reply, f"{turn} {row['answer']}")]
    return sum(not letter.isspace() for letter in said) / max(1, len(said))


async def chatters_with_a_stop(session, row):
    """Do what `chatters` does, with a text that ends a turn."""
    return await chatters(session, row, stop=["##"])


async def branches_by_turn(session, row):
    """Hold the dialogue of `branches`, and give each turn a reward."""
    await branches(session, row)
    return [1.0, 0.0, 2.0, -1.0]


async def branches_at_random(session, row):
    """Hold the dialogue of `branches`, and earn what no other episode earns."""
    await branches(session, row)
    return random.random()


async def dated(session, row):
    """Ask twice in one dialogue whose system's text changes with each request."""
    asked = [{"role": "system", "content": "at 1"}, {"role": "user", "content": row["question"]}]
    reply = await session.chat(asked, max_tokens=9)
    again = [{"role": "system", "content": "at 2"}, asked[1], reply, {"role": "user", "content": "more"}]
    await session.chat(again, max_tokens=9)
    return 1.0
