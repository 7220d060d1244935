"""Compares value and gradient of each loss with its formula in plain Python floats."""

import inspect
import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.config.objective import LOSS_PARAMETERS, LOSSES
from moe_rl.errors import ConfigError
from moe_rl.objectives.loss_parts import LossInputs
from moe_rl.objectives.losses import POLICY_LOSSES, global_denominator, gspo, nonempty, policy_loss, reference_kl
from tests.support.refusals import refused

F64 = torch.float64
MAX_TOKENS = 7  # longest completion allowed, for dr_grpo
SEQUENCE_MEANS = {"gspo", "gspo_token", "grpo", "sapo", "gmpo"}
TOKEN_MEANS = {"dapo", "cispo", "dppo_tv", "decoupled"}
CLIPPED = ("gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "gmpo", "decoupled")  # an unclipped ratio is not bounded


@dataclass
class Batch:
    """Holds a batch. Token t belongs to sequence ids[t]; tokens of one sequence need not be neighbours."""

    l: list[float]  # noqa: E741
    old: list[float]
    advantages: list[float]
    ids: list[int]
    low: float
    high: float
    rollout: list[float] | None = None
    others: dict[str, float] = field(
        default_factory=lambda: {
            "weight_cap": 2.0,
            "tau_positive": 1.0,
            "tau_negative": 1.05,
            "delta_low": 0.15,
            "delta_high": 0.2,
            "dual_clip": None,
        }
    )
    weights: list[float] | None = None

    @property
    def lengths(self):
        return [self.ids.count(i) for i in range(len(self.advantages))]

    def denominator(self, name):
        return max(1, global_denominator(name, self.lengths, MAX_TOKENS))

    def parameters(self, name):
        every = {"clip_low": self.low, "clip_high": self.high, **self.others}
        return {key: every[key] for key in LOSS_PARAMETERS[name]}

    def run(self, name, dtype=F64, denominator=None):
        """Return the loss and its gradient with respect to the current logprobs."""
        logprobs = torch.tensor(self.l, dtype=dtype, requires_grad=True)
        result = policy_loss(
            name,
            logprobs,
            torch.tensor(self.old, dtype=dtype),
            torch.tensor(self.advantages, dtype=dtype),
            torch.tensor(self.ids, dtype=torch.int64),
            denominator=denominator or self.denominator(name),
            rollout_logprobs=torch.tensor(self.rollout or self.old, dtype=dtype),
            weights=None if self.weights is None else torch.tensor(self.weights, dtype=F64),
            **self.parameters(name),
        )
        result.loss.backward()
        return result, logprobs.grad.tolist()

    def cut(self, sequences):
        """Return the microbatch of these sequences, renumbered, and the positions of its tokens."""
        positions = [t for t, i in enumerate(self.ids) if i in sequences]
        return Batch(
            [self.l[t] for t in positions],
            [self.old[t] for t in positions],
            [self.advantages[i] for i in sequences],
            [sequences.index(self.ids[t]) for t in positions],
            self.low,
            self.high,
            self.rollout and [self.rollout[t] for t in positions],
            self.others,
            self.weights and [self.weights[t] for t in positions],
        ), positions


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5]), max_size=6))
    ids = [i for i, n in enumerate(lengths) for _ in range(n)]
    if draw(st.booleans()):
        ids = draw(st.permutations(ids))
    # Log-ratios near the clip bounds of the losses, far outside them on both sides, and in between.
    delta = st.sampled_from([0.0, 1e-4, 2.5e-4, -2.5e-4, 1e-3, -1e-3, 0.1, -0.1, 0.3, -0.3, 3.0, -8.0, 20.0])
    old = draw(st.lists(st.floats(-8, 0), min_size=len(ids), max_size=len(ids)))
    deltas = draw(st.lists(st.one_of(delta, st.floats(-1, 1)), min_size=len(ids), max_size=len(ids)))
    rollout = draw(st.lists(st.sampled_from([0.0, 1e-3, 0.2, -0.4, -2.0]), min_size=len(ids), max_size=len(ids)))
    advantage = st.sampled_from([0.0, 1.3, -0.7, 2.0, -2.0])
    advantages = draw(st.lists(advantage, min_size=len(lengths), max_size=len(lengths)))
    low, high = draw(st.sampled_from([(3e-4, 4e-4), (0.2, 0.28), (1.5, 5.0)]))
    others = {
        "weight_cap": draw(st.sampled_from([1.05, 2.0, 20.0])),
        "tau_positive": draw(st.sampled_from([1.0, 0.3])),
        "tau_negative": draw(st.sampled_from([1.05, 4.0])),
        "delta_low": draw(st.sampled_from([1e-3, 0.15])),
        "delta_high": draw(st.sampled_from([1e-3, 0.2])),
        "dual_clip": draw(st.sampled_from([None, 1.05, 3.0])),
    }
    return Batch(
        [o + d for o, d in zip(old, deltas, strict=True)],
        old,
        advantages,
        ids,
        low,
        high,
        [o + d for o, d in zip(old, rollout, strict=True)],
        others,
    )


