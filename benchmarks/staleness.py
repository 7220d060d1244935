"""Measures off-policy weights on a run's kept rollouts: `python -m benchmarks.staleness RUN [--json FILE]`.

The rollouts of each step are scored in transformers in float32, with the recorded routes, by the weights that sampled
them and by those of 2 and 8 steps later. A token's factor is what an objective multiplies its score function by in the
first update, divided by its advantage. The exact factor is the product of the completion's token ratios, by which the
sampler's completions have the trainer's expectation. At each lag, for each objective:

    error   mean |factor - exact factor|, over the tokens of completions with an advantage
    ess     effective sample size (sum f)^2 / sum f^2 of the factors f, as a share of these tokens
    zero    share of these tokens with factor 0

RUN needs export.every_steps=1, and replay.keep_shards of all its steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.output import show
from moe_rl.comparison.third_engine import ThirdEngine
from moe_rl.config.load import load_config
from moe_rl.config.objective import CorrectionConfig
from moe_rl.objectives import second_moment
from moe_rl.objectives.advantages import advantages
from moe_rl.objectives.corrections import token_weights
from moe_rl.objectives.lags import interpolated
from moe_rl.objectives.loss_parts import own_length, sum_by_sequence
from moe_rl.objectives.losses import USE_ROLLOUT_LOGPROBS, policy_loss
from moe_rl.rollout.kept import KeptRollouts
from moe_rl.trace import TraceStore
from moe_rl.types import Sequence

LAGS = (0, 2, 8)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
# {name: keys of `objective`}. The bounds are those of the papers.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "no ratio": {"name": "dapo", **CLIPS},
    "token truncate": {"name": "dapo", **CLIPS, "correction": ("token", "truncate", None, 5.0)},
    "token mask": {"name": "dapo", **CLIPS, "correction": ("token", "mask", 0.5, 5.0)},
    "sequence truncate, vtrace": {"name": "dapo", **CLIPS, "correction": ("sequence", "vtrace", None, 1.0)},
    "geometric reject": {"name": "dapo", **CLIPS, "correction": ("geometric", "reject", 0.99, 1.01)},
    "off_policy_delta": {"name": "dapo", **CLIPS, "off_policy_delta": 0.1},
    "second_moment_limit": {
        "name": "cispo", "weight_cap": 1000.0, "correction": ("token", "truncate", None, 1000.0), "limit": 0.04,
    },
    "decoupled": {"name": "decoupled", **CLIPS, "weight_cap": 5.0},
    "decoupled, interpolated": {"name": "decoupled", **CLIPS, "weight_cap": 5.0, "old": "interpolated"},
    "topr": {"name": "topr", "weight_cap": 1.0, "old": "sampler"},
    "gspo, sampler": {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "old": "sampler"},
}  # fmt: skip


class Batch:
    """Holds the tokens of sequences at one lag: `now` the trainer's logprobs, `rollout` the sampler's, both [T]."""

    def __init__(self, sequences: list[Sequence], groups: list[int], scored: list[np.ndarray], lag: int):
        lengths = [len(one.token_ids) for one in sequences]
        self.lag, self.now = lag, torch.from_numpy(np.concatenate(scored)).double()
        self.rollout = torch.from_numpy(np.concatenate([one.rollout_logprobs for one in sequences])).double()
        self.ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        worth = advantages("group_mean", [one.reward for one in sequences], groups, lengths)
        self.worth = torch.tensor(worth, dtype=torch.float64)
        self.exact = sum_by_sequence(self.now - self.rollout, self.worth, self.ids)[self.ids].exp()

    def factors(self, objective: Mapping[str, Any]) -> torch.Tensor:
        """Return [T], by what the objective multiplies each score, divided by the advantage."""
        keys = dict(objective)
        between = interpolated(self.now, self.rollout, torch.full_like(self.ids, self.lag))
        old = {"sampler": self.rollout, "interpolated": between}.get(keys.pop("old", ""), self.now)
        limit, delta = keys.pop("limit", None), keys.pop("off_policy_delta", None)
        correction, name = keys.pop("correction", None), keys.pop("name")
        weights, trusted = None, None
        if limit is not None:
            squares, region = second_moment.squares(old, self.rollout, self.worth, self.ids)
            trusted = ~torch.zeros_like(self.ids, dtype=torch.bool)
            trusted[region] = squares[region] <= second_moment.largest_kept(squares[region].numpy(), limit)
        if correction is not None or delta is not None:
            level, rule, low, high = correction or (None,) * 4
            rules = [CorrectionConfig(level=level, rule=rule, low=low, high=high)] if correction else []
            weights = token_weights(
                rules, delta, logprobs=self.now, old_logprobs=old, rollout_logprobs=self.rollout,
                advantages=self.worth, sequence_ids=self.ids, trusted=trusted,
            ).values  # fmt: skip
        logprobs = self.now.clone().requires_grad_()
        loss = policy_loss(
            name, logprobs, old, self.worth, self.ids, rollout_logprobs=self.rollout, denominator=1, weights=weights,
            **({"dual_clip": None} if name in ("dapo", *USE_ROLLOUT_LOGPROBS) else {}), **keys,
        ).loss  # fmt: skip
        (gradient,) = torch.autograd.grad(loss, logprobs)
        if name == "gspo":
            gradient = gradient * own_length(self.ids)
        return -gradient / self.worth[self.ids]


def measured(batches: list[Batch], objective: Mapping[str, Any]) -> dict[str, float]:
    """Return error, ess and zero over these batches."""
    found, exact = [], []
    for one in batches:
        counted = one.worth[one.ids] != 0
        found.append(one.factors(objective)[counted])
        exact.append(one.exact[counted])
    factors, truth = torch.cat(found), torch.cat(exact)
    squares = float((factors * factors).sum())
    return {
        "error": float((factors - truth).abs().mean()),
        "ess": float(factors.sum()) ** 2 / (squares * len(factors)) if squares else 0.0,
        "zero": float((factors == 0).double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    options = parser.parse_args()
    config, store = load_config(options.run / "config.yaml"), TraceStore(options.run / "trace")
    kept = KeptRollouts(options.run / "rollouts", store)
    folders = {int(path.name.rpartition("-")[2]): path for path in (options.run / "export").glob("step-*")}
    folders[0] = config.model.path
    batches: dict[int, list[Batch]] = {lag: [] for lag in LAGS}
    for step in kept.steps():
        version, batch = step - 1, kept.load(step)
        if version + LAGS[-1] not in folders:
            continue  # all lags have the same rollouts
        sequences = batch.sequences
        records = store.read_each([(one.routes, None) for one in sequences])
        tokens, prompts = [one.ids for one in sequences], [len(one.prompt_token_ids) for one in sequences]
        routes = [one.routes for one in records]
        for lag in LAGS:
            weights = {str(version + lag): folders[version + lag]}
            engine = ThirdEngine(tokens, prompts, routes, weights=weights)
            batches[lag].append(Batch(sequences, batch.group_ids, engine(engine.settings), lag))
    result: dict[str, Any] = {"steps": len(batches[0]), "tokens": sum(len(one.ids) for one in batches[0])}
    for lag, found in batches.items():
        drift = torch.cat([one.now - one.rollout for one in found])
        result[f"k3 lag {lag}"] = float((drift.exp() - 1 - drift).mean())
        for name, objective in OBJECTIVES.items():
            result |= {f"{name} lag {lag} {key}": value for key, value in measured(found, objective).items()}
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
