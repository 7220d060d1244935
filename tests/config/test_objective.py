"""Corrections, and the KL of the loss, that do not fit each other, the loss or the old policy."""

import pytest

from moe_rl.config.check import problems
from moe_rl.config.load import dump_config, load_config
from moe_rl.config.objective import LOSS_PARAMETERS, LOSSES
from moe_rl.errors import ConfigError

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
        assert "objective.corrections.1.level" in message and f"objective.name is {name}" in message
        assert f"Use {other}, or a sequence-level correction" in message


@pytest.mark.parametrize("name", ["minirl", "decoupled"])
def test_losses_with_the_ratio_in_them_take_what_does_not_weigh(found, name):
    assert found(*loss(name), corrections(GEOMETRIC, VETO, "{level: token, rule: reject, low: 0.5}")) == []
    for text in (TIS, ICEPOP, PRODUCT):
        (message,) = found(*loss(name), corrections(text))
        assert "objective.corrections.0.rule" in message and "twice" in message and "reject or veto" in message


@pytest.mark.parametrize("text", [TIS, ICEPOP, PRODUCT, GEOMETRIC, VETO])
def test_ratios_that_are_1_are_refused(found, text):
    (message,) = found(*loss("gspo_token", old="sampler"), corrections(text))
    assert "every ratio it looks at is 1" in message and "objective.old_logprobs is sampler" in message
    assert found(*loss("gspo_token", old="sampler"), "objective.off_policy_delta=0.5") == []
    (message,) = found(*loss("dppo_tv", old="sampler"), corrections(text))
    assert "every ratio it looks at is 1" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{level: token, rule: truncate}", ["corrections.0.high", "truncate needs it"]),
        ("{level: token, rule: mask, low: 0.5}", ["corrections.0.high", "mask needs it"]),
        ("{level: token, rule: veto, high: 2}", None),
        ("{level: token, rule: truncate, low: 0.5, high: 2}", ["corrections.0.low", "got 0.5", "only high"]),
        ("{level: token, rule: veto, low: 0.5, high: 2}", ["corrections.0.high", "got 2", "only low"]),
        ("{level: token, rule: reject}", ["corrections.0", "reject without a bound"]),
        ("{level: token, rule: mask, low: 1, high: 1}", ["corrections.0", "low < high"]),
        ("{level: sequence, rule: veto, low: 0.5}", ["corrections.0.level", "expected token", "rule reject"]),
        ("{level: geometric, rule: veto, low: 0.5}", ["corrections.0.level", "expected token", "rule reject"]),
    ],
)
def test_bounds_that_do_not_fit_the_rule(found, text, parts):
    messages = found(*loss("grpo"), corrections(text))
    if parts is None:
        assert [m.split(":")[0] for m in messages] == ["objective.corrections.0.low", "objective.corrections.0.high"]
    else:
        assert len(messages) == 1 and all(part in messages[0] for part in parts), messages


def test_the_ratio_is_not_counted_twice(found):
    (message,) = found(*loss("grpo"), corrections(TIS, VETO, PRODUCT))
    assert "got token truncate and sequence mask" in message and "reject" in message
    (message,) = found(*loss("grpo"), corrections(GEOMETRIC, TIS, GEOMETRIC))
    assert "twice" in message and "geometric reject" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{level: tokens, rule: mask, high: 2}", "objective.corrections.0.level"),
        ("{level: token, rule: icepop, high: 2}", "objective.corrections.0.rule"),
        ("{level: token, rule: mask, high: 0.9}", "objective.corrections.0.high"),  # 1 must be within the bounds
        ("{level: token, rule: mask, low: 1.1, high: 2}", "objective.corrections.0.low"),
        ("{level: token, rule: mask, low: 0, high: 2}", "objective.corrections.0.low"),
        ("{level: token, rule: mask, hihg: 2}", "Did you mean objective.corrections.0.high?"),
        ("{rule: mask, high: 2}", "objective.corrections.0.level: required"),
        ("mask", "objective.corrections.0"),
    ],
)
def test_what_no_correction_can_be(config_file, text, part):
    with pytest.raises(ConfigError) as error:
        load_config(config_file, [corrections(text)])
    (message,) = error.value.problems
    assert part in message and "corrections" in message