@st.composite
def weighted_batches(draw, name):
    """Draw weights: one per token, or one per sequence for losses with one term per sequence."""
    batch, weight = draw(batches()), st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.0])
    if draw(st.booleans()):
        return batch
    if name in ("gspo", "gmpo"):
        of_sequence = [draw(weight) for _ in batch.advantages]
        batch.weights = [of_sequence[i] for i in batch.ids]
    else:
        batch.weights = [draw(weight) for _ in batch.ids]
    return batch


def scalar_denominator(name, lengths):
    if name in SEQUENCE_MEANS:
        return max(1, len([n for n in lengths if n > 0]))
    if name in TOKEN_MEANS:
        return max(1, sum(lengths))
    return max(1, {"minirl": len(lengths), "topr": len(lengths), "dr_grpo": len(lengths) * MAX_TOKENS}[name])


def clip(ratio, batch):
    return min(max(ratio, 1 - batch.low), 1 + batch.high)


def scalar_sequence(name, batch, advantage, tokens):
    """Return, for one sequence and before the denominator: its part of the loss, each token's gradient, the ratios, and
    the number of clip events.
    """
    n, o = len(tokens), batch.others
    weights = [1.0 if batch.weights is None else batch.weights[t] for t in tokens]  # of gspo, gmpo: all the same
    deltas = [batch.l[t] - batch.old[t] for t in tokens]
    if name in ("gspo", "gspo_token"):
        ratio = math.exp(math.fsum(deltas) / n)
        clipped = clip(ratio, batch) * advantage < ratio * advantage
        value = -min(ratio * advantage, clip(ratio, batch) * advantage)
        counted = weights[:1] if name == "gspo" else weights
        slopes = [0.0 if clipped else -w * ratio * advantage / n for w in weights]
        return (
            math.fsum(w * value / n for w in weights),
            slopes,
            [ratio] * len(counted),
            sum(clipped and w > 0 for w in counted),
        )
    if name == "gmpo":
        # The product that the paper writes, token by token: min(r, hi) for A > 0, max(r, lo) for A < 0.
        product, events = 0.0, []
        for d in deltas:
            ratio = math.exp(d)
            events.append(advantage > 0 and ratio > 1 + batch.high or advantage < 0 and ratio < 1 - batch.low)
            bounded = 1 + batch.high if advantage > 0 else 1 - batch.low
            product += math.log(bounded) if events[-1] else d
        value = -weights[0] * advantage * math.exp(product / n)
        return (
            value,
            [0.0 if e else value / n for e in events],
            [math.exp(d) for d in deltas],
            sum(e and weights[0] > 0 for e in events),
        )
    if name == "topr":
        whole = math.exp(min(math.fsum(deltas), 700))
        scale = min(whole, o["weight_cap"]) if advantage < 0 else 1.0
        event = advantage < 0 and whole > o["weight_cap"]
        slopes = [-w * scale * advantage for w in weights]
        return (
            math.fsum(slope * batch.l[t] for slope, t in zip(slopes, tokens, strict=True)),
            slopes,
            [math.exp(d) for d in deltas],
            sum(event and w > 0 for w in weights),
        )
    value, gradient, ratios, events = 0.0, [], [], 0
    for t, d, correction in zip(tokens, deltas, weights, strict=True):
        ratio = math.exp(d)
        outside = advantage > 0 and ratio > 1 + batch.high or advantage < 0 and ratio < 1 - batch.low
        if name in ("grpo", "dr_grpo", "dapo", "decoupled"):
            weight = {"grpo": 1 / n}.get(name, 1.0)
            if name == "decoupled":
                weight = min(math.exp(batch.old[t] - batch.rollout[t]), o["weight_cap"])
            least = o["dual_clip"] * advantage if o["dual_clip"] and advantage < 0 else -math.inf
            surrogate = min(ratio * advantage, clip(ratio, batch) * advantage)
            event = outside or surrogate < least
            term = -weight * max(surrogate, least)
            slope = 0.0 if event else -weight * ratio * advantage
        elif name == "sapo":
            tau = o["tau_positive"] if advantage > 0 else o["tau_negative"]
            level = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700)))
            rest = 1 / (1 + math.exp(min(tau * (ratio - 1), 700)))  # 1 - level, without its cancellation
            gate = 4 * level * rest
            event = advantage != 0 and gate < 0.5
            term, slope = -4 / tau * level * advantage / n, -gate * ratio * advantage / n
        else:
            if name == "cispo":
                event = advantage != 0 and ratio > o["weight_cap"]
                weight = min(ratio, o["weight_cap"])
            elif name == "dppo_tv":
                moved = math.exp(batch.l[t]) - math.exp(batch.old[t])
                event = advantage > 0 and moved > o["delta_high"] or advantage < 0 and moved < -o["delta_low"]
                weight = 0.0 if event else min(ratio, o["weight_cap"])
            else:
                assert name == "minirl"
                event = outside
                weight = 0.0 if event else min(math.exp(batch.l[t] - batch.rollout[t]), o["weight_cap"])
            term, slope = -weight * advantage * batch.l[t], -weight * advantage
        value += correction * term
        gradient.append(correction * slope)
        ratios.append(ratio)
        events += event and correction > 0
    return value, gradient, ratios, events


