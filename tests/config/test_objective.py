"""Tests corrections and KL settings that conflict with each other, the loss or the old policy."""

import pytest
from pydantic import ValidationError

from moe_rl.config.check import problems
from moe_rl.config.load import dump_config, load_config
from moe_rl.config.objective import LOSS_PARAMETERS, LOSSES
from moe_rl.errors import ConfigError
from tests.support.refusals import tells

TOKEN_LOSSES = ["gspo_token", "grpo", "dr_grpo", "dapo", "cispo", "sapo"]
TIS, ICEPOP = "{level: token, rule: truncate, high: 2}", "{level: token, rule: mask, low: 0.5, high: 5}"
VETO = "{level: token, rule: veto, low: 1e-4}"
GEOMETRIC, PRODUCT = "{level: geometric, rule: reject, low: 0.99, high: 1.01}", "{level: sequence, rule: mask, high: 3}"


@pytest.fixture
def found(config_file, write_model, tmp_path):
    write_model(tmp_path / "model", mlp_only_layers=[])

    def check(*overrides):
        try:
            return problems(load_config(config_file, overrides), 2)
        except ConfigError as error:
            return error.problems

    return check


def loss(name, *, old="trainer"):
    """Overrides that choose a loss."""
    parameters = (f"{key}={value}" for key, value in LOSS_PARAMETERS[name].items())
    shared = [f"name={name}", f"old_logprobs={old}", *parameters]
    if name in ("dr_grpo", "minirl"):
        shared.append("advantage=group_mean")
    return [f"objective.{item}" for item in shared]


def corrections(*texts):
    return f"objective.corrections=[{', '.join(texts)}]"


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_losses_by_token_take_any_correction(found, name):
    for texts in [(TIS,), (ICEPOP,), (PRODUCT,), (GEOMETRIC, VETO, TIS)]:
        assert found(*loss(name), corrections(*texts), "objective.off_policy_delta=0.5") == []


@pytest.mark.parametrize(("name", "other"), [("gspo", "gspo_token"), ("gmpo", "grpo")])
def test_losses_by_sequence_take_what_is_constant_in_one(found, name, other):
    assert found(*loss(name), corrections(PRODUCT, GEOMETRIC, VETO), "objective.off_policy_delta=0.5") == []
    for text in (TIS, ICEPOP, "{level: token, rule: reject, low: 0.5}"):
        (message,) = found(*loss(name), corrections(VETO, text))
        tells(message, other, key="objective.corrections.1.level", given=f"objective.name is {name}")


@pytest.mark.parametrize("name", ["minirl", "decoupled"])
def test_losses_with_the_ratio_in_them_take_what_does_not_weigh(found, name):
    assert found(*loss(name), corrections(GEOMETRIC, VETO, "{level: token, rule: reject, low: 0.5}")) == []
    for text in (TIS, ICEPOP, PRODUCT):
        (message,) = found(*loss(name), corrections(text))
        tells(
            message, key="objective.corrections.0.rule", given=f"objective.name is {name}", expected=("reject", "veto")
        )


SECOND_MOMENT = "objective.second_moment_limit=0.04"


def test_the_second_moment_limit_needs_a_loss_by_token_and_the_trainers_old_policy(found):
    for name in (*TOKEN_LOSSES, "minirl", "decoupled"):
        assert found(*loss(name), SECOND_MOMENT) == []
    for name, other in (("gspo", "gspo_token"), ("gmpo", "grpo")):
        (message,) = found(*loss(name), SECOND_MOMENT)
        tells(message, other, key="objective.second_moment_limit", given=f"objective.name is {name}")
    for name, old in (("gspo_token", "sampler"), ("dppo_tv", "sampler"), ("decoupled", "interpolated")):
        (message,) = found(*loss(name, old=old), SECOND_MOMENT)
        tells(message, key="objective.second_moment_limit", given=f"objective.old_logprobs is {old}")


CENTERED = "objective.score_centering=8"


