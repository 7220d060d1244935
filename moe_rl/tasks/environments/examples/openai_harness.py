"""Runs an agent with its own client, the unmodified package `openai`. A row has a question and its answer.

The agent knows nothing of moe_rl: it gets an address and a key.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from moe_rl.tasks.environments.agent_session import AgentSession


async def run(session: AgentSession, row: dict[str, Any]) -> float:
    """Return 1 if the agent's final text contains the row's answer, else 0."""
    text = await answer_and_check(AsyncOpenAI(base_url=session.base_url, api_key=session.key), row["question"])
    return float(str(row["answer"]) in text)


async def answer_and_check(client: AsyncOpenAI, question: str) -> str:
    """Ask a question, let the model check its own answer, and return its next text."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    first = await client.chat.completions.create(model="policy", messages=messages, max_tokens=256)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "Check your answer. Say the right one."},
    ]
    last = await client.chat.completions.create(model="policy", messages=messages, max_tokens=256)
    return last.choices[0].message.content or ""
