"""Plays a text game of the package `textarena`, alone or against players that your function plays.

A row has

    game        id of the game, such as GuessTheNumber-v0
    seed        seed of the game (default 0)
    arguments   arguments of textarena.make, such as {"max_turns": 5} (default none)
    players     number of players (default 1)
    player      the model's player number, from 0 (default 0)
    opponent    with several players: dotted path of a function that plays the others. It gets the game's text for a
                player, and returns the move
    sampling    fields of each request, such as max_tokens (default none)

The game sends the model only new text, so each turn continues the previous one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from moe_rl.errors import DataError
from moe_rl.tasks.environments.adapters import missing
from moe_rl.tasks.environments.agent_session import AgentSession, ChatError

try:
    import textarena
except ImportError as error:
    raise missing("textarena", error) from error

# The variant of a game without wrappers: other variants repeat the whole history in each observation.
_RAW = "-raw"
_UNFINISHED = 0.0


async def run(session: AgentSession, row: dict[str, Any]) -> float:
    """Return the game's reward for the model's player; 0 if the session's limits end before the game does."""
    players, player = row.get("players", 1), row.get("player", 0)
    opponent = _opponent(row.get("opponent"), players)
    game = textarena.make(row["game"].removesuffix(_RAW) + _RAW, **row.get("arguments", {}))
    game.reset(num_players=players, seed=row.get("seed", 0))
    messages: list[dict[str, Any]] = []
    done = False
    while not done:
        turn, observation = game.get_observation()
        # Observations repeat the player's own moves, which the model already has.
        observed = "\n".join(text for sender, text, _ in observation if sender != turn)
        if turn != player:
            move = opponent(observed)
        else:
            messages.append({"role": "user", "content": observed})
            try:
                reply = await session.chat(messages, **row.get("sampling", {}))
            except ChatError as error:
                if error.code in ("session_limit", "context_length_exceeded"):
                    return _UNFINISHED
                raise
            messages.append(reply)
            move = reply["content"] or ""
        done, _ = game.step(move)
    rewards, _ = game.close()
    return float(rewards[player])


def _opponent(path: str | None, players: int) -> Callable[[str], str]:
    if (path is None) != (players == 1):
        raise DataError(
            "players and opponent of a game do not match",
            where={"field": "opponent"},
            got=f"{path} with {players} players",
            expected="a dotted path with several players, and none with one",
        )
    if path is None:
        return str
    module, _, name = path.rpartition(".")
    opponent: Callable[[str], str] = getattr(importlib.import_module(module), name)
    return opponent