def test_the_score_is_centered_where_the_weights_of_other_tokens_are_known(found):
    for name in ("cispo", "dppo_tv"):
        assert found(*loss(name, old="sampler"), CENTERED, "objective.off_policy_delta=0.5") == []
        (message,) = found(*loss(name, old="sampler"), CENTERED, "rollout.capture=native")
        tells(message, key="objective.score_centering", given="rollout.capture is native")
    for name, old in (("cispo", "trainer"), ("grpo", "sampler"), ("gspo", "sampler"), ("minirl", "trainer")):
        (message,) = found(*loss(name, old=old), CENTERED)
        tells(message, key="objective.score_centering", expected=("cispo", "dppo_tv", "sampler"))
        assert name in message.about["given"] and old in message.about["given"]


@pytest.mark.parametrize("text", [TIS, ICEPOP, PRODUCT, GEOMETRIC, VETO])
def test_ratios_that_are_1_are_refused(found, text):
    (message,) = found(*loss("gspo_token", old="sampler"), corrections(text))
    tells(message, key="objective.corrections.0", given="objective.old_logprobs is sampler")
    assert found(*loss("gspo_token", old="sampler"), "objective.off_policy_delta=0.5") == []
    (message,) = found(*loss("dppo_tv", old="sampler"), corrections(text))
    tells(message, key="objective.corrections.0", given="objective.old_logprobs is sampler")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{level: token, rule: truncate}", ["objective.corrections.0.high", "truncate"]),
        ("{level: token, rule: mask, low: 0.5}", ["objective.corrections.0.high", "mask"]),
        ("{level: token, rule: veto, high: 2}", None),
        ("{level: token, rule: truncate, low: 0.5, high: 2}", ["objective.corrections.0.low", "got 0.5", "high"]),
        ("{level: token, rule: veto, low: 0.5, high: 2}", ["objective.corrections.0.high", "got 2", "low"]),
        ("{level: token, rule: reject}", ["objective.corrections.0", "reject"]),
        ("{level: token, rule: mask, low: 1, high: 1}", ["objective.corrections.0", "low < high"]),
        ("{level: sequence, rule: veto, low: 0.5}", ["objective.corrections.0.level", "expected token", "reject"]),
        ("{level: geometric, rule: veto, low: 0.5}", ["objective.corrections.0.level", "expected token", "reject"]),
    ],
)
def test_bounds_that_do_not_fit_the_rule(found, text, parts):
    messages = found(*loss("grpo"), corrections(text))
    if parts is None:
        assert [m.about["key"] for m in messages] == ["objective.corrections.0.low", "objective.corrections.0.high"]
    else:
        (message,), (key, *pieces) = messages, parts
        tells(message, *pieces, key=key)


def test_the_ratio_is_not_counted_twice(found):
    (message,) = found(*loss("grpo"), corrections(TIS, VETO, PRODUCT))
    tells(message, key="objective.corrections", got=("token truncate", "sequence mask"))
    (message,) = found(*loss("grpo"), corrections(GEOMETRIC, TIS, GEOMETRIC))
    tells(message, key="objective.corrections", got="geometric reject")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{level: tokens, rule: mask, high: 2}", "objective.corrections.0.level"),
        ("{level: token, rule: icepop, high: 2}", "objective.corrections.0.rule"),
        ("{level: token, rule: mask, high: 0.9}", "objective.corrections.0.high"),  # 1 must be within the bounds
        ("{level: token, rule: mask, low: 1.1, high: 2}", "objective.corrections.0.low"),
        ("{level: token, rule: mask, low: 0, high: 2}", "objective.corrections.0.low"),
        ("{level: token, rule: mask, hihg: 2}", "objective.corrections.0.hihg"),
        ("{rule: mask, high: 2}", "objective.corrections.0.level"),
        ("mask", "objective.corrections.0"),
    ],
)
def test_what_no_correction_can_be(config_file, text, key):
    with pytest.raises(ConfigError) as error:
        load_config(config_file, [corrections(text)])
    (message,) = error.value.problems
    tells(message, key=key)


