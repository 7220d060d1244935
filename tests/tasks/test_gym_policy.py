"""Tests the policy of configs/reasoning_gym_cpu.yaml: its prompts, its demonstrations, and what it starts from."""

import json
import random
import sys
from pathlib import Path

import pytest

from moe_rl.commands import start_checks
from moe_rl.config.load import load_config
from moe_rl.tasks.prompts import load_task
from moe_rl.tasks.tokenizer import ChatTemplate, TextCodec
from tests.support.refusals import tells

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/reasoning_gym_cpu.yaml"
EOS = 1


@pytest.fixture
def config(monkeypatch):
    monkeypatch.chdir(ROOT)
    return load_config(CONFIG, [])


def problems(config):
    return start_checks.every_problem(config, None, 2, first=True)[0]


@pytest.mark.long
def test_the_run_has_no_problem(config):
    pytest.importorskip("reasoning_gym")
    assert problems(config) == []


def test_a_missing_library_is_one_problem_that_says_what_to_install(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    (problem,) = problems(config)
    tells(problem, "'.[tasks]'", key="task.rewards.gym.kind", fault="no library")


def test_the_template_and_the_tokenizer_are_whole(config):
    template, codec = ChatTemplate(config.model.path, config.task.chat), TextCodec(config.model.path, (EOS,))
    text = template.render(template.messages("Spell this word backward (example: sun -> nus): zinc"))
    assert text == "<|user|>Spell this word backward (example: sun -> nus): zinc<|end|><|assistant|>"
    ids = codec.encode(text)
    assert codec.decode(ids) == text and ids[-2] == EOS
    # Words that every prompt has are one token each. The word of the task is letters.
    assert [codec.decode([one]) for one in ids[-7:-2]] == [" ", "z", "i", "n", "c"] and len(ids) == 19


def test_the_warm_start_leaves_room_to_learn():
    report = json.loads((ROOT / "assets/tiny_gym/policy_report.json").read_text(encoding="ascii"))
    for dtype in ("bfloat16", "float32"):
        rates = report[dtype]
        assert 0.25 <= rates["pass_rate"] <= 0.45
        assert rates["mixed_groups_of_8"] >= 0.6
        assert rates["truncated_fraction"] <= 0.01
        assert 20 <= rates["mean_completion_tokens"] <= 100


@pytest.mark.long
def test_it_is_shown_the_prompts_of_the_run_and_right_answers(config, tmp_path):
    """The run renders and tokenises the prompts as the warm start did, and its scorers pass the first style."""
    pytest.importorskip("reasoning_gym")
    from moe_rl.tasks.gym_reward import reasoning_gym
    from tools.dev import gym_policy

    task = load_task(config, TextCodec(config.model.path, (EOS,)))
    lesson = gym_policy.lesson(tmp_path)
    prompts = {prompt.text: prompt for _, prompt in task.evaluated(config)}
    exercises = lesson.heldout[:48]
    assert {exercise.level for exercise in exercises} == {"chain_sum", "spell_backward", "letter_counting"}
    (reward,) = config.task.rewards.values()
    score = reasoning_gym(**reward.settings, options=config.task.generators)
    rng, limit = random.Random(1), config.rollout.max_completion_tokens
    for exercise in exercises:
        prompt = prompts[exercise.prompt]
        assert lesson.tokenizer.encode(exercise.prompt) == list(prompt.token_ids)
        assert prompt.text == f"<|user|>{prompt.columns['question']}<|end|><|assistant|>"
        columns = {name: prompt.columns[name] for name in ("question", "answer", "metadata")}
        for style in lesson.styles:
            text = lesson.write(exercise, style, rng)
            assert (
                len(lesson.tokenizer.encode(text)) < limit and lesson.judge(exercise, text).right or style == "stopped"
            )
            passes = score(completion=text, **columns) == 1
            assert passes == lesson.judge(exercise, text).passed
            assert passes == (style in ("whole", "no steps")) or style == "stopped"
    first = next(lesson.exercises(1))
    assert first.prompt not in prompts
