"""One denominator: the gradient of every objective is the same, however its batch was cut."""

import functools

import pytest

from moe_rl.config.objective import LOSS_PARAMETERS
from moe_rl.objectives.losses import POLICY_LOSSES
from moe_rl.proof.batch import make_checkpoint
from moe_rl.report.registry import METRICS
from tests.distributed.jobs import objective

FEW, MANY = "train.microbatch_tokens=4096", "train.microbatch_tokens=36"
ALONE = {
    "few microbatches": {"overrides": [FEW, "parallel.expert=1"], "order": None},
    "many microbatches": {"overrides": [MANY, "parallel.expert=1"], "order": None},
    "another order": {"overrides": ["train.microbatch_tokens=60", "parallel.expert=1"], "order": 1},
}
TOGETHER = {
    "DP2": {"overrides": [MANY, "parallel.expert=1"], "order": None},
    "DP2 EP2": {"overrides": [MANY, "parallel.expert=2"], "order": 2},
    "CP2": {"overrides": [MANY, "parallel.expert=1", "parallel.context=2"], "order": None},
    "TP2": {"overrides": [FEW, "parallel.expert=1", "parallel.tensor=2"], "order": 3},
}
NARROW = {"clip_low": 0.02, "clip_high": 0.03}  # of a mean over a sequence; 0.02 is what the sequences are apart
PARAMETERS = LOSS_PARAMETERS | {"gspo": NARROW, "gspo_token": NARROW}
BY_TOKEN = "[{level: token, rule: mask, low: 0.8, high: 1.2}, {level: sequence, rule: reject, low: 0.2, high: 5}]"
BY_SEQUENCE = "[{level: geometric, rule: truncate, high: 1.01}, {level: token, rule: veto, low: 0.7}]"
CORRECTED = {
    "corrected by token": (
        "dapo",
        [f"objective.corrections={BY_TOKEN}", "objective.off_policy_delta=0.01", "objective.kl_coef=0.1"],
    ),
    "corrected by sequence": (
        "gspo",
        [
            f"objective.corrections={BY_SEQUENCE}",
            "objective.kl_coef=0.5",
            "objective.kl_estimator=k1",
            "objective.kl_unbiased=true",
        ],
    ),  # fmt: skip
    "second moment": (
        "decoupled",
        ["objective.second_moment_limit=0.003", "objective.off_policy_delta=0.05", "objective.kl_coef=0.1"],
    ),
}


def overrides(name, others=()):
    """The loss with its parameters, in place of the demo's clip range."""
    parameters = {"clip_low": "null", "clip_high": "null"} | PARAMETERS[name]
    return [f"objective.name={name}", *(f"objective.{k}={v}" for k, v in parameters.items()), *others]


CASES = {name: overrides(name) for name in POLICY_LOSSES}
CASES |= {case: overrides(*given) for case, given in CORRECTED.items()}
CENTERED = {f"centered {name}": name for name in ("cispo", "dppo_tv")}
CASES |= {case: overrides(name, ["objective.score_centering=5"]) for case, name in CENTERED.items()}
CORRECTION_METRICS = {key for key in METRICS if key.startswith("correction/")}
CONTROLS = ["grpo", "dapo", "minirl"]
LAYOUTS = [*ALONE, *TOGETHER]
USUAL = ["many microbatches", "DP2 EP2"]


@pytest.fixture(scope="module")
def seen(on_ranks, tmp_path_factory):
    """seen(layout) -> {case: [what each rank has]}"""
    out = tmp_path_factory.mktemp("objectives")
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("two-layers"), layers=2)

    @functools.cache
    def run(layout):
        number, shape = (1, ALONE[layout]) if layout in ALONE else (2, TOGETHER[layout])
        found = on_ranks(number, objective.run, checkpoint, out, shape, CASES, CONTROLS)
        return {case: [of[case] for of in found] for case in found[0]}

    run(LAYOUTS[0])  # what the others are held against
    return run


def worst(ranks):
    """The largest difference of a case as a fraction of the gradient's largest entry."""
    return max(rank["difference"] for rank in ranks) / ranks[0]["largest"]


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_the_gradient_does_not_depend_on_the_cut(seen, layout):
    for case in CASES:
        everything = seen("few microbatches")[case][0]
        assert everything["largest"] > 1e-4, case
        assert set().union(*(rank["names"] for rank in seen(layout)[case])) == set(everything["names"])
        assert worst(seen(layout)[case]) < 1e-6, case


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_what_the_step_tells_does_not_depend_on_the_cut(seen, layout):
    for case in CASES:
        expected = seen("few microbatches")[case][0]["metrics"]
        for rank in seen(layout)[case]:
            assert rank["metrics"] == pytest.approx(expected, rel=1e-5, abs=1e-6), case


@pytest.mark.long
def test_the_layouts_do_cut_the_batch(seen):
    count = {layout: [rank["microbatches"] for rank in seen(layout)["grpo"]] for layout in LAYOUTS}
    assert count["few microbatches"] == [1] and count["another order"] == [3] and count["TP2"] == [1, 1]
    assert count["many microbatches"][0] >= 4 and count["CP2"] == count["many microbatches"] * 2
    assert count["DP2"][0] >= 2


@pytest.mark.parametrize("layout", ["many microbatches", "another order", "DP2", "DP2 EP2", "CP2"])
def test_a_mean_of_each_microbatch_is_another_gradient(seen, layout):
    """The control: with what is usually wrong about denominators the same comparison fails, by far."""
    for case in CONTROLS:
        assert worst(seen(layout)[f"{case} by microbatch"]) > 0.05, case
    # where there is one microbatch, it is right
    assert worst(seen("few microbatches")["dapo by microbatch"]) == 0


def test_the_batch_has_what_the_objectives_tell_apart(seen):
    """Clipped and unclipped tokens, rejected and kept ones, truncated ones: none of the branches is idle."""
    told = {case: ranks[0]["metrics"] for case, ranks in seen("few microbatches").items()}
    for case in CASES:
        if CENTERED.get(case, case) not in ("cispo", "dppo_tv", "sapo"):  # their published bounds are far away
            assert 0 < told[case]["objective/clip_fraction"] < 1, case
        assert CORRECTION_METRICS & set(told[case]) == (CORRECTION_METRICS if case in CORRECTED else set())
    by_token, by_sequence = told["corrected by token"], told["corrected by sequence"]
    for case in CENTERED:
        assert told[case]["objective/head_mass"] == pytest.approx(0.9, abs=1e-6)
    by_update = told["second moment"]
    assert by_update["objective/second_moment"] > 0.003  # above the limit
    for one in (by_token, by_sequence, by_update):
        assert 0.05 < one["correction/zero_token_fraction"] < 0.9 and 0 < one["correction/zero_sequence_fraction"] < 1
        assert 0 < one["correction/ess_token_fraction"] < 1 and one["objective/kl_ref"] != 0
    assert by_token["correction/truncated_token_fraction"] == 0 < by_sequence["correction/truncated_token_fraction"]