def test_a_config_with_corrections_is_written_out_and_read_again(config_file, tmp_path):
    config = load_config(config_file, [corrections(ICEPOP, VETO), "objective.off_policy_delta=0.5"])
    assert [c.rule for c in config.objective.corrections] == ["mask", "veto"] and config.objective.corrected
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    assert not load_config(config_file).objective.corrected


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["kl_coef=0.1"], None),
        (["kl_coef=0.1", "kl_estimator=k2"], None),
        (["kl_coef=0.1", "kl_unbiased=true"], None),
        (["kl_coef=0.1", "kl_estimator=k1", "kl_unbiased=true"], None),
        (["kl_coef=0.1", "kl_estimator=k1"], ["objective.kl_estimator", "got k1"]),
        (
            ["kl_coef=0.1", "kl_estimator=k2", "kl_unbiased=true"],
            ["objective.kl_unbiased", "objective.kl_estimator is k2"],
        ),
        (["kl_estimator=k2"], ["objective.kl_estimator", "objective.kl_coef is 0"]),
        (["kl_unbiased=true"], ["objective.kl_unbiased", "objective.kl_coef is 0"]),
        (["kl_in=reward"], ["objective.kl_in", "objective.kl_coef is 0"]),
        (["kl_coef=0.1", "kl_in=reward", "kl_estimator=k1"], None),
        (
            ["kl_coef=0.1", "kl_in=reward", "old_logprobs=sampler"],
            ["objective.old_logprobs", "objective.kl_in is reward"],
        ),
        (["kl_coef=0.1", "kl_in=reward", "kl_unbiased=true"], ["objective.kl_unbiased", "objective.kl_in is reward"]),
    ],
)
def test_estimators_of_the_kl_that_hold_the_policy(found, settings, parts):
    messages = found(*(f"objective.{item}" for item in settings))
    assert len(messages) == (parts is not None)
    for message in messages:
        key, given = parts
        tells(message, given, key=key)


def test_another_loss_than_that_of_the_file(found, config_file):
    """Keys that both losses have keep the file's values. Keys of the old loss alone are refused unless they are
    null.
    """
    own = "objective: {name: minirl, clip_low: 0.1, clip_high: 0.2, weight_cap: 3}\n"
    own = "objective: {name: minirl, clip_low: 0.1, clip_high: 0.2, weight_cap: 3}\n"
    own = "objective: {name: minirl, clip_low: 0.1, clip_high: 0.2, weight_cap: 3}\n"
    config_file.write_text(config_file.read_text() + own)
    line = len(config_file.read_text().splitlines())
    assert found() == []
    (message,) = found("objective.name=grpo")
    tells(message, key="objective.weight_cap", file=config_file, line=line, given="objective.name is grpo", got=3)
    tells(message, "cispo, dppo_tv, minirl, topr, decoupled", expected=("objective.clip_low, objective.clip_high",))
    objective = load_config(config_file, ["objective.name=grpo", "objective.weight_cap=null"]).objective
    assert objective.parameters == {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": None} and objective.name == "grpo"
    lost = found("objective.name=sapo")
    assert [message.about["key"] for message in lost] == [
        f"objective.{key}" for key in ("tau_positive", "tau_negative", "clip_low", "clip_high", "weight_cap")
    ]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("objective.name=grpoo", ["objective.name", 'got "grpoo"', "gspo, gspo_token, grpo"]),
        ("objective.name=[gspo]", ["objective.name", "gspo, gspo_token"]),
        ("objective.name=null", ["objective.name", "got null"]),
        ("objective=gspo", ["objective", 'got "gspo"']),
        ("objective.clip_lo=0.1", ["objective.clip_lo", "objective.clip_low?"]),
        ("train.weight_cap=2", ["train.weight_cap", "objective.weight_cap"]),
    ],
)
def test_what_no_objective_can_be(config_file, override, parts):
    with pytest.raises(ConfigError) as error:
        load_config(config_file, [override])
    (message,), (key, *pieces) = error.value.problems, parts
    tells(message, *pieces, key=key, override=repr(override))


def test_a_method_brings_what_it_asks_of_the_shared_keys(config_file):
    minirl = load_config(config_file, loss("minirl")[:1] + loss("minirl")[2:-1]).objective
    assert (minirl.advantage, minirl.old_logprobs) == ("group_mean", "trainer")
    dppo = load_config(config_file, [item for item in loss("dppo_tv") if "old_logprobs" not in item]).objective
    assert dppo.old_logprobs == "sampler"


def test_a_section_made_by_hand_is_refused_with_all_that_is_wrong():
    with pytest.raises(ValidationError) as error:
        LOSSES["gspo"](kl_in="reward", kl_unbiased=True)
    (one,) = error.value.errors()
    assert [message.about["key"] for message in one["ctx"]["found"]] == ["objective.kl_unbiased", "objective.kl_in"]
