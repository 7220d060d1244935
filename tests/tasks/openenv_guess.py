"""Serves a game with the package openenv-core: `python openenv_guess.py PORT`. The number to guess is that of reset."""

from __future__ import annotations

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, number: int = 5, **_) -> Hint:
        self._number = number
        return Hint(hint="guess")

    def step(self, action: Guess, timeout_s=None, **_) -> Hint:
        if action.guess < 0:
            raise OverflowError("planted")
        right = action.guess == self._number
        hint = "right" if right else "higher" if action.guess < self._number else "lower"
        return Hint(hint=hint, reward=float(right), done=right)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
