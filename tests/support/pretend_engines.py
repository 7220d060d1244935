"""Stands for the vLLM engines of `moe_rl.comparison.engine_runs`: each gives the same tokens, with log-probabilities
that a planted fault moves in engines with one setting, or in all but these."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from moe_rl.comparison import engine_runs

# What a fault depends on, in an engine's settings and the number of times that it was asked before.
HAS = {
    "chunked prefill": lambda settings, _: "long_prefill_token_threshold" in settings.passed,
    "prefix cache": lambda settings, before: before > 0 and settings.passed.get("enable_prefix_caching", True),
    "batch composition": lambda settings, _: settings.max_concurrent == 1,
    "engine patch": lambda settings, _: settings.trace_root is None,
    engine_runs.DEGREE: lambda *_: False,  # each has one device
}
VALUE = {
    "chunked prefill": "pieces of 8 tokens",
    "prefix cache": "warm",
    "batch composition": "one at a time",
    "engine patch": "without recorder",
    engine_runs.DEGREE: "one device",
}


class PretendEngines:
    """Makes such engines.

    Args:
        causes: The causes that are planted.
        completions: {key: (tokens, log-probabilities [N] without a fault)}.
        kind: changed: all engines but those with these settings have the faults. Else only these have them, as the
            run's had.
    """

    def __init__(self, causes, completions, kind="suspected", seed=0):
        self._completions, self._kind, self.started = completions, kind, 0
        rng = np.random.default_rng(seed)
        self._effects = {
            cause: {key: rng.normal(0, 0.05, len(tokens)) for key, (tokens, _) in completions.items()}
            for cause in causes
        }

    def recorded(self, key):
        """Return the log-probabilities of the run, whose engine had the faults."""
        return (self._completions[key][1] + sum(one[key] for one in self._effects.values())).astype(np.float32)

    def install(self, monkeypatch):
        """Put them in the place of vLLM's, on a machine without a GPU."""
        monkeypatch.setattr(engine_runs, "VllmEngine", lambda settings: _Engine(self, settings))
        monkeypatch.setattr(engine_runs, "Blocking", lambda engine: engine)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def moved(self, key, settings, before):
        tokens, logprobs = self._completions[key]
        for cause, effects in self._effects.items():
            if bool(HAS[cause](settings, before)) != (self._kind == "changed"):
                logprobs = logprobs + effects[key]
        return SimpleNamespace(token_ids=tokens, logprobs=logprobs)


class _Engine:
    def __init__(self, made_by, settings):
        self._made_by, self._settings, self._asked = made_by, settings, 0
        made_by.started += 1

    def generate(self, requests, shard):
        self._asked += 1
        return [self._made_by.moved(one.key, self._settings, self._asked - 1) for one in requests]

    def close(self):
        pass
