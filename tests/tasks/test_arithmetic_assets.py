"""Tests that the shipped task and policy have the properties that the documentation states."""

from __future__ import annotations

import ast
import json
import operator
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

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
def config() -> dict:
    return json.loads((POLICY / "config.json").read_text(encoding="ascii"))


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
    negative = [row for row in train if row["level"] == "3" and row["answer"].startswith("-")]
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


def test_tokenizer_covers_any_text_and_fills_the_vocabulary(tokenizer, config):
    text = "The answer is 42, n'est-ce pas? \u00e9\u4e2d\n<answer>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.eos_token_id == config["eos_token_id"]
    assert tokenizer.pad_token_id == config["pad_token_id"] != tokenizer.eos_token_id
    # The tags are text: decoding without special tokens must keep them.
    assert set(tokenizer.all_special_ids) == {config["eos_token_id"], config["pad_token_id"]}


def test_checkpoint_has_the_published_names_and_the_shapes_of_its_config(config):
    assert config["num_hidden_layers"] >= 8 and config["mlp_only_layers"] == [] and config["decoder_sparse_step"] == 1
    assert config["num_experts"] == 32 and config["num_experts_per_tok"] == 4 and config["norm_topk_prob"]
    assert not config["tie_word_embeddings"]
    hidden, head, inner = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    expected = {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "lm_head.weight": [config["vocab_size"], hidden],
        "model.norm.weight": [hidden],
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        expected |= {
            layer + "input_layernorm.weight": [hidden],
            layer + "post_attention_layernorm.weight": [hidden],
            layer + "self_attn.q_proj.weight": [queries, hidden],
            layer + "self_attn.k_proj.weight": [keys, hidden],
            layer + "self_attn.v_proj.weight": [keys, hidden],
            layer + "self_attn.o_proj.weight": [hidden, queries],
            layer + "self_attn.q_norm.weight": [head],
            layer + "self_attn.k_norm.weight": [head],
            layer + "mlp.gate.weight": [config["num_experts"], hidden],
        }
        for expert in range(config["num_experts"]):
            expected[layer + f"mlp.experts.{expert}.gate_proj.weight"] = [inner, hidden]
            expected[layer + f"mlp.experts.{expert}.up_proj.weight"] = [inner, hidden]
            expected[layer + f"mlp.experts.{expert}.down_proj.weight"] = [hidden, inner]
    with safe_open(POLICY / "model.safetensors", "pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        assert {name: part.get_shape() for name, part in found.items()} == expected
        assert {part.get_dtype() for part in found.values()} == {"BF16"}
    assert (POLICY / "model.safetensors").stat().st_size <= 8_000_000


def test_recorded_rates_leave_room_to_learn(report):
    for dtype in ("bfloat16", "float32"):
        rates = report[dtype]
        assert 0.25 <= rates["pass_rate"] <= 0.45
        # The format must be rare enough to be learnt and the sums good enough for 30 points.
        assert 0.35 <= rates["format_rate"] <= 0.65
        assert rates["accuracy_given_format"] >= 0.65
        assert rates["mixed_groups_of_8"] >= 0.6
        assert rates["truncated_fraction"] <= 0.01
    load = report["expert_load"]
    assert load["unused_experts"] == [0] * 8
    assert np.allclose(load["lower_half_share"], 0.5, atol=0.1)


def test_help_does_not_wait_for_torch():
    command = [sys.executable, "-X", "importtime", "tools/dev/make_tiny_policy.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "About ten minutes" in done.stdout and "| argparse" in done.stderr
    assert "torch" not in done.stderr and "transformers" not in done.stderr


def test_transformers_loads_the_policy_whole_and_it_passes_as_often_as_recorded(heldout, report, tokenizer):
    import torch
    from transformers import Qwen3MoeForCausalLM

    from tools.dev.tiny_policy import sample

    torch.set_num_threads(1)
    policy, info = Qwen3MoeForCausalLM.from_pretrained(POLICY, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rows = heldout[:64]
    texts, _, _ = sample(policy.eval(), tokenizer, [row["prompt"] for row in rows], samples=8, seed=5)
    passed = [
        text.strip() == wanted_completion(row["answer"])
        for row, group in zip(rows, texts, strict=True)
        for text in group
    ]
    # 512 samples of 64 prompts: the standard error is about 0.04, prompts and samples together.
    assert abs(np.mean(passed) - report["float32"]["pass_rate"]) < 0.12
