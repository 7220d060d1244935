"""Which keys go together with an environment."""

import sys
from pathlib import Path

import pytest

from moe_rl.config.check import problems
from moe_rl.config.load import dump_config, load_config
from moe_rl.errors import ConfigError
from tests.support.refusals import tells

CONFIG = Path(__file__).parents[2] / "configs/tiny_moe_cpu.yaml"
PLAYS = ["task.environment={run: moe_rl.tasks.environments.examples.calculator.run}"]
NO_REWARDS = ["task.rewards={}", "task.pass_reward=null"]


def found(*overrides):
    try:
        return problems(load_config(CONFIG, overrides), 2)
    except ConfigError as error:
        return error.problems


def keys(*overrides):
    return sorted(str(problem.about["key"]) for problem in found(*overrides))


def test_an_environment_takes_the_place_of_rewards():
    assert found(*PLAYS, *NO_REWARDS) == []


def test_rewards_or_an_environment_are_needed():
    assert keys() == []
    assert keys(*NO_REWARDS) == ["task.rewards"]
    assert keys("task.pass_reward=null") == ["task.pass_reward"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("task.rewards.own={kind: exact}", "task.rewards"),
        ("task.pass_reward=exact", "task.pass_reward"),
        ("task.chat={}", "task.chat"),
        ("task.overlong={cache_tokens: 2}", "task.overlong"),
        ("task.verifier_workers=2", "task.verifier_workers"),
        ("rollout.stop=[END]", "rollout.stop"),
        ("gateway.max_sessions=15", "task.environment.concurrent"),
        ("task.environment.run=moe_rl.tasks.environments.examples.calculator.no_such", "task.environment.run"),
        ("task.environment.run=calculator", "task.environment.run"),
        ("task.environment.python=no_such", "task.environment.python"),
        ("task.environment.turns=0", "task.environment.turns"),
        ("task.environment.host=0.0.0.0", "task.environment.host"),
        ("task.environment.env=[A=b]", "task.environment.env.0"),
    ],
)
def test_what_an_environment_does_not_go_with(override, key):
    before = found(*PLAYS, *NO_REWARDS)
    (problem,) = [one for one in found(*PLAYS, *NO_REWARDS, override) if one not in before]
    tells(problem, key=key)


def test_an_environment_may_be_a_package_of_its_own_interpreter():
    assert (
        found(*PLAYS, *NO_REWARDS, "task.environment.run=only.there", f"task.environment.python={sys.executable}") == []
    )


def test_an_environment_is_read_back_from_the_resolved_config(tmp_path):
    config = load_config(CONFIG, [*PLAYS, *NO_REWARDS, "task.environment.turns=3"])
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    assert config.task.environment.turns == 3


def test_an_episode_is_not_aborted_by_new_weights():
    asynchronous = ["pipeline.mode=async", "rollout.sleep_level=0"]
    assert found(*PLAYS, *NO_REWARDS, *asynchronous) == []
    assert keys(*PLAYS, *NO_REWARDS, *asynchronous, "pipeline.kv=recompute") == ["pipeline.kv"]


def test_a_kl_penalty_in_the_reward_is_of_whole_completions():
    kl = ["objective.kl_coef=0.1", "objective.kl_in=reward"]
    by_turn = "task.environment.credit=turn"
    assert keys(*PLAYS, *NO_REWARDS, by_turn) == [] == keys(*PLAYS, *NO_REWARDS, *kl)
    assert keys(*PLAYS, *NO_REWARDS, by_turn, *kl) == ["objective.kl_in"]


@pytest.mark.parametrize(
    ("override", "got"),
    [
        ("task.chat={}", "{}"),
        ("task.chat.system=Be brief.", "{'system': 'Be brief.'}"),
        ("task.overlong={cache_tokens: 5}", "{'cache_tokens': 5}"),
    ],
)
def test_an_unused_section_is_told_as_it_was_written(override, got):
    (problem,) = found(*PLAYS, *NO_REWARDS, override)
    assert problem.got == got
