"""Plays the rows of a data set through a gateway: opens a session for each, runs the environment in it, finishes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from moe_rl.errors import EngineError
from moe_rl.tasks.environments.agent_session import SessionAccess
from moe_rl.tasks.environments.environment_pool import EnvironmentPool

# How long the gateway may take to end the last request of a session whose agent was killed.
_BUSY_SECONDS, _ASK_AGAIN_SECONDS = 30.0, 0.05
_CALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """Describes the result of one row.

    Attributes:
        row: its number, from 0.
        session: name of its session.
        rewards, problem, traceback, seconds: as in `Episode`.
        turns, undelivered, branches, tokens, sampled_tokens: the session's counts.
    """

    row: int
    session: str
    rewards: float | tuple[float, ...] | None
    problem: str
    traceback: str
    seconds: float
    turns: int
    undelivered: int
    branches: int
    tokens: int
    sampled_tokens: int

    @property
    def reward(self) -> float | None:
        """Return the reward of the episode, the sum over its turns; None if it failed."""
        return sum(self.rewards) if isinstance(self.rewards, tuple) else self.rewards


class GatewayOwner:
    """Opens and finishes sessions of a gateway, with its owner's token. Use as an async context manager.

    Args:
        url: address of the gateway.
        turns, tokens: limits of each session; None: the gateway's.
    """

    def __init__(self, url: str, token: str, *, turns: int | None = None, tokens: int | None = None):
        self._url, self._turns, self._tokens = url.rstrip("/"), turns, tokens
        limits = {"turns": turns, "tokens": tokens}
        self._limits = {name: value for name, value in limits.items() if value is not None}
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.AsyncClient(timeout=_CALL_SECONDS, trust_env=False, headers=headers)

    async def __aenter__(self) -> GatewayOwner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def open(self, group: str) -> SessionAccess:
        """Open a session of a group. Raises EngineError if the gateway refuses."""
        answer = await self._post("/sessions", {"group": group} | self._limits)
        if answer.status_code != 200:
            raise self._refused(answer)
        body = answer.json()
        return SessionAccess(body["session"], body["url"], body["base_url"], body["key"], self._turns, self._tokens)

    async def finish(self, name: str) -> tuple[dict[str, Any], str]:
        """Finish a session. Return its counts, and the fault that the gateway found in it ("" for none).

        Raises:
            EngineError: the gateway cannot be reached, or has lost the session.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _BUSY_SECONDS
        while (answer := await self._post(f"/sessions/{name}/finish", {})).status_code == 409:
            body = answer.json()
            if body["code"] != "busy" or loop.time() > deadline:
                return {}, body["error"]
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        if answer.status_code != 200:
            raise self._refused(answer)
        return answer.json(), ""

    async def _post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        try:
            return await self._client.post(self._url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL, OverflowError) as error:  # the last for a port above 65,535
            raise EngineError(
                "the gateway cannot be reached", where={"url": self._url}, got=f"{type(error).__name__}: {error}"
            ) from error

    def _refused(self, answer: httpx.Response) -> EngineError:
        do = "give the token that the gateway was started with" if answer.status_code == 401 else ""
        got = f"status {answer.status_code}: {answer.text[:200]}"
        return EngineError("the gateway refused a session", where={"url": self._url}, got=got, do=do)


async def play_rows(
    rows: Sequence[Mapping[str, Any]], pool: EnvironmentPool, owner: GatewayOwner
) -> AsyncIterator[PlayedRow]:
    """Yield the result of each row as it ends. A session is opened only once the pool has room for its episode.

    Raises:
        EngineError: the gateway refuses a session, or is lost.
        RewardError: the pool is closed.
    """
    places = asyncio.Semaphore(pool.concurrent)

    async def play(number: int) -> PlayedRow:
        async with places:
            return await _play(number, rows[number], pool, owner)

    tasks = [asyncio.create_task(play(number)) for number in range(len(rows))]
    try:
        for ended in asyncio.as_completed(tasks):
            yield await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _play(number: int, row: Mapping[str, Any], pool: EnvironmentPool, owner: GatewayOwner) -> PlayedRow:
    access = await owner.open(f"row {number}")
    try:
        episode = await pool.play(access, row)
    finally:
        has, fault = await owner.finish(access.name)
    counts = {name: has.get(name, 0) for name in ("turns", "undelivered", "branches", "tokens", "sampled_tokens")}
    problem, rewards = episode.problem, episode.rewards
    if fault and not problem:
        problem = f"the gateway cannot keep its session: {fault}"
    elif isinstance(rewards, tuple) and len(rewards) != counts["turns"]:
        problem = f"returned {len(rewards)} rewards, expected one for each of {counts['turns']} turns"
    return PlayedRow(
        number,
        access.name,
        None if problem else rewards,
        problem,
        episode.traceback,
        episode.seconds,
        **counts,
    )