def test_a_config_with_corrections_is_written_out_and_read_again(config_file, tmp_path):
    config = load_config(config_file, [corrections(ICEPOP, VETO), "objective.off_policy_delta=0.5"])
    assert [c.rule for c in config.objective.corrections] == ["mask", "veto"] and config.objective.corrected
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    assert not load_config(config_file).objective.corrected


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["kl_coef=0.1"], None),
        (["kl_coef=0.1", "kl_estimator=k2"], None),
        (["kl_coef=0.1", "kl_unbiased=true"], None),
        (["kl_coef=0.1", "kl_estimator=k1", "kl_unbiased=true"], None),
        (["kl_coef=0.1", "kl_estimator=k1"], "objective.kl_estimator: the gradient of k1 in a loss is 0 on average"),
        (["kl_coef=0.1", "kl_estimator=k2", "kl_unbiased=true"], "objective.kl_unbiased: k2 times the ratio"),
        (["kl_estimator=k2"], "objective.kl_estimator: without effect where objective.kl_coef is 0"),
        (["kl_unbiased=true"], "objective.kl_unbiased: without effect where objective.kl_coef is 0"),
        (["kl_in=reward"], "objective.kl_in: without effect where objective.kl_coef is 0"),
        (["kl_coef=0.1", "kl_in=reward", "kl_estimator=k1"], None),
        (["kl_coef=0.1", "kl_in=reward", "old_logprobs=sampler"], "objective.old_logprobs: a KL in the reward is of"),
        (["kl_coef=0.1", "kl_in=reward", "kl_unbiased=true"], "objective.kl_unbiased: is about a gradient"),
    ],
)
def test_estimators_of_the_kl_that_hold_the_policy(found, settings, part):
    messages = found(*(f"objective.{item}" for item in settings))
    assert messages == [] if part is None else (len(messages) == 1 and part in messages[0]), messages


def test_another_loss_than_that_of_the_file(found, config_file):
    """Keys that both losses have keep the file's values; those of the old one alone are refused until they are null."""
    own = "objective: {name: minirl, clip_low: 0.1, clip_high: 0.2, weight_cap: 3}\n"
    own = "objective: {name: minirl, clip_low: 0.1, clip_high: 0.2, weight_cap: 3}\n"
    own = "objective: {name: minirl, clip_low: 0.1, clip_high: 0.2, weight_cap: 3}\n"
    config_file.write_text(config_file.read_text() + own)
    line = len(config_file.read_text().splitlines())
    assert found() == []
    (message,) = found("objective.name=grpo")
    assert message == (
        f"objective.weight_cap: the loss does not take it ({config_file}:{line}, objective.name is grpo): got 3, "
        "expected only objective.clip_low, objective.clip_high. It is of cispo, dppo_tv, minirl, decoupled: remove it, "
        "or set it to null"
    )
    objective = load_config(config_file, ["objective.name=grpo", "objective.weight_cap=null"]).objective
    assert objective.parameters == {"clip_low": 0.1, "clip_high": 0.2} and objective.name == "grpo"
    lost = found("objective.name=sapo")
    assert [text.partition(":")[0].partition(" ")[0] for text in lost] == [
        f"objective.{key}" for key in ("tau_positive", "tau_negative", "clip_low", "clip_high", "weight_cap")
    ]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("objective.name=grpoo", ["objective.name (override", 'got "grpoo"', "one of gspo, gspo_token, grpo"]),
        ("objective.name=[gspo]", ["objective.name (override", "one of gspo"]),
        ("objective.name=null", ["objective.name (override", "got null"]),
        ("objective=gspo", ["objective (override", 'got "gspo"', "expected a mapping"]),
        ("objective.clip_lo=0.1", ["objective.clip_lo: unknown key", "Did you mean objective.clip_low?"]),
        ("train.weight_cap=2", ["Did you mean objective.weight_cap?"]),
    ],
)
def test_what_no_objective_can_be(config_file, override, parts):
    with pytest.raises(ConfigError) as error:
        load_config(config_file, [override])
    (message,) = error.value.problems
    assert all(part in message for part in parts), message


def test_a_method_brings_what_it_asks_of_the_shared_keys(config_file):
    minirl = load_config(config_file, loss("minirl")[:1] + loss("minirl")[2:-1]).objective
    assert (minirl.advantage, minirl.old_logprobs) == ("group_mean", "trainer")
    dppo = load_config(config_file, [item for item in loss("dppo_tv") if "old_logprobs" not in item]).objective
    assert dppo.old_logprobs == "sampler"


def test_a_section_made_by_hand_is_refused_with_all_that_is_wrong():
    with pytest.raises(ValueError, match="kl_in: without effect(.|\n)*kl_unbiased|kl_unbiased: without(.|\n)*kl_in"):
        LOSSES["gspo"](kl_in="reward", kl_unbiased=True)