def scalar_reference(name, batch):
    """Return loss, gradient, clip events and ratios from the printed formulas, in Python floats."""
    total, events, ratios = 0.0, 0, []
    gradient = [0.0] * len(batch.l)
    denominator = scalar_denominator(name, batch.lengths)
    for i, advantage in enumerate(batch.advantages):
        tokens = [t for t, owner in enumerate(batch.ids) if owner == i]
        if not tokens:
            continue
        value, slopes, counted, clipped = scalar_sequence(name, batch, advantage, tokens)
        total += value / denominator
        for t, slope in zip(tokens, slopes, strict=True):
            gradient[t] = slope / denominator
        ratios += counted
        events += clipped
    return total, gradient, events, ratios


def close(got, expected, tolerance=1e-12):
    scale = max([1.0, *map(abs, expected)])
    return all(abs(a - b) <= tolerance * scale for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_values_gradients_and_counts_equal_the_scalar_reference(name, data):
    batch = data.draw(weighted_batches(name))
    result, gradient = batch.run(name)
    loss, expected_gradient, events, ratios = scalar_reference(name, batch)
    assert close([result.loss.item()], [loss])
    assert close(gradient, expected_gradient)
    assert (result.clip_events.item(), result.clip_units.item()) == (events, len(ratios))
    assert close([result.ratio_sum.item()], [math.fsum(ratios)])
    assert close([result.ratio_min.item()], [min(ratios)]) if ratios else result.ratio_min.item() == math.inf
    assert close([result.ratio_max.item()], [max(ratios)]) if ratios else result.ratio_max.item() == -math.inf


FIXED = Batch(
    l=[-1.0, -0.5, -2.0, -0.3, -0.9, -1.1, -0.2],
    old=[-1.1, -0.4, -2.5, -0.3001, -0.2, -1.0, -0.9],
    advantages=[1.5, 0.0, -0.5, -2.0, 0.7, 1.0],
    ids=[0, 0, 2, 3, 4, 4, 5],
    low=0.2,
    high=0.28,
    rollout=[-1.2, -0.3, -2.4, -0.4, -0.2, -2.1, -0.95],
)


@pytest.mark.parametrize("name", [*(n for n in CLIPPED if n != "gspo_token"), "sapo"])  # no ratio that is a constant
def test_gradients_equal_finite_differences(name):
    ids, advantages = torch.tensor(FIXED.ids), torch.tensor(FIXED.advantages, dtype=F64)
    old, rollout = torch.tensor(FIXED.old, dtype=F64), torch.tensor(FIXED.rollout, dtype=F64)

    def loss(logprobs):
        return policy_loss(
            name, logprobs, old, advantages, ids, rollout_logprobs=rollout, denominator=5, **FIXED.parameters(name)
        ).loss

    assert torch.autograd.gradcheck(loss, torch.tensor(FIXED.l, dtype=F64, requires_grad=True), atol=1e-8)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_fixed_batch_has_both_branches(name):
    batch = Batch(**{**vars(FIXED), "others": FIXED.others | {"tau_positive": 5.0, "weight_cap": 1.5}})  # narrow enough
    result, _ = batch.run(name)
    assert 0 < result.clip_events.item() < result.clip_units.item()


def test_by_hand():
    # s = exp((0.2 + 0.0) / 2) = e^0.1 > 1.05: clipped for A > 0, not for A < 0. Sequence 1 is empty.
    for advantage, expected, events in ((2.0, -1.05 * 2.0, 1), (-2.0, math.exp(0.1) * 2.0, 0)):
        batch = Batch([-0.8, -1.0], [-1.0, -1.0], [advantage, 9.0], [0, 0], 0.05, 0.05)
        for name, tokens in (("gspo", 1), ("gspo_token", 2)):
            result, _ = batch.run(name)
            assert math.isclose(result.loss.item(), expected, rel_tol=1e-14)
            assert result.clip_events.item() == events * tokens and result.clip_units.item() == tokens
    # per token: ratios e^0.2 and 1; only the first is clipped
    result, gradient = Batch([-0.8, -1.0], [-1.0, -1.0], [2.0], [0, 0], 0.05, 0.05).run("grpo")
    assert math.isclose(result.loss.item(), -(1.05 * 2 + 2) / 2, rel_tol=1e-14)
    assert gradient == [0.0, -1.0] and result.clip_events.item() == 1 and result.clip_units.item() == 2


# Lengths 1, 0, 3. Ratios: 2; 1, 1/4, 1. Advantages 3 and -1. Trainer's old policy / sampler: 1, 1/2, 1, 16.
HAND = Batch(
    [math.log(p) for p in (0.5, 0.5, 0.125, 0.5)],
    [math.log(p) for p in (0.25, 0.5, 0.5, 0.5)],
    [3.0, 5.0, -1.0],
    [0, 2, 2, 2],
    0.5,
    0.5,
    [math.log(p) for p in (0.25, 1.0, 0.5, 0.03125)],
    {
        "weight_cap": 1.75,
        "tau_positive": 1.0,
        "tau_negative": 2.0,
        "delta_low": 0.3,
        "delta_high": 0.5,
        "dual_clip": None,
    },
)
BY_HAND = {  # gradients times the denominator, and the denominator
    "dr_grpo": ([0, 1, 0, 1], 3 * MAX_TOKENS),  # 2 > 1.5 and 1/4 < 0.5 are clipped
    "dapo": ([0, 1, 0, 1], 4),
    "cispo": ([-1.75 * 3, 1, 0.25, 1], 4),  # 2 is truncated to 1.75
    "dppo_tv": ([-1.75 * 3, 1, 0, 1], 4),  # 0.5 - 0.25 is within 0.5, 0.125 - 0.5 is not within 0.3
    "minirl": ([0, 0.5, 0, 1.75], 3),  # 2 and 1/4 are masked; to the sampler 0.5 / 1.0 and 0.5 / 0.03125 truncated
    "topr": ([-3, 0.25, 0.25, 0.25], 3),  # the ratio of the good completion does not count, that of the bad one is 1/4
    "decoupled": ([0, 0.5, 0, 1.75], 4),  # clipped alike; times 1/2 and 16 truncated
    # the third root of 1 x 1/2 x 1, where 1/4 is held at 1/2, over 3 tokens; 2 is held at 1.5
    "gmpo": ([0, 0.5 ** (1 / 3) / 3, 0, 0.5 ** (1 / 3) / 3], 2),
    # 4 sigmoid'(tau (r - 1)) r A: sigmoid' is 1/4 at ratio 1, 1 / (2 + 2 cosh x) at x = tau (r - 1)
    "sapo": ([-4 / (2 + 2 * math.cosh(1)) * 2 * 3, 1 / 3, 4 / (2 + 2 * math.cosh(1.5)) / 4 / 3, 1 / 3], 2),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_by_hand(name):
    gradient, denominator = BY_HAND[name]
    assert HAND.denominator(name) == denominator
    assert close(HAND.run(name)[1], [g / denominator for g in gradient], 1e-14)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_cut_into_microbatches_sums_to_the_same(name, data):
    batch = data.draw(weighted_batches(name))
    whole, gradient = batch.run(name)
    cut = data.draw(st.lists(st.integers(0, 3), min_size=len(batch.advantages), max_size=len(batch.advantages)))
    loss, events, units, pieces = 0.0, 0, 0, [0.0] * len(batch.l)
    for microbatch in range(4):  # some of them without a sequence
        part, positions = batch.cut([i for i, m in enumerate(cut) if m == microbatch])
        result, part_gradient = part.run(name, denominator=batch.denominator(name))
        loss += result.loss.item()
        events += result.clip_events.item()
        units += result.clip_units.item()
        for t, g in zip(positions, part_gradient, strict=True):
            pieces[t] += g
    assert close([loss], [whole.loss.item()]) and close(pieces, gradient)
    assert (events, units) == (whole.clip_events.item(), whole.clip_units.item())


@settings(max_examples=60, deadline=None)
@given(batches())
def test_gspo_token_is_gspo_with_one_advantage_per_sequence(batch):
    (one, gradient), (other, token_gradient) = batch.run("gspo"), batch.run("gspo_token")
    assert close([one.loss.item()], [other.loss.item()]) and close(gradient, token_gradient)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=40, deadline=None)
@given(batches())
def test_on_policy_gradient_is_the_plain_policy_gradient(name, batch):
    batch.old, batch.rollout = list(batch.l), list(batch.l)
    result, gradient = batch.run(name)
    lengths = batch.lengths if name in SEQUENCE_MEANS else [1] * len(batch.advantages)
    plain = [-batch.advantages[i] / lengths[i] / batch.denominator(name) for i in batch.ids]
    assert close(gradient, plain)
    assert result.clip_events.item() == 0 and result.ratio_sum.item() == result.clip_units.item()


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_an_overflowing_ratio_that_does_not_count_leaves_no_nan(name, advantage):
    batch = Batch([0.0, -1.0], [-2000.0, -1.0], [advantage, 1.0], [0, 1], 0.2, 0.2, [-2000.0, -1.0])
    result, gradient = batch.run(name, denominator=2)
    assert result.ratio_max.item() == math.inf  # the witness: exp did overflow
    assert math.isclose(result.loss.item(), -(1.2 * advantage + 1.0) / 2, rel_tol=1e-14)
    assert gradient == [0.0, -0.5]


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name not in CLIPPED])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_an_overflowing_ratio_is_bounded_by_the_losses_that_truncate_or_fade(name, advantage):
    result, gradient = Batch([-0.5], [-2000.0], [advantage], [0], 0.2, 0.2).run(name)
    assert result.ratio_max.item() == math.inf  # the witness: exp did overflow
    kept = advantage if name == "cispo" or (name in ("dppo_tv", "minirl", "topr") and advantage < 0) else 0.0
    kept = 0.5 if name == "topr" and advantage > 0 else kept  # imitated at full weight
    assert gradient == [-2.0 * kept] and math.isfinite(result.loss.item())  # 2 is weight_cap


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_overflow_of_a_token_that_has_weight_0_leaves_no_nan(name, advantage):
    """The gradient of the other sequence stays the same without the first, because the denominator stays."""
    batch = Batch([0.0, -1.0], [-2000.0, -1.0], [advantage, 1.0], [0, 1], 0.2, 0.2, [-2000.0, -1.0], weights=[0.0, 1.0])
    result, gradient = batch.run(name, denominator=2)
    assert result.ratio_max.item() == math.inf and math.isfinite(result.loss.item())
    assert gradient == [0.0, -0.5] and result.clip_events.item() == 0 and result.clip_units.item() == 2


