"""Provides what the runs of `pairs.py` learn from: rewards by chance, because the models are random."""

from __future__ import annotations

import zlib
from typing import Any

_TURN_TOKENS = 12


def chance(completion: str) -> float:
    """Reward half of all completions."""
    return float(zlib.crc32(completion.encode()) % 2)


def chance_or_none(completion: str, answer: str) -> float:
    """Fail for every third question, so that its group is dropped."""
    _refuse_some(answer)
    return chance(completion)


async def episode(session, row: dict[str, Any]) -> list[float]:
    """Ask twice. Return a reward for each turn."""
    messages = [{"role": "user", "content": row["question"]}]
    rewards = []
    for _ in range(2):
        reply = await session.chat(messages, max_tokens=_TURN_TOKENS)
        said = reply["content"] or ""
        rewards.append(chance(said))
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return rewards


async def episode_or_none(session, row: dict[str, Any]) -> list[float]:
    """Fail for every third question, so that its group is dropped."""
    _refuse_some(row["answer"])
    return await episode(session, row)


def _refuse_some(answer: str) -> None:
    if zlib.crc32(answer.encode()) % 3 == 0:
        raise ValueError("this question fails on purpose")
