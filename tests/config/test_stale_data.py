"""What an objective bears of completions that older weights sampled."""

from pathlib import Path

import pytest

from moe_rl.config.check import config_problems
from moe_rl.config.check_features import UNCORRECTED_LAG, stale_problems
from moe_rl.config.load import load_config
from moe_rl.config.objective import LOSS_PARAMETERS, LOSSES, CorrectionConfig
from moe_rl.config.sampling_keys import PipelineConfig
from tests.support.refusals import tells

ROOT = Path(__file__).parents[2]
TIS = CorrectionConfig(level="token", rule="truncate", high=2.0)
MASK = CorrectionConfig(level="geometric", rule="mask", low=0.5, high=2.0)
REJECT = CorrectionConfig(level="sequence", rule="reject", low=0.5, high=2.0)
VETO = CorrectionConfig(level="token", rule="veto", low=0.1)
PLAIN = ("gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "cispo", "sapo", "gmpo")
CASES = [
    *((name, {}, False) for name in PLAIN),
    *((name, {"old_logprobs": "sampler"}, True) for name in PLAIN),
    *((name, {}, True) for name in ("dppo_tv", "minirl", "topr", "decoupled")),
    ("decoupled", {"old_logprobs": "interpolated"}, True),
    *(("grpo", {"corrections": (one,)}, True) for one in (TIS, MASK, REJECT)),
    ("grpo", {"corrections": (VETO,)}, False),
    ("gspo", {"corrections": (VETO, REJECT)}, True),
    ("dapo", {"off_policy_delta": 0.5}, True),
    ("dapo", {"second_moment_limit": 0.04}, True),
    ("dapo", {"dual_clip": 3.0}, False),
    ("gspo", {"kl_coef": 0.1, "entropy_coef": 0.1}, False),
    ("cispo", {"old_logprobs": "sampler", "score_centering": 8}, True),
]


@pytest.mark.parametrize(("name", "given", "borne"), CASES)
def test_what_an_objective_bears(name, given, borne):
    objective = LOSSES[name](**({"name": name} | LOSS_PARAMETERS[name] | given))
    for lag in range(UNCORRECTED_LAG + 1):
        assert list(stale_problems(objective, lag)) == []
    for lag in (UNCORRECTED_LAG + 1, 8):
        found = list(stale_problems(objective, lag))
        assert len(found) == (0 if borne else 1)
        for problem in found:
            tells(
                problem,
                "decoupled",
                "objective.corrections",
                key="objective",
                got=(name,),
                expected=(f"at most {UNCORRECTED_LAG}",),
            )
            assert f"{lag} weight versions" in problem.about["given"]


def test_a_config_is_checked_for_the_lag_of_its_pipeline(monkeypatch):
    config = load_config(ROOT / "configs/tiny_moe_cpu.yaml")
    assert not any("weight versions old" in str(one) for one in config_problems(config, None, 2))
    monkeypatch.setattr(PipelineConfig, "lag", 8)
    (problem,) = config_problems(config, None, 2)
    tells(problem, key="objective", given=("8 weight versions",))


def test_every_loss_is_judged():
    assert {name for name, *_ in CASES} == set(LOSSES)
