"""Plays a dialogue of as many turns as its row says, each of one token of the model, in an episode of a run."""

from __future__ import annotations

from typing import Any

from moe_rl.tasks.environments.agent_session import AgentSession


async def run(session: AgentSession, row: dict[str, Any]) -> float:
    """Return the share of turns in which the model said a letter."""
    messages, letters = [{"role": "user", "content": row["question"]}], 0
    for _ in range(row["turns"]):
        reply = await session.chat(messages, max_tokens=1)
        letters += (reply["content"] or "").isalpha()
        messages += [reply, {"role": "user", "content": "?"}]
    return letters / row["turns"]
