"""Runs the guards of a run over real tiny models, healthy and with planted faults: second witness, canary,
conservation, lag 0 and collapse.

Each run trains a model of alarm_parts/models.py for some steps. In each, the sampler takes the weights in bfloat16,
both sides score the canary, and the sampler samples tokens that the trainer scores: all have lag 0, whatever the
setting's staleness. Legend: see zoo.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.alarm_parts import models
from benchmarks.alarm_parts.faults import is_fault
from moe_rl.config.schema import GuardsConfig
from moe_rl.errors import MoeRLError
from moe_rl.train.canary import Heard, compare_routes
from moe_rl.train.guards import Guards
from moe_rl.vllm.router_witness import Ranking
from moe_rl.weights.conservation import Content, PartSums, cut, difference, parts_of

_STEPS = 6
_EXTREME = 0.5

Checked = tuple[str, str, bool]
"""A guard's name, the planted fault or "", and whether the guard refused. Each of the faults is one that the guard
claims to see."""


def run(setting: models.Setting, seed: int) -> Iterator[Checked]:
    """Yield the result of every check of a run."""
    model = models.load(setting, seed)
    guards, earlier = Guards(GuardsConfig()), dict[str, Tensor]()
    rng = torch.Generator().manual_seed(seed)
    canary = torch.randint(2, model.config.vocab_size, (8, 33), generator=rng)
    tokens, last, before = canary, (), None
    metrics = dict[str, float]()
    for step in range(_STEPS):
        if step:
            models.train(model, tokens, updates=1, rate=setting.rate)
        sampler, held = copy.deepcopy(model).bfloat16(), _content(model)
        yield "conservation", "", bool(difference(_content(model), held, before, step))
        for fault, wrong in _wrong_exports(model, earlier):
            yield "conservation", fault, bool(difference(wrong, held, before, step))
        earlier = {name: value.clone() for name, value in model.state_dict().items()}
        before = (step, held)

        scores = [_logprobs(one, canary) for one in (model, sampler)]
        changes = [float((new - was).abs().mean()) for new, was in zip(scores, last, strict=False)]
        apart, last = float((scores[0] - scores[1]).abs().mean()), scores
        heard = Heard(apart, apart, "sampler", change=(*changes, "sampler") if changes else None)
        yield "canary", "", _refuses(guards.after_sync, step, heard)
        (ranked, chosen), (_, record) = (models.Routers(one).run(canary[:, :-1]) for one in (model, sampler))
        trainer = (chosen, ranked, list(canary[:, :-1].numpy()), range(len(record)))
        found, power = compare_routes(record, *trainer)
        yield "canary", "", bool(found)
        exchanged = record[[1, 0, *range(2, len(record))]]
        if power >= 0.95 and is_fault(record[:2], exchanged[:2]):
            yield "canary", "two layers exchanged", bool(compare_routes(exchanged, *trainer)[0])

        yield "second witness", "", _contradicted(sampler, canary[:, :-1], record)
        late = np.roll(record, 1, 1)
        if is_fault(record, late):
            yield "second witness", "rows one token late", _contradicted(sampler, canary[:, :-1], late)

        tokens = models.sample(sampler, seed + step)
        metrics = _metrics(model, sampler, tokens)
        yield "lag 0 and collapse", "", _refuses(guards.after_step, step, metrics)
    lost = Guards(GuardsConfig())
    broken = metrics | {"policy_kl/k3": math.nan}
    ends = [lost.after_step(step, broken) for step in range(lost.settings.collapse_steps)]
    yield "lag 0 and collapse", "a policy KL that is not a number", ends[-1] is not None


def _refuses(check: Callable[..., object], *given: object) -> bool:
    """Return whether the check raises an error, or returns one."""
    try:
        return check(*given) is not None
    except MoeRLError:
        return True


def _metrics(model: Any, sampler: Any, tokens: Tensor) -> dict[str, float]:
    first = models.PROMPT - 1
    ours, theirs = (_logprobs(one, tokens)[:, first:] for one in (model, sampler))
    log_ratio = ours - theirs
    k3 = float((log_ratio.exp() - 1 - log_ratio).mean())
    extreme = ((ours.exp() - theirs.exp()).abs() > _EXTREME).float().mean()
    return {
        "policy_kl/tokens_lag/0": float(log_ratio.numel()),
        "policy_kl/k3_lag/0": k3,
        "policy_kl/k3": k3,
        "policy/extreme_fraction": float(extreme),
        "reward/pass_rate": 0.5,
        "reward/mean": 0.5,
        "rollout/truncated_fraction": 0.0,
    }


@torch.no_grad()
def _logprobs(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probabilities [N, T - 1] of the tokens [N, T]."""
    logits = model(tokens[:, :-1], use_cache=False).logits.float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def _contradicted(sampler: Any, tokens: Tensor, record: np.ndarray) -> bool:
    """Return whether the logits of the sampler's routers contradict the record."""
    routers = models.Routers(sampler)
    routers.run(tokens)
    for gate, logits, ids in zip(routers.gates, routers.logits, record, strict=True):
        config, bias = sampler.config, getattr(gate, models.BIAS, None)
        groups, kept = (getattr(config, name, None) or 1 for name in ("n_group", "topk_group"))
        known = None if bias is None else bias.float().numpy()
        ranking = Ranking(ids.shape[1], known is not None, known, groups, kept, 4 * torch.finfo(torch.bfloat16).eps)
        must, may = ranking.bounds(logits)
        chosen = np.zeros(must.shape, bool)
        np.put_along_axis(chosen, ids, True, 1)
        if ((must & ~chosen) | (chosen & ~may)).any():
            return True
    return False


def _content(model: Any, replaced: dict[str, Tensor] | None = None) -> Content:
    """Return the sums of a model's weights, some of which are replaced."""
    tensors = dict(model.state_dict()) | (replaced or {})
    sums = PartSums(parts_of({name: one.shape for name, one in tensors.items()}), torch.device("cpu"))
    for name, tensor in tensors.items():
        for part, piece in cut(name, tensor):
            sums.add(part, piece, torch.bfloat16)
    return sums.content()


def _wrong_exports(model: Any, earlier: dict[str, Tensor]) -> Iterator[tuple[str, Content]]:
    state = model.state_dict()
    gates = [name for name in state if name.endswith(("mlp.gate.weight", "mlp.router.weight"))]
    one, other = gates[:2]
    yield "two routers exchanged", _content(model, {one: state[other], other: state[one]})
    down = next(name for name in state if "experts" in name and "down_proj" in name and "shared" not in name)
    zeroed = state[down].clone()
    zeroed[0] = 0
    yield "an expert zeroed", _content(model, {down: zeroed})
    if earlier and (earlier[one].bfloat16() != state[one].bfloat16()).any():
        yield "a stale router", _content(model, {one: earlier[one]})
