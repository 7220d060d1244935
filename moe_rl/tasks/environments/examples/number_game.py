"""Lets the model find a hidden number by guesses. A row has the number as `secret`, from 1 to `largest`."""

from __future__ import annotations

import re
from typing import Any

from moe_rl.tasks.environments.agent_session import AgentSession, ChatError

_MOST_GUESSES = 8


async def run(session: AgentSession, row: dict[str, Any]) -> list[float]:
    """Return a reward for each turn: 1 for the right number, 0 for a wrong one, -0.1 for none."""
    secret, largest = int(row["secret"]), int(row.get("largest", 100))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"Find my number from 1 to {largest}. Say one number at a time."}
    ]
    rewards: list[float] = []
    for _ in range(_MOST_GUESSES):
        try:
            reply = await session.chat(messages, max_tokens=64)
        except ChatError as error:
            if error.code in ("session_limit", "context_length_exceeded"):
                break  # the rewards so far count
            raise
        guess = re.search(r"\d+", reply["content"] or "")
        if guess is None:
            rewards.append(-0.1)
            hint = "Say a number."
        elif int(guess[0]) == secret:
            return [*rewards, 1.0]
        else:
            rewards.append(0.0)
            hint = "Higher." if int(guess[0]) < secret else "Lower."
        messages += [reply, {"role": "user", "content": hint}]
    return rewards
