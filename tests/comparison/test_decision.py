"""Tests when sampling on ends, and what repeated looks cost."""

import numpy as np
import pytest

from moe_rl.comparison import experiment
from moe_rl.comparison.experiment import Sums, decide, look, plan_looks


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(experiment, "RESAMPLES", 1000)


def drawn(rng, prompts, mean, *, tokens=5, start=0):
    """Return a sequence for each of these prompts, whose difference has this mean and a standard deviation of 1."""
    return [
        Sums((start + number,), tokens, tokens * float(value))
        for number, value in enumerate(rng.normal(mean, 1, prompts))
    ]


class Supply:
    """Gives as many sequences as it is asked for, and keeps what it was asked for."""

    def __init__(self, mean, seed=1):
        self.rng, self.mean, self.asked, self.given = np.random.default_rng(seed), mean, [], 0

    def __call__(self, tokens):
        self.asked.append(tokens)
        found = drawn(self.rng, tokens // 5, self.mean, start=self.given)
        self.given += len(found)
        return found


@pytest.mark.parametrize(
    ("tokens", "budget", "planned"),
    [
        (100, 0, [100]),
        (100, 100, [100]),
        (100, 101, [100, 101]),
        (100, 200, [100, 200]),
        (100, 1000, [100, 200, 400, 800, 1000]),
    ],
)
def test_looks_are_planned_by_doubling_up_to_the_budget(tokens, budget, planned):
    assert plan_looks(tokens, budget) == planned


def test_a_clear_difference_needs_no_more_samples():
    for mean, outcome in ((1.0, "lower"), (-1.0, "higher")):
        supply = Supply(mean)
        found = decide(supply(500), 8000, supply, seed=1)
        assert (found.outcome, len(found.looks), supply.asked) == (outcome, 1, [500])


def test_it_samples_on_until_it_is_decided_and_says_by_how_much():
    supply = Supply(0.15)
    found = decide(supply(500), 32_000, supply, seed=1)
    assert [one.tokens for one in found.looks] == found.planned[: len(found.looks)]
    assert 1 < len(found.looks) < len(found.planned) and found.outcome == "lower"
    assert [one.outcome for one in found.looks] == ["undecided"] * (len(found.looks) - 1) + ["lower"]
    assert sum(supply.asked) == found.looks[-1].tokens == 5 * found.looks[-1].sequences
    assert found.looks[-1].difference.value == pytest.approx(0.15, abs=0.1)


def test_a_budget_that_is_spent_leaves_it_undecided():
    supply = Supply(0.0, seed=3)
    found = decide(supply(500), 1500, supply, seed=1)
    assert (found.outcome, [one.tokens for one in found.looks], found.budget) == ("undecided", [500, 1000, 1500], 1500)
    nothing = Supply(0.0, seed=3)
    assert len(decide(nothing(500), 0, nothing, seed=1).looks) == len(nothing.asked) == 1


def test_what_was_given_beyond_the_plan_is_not_asked_for_again():
    supply = Supply(0.0, seed=3)
    found = decide(supply(500), 3000, lambda tokens: supply(3 * tokens), seed=1)
    assert supply.asked == [500, 1500, 3000] and [one.tokens for one in found.looks] == [500, 2000, 2000, 5000]


def test_a_value_that_is_not_finite_ends_it():
    supply = Supply(float("nan"))
    assert decide(supply(500), 8000, supply, seed=1).outcome == "undecided" and supply.asked == [500]


def test_more_looks_make_every_interval_wider():
    sequences = Supply(0.1)(500)
    widths = []
    for budget in (0, 1000, 16_000):
        found = decide(sequences, budget, lambda tokens: [], seed=1)
        widths.append(found.looks[0].difference.high - found.looks[0].difference.low)
        assert found.confidence == pytest.approx(1 - 0.05 / len(found.planned))
    assert widths[0] < widths[1] < widths[2]


def test_completions_of_a_prompt_are_drawn_together():
    rng = np.random.default_rng(1)
    apart = drawn(rng, 40, 0.0)
    alike = [one for one in apart for _ in range(8)]
    as_if_apart = [Sums((number,), one.tokens, one.less) for number, one in enumerate(alike)]
    one, other = look(alike, 0.95, 1).difference, look(as_if_apart, 0.95, 1).difference
    assert one.value == pytest.approx(other.value) and (one.high - one.low) > 2.5 * (other.high - other.low)
    assert (look(alike, 0.95, 1).prompts, look(alike, 0.95, 1).sequences) == (40, 320)


def test_the_sequences_of_a_single_prompt_are_drawn_one_by_one():
    rng = np.random.default_rng(1)
    single = [Sums((7,), one.tokens, one.less) for one in drawn(rng, 40, 1.0)]
    found = look(single, 0.95, 1)
    assert found.prompts == 1 and 0 < found.difference.low < found.difference.value < found.difference.high


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_looking_several_times_decides_wrongly_no_more_often_than_promised(monkeypatch):
    """Without a difference, 5% of the decisions may be wrong. Uncorrected looks would be wrong twice as often."""
    monkeypatch.setattr(experiment, "RESAMPLES", 3000)

    def wrong(runs=400):
        found = []
        for seed in range(runs):
            supply = Supply(0.0, seed=seed)
            found.append(decide(supply(150), 2400, supply, seed=seed).outcome != "undecided")
        return np.mean(found)

    corrected = wrong()
    monkeypatch.setattr(experiment, "CONFIDENCE", 1 - 5 * 0.05)  # 5 looks, each at 95%
    assert corrected < 0.07 < 0.1 < wrong()
