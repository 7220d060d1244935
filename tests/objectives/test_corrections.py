"""Compares the weights of tokens and sequences with their definitions in plain Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.config.objective import CorrectionConfig
from moe_rl.objectives.corrections import SUMS, metrics, token_weights
from tests.objectives.test_policy import F64, Batch, batches, close


def corrections():
    """Draw any number of corrections, of every rule and level, with bounds inside the range of the batches."""
    low, high = st.sampled_from([0.02, 0.5, 0.97, 1.0]), st.sampled_from([1.0, 1.03, 2.0, 30.0])
    level = st.sampled_from(["token", "sequence", "geometric"])

    def rule(name, low, high, level=level):
        return st.builds(CorrectionConfig, level=level, rule=st.just(name), low=low, high=high)

    optional_low, optional_high = st.one_of(st.none(), low), st.one_of(st.none(), high)
    return st.lists(
        st.one_of(
            rule("truncate", st.none(), high),
            rule("vtrace", st.none(), high, st.just("sequence")),
            rule("mask", optional_low, high),
            rule("reject", optional_low, optional_high),
            rule("veto", low, st.none(), st.just("token")),
        ),
        max_size=3,
    )


def scalar_weights(chosen, delta, batch):
    """Return the weight of each token and whether it was truncated, computed from the definition of each rule."""
    weights, truncated = [1.0] * len(batch.l), [False] * len(batch.l)
    for i, advantage in enumerate(batch.advantages):
        tokens = [t for t, owner in enumerate(batch.ids) if owner == i]
        d = {t: batch.old[t] - batch.rollout[t] for t in tokens}
        for c in chosen:
            low, high = 0.0 if c.low is None else c.low, math.inf if c.high is None else c.high
            for t in tokens:
                ratio = math.exp(
                    {
                        "token": d[t],
                        "sequence": math.fsum(d.values()),
                        "geometric": math.fsum(d.values()) / len(d),
                    }[c.level]
                )
                inside = low <= ratio <= high
                if c.rule in ("truncate", "vtrace"):
                    weights[t] *= min(ratio, high)
                    truncated[t] |= ratio > high
                elif c.rule == "mask":
                    weights[t] *= ratio if inside else 0.0
                elif c.rule == "reject":
                    weights[t] *= 1.0 if inside else 0.0
                else:
                    weights[t] *= 0.0 if any(math.exp(other) < low for other in d.values()) else 1.0
        if delta is not None and tokens and advantage < 0:
            drift = math.fsum(batch.rollout[t] - batch.l[t] for t in tokens) / len(tokens)
            for t in tokens:
                weights[t] *= 0.0 if drift > delta else 1.0
    return weights, truncated


def run(chosen, delta, batch, dtype=F64):
    return token_weights(
        chosen,
        delta,
        logprobs=torch.tensor(batch.l, dtype=dtype),
        old_logprobs=torch.tensor(batch.old, dtype=dtype),
        rollout_logprobs=torch.tensor(batch.rollout, dtype=dtype),
        advantages=torch.tensor(batch.advantages, dtype=dtype),
        sequence_ids=torch.tensor(batch.ids, dtype=torch.int64),
    )


@st.composite
def noisy_batches(draw):
    """Make sampler and trainer differ by amounts that are no sums of each other, so that no ratio equals a bound."""
    batch = draw(batches())
    noise = draw(st.lists(st.integers(-1000, 1000), min_size=len(batch.l), max_size=len(batch.l)))
    scale = draw(st.sampled_from([1e-5, 1e-3, 3e-3]))
    batch.rollout = [o + scale * n + 1.23456e-7 for o, n in zip(batch.old, noise, strict=True)]
    return batch


DELTA = st.sampled_from([None, 1e-4, 0.013])


@settings(max_examples=400, deadline=None)
@given(corrections(), DELTA, noisy_batches())
def test_weights_and_sums_equal_the_scalar_reference(chosen, delta, batch):
    got = run(chosen, delta, batch)
    weights, truncated = scalar_weights(chosen, delta, batch)
    assert close(got.values.tolist(), weights)
    sequences = [i for i in range(len(batch.advantages)) if i in batch.ids]
    gone = [i for i in sequences if all(w == 0 for w, o in zip(weights, batch.ids, strict=True) if o == i)]
    expected = [
        len(weights),
        math.fsum(weights),
        math.fsum(w * w for w in weights),
        weights.count(0.0),
        sum(truncated),
        len(sequences),
        len(gone),
    ]
    assert len(got.sums) == SUMS and close(got.sums.tolist(), expected)
    assert [got.sums[n].item() for n in (0, 3, 4, 5, 6)] == [expected[n] for n in (0, 3, 4, 5, 6)]


@settings(max_examples=150, deadline=None)
@given(corrections(), DELTA, noisy_batches(), st.data())
def test_no_weight_depends_on_the_cut_and_sums_add_up(chosen, delta, batch, data):
    whole = run(chosen, delta, batch)
    cut = data.draw(st.lists(st.integers(0, 2), min_size=len(batch.advantages), max_size=len(batch.advantages)))
    total = torch.zeros(SUMS, dtype=F64)
    for microbatch in range(3):
        part, positions = batch.cut([i for i, m in enumerate(cut) if m == microbatch])
        part.rollout = [batch.rollout[t] for t in positions]
        got = run(chosen, delta, part)
        assert torch.equal(got.values, whole.values[torch.tensor(positions, dtype=torch.int64)])
        total += got.sums
    assert close(total.tolist(), whole.sums.tolist())
    counts = [0, 3, 4, 5, 6]
    assert torch.equal(total[counts], whole.sums[counts])


# d of the tokens: log 4, log 1/2 | log 2 | nothing | log 1/2, log 1/2, log 1/8. The policy moved away from the last.
HAND = Batch(
    l=[-1.0, -1.0, -1.0, -3.0, -3.0, -3.0],
    old=[-1.0] * 6,
    advantages=[1.0, -1.0, 2.0, -1.0],
    ids=[0, 0, 1, 3, 3, 3],
    low=0.2,
    high=0.2,
    rollout=[-1.0 - math.log(r) for r in (4, 0.5, 2, 0.5, 0.5, 0.125)],
)
BY_HAND = [
    (("token", "truncate", None, 3.0), [3, 0.5, 2, 0.5, 0.5, 0.125]),
    (("token", "mask", 0.3, 3.0), [0, 0.5, 2, 0.5, 0.5, 0]),  # IcePop
    (("token", "mask", None, 3.0), [0, 0.5, 2, 0.5, 0.5, 0.125]),
    (("token", "reject", 0.3, 3.0), [0, 1, 1, 1, 1, 0]),
    (("token", "reject", 0.3, None), [1, 1, 1, 1, 1, 0]),
    (("token", "veto", 0.3, None), [1, 1, 1, 0, 0, 0]),
    (("sequence", "truncate", None, 1.5), [1.5, 1.5, 1.5, 1 / 32, 1 / 32, 1 / 32]),
    (("sequence", "mask", 0.1, 3.0), [2, 2, 2, 0, 0, 0]),
    (("geometric", "mask", 0.1, 1.6), [2**0.5, 2**0.5, 0, *[2 ** (-5 / 3)] * 3]),
    (("geometric", "reject", 0.5, 1.6), [1, 1, 0, 0, 0, 0]),
]


@pytest.mark.parametrize(("correction", "expected"), BY_HAND)
def test_by_hand(correction, expected):
    level, rule, low, high = correction
    got = run([CorrectionConfig(level=level, rule=rule, low=low, high=high)], None, HAND)
    assert close(got.values.tolist(), expected, 1e-14)


def test_the_off_policy_mask_by_hand():
    # l_rollout - l of the last: (2 + log 2) twice and 2 + log 8, on average 2 + (5/3) log 2; of the second: -log 2
    drift = 2 + 5 / 3 * math.log(2)
    assert run([], drift - 1e-9, HAND).values.tolist() == [1, 1, 1, 0, 0, 0]
    assert run([], drift + 1e-9, HAND).values.tolist() == [1] * 6
    # only where the advantage is negative
    assert run([], 1e-9, Batch(**{**vars(HAND), "advantages": [1.0, 1.0, 1.0, 1.0]})).values.tolist() == [1] * 6


def test_several_multiply():
    chosen = [
        CorrectionConfig(level="token", rule="truncate", high=3.0),
        CorrectionConfig(level="token", rule="veto", low=0.3),
        CorrectionConfig(level="geometric", rule="reject", high=1.6),
    ]
    assert close(run(chosen, None, HAND).values.tolist(), [3, 0.5, 0, 0, 0, 0], 1e-14)


def test_metrics_by_hand():
    got = run(
        [
            CorrectionConfig(level="token", rule="truncate", high=3.0),
            CorrectionConfig(level="token", rule="veto", low=0.3),
        ],
        None,
        HAND,
    )
    total, squares = 3 + 0.5 + 2, 9 + 0.25 + 4
    assert metrics(got.sums.tolist()) == pytest.approx(
        {
            "weight_mean": total / 6,
            "zero_token_fraction": 0.5,
            "truncated_token_fraction": 1 / 6,
            "zero_sequence_fraction": 1 / 3,
            "ess_token_fraction": total**2 / (6 * squares),
        },
        rel=1e-14,
    )
    assert metrics([4, 0, 0, 4, 0, 2, 2])["ess_token_fraction"] == 0
    assert metrics([4, 2, 1, 0, 0, 2, 0])["ess_token_fraction"] == 1
    assert all(math.isnan(value) for value in metrics([0] * SUMS).values())


LONG = 4000


@pytest.mark.parametrize("sign", [1, -1])
def test_ratios_that_no_float_can_hold(sign):
    """4000 tokens differ by one nat each, so the product of their ratios is e^4000 or e^-4000."""
    batch = Batch([-1.0] * LONG, [-1.0] * LONG, [1.0], [0] * LONG, 0.2, 0.2, [-1.0 - sign] * LONG)
    assert torch.tensor(sign * LONG, dtype=F64).exp().item() in (math.inf, 0)  # the witness
    for rule, low, high, up, down in [
        ("truncate", None, 2.0, 2.0, 0.0), ("mask", None, 2.0, 0.0, 0.0), ("mask", 0.5, 2.0, 0.0, 0.0),
        ("reject", None, 2.0, 0.0, 1.0), ("reject", 0.5, None, 1.0, 0.0),
    ]:  # fmt: skip
        one = CorrectionConfig(level="sequence", rule=rule, low=low, high=high)
        expected = up if sign > 0 else down
        assert close(run([one], None, batch).values.tolist(), [expected] * LONG, 1e-14), rule
        # a zero beside it is a zero, on either side
        zero = CorrectionConfig(level="geometric", rule="reject", low=0.9, high=1.1)
        assert not run([one, zero], 0.1, batch).values.any() and not run([zero, one], 0.1, batch).values.any()


@pytest.mark.parametrize("rule", ["truncate", "mask", "reject"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_nan_is_shown_and_stays_in_its_sequence(level, rule):
    batch = Batch([-1.0] * 4, [-1.0, math.nan, -1.0, -1.0], [1.0, 1.0], [0, 0, 1, 1], 0.2, 0.2, [-1.0] * 4)
    got = run([CorrectionConfig(level=level, rule=rule, high=2.0)], None, batch)
    assert got.values.isnan().tolist() == [level != "token", True, False, False]
    assert math.isnan(metrics(got.sums.tolist())["weight_mean"])


def test_weights_have_no_gradient_and_resolve_float32_logprobs():
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    one = CorrectionConfig(level="sequence", rule="truncate", high=2.0)
    got = token_weights(
        [one],
        0.5,
        logprobs=logprobs,
        old_logprobs=logprobs,
        rollout_logprobs=logprobs.detach() + 1e-7,
        advantages=torch.ones(1),
        sequence_ids=torch.zeros(3, dtype=torch.int64),
    )
    assert not got.values.requires_grad and got.values.dtype == F64
    d = float(logprobs[0].detach()) - float((logprobs.detach() + 1e-7)[0])
    assert d != 0 and close(got.values.tolist(), [math.exp(3 * d)] * 3, 1e-15)