@pytest.mark.parametrize("name", CLIPPED)
def test_an_overflow_that_counts_is_shown(name):
    result, _ = Batch([0.0], [-2000.0], [-1.0], [0], 0.2, 0.2).run(name)
    assert result.loss.item() == math.inf


def test_the_dual_clip_by_hand():
    """The ratios are 16, 4 and 1/4, with A < 0; one token with A > 0 has the ratio 16 too."""
    ratios = [16.0, 4.0, 0.25, 16.0]
    batch = Batch([math.log(r) - 5 for r in ratios], [-5.0] * 4, [-2.0, 2.0], [0, 0, 0, 1], 0.5, 0.5)
    batch.others = batch.others | {"dual_clip": 5.0}
    result, gradient = batch.run("dapo", denominator=1)
    assert math.isclose(result.loss.item(), 2 * (5.0 + 4.0 + 0.5) - 2 * 1.5, rel_tol=1e-14)  # 1/4 is held at 1/2
    assert close(gradient, [0.0, 2 * 4.0, 0.0, 0.0], 1e-14) and result.clip_events.item() == 3


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "decoupled"])
def test_the_dual_clip_bounds_an_overflow_and_leaves_no_nan(name):
    batch = Batch([0.0, -1.0], [-2000.0, -1.0], [-1.0, -1.0], [0, 1], 0.2, 0.2, [-2000.0, -1.0])
    batch.others = batch.others | {"dual_clip": 3.0}
    result, gradient = batch.run(name, denominator=2)
    assert result.ratio_max.item() == math.inf  # the witness: exp did overflow
    assert math.isclose(result.loss.item(), (3.0 + 1.0) / 2, rel_tol=1e-14) and gradient == [0.0, 0.5]


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_nan_is_shown(name, advantage):
    for weights in (None, [0.0]):
        result, _ = Batch([math.nan], [-1.0], [advantage], [0], 0.2, 0.2, weights=weights).run(name)
        assert math.isnan(result.loss.item())
    result, _ = Batch([-1.0], [-1.0], [advantage], [0], 0.2, 0.2, weights=[math.nan]).run(name)
    assert math.isnan(result.loss.item())


