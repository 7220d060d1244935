"""Each loss against its formula written out in plain Python floats, values and gradients."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import ConfigError
from moe_rl.objectives.policy import POLICY_LOSSES, global_denominator, grpo, gspo, policy_loss, reference_kl

F64 = torch.float64


@dataclass
class Batch:
    """Token t belongs to sequence ids[t]; tokens of one sequence need not be neighbours."""

    l: list[float]  # noqa: E741
    old: list[float]
    advantages: list[float]
    ids: list[int]
    low: float
    high: float

    @property
    def lengths(self):
        return [self.ids.count(i) for i in range(len(self.advantages))]

    @property
    def denominator(self):
        return max(1, global_denominator(self.lengths))

    def run(self, name, dtype=F64, denominator=None):
        """The loss and its gradient in the current logprobs."""
        logprobs = torch.tensor(self.l, dtype=dtype, requires_grad=True)
        result = policy_loss(
            name, logprobs, torch.tensor(self.old, dtype=dtype), torch.tensor(self.advantages, dtype=dtype),
            torch.tensor(self.ids, dtype=torch.int64), clip_low=self.low, clip_high=self.high,
            denominator=denominator or self.denominator,
        )
        result.loss.backward()
        return result, logprobs.grad.tolist()

    def cut(self, sequences):
        """The microbatch that holds these sequences, renumbered, and the positions of its tokens."""
        positions = [t for t, i in enumerate(self.ids) if i in sequences]
        return Batch([self.l[t] for t in positions], [self.old[t] for t in positions],
                     [self.advantages[i] for i in sequences], [sequences.index(self.ids[t]) for t in positions],
                     self.low, self.high), positions


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5]), max_size=6))
    ids = [i for i, n in enumerate(lengths) for _ in range(n)]
    if draw(st.booleans()):
        ids = draw(st.permutations(ids))
    # Log-ratios near the clip bounds of both losses, far outside them on both sides, and in between.
    delta = st.sampled_from([0.0, 1e-4, 2.5e-4, -2.5e-4, 1e-3, -1e-3, 0.1, -0.1, 0.3, -0.3, 3.0, -8.0, 20.0])
    old = draw(st.lists(st.floats(-8, 0), min_size=len(ids), max_size=len(ids)))
    deltas = draw(st.lists(st.one_of(delta, st.floats(-1, 1)), min_size=len(ids), max_size=len(ids)))
    advantage = st.sampled_from([0.0, 1.3, -0.7, 2.0, -2.0])
    advantages = draw(st.lists(advantage, min_size=len(lengths), max_size=len(lengths)))
    low, high = draw(st.sampled_from([(3e-4, 4e-4), (0.2, 0.28), (1.5, 5.0)]))
    return Batch([o + d for o, d in zip(old, deltas, strict=True)], old, advantages, ids, low, high)


def scalar_reference(name, batch):
    """loss, gradient, clip events, clip units, ratios; the two formulas as they are printed, in Python floats."""
    total, events, ratios = 0.0, 0, []
    gradient = [0.0] * len(batch.l)
    for i, advantage in enumerate(batch.advantages):
        tokens = [t for t, owner in enumerate(batch.ids) if owner == i]
        n = len(tokens)
        if n == 0:
            continue
        deltas = [batch.l[t] - batch.old[t] for t in tokens]
        groups = [(tokens, math.exp(math.fsum(deltas) / n))] if name == "gspo" else [
            ([t], math.exp(d)) for t, d in zip(tokens, deltas, strict=True)
        ]
        for members, ratio in groups:
            bounded = min(max(ratio, 1 - batch.low), 1 + batch.high)
            clipped = bounded * advantage < ratio * advantage
            total -= min(ratio * advantage, bounded * advantage) / len(groups)
            events += clipped
            ratios.append(ratio)
            if not clipped:
                for t in members:
                    gradient[t] = -ratio * advantage / n / batch.denominator
    return total / batch.denominator, gradient, events, len(ratios), ratios


def close(got, expected, tolerance=1e-12):
    scale = max([1.0, *map(abs, expected)])
    return all(abs(a - b) <= tolerance * scale for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=150, deadline=None)
@given(batches())
def test_values_gradients_and_counts_equal_the_scalar_reference(name, batch):
    result, gradient = batch.run(name)
    loss, expected_gradient, events, units, ratios = scalar_reference(name, batch)
    assert close([result.loss.item()], [loss])
    assert close(gradient, expected_gradient)
    assert (result.clip_events.item(), result.clip_units.item()) == (events, units)
    assert close([result.ratio_sum.item()], [math.fsum(ratios)])
    assert close([result.ratio_min.item()], [min(ratios)]) if ratios else result.ratio_min.item() == math.inf
    assert close([result.ratio_max.item()], [max(ratios)]) if ratios else result.ratio_max.item() == -math.inf


FIXED = Batch(
    l=[-1.0, -0.5, -2.0, -0.3, -0.9, -1.1, -0.2], old=[-1.1, -0.4, -2.5, -0.3001, -0.2, -1.0, -0.9],
    advantages=[1.5, 0.0, -0.5, -2.0, 0.7, 1.0], ids=[0, 0, 2, 3, 4, 4, 5], low=0.2, high=0.28,
)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gradients_equal_finite_differences(name):
    ids, advantages = torch.tensor(FIXED.ids), torch.tensor(FIXED.advantages, dtype=F64)
    old = torch.tensor(FIXED.old, dtype=F64)

    def loss(logprobs):
        return policy_loss(name, logprobs, old, advantages, ids, clip_low=0.2, clip_high=0.28, denominator=5).loss

    assert torch.autograd.gradcheck(loss, torch.tensor(FIXED.l, dtype=F64, requires_grad=True), atol=1e-8)
    result, _ = FIXED.run(name)
    assert 0 < result.clip_events.item() < result.clip_units.item()  # both branches were differentiated


def test_by_hand():
    # s = exp((0.2 + 0.0) / 2) = e^0.1 > 1.05: clipped for A > 0, not for A < 0. Sequence 1 is empty.
    for advantage, expected, events in ((2.0, -1.05 * 2.0, 1), (-2.0, math.exp(0.1) * 2.0, 0)):
        batch = Batch([-0.8, -1.0], [-1.0, -1.0], [advantage, 9.0], [0, 0], 0.05, 0.05)
        result, _ = batch.run("gspo")
        assert math.isclose(result.loss.item(), expected, rel_tol=1e-14)
        assert result.clip_events.item() == events and result.clip_units.item() == 1
    # per token: ratios e^0.2 and 1; only the first is clipped
    result, gradient = Batch([-0.8, -1.0], [-1.0, -1.0], [2.0], [0, 0], 0.05, 0.05).run("grpo")
    assert math.isclose(result.loss.item(), -(1.05 * 2 + 2) / 2, rel_tol=1e-14)
    assert gradient == [0.0, -1.0] and result.clip_events.item() == 1 and result.clip_units.item() == 2


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=60, deadline=None)
@given(batches(), st.data())
def test_any_cut_into_microbatches_sums_to_the_same(name, batch, data):
    whole, gradient = batch.run(name)
    cut = data.draw(st.lists(st.integers(0, 3), min_size=len(batch.advantages), max_size=len(batch.advantages)))
    loss, events, units, pieces = 0.0, 0, 0, [0.0] * len(batch.l)
    for microbatch in range(4):  # some of them without a sequence
        part, positions = batch.cut([i for i, m in enumerate(cut) if m == microbatch])
        result, part_gradient = part.run(name, denominator=batch.denominator)
        loss += result.loss.item()
        events += result.clip_events.item()
        units += result.clip_units.item()
        for t, g in zip(positions, part_gradient, strict=True):
            pieces[t] += g
    assert close([loss], [whole.loss.item()]) and close(pieces, gradient)
    assert (events, units) == (whole.clip_events.item(), whole.clip_units.item())


@settings(max_examples=60, deadline=None)
@given(batches())
def test_gspo_equals_its_token_form(batch):
    """GSPO-token (arXiv 2507.18071, section 4.3): s_{i,t} = sg[s_i] exp(l_t - sg[l_t]), averaged over the tokens."""
    result, gradient = batch.run("gspo")
    logprobs = torch.tensor(batch.l, dtype=F64, requires_grad=True)
    old = torch.tensor(batch.old, dtype=F64)
    loss = logprobs.sum() * 0
    for i, advantage in enumerate(batch.advantages):
        tokens = [t for t, owner in enumerate(batch.ids) if owner == i]
        if tokens:
            s = (logprobs[tokens].detach() - old[tokens]).mean().exp()
            s_t = s * (logprobs[tokens] - logprobs[tokens].detach()).exp()
            terms = torch.minimum(s_t * advantage, s_t.clamp(1 - batch.low, 1 + batch.high) * advantage)
            loss = loss - terms.mean() / batch.denominator
    loss.backward()
    assert close([result.loss.item()], [loss.item()]) and close(gradient, logprobs.grad.tolist())


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=60, deadline=None)
@given(batches())
def test_on_policy_gradient_is_the_plain_policy_gradient(name, batch):
    batch.old = list(batch.l)
    result, gradient = batch.run(name)
    plain = [-batch.advantages[i] / batch.lengths[i] / batch.denominator for i in batch.ids]
    assert close(gradient, plain)
    assert result.clip_events.item() == 0 and result.ratio_sum.item() == result.clip_units.item()


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_an_overflowing_ratio_that_does_not_count_leaves_no_nan(name, advantage):
    result, gradient = Batch([0.0, -1.0], [-2000.0, -1.0], [advantage, 1.0], [0, 1], 0.2, 0.2).run(name)
    assert result.ratio_max.item() == math.inf  # the witness: exp did overflow
    assert math.isclose(result.loss.item(), -(1.2 * advantage + 1.0) / 2, rel_tol=1e-14)
    assert gradient == [0.0, -0.5]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_overflow_or_nan_that_counts_is_shown(name):
    result, _ = Batch([0.0], [-2000.0], [-1.0], [0], 0.2, 0.2).run(name)
    assert result.loss.item() == math.inf
    for advantage in (-1.0, 0.0, 1.0):
        result, _ = Batch([math.nan], [-1.0], [advantage], [0], 0.2, 0.2).run(name)
        assert math.isnan(result.loss.item())


def test_float32_logprobs_resolve_the_gspo_clip_range_over_a_long_sequence():
    generator = torch.Generator().manual_seed(0)
    old = -5 * torch.rand(8192, generator=generator)
    logprobs = old + 0.05 * torch.randn(8192, generator=generator) + 2e-4
    ids, one = torch.zeros(8192, dtype=torch.int64), torch.ones(1)
    result = gspo(logprobs, old, one, ids, clip_low=3e-4, clip_high=4e-4, denominator=1)
    exact = math.exp(math.fsum(a - b for a, b in zip(logprobs.tolist(), old.tolist(), strict=True)) / 8192)
    assert result.loss.dtype == torch.float32
    assert abs(result.ratio_sum.item() - exact) < 1e-12


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_float32_gradients_do_not_depend_on_the_cut(name):
    whole, gradient = FIXED.run(name, dtype=torch.float32)
    for sequences in ([0, 1, 2], [3], [4, 5]):
        part, positions = FIXED.cut(sequences)
        _, part_gradient = part.run(name, dtype=torch.float32, denominator=FIXED.denominator)
        assert close(part_gradient, [gradient[t] for t in positions], 1e-6)
    assert close([whole.loss.item()], [scalar_reference(name, FIXED)[0]], 1e-6)


def test_no_gradient_reaches_old_logprobs_or_advantages():
    logprobs, old = (torch.tensor([-1.0, -2.0], requires_grad=True) for _ in range(2))
    advantages = torch.tensor([1.0], requires_grad=True)
    for loss in POLICY_LOSSES.values():
        loss(logprobs, old, advantages, torch.zeros(2, dtype=torch.int64),
             clip_low=0.1, clip_high=0.1, denominator=1).loss.backward()
    reference_kl(logprobs, old, torch.zeros(2, dtype=torch.int64), 1).backward()
    assert old.grad is None and advantages.grad is None and logprobs.grad.abs().sum() > 0


def test_denominator_counts_non_empty_sequences():
    assert global_denominator([3, 0, 1, 0]) == 2
    assert global_denominator([]) == 0


VALID = {"logprobs": torch.zeros(2), "old_logprobs": torch.zeros(2), "advantages": torch.zeros(1),
         "sequence_ids": torch.zeros(2, dtype=torch.int64), "clip_low": 0.1, "clip_high": 0.1, "denominator": 1}


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize(("change", "error", "message"), [
    ({"logprobs": torch.zeros(2).bfloat16(), "old_logprobs": torch.zeros(2).bfloat16()}, TypeError, "bfloat16"),
    ({"logprobs": torch.zeros(2).half()}, TypeError, "float16"),
    ({"old_logprobs": torch.zeros(2).double()}, TypeError, "float64"),
    ({"advantages": torch.zeros(1).double()}, TypeError, "advantages"),
    ({"advantages": torch.zeros(1, 1)}, ValueError, "one per sequence"),
    ({"sequence_ids": torch.zeros(2, dtype=torch.int32)}, TypeError, "int32"),
    ({"sequence_ids": torch.zeros(3, dtype=torch.int64)}, ValueError, r"\(3,\)"),
    ({"old_logprobs": torch.zeros(1)}, ValueError, r"\(1,\)"),
    ({"denominator": 0}, ValueError, "denominator"),
    ({"clip_low": -0.1}, ValueError, "clip_low"),
    ({"clip_high": math.nan}, ValueError, "clip_high"),
])
def test_bad_input_is_refused(name, change, error, message):
    policy_loss(name, **VALID)
    with pytest.raises(error, match=message):
        policy_loss(name, **(VALID | change))


def test_unknown_loss_is_refused_by_name():
    with pytest.raises(ConfigError, match="'ppo'.*gspo or grpo"):
        policy_loss("ppo", **VALID)
    assert (POLICY_LOSSES["gspo"], POLICY_LOSSES["grpo"]) == (gspo, grpo)


@settings(max_examples=100, deadline=None)
@given(batches())
def test_reference_kl_equals_the_scalar_reference(batch):
    logprobs = torch.tensor(batch.l, dtype=F64, requires_grad=True)
    ids = torch.tensor(batch.ids, dtype=torch.int64)
    got = reference_kl(logprobs, torch.tensor(batch.old, dtype=F64), ids, batch.denominator)
    got.backward()
    value, gradient = 0.0, []
    for current, reference, i in zip(batch.l, batch.old, batch.ids, strict=True):
        d, weight = reference - current, 1 / batch.lengths[i] / batch.denominator
        value += (math.expm1(d) - d) * weight
        gradient.append(-math.expm1(d) * weight)
    assert close([got.item()], [value]) and close(logprobs.grad.tolist(), gradient)
    assert got.item() >= 0


def test_reference_kl_directions_of_value_and_gradient():
    """Expectations over a categorical policy, taken exactly, by giving every outcome its probability."""
    theta = torch.tensor([1.5, -1.2, 0.8, -2.0], dtype=F64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.4, 0.2, 1.1], dtype=F64).log_softmax(0)
    policy = theta.log_softmax(0)
    drawn = policy.detach().exp()
    value, slope = 0.0, torch.zeros(4, dtype=F64)
    for outcome in range(4):
        token = policy.detach()[outcome : outcome + 1].requires_grad_()
        kl = reference_kl(token, reference[outcome : outcome + 1], torch.zeros(1, dtype=torch.int64), 1)
        value += drawn[outcome] * kl.detach()
        slope[outcome] = drawn[outcome] * torch.autograd.grad(kl, token)[0][0]
    gradient, = torch.autograd.grad(policy, theta, slope, retain_graph=True)
    policy_to_reference = (policy.exp() * (policy - reference)).sum()
    reference_to_policy = (reference.exp() * (reference - policy)).sum()
    assert math.isclose(value.item(), policy_to_reference.item(), rel_tol=1e-12)
    assert abs(value.item() - reference_to_policy.item()) > 0.05
    same, = torch.autograd.grad(reference_to_policy, theta, retain_graph=True)
    other, = torch.autograd.grad(policy_to_reference, theta)
    assert torch.allclose(gradient, same, atol=1e-12) and not torch.allclose(gradient, other, atol=1e-2)
