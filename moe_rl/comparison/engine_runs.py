"""Samples a run's completions again, in vLLM engines that differ from the run's in one setting."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_rl.comparison.bisection import Settings
from moe_rl.config.schema import Config
from moe_rl.models.hf import ModelFacts
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.rollouts import engine_settings, generate_request
from moe_rl.rollout.sampler import Blocking
from moe_rl.tasks.tokenizer import stop_tokens
from moe_rl.types import Sequence
from moe_rl.vllm import patches

# Prompts are cut into pieces of so many tokens.
PIECE = 8
# An engine started here has one device; what the run's engines computed is the record.
DEGREE = "engine's parallel degree"


class EngineRuns:
    """Is the `run` of a `Computation` for the causes in `changes`.

    A request has random numbers of its own, so an engine with the run's settings samples the same tokens, and one that
    rounds otherwise nearly the same. From the first token on that is another one, a completion is unknown: NaN.

    Args:
        config: Of the run.
        folder: The weights that sampled, as a Hugging Face checkpoint.
        sequences: What was sampled.
        out: Folder for logs and traces of the engines.

    Attributes:
        changes: {cause: values} that can be tried here. suspects: the same, and what an engine's own state may be; the
            one that comes closer to what the run recorded than a fresh engine does was the run's. untested: {cause: why
            not}, for all others of CAUSES.
    """

    CAUSES = (
        "chunked prefill",
        "prefix cache",
        "batch composition",
        "eager or graph",
        "engine patch",
        DEGREE,
    )

    def __init__(self, config: Config, facts: ModelFacts, folder: Path, sequences: Seq[Sequence], out: Path):
        self._config, self._facts, self._sequences = config, facts, sequences
        self._settings = replace(engine_settings(config, facts, out), model_path=folder)
        self._out, self._engines = out, 0
        longest = max(len(sequence.prompt_token_ids) for sequence in sequences)
        cached, on_cpu = config.rollout.vllm.get("enable_prefix_caching", True), not torch.cuda.is_available()
        changed: dict[str, Any] = {
            "chunked prefill": f"pieces of {PIECE} tokens",
            "prefix cache": "off" if cached else "on",
            "batch composition": "one at a time",
            "eager or graph": "eager" if self._settings.cuda_graphs else "graph",
            "engine patch": "without recorder",
            DEGREE: "one device",
        }
        self.untested: dict[str, str] = {}
        if config.cluster is None and config.rollout.servers:
            self.untested[DEGREE] = "the config does not say how many devices a server has (cluster.gpus_per_engine)"
        elif config.cluster is None or config.cluster.gpus_per_engine == 1:
            self.untested[DEGREE] = "the run's engines have one device"
        if on_cpu:
            self.untested["eager or graph"] = "vLLM has no graphs on a CPU"
        if longest <= PIECE:
            self.untested["chunked prefill"] = f"no prompt is longer than {PIECE} tokens"
        elif on_cpu and patches.inspect().summary != "patched":
            self.untested["chunked prefill"] = "an unpatched vLLM cuts no prompts on a CPU"
        if why := self._why_none():
            self.untested |= dict.fromkeys(self.CAUSES, why)
        self.changes: dict[Any, list[Any]] = {
            cause: [value] for cause, value in changed.items() if cause not in self.untested
        }
        self.suspects: dict[Any, list[Any]] = {
            cause: list(values) for cause, values in self.changes.items() if cause != DEGREE
        }
        if cached and "prefix cache" in self.suspects:
            self.suspects["prefix cache"].append("warm")

    def _why_none(self) -> str:
        """Return why the run's completions cannot be sampled again; "" if they can."""
        rollout = self._config.rollout
        if self._config.task.environment is not None:
            return "the completions are turns of episodes"
        if not rollout.request_seeds:
            return "without rollout.request_seeds no engine samples the same tokens again"
        return "" if rollout.weights == "exact" else "an engine started here loads weights that are not rounded to fp8"

    def __call__(self, changed: Settings) -> list[np.ndarray]:
        """Return the log-probabilities [N] of each completion, sampled with these causes changed.

        Raises:
            EngineError: The engine does not start, or fails.
        """
        settings, passed = self._settings, dict(self._settings.passed)
        if "chunked prefill" in changed:
            passed["long_prefill_token_threshold"] = PIECE
        if "prefix cache" in changed:
            passed["enable_prefix_caching"] = changed["prefix cache"] != "off"
        if "batch composition" in changed:
            settings = replace(settings, max_concurrent=1)
        if "eager or graph" in changed:
            settings = replace(settings, cuda_graphs=changed["eager or graph"] == "graph")
        if "engine patch" in changed:
            settings = replace(settings, trace_root=None)
        self._engines += 1
        folder = self._out / f"engine{self._engines}"
        folder.mkdir()
        if settings.trace_root is not None:
            settings = replace(settings, trace_root=folder / "trace")
        engine = Blocking(VllmEngine(replace(settings, passed=passed, log_path=folder / "engine.log")))
        config, stops = self._config, stop_tokens(self._config, self._facts)
        with closing(engine):
            requests = [
                generate_request(config, sequence.key, sequence.prompt_token_ids, stops, config.rollout.temperature)
                for sequence in self._sequences
            ]
            sampled = engine.generate(requests, shard="again")
            if changed.get("prefix cache") == "warm":  # by the first time
                sampled = engine.generate(requests, shard="warm")
        return [
            _known(before.token_ids, after.token_ids, after.logprobs)
            for before, after in zip(self._sequences, sampled, strict=True)
        ]


def _known(before: Seq[int], after: Seq[int], logprobs: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of a completion sampled again; NaN from the first token on that is another one."""
    same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    known = np.full(len(before), np.nan, np.float32)
    known[: len(same)] = logprobs[: len(same)]
    return known
