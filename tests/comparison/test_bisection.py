"""Tests that `moe_rl.bisect` finds planted causes, one and two at once, and names none that it cannot tell apart."""

import numpy as np
import pytest

import moe_rl
from benchmarks.diagnosis import causes
from benchmarks.diagnosis_parts.causes import PLANTED, Batch, found
from moe_rl.comparison.bisection import Computation, bisect, text
from moe_rl.comparison.third_engine import ThirdEngine
from moe_rl.errors import DataError

QUICK = {
    ("replay that does nothing", "trainer"),
    ("support left out", "sampler"),
    ("gate weights and temperature", "sampler"),
    ("temperature and log-softmax", "trainer"),
}
CASES = [(name, side) for name in PLANTED for side in ("sampler", "trainer")]


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    return Batch(tmp_path_factory.mktemp("causes"), seed=0, sequences=12)


@pytest.mark.parametrize(
    ("name", "side"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.long) for case in CASES]
)
def test_a_planted_cause_is_found(batch, name, side):
    bisection = batch.bisected(PLANTED[name], side)
    assert found(bisection) == {side: PLANTED[name]}
    assert bisection.explained and bisection.remaining.value < bisection.kl.value / 4


@pytest.mark.long
def test_the_benchmark_counts_each_planted_cause():
    counted = causes(seeds=1)
    assert counted["causes_planted"] == counted["causes_found"] == 16


def test_sides_that_agree_have_no_cause(batch):
    bisection = batch.bisected({}, "sampler", noise=0.0)
    assert bisection.kl.value < 1e-10 and bisection.causes == [] and bisection.explained
    assert text(bisection).endswith("verdict: the two sides agree")


def test_noise_is_no_cause(batch):
    bisection = batch.bisected({}, "trainer", noise=0.01)
    assert bisection.causes == [] and not bisection.explained
    assert bisection.remaining == bisection.kl
    assert "none of the tested causes carries the KL" in text(bisection)


LENGTHS = (7, 9, 8, 11, 6, 10, 12, 8, 9, 7)


class Sides:
    """Two sides whose settings each add a fixed vector to the log-probabilities."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.base = [-rng.exponential(1, n) for n in LENGTHS]
        self.effects = {name: [rng.normal(0, 0.1, n) for n in LENGTHS] for name in ("a", "b", "c")}

    def run(self, settings):
        return [
            base + sum(effects[at] * settings[name] for name, effects in self.effects.items())
            for at, base in enumerate(self.base)
        ]

    def bisected(self, **sampler):
        trainer = dict.fromkeys(self.effects, 0.0)
        suspects = {name: [1.0] for name in self.effects}
        return bisect(
            Computation(trainer | sampler, self.run),
            Computation(trainer, self.run, suspects=suspects),
            untested={"d": "x"},
        )


def test_declared_differences_are_measured():
    sides = Sides()
    sides.effects["b"] = [one / 2 for one in sides.effects["b"]]
    bisection = sides.bisected(a=1.0, b=1.0)
    assert [(atom.cause, atom.kind) for one in bisection.causes for atom in one.swap] == [
        ("a", "matched"),
        ("b", "matched"),
    ]
    first, second = bisection.causes
    d = np.concatenate(sides.effects["b"])
    assert second.besides.value == pytest.approx(np.mean(np.expm1(-d) + d))
    assert second.besides.low < second.besides.value < second.besides.high < first.besides.low
    assert bisection.remaining.value == 0
    assert "not tested: d: x" in text(bisection)


def test_a_cause_that_shows_in_one_token_alone_is_found():
    """No interval over sequences lies above 0, but nothing of the KL is left."""
    sides = Sides()
    sides.effects["a"] = [np.zeros(n) for n in LENGTHS]
    sides.effects["a"][3][2] = 0.3
    bisection = sides.bisected(a=1.0)
    (cause,) = bisection.causes
    assert [atom.cause for atom in cause.swap] == ["a"] and cause.verdict == "carries"
    assert bisection.remaining.value == 0 and bisection.explained


def test_causes_with_the_same_effect_are_not_told_apart():
    sides = Sides()
    sides.effects["b"] = sides.effects["a"]
    declared = dict.fromkeys(sides.effects, 0.0)
    suspects = {name: [1.0] for name in sides.effects}
    sampler = Computation(declared, sides.run, sides.run(declared | {"a": 1.0}), suspects)
    bisection = bisect(sampler, Computation(declared, sides.run))
    (cause,) = bisection.causes
    assert cause.verdict == "either" and "or " in cause.why
    (other,) = (one for one in bisection.others if one.verdict == "either")
    assert {cause.swap[0].cause, other.swap[0].cause} == {"a", "b"}
    assert found(bisection) == {"sampler": {cause.swap[0].cause: "not told apart"}}


def test_a_side_that_computes_what_it_declares_is_not_suspected():
    """The sampler really had a = 1. The trainer with a = -1 would differ from the declared sampler as much."""
    sides = Sides()
    declared = dict.fromkeys(sides.effects, 0.0)
    sampler = Computation(declared, sides.run, sides.run(declared | {"a": 1.0}), {"a": [1.0]})
    bisection = bisect(sampler, Computation(declared, sides.run, suspects={"a": [-1.0]}))
    assert found(bisection) == {"sampler": {"a": 1.0}}
    assert [one.verdict for one in bisection.others] == ["no"]


def test_an_interaction_is_reported():
    """Each setting undoes half of the other: alone none lowers the KL as it does after the other."""
    sides = Sides()
    sides.effects["b"] = [
        -0.6 * one + 0.5 * other for one, other in zip(sides.effects["a"], sides.effects["b"], strict=True)
    ]
    bisection = sides.bisected(a=1.0, b=1.0)
    assert {atom.cause for one in bisection.causes for atom in one.swap} == {"a", "b"}
    assert any(one.why == "depends on the others" for one in bisection.causes)


def test_tokens_that_are_not_known_are_left_out():
    sides = Sides()
    run = sides.run

    def cut(settings):
        return [np.where(np.arange(len(one)) < 5 if settings["a"] else True, one, np.nan) for one in run(settings)]

    declared = dict.fromkeys(sides.effects, 0.0)
    sampler = Computation(declared, cut, run(declared | {"a": -1.0}), changes={"a": [1.0]})
    bisection = bisect(sampler, Computation(declared, run))
    (cause,) = bisection.causes
    assert cause.swap[0].kind == "changed" and cause.verdict == "carries"
    assert bisection.remaining.value == pytest.approx(0, abs=1e-12)


def test_sides_of_other_sequences_are_refused():
    sides = Sides()
    settings = dict.fromkeys(sides.effects, 0.0)
    with pytest.raises(DataError, match="do not belong together"):
        moe_rl.bisect(moe_rl.Computation(settings, sides.run), moe_rl.Computation(settings, sides.run, sides.base[1:]))


def test_what_the_third_engine_cannot_compute_is_refused(batch):
    engine, settings = batch.engine, batch.engine.settings
    with pytest.raises(DataError, match="router: unknown setting: got float16"):
        engine(settings | {"router": "float16"})
    with pytest.raises(DataError, match="got attention"):
        engine({cause: value for cause, value in settings.items() if cause != "attention"})
    tokens, routes = engine._tokens, engine._routes
    with pytest.raises(DataError, match="sequence 1"):
        ThirdEngine(tokens, [4] * len(tokens), [routes[0], *routes[:-1]], weights=engine._folders)
    with pytest.raises(DataError, match="sequence 0.*16|sequence 0"):
        ThirdEngine(tokens, [len(tokens[0]), *[4] * (len(tokens) - 1)], weights=engine._folders)
