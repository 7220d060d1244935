"""Tests the task and the policy of the tool demo: its rows, its dialogues as the gateway renders them, its start."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from moe_rl.commands import start_checks
from moe_rl.config.load import load_config
from moe_rl.gateway.rendering import ChatRenderer
from moe_rl.tasks.environments.examples.calculator import calculate
from moe_rl.tasks.environments.examples.pocket_calculator import MOST_TOKENS, TOOL
from moe_rl.tasks.tokenizer import TextCodec
from tools.dev.calculator_task import HELDOUT_SIZE, LEVELS, TRAIN_SIZE, build_splits, problem_stream

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "assets" / "tiny_tool"
CONFIG = "configs/tool_use_cpu.yaml"
EOS = 1


@pytest.mark.long
def test_the_run_has_no_problem(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(CONFIG, [])
    assert start_checks.every_problem(config, None, 2, first=True)[0] == []


def test_the_config_has_room_for_every_turn(lesson):
    """A call and the longest prompt fit, and so does the longest dialogue of the demonstrations."""
    config = load_config(ROOT / CONFIG, [])
    room, rng = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens, random.Random(5)
    lengths = [
        len(lesson.tokenizer.encode(one.prompt + lesson.write(one, style, rng)))
        for one in lesson.heldout
        for style in lesson.styles
    ]
    assert min(lengths) >= 30 and max(lengths) <= 170
    assert max(lengths) + MOST_TOKENS <= room <= lesson.sizes["max_position_embeddings"]
    assert max(lengths) + MOST_TOKENS <= config.task.environment.tokens


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    return {
        name: [json.loads(line) for line in (ASSETS / f"task/{name}.jsonl").read_text(encoding="ascii").splitlines()]
        for name in ("train", "heldout")
    }


def expression(row: dict) -> str:
    return row["question"].removeprefix("What is ").removesuffix("?")


def key(text: str) -> list[str]:
    """Return the signed terms of an expression, and the factors of each, in any order."""
    return sorted(f"{term[:1]}{sorted(term[1:].split('*'))}" for term in re.findall(r"[+-][\d*]+", f"+{text}"))


def test_every_answer_is_right_and_every_level_as_frequent(rows):
    for name, size in (("train", TRAIN_SIZE), ("heldout", HELDOUT_SIZE)):
        for row in rows[name]:
            assert set(row) == {"id", "question", "answer", "level", "calls"}
            assert str(calculate(expression(row))) == row["answer"], row
            operations = len(re.findall(r"\d[+*-]\d", expression(row)))
            assert int(row["level"]) == row["calls"] == (operations if row["level"] != "0" else 0)
        assert Counter(row["level"] for row in rows[name]) == dict.fromkeys(LEVELS, size // len(LEVELS))
        assert len({row["id"] for row in rows[name]}) == size


def test_no_heldout_expression_is_trained_on_in_any_order(rows):
    heldout = {tuple(key(expression(row))) for row in rows["heldout"]}
    assert len(heldout) == HELDOUT_SIZE
    assert not heldout & {tuple(key(expression(row))) for row in rows["train"]}
    warm = problem_stream(7, {one.key for one in build_splits()[1]})
    assert not heldout & {tuple(key(next(warm).expression)) for _ in range(5000)}


def test_the_steps_of_a_problem_are_single_operations_that_lead_to_its_answer():
    for problem in build_splits()[1]:
        assert len(problem.steps) == max(1, int(problem.level))
        for step, result in problem.steps:
            assert re.fullmatch(r"-?\d+[+*-]-?\d+", step) and str(calculate(step)) == result
        assert problem.answer == str(calculate(problem.expression))


@pytest.fixture(scope="module")
def lesson(tmp_path_factory):
    from tools.dev import calculator_policy

    return calculator_policy.lesson(tmp_path_factory.mktemp("lesson"))


def test_the_gateway_writes_the_tokens_that_the_policy_was_shown(lesson):
    """Every turn of every style, from the renderer of Qwen3 and from the chat template alike."""
    renderer, codec = (
        ChatRenderer(ASSETS / "policy", {"name": "qwen3"}, ("reasoning",)),
        TextCodec(ASSETS / "policy", (EOS,)),
    )
    assert renderer.reads_tools and renderer.stop_token_ids[0] == EOS
    rng = random.Random(3)
    for number, exercise in enumerate(lesson.heldout[:24]):
        text = lesson.write(exercise, list(lesson.styles)[number % 4], rng)
        messages = [{"role": "user", "content": exercise.problem.question}]
        prompt = renderer.render(messages, [TOOL])
        assert prompt == tuple(codec.encode(exercise.prompt)) and len(prompt) <= 32
        *earlier, last = re.split(lesson.given, text)
        for said, result in zip(earlier, re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text), strict=True):
            completion = tuple(codec.encode(said))
            assert completion[-1] == EOS
            found = renderer.parse(prompt, completion, [TOOL])
            ((name, arguments),) = [(use.name, use.arguments) for use in found.uses]
            assert (name, found.content, found.unreadable) == ("calculate", "", 0)
            call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": result},
            ]
            extended = renderer.extend(prompt, completion, messages[-1:], [TOOL])
            assert extended is not None, "a turn does not continue the one before"
            prompt = extended
        template = lesson.tokenizer.apply_chat_template(
            messages, tools=[TOOL], tokenize=False, add_generation_prompt=True
        )
        assert prompt == tuple(codec.encode(template)), "the chat template writes a dialogue otherwise"
        assert codec.decode(prompt) + last == exercise.prompt + text
        assert len(prompt) + len(last) < 200


def test_only_what_the_policy_says_is_predicted(lesson):
    from tools.dev.tiny_policy import encode_demonstration

    text = lesson.write(lesson.heldout[0], "all calls", random.Random(1))
    ids, said = encode_demonstration(lesson, lesson.heldout[0].prompt, text)
    shown = lesson.tokenizer.decode([one for one, own in zip(ids, said, strict=True) if own])
    assert shown == "".join(re.split(lesson.given, text)) + "<|im_end|>"
    assert lesson.tokenizer.decode(ids) == lesson.heldout[0].prompt + text + "<|im_end|>"


def test_a_demonstration_is_judged_as_the_environment_would(lesson):
    rng = random.Random(2)
    for exercise in lesson.heldout:
        for style in lesson.styles:
            text = lesson.write(exercise, style, rng)
            assert lesson.judge(exercise, text).passed and not lesson.judge(exercise, f"{text}1").passed
    first = next(one for one in lesson.heldout if one.level == "2")
    refused = lesson.write(first, "in one call", rng)
    assert "error: " in refused and not lesson.judge(first, refused).formatted
    assert lesson.judge(first, lesson.write(first, "all calls", rng)).formatted


def test_the_warm_start_leaves_room_to_learn():
    """It calls in some of its samples, and answers an easy sum by itself. Its likeliest answer calls nothing."""
    report = json.loads((ASSETS / "policy_report.json").read_text(encoding="ascii"))
    for dtype in ("bfloat16", "float32"):
        rates = report[dtype]
        assert 0.35 <= rates["pass_rate"] <= 0.45
        by_level = rates["pass_rate_by_level"]
        assert by_level["0"] >= 0.9 and all(0.1 <= by_level[level] <= 0.35 for level in "123")
        assert rates["greedy_pass_rate"] <= 0.3 and rates["mixed_groups_of_8"] >= 0.5
        assert rates["truncated_fraction"] <= 0.01