def test_float32_logprobs_resolve_the_gspo_clip_range_over_a_long_sequence():
    generator = torch.Generator().manual_seed(0)
    old = -5 * torch.rand(8192, generator=generator)
    logprobs = old + 0.05 * torch.randn(8192, generator=generator) + 2e-4
    ids, one = torch.zeros(8192, dtype=torch.int64), torch.ones(1)
    result = gspo(LossInputs(logprobs, old, one, ids, denominator=1), clip_low=3e-4, clip_high=4e-4)
    exact = math.exp(math.fsum(a - b for a, b in zip(logprobs.tolist(), old.tolist(), strict=True)) / 8192)
    assert result.loss.dtype == torch.float32
    assert abs(result.ratio_sum.item() - exact) < 1e-12


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_float32_gradients_do_not_depend_on_the_cut(name):
    whole, gradient = FIXED.run(name, dtype=torch.float32)
    for sequences in ([0, 1, 2], [3], [4, 5]):
        part, positions = FIXED.cut(sequences)
        _, part_gradient = part.run(name, dtype=torch.float32, denominator=FIXED.denominator(name))
        assert close(part_gradient, [gradient[t] for t in positions], 1e-6)
    assert close([whole.loss.item()], [scalar_reference(name, FIXED)[0]], 1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_no_gradient_reaches_anything_but_the_logprobs(name):
    logprobs, old, rollout = (torch.tensor([-1.0, -2.0], requires_grad=True) for _ in range(3))
    advantages = torch.tensor([1.0], requires_grad=True)
    policy_loss(
        name,
        logprobs,
        old,
        advantages,
        torch.zeros(2, dtype=torch.int64),
        rollout_logprobs=rollout,
        denominator=1,
        **LOSS_PARAMETERS[name],
    ).loss.backward()
    ids = torch.zeros(2, dtype=torch.int64)
    reference_kl(logprobs, old, ids, 1, estimator="k3", old_logprobs=rollout).backward()
    assert old.grad is None and rollout.grad is None and advantages.grad is None and logprobs.grad.abs().sum() > 0


def test_denominators():
    lengths = [3, 0, 2, 0]
    got = {name: global_denominator(name, iter(lengths), 10) for name in POLICY_LOSSES}
    assert got == {
        "gspo": 2,
        "gspo_token": 2,
        "grpo": 2,
        "sapo": 2,
        "gmpo": 2,
        "dapo": 5,
        "cispo": 5,
        "dppo_tv": 5,
        "decoupled": 5,
        "minirl": 4,
        "topr": 4,
        "dr_grpo": 40,
    }
    assert {global_denominator(name, [], 10) for name in POLICY_LOSSES} == {0}
    assert nonempty(lengths) == 2


def test_config_and_losses_agree_on_names_and_parameters():
    assert list(POLICY_LOSSES) == list(LOSS_PARAMETERS)
    assert list(POLICY_LOSSES) == list(LOSSES)
    for name, function in POLICY_LOSSES.items():
        keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert keywords == list(LOSS_PARAMETERS[name])


VALID = {
    "logprobs": torch.zeros(2),
    "old_logprobs": torch.zeros(2),
    "advantages": torch.zeros(1),
    "sequence_ids": torch.zeros(2, dtype=torch.int64),
    "rollout_logprobs": torch.zeros(2),
    "denominator": 1,
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize(
    ("change", "error", "facts"),
    [
        (
            {"logprobs": torch.zeros(2).bfloat16(), "old_logprobs": torch.zeros(2).bfloat16()},
            TypeError,
            {"argument": "logprobs", "got": "torch.bfloat16"},
        ),
        ({"logprobs": torch.zeros(2).half()}, TypeError, {"argument": "logprobs", "got": "torch.float16"}),
        ({"old_logprobs": torch.zeros(2).double()}, TypeError, {"got": ("float32", "float64")}),
        ({"advantages": torch.zeros(1).double()}, TypeError, {"argument": "advantages"}),
        ({"advantages": torch.zeros(1, 1)}, ValueError, {"argument": "advantages", "got": "(1, 1)"}),
        (
            {"sequence_ids": torch.zeros(2, dtype=torch.int32)},
            TypeError,
            {"argument": "sequence_ids", "got": "torch.int32"},
        ),
        ({"sequence_ids": torch.zeros(3, dtype=torch.int64)}, ValueError, {"got": ("(3,)",)}),
        ({"old_logprobs": torch.zeros(1)}, ValueError, {"got": ("(1,)",)}),
        ({"denominator": 0}, ValueError, {"argument": "denominator", "got": 0}),
        ({"weights": torch.ones(2)}, ValueError, {"argument": "weights", "got": ("float32",)}),
        ({"weights": torch.ones(1, dtype=F64)}, ValueError, {"argument": "weights", "got": ("(1,)",)}),
    ],
)
def test_bad_input_is_refused(name, change, error, facts):
    policy_loss(name, **VALID, **LOSS_PARAMETERS[name])
    with refused(error, **facts):
        policy_loss(name, **(VALID | LOSS_PARAMETERS[name] | change))


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in LOSS_PARAMETERS.items() for key in keys])
def test_bad_parameters_are_refused(name, key):
    for value in (0.0, -0.1, math.nan):
        with refused(ValueError, argument=key):
            policy_loss(name, **(VALID | LOSS_PARAMETERS[name] | {key: value}))
    with pytest.raises(TypeError, match="epsilon"):
        policy_loss(name, **VALID, **LOSS_PARAMETERS[name], epsilon=0.1)


@pytest.mark.parametrize("name", ["minirl", "decoupled"])
@pytest.mark.parametrize(("rollout", "error"), [(torch.zeros(2).bfloat16(), TypeError), (torch.zeros(1), ValueError)])
def test_the_samplers_logprobs_are_checked_where_they_are_used(name, rollout, error):
    with pytest.raises(error):
        policy_loss(name, **(VALID | LOSS_PARAMETERS[name] | {"rollout_logprobs": rollout}))


def test_unknown_loss_is_refused_by_name():
    with refused(ConfigError, key="objective.name", got="'ppo'", expected=("gspo", "gspo_token", "grpo")):
        policy_loss("ppo", **VALID)
    with refused(ConfigError, key="objective.name", got="'ppo'"):
        global_denominator("ppo", [1], 10)
    assert all(function.__name__ == name for name, function in POLICY_LOSSES.items())
