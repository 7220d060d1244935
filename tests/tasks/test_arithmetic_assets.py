"""Tests that the shipped task and policy have the properties that the documentation states."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections import Counter
from pathlib import Path

import pytest

from tools.dev.arithmetic_task import HELDOUT_SIZE, LEVELS, TRAIN_SIZE, build_splits, wanted_completion

ASSETS = Path(__file__).parents[2] / "assets" / "tiny_moe"
POLICY = ASSETS / "policy"
MAX_PROMPT_TOKENS = 16
MAX_COMPLETION_TOKENS = 10


def read_jsonl(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ASSETS / "task" / name).read_text(encoding="ascii").splitlines()]


@pytest.fixture(scope="module")
def train() -> list[dict[str, str]]:
    return read_jsonl("train.jsonl")


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, str]]:
    return read_jsonl("heldout.jsonl")


@pytest.fixture(scope="module")
def report() -> dict:
    return json.loads((ASSETS / "policy_report.json").read_text(encoding="ascii"))


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(POLICY)


def terms(prompt: str) -> tuple[int, ...]:
    """Return the signed terms of `a+b-c=`, in any order."""
    assert re.fullmatch(r"\d+([+-]\d+)+=", prompt), prompt
    return tuple(sorted(int(term) for term in re.findall(r"[+-]?\d+", prompt)))


def evaluate(expression: str) -> int:
    """Evaluate the expression with Python's own syntax tree, which shares no code with the generator."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub}

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return operators[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant)
        return node.value

    return value(ast.parse(expression, mode="eval").body)


def test_every_answer_is_right(train, heldout):
    for row in train + heldout:
        assert set(row) == {"id", "prompt", "answer", "level"}
        assert str(evaluate(row["prompt"].removesuffix("="))) == row["answer"], row


def test_heldout_expressions_are_never_trained_on_in_any_order_of_their_terms(train, heldout):
    keys = [terms(row["prompt"]) for row in train + heldout]
    assert len(keys) == len(set(keys)) == TRAIN_SIZE + HELDOUT_SIZE


def test_ids_are_unique_and_levels_equally_many(train, heldout):
    assert len({row["id"] for row in train + heldout}) == TRAIN_SIZE + HELDOUT_SIZE
    for rows in (train, heldout):
        assert Counter(row["level"] for row in rows) == dict.fromkeys(LEVELS, len(rows) // len(LEVELS))
    negative = [row for row in train if row["level"] == "subtraction" and row["answer"].startswith("-")]
    assert 300 < len(negative) < 700


def test_the_generator_still_makes_the_shipped_splits(train, heldout):
    for problems, rows in zip(build_splits(), (train, heldout), strict=True):
        assert [(p.prompt, p.answer, p.level) for p in problems] == [
            (row["prompt"], row["answer"], row["level"]) for row in rows
        ]


def test_prompts_and_wanted_completions_round_trip_within_the_token_limits(train, heldout, tokenizer):
    for row in train + heldout:
        prompt = tokenizer.encode(row["prompt"])
        assert len(prompt) == len(row["prompt"]) <= MAX_PROMPT_TOKENS
        assert tokenizer.decode(prompt) == row["prompt"]
        wanted = wanted_completion(row["answer"])
        completion = [*tokenizer.encode(wanted), tokenizer.eos_token_id]
        assert len(completion) == len(row["answer"]) + 3 <= MAX_COMPLETION_TOKENS
        assert tokenizer.decode(completion, skip_special_tokens=True) == wanted


def test_recorded_rates_leave_room_to_learn(report):
    for dtype in ("bfloat16", "float32"):
        rates = report[dtype]
        assert 0.25 <= rates["pass_rate"] <= 0.45
        # The format must be rare enough to be learnt and the sums good enough for 30 points.
        assert 0.35 <= rates["format_rate"] <= 0.65
        assert rates["accuracy_given_format"] >= 0.65
        assert rates["mixed_groups_of_8"] >= 0.6
        assert rates["truncated_fraction"] <= 0.01
