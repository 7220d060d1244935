"""Tests what holds for all shipped policies: whole files, published names, the rates that were recorded."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

ASSETS = Path(__file__).parents[2] / "assets"
LAYERS = {"tiny_moe": 8, "tiny_gym": 4, "tiny_tool": 4}
TAGS = {"tiny_tool": ("<tool_call>", "</tool_call>")}


@pytest.fixture(params=LAYERS)
def name(request):
    return request.param


@pytest.fixture
def config(name) -> dict:
    return json.loads((ASSETS / name / "policy/config.json").read_text(encoding="ascii"))


@pytest.fixture
def report(name) -> dict:
    return json.loads((ASSETS / name / "policy_report.json").read_text(encoding="ascii"))


@pytest.fixture
def tokenizer(name):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ASSETS / name / "policy")


def test_tokenizer_covers_any_text_and_fills_the_vocabulary(name, tokenizer, config):
    text = "The answer is 42, n'est-ce pas? \u00e9\u4e2d\n<answer>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.eos_token_id == config["eos_token_id"]
    assert tokenizer.pad_token_id == config["pad_token_id"] != tokenizer.eos_token_id
    # The tags are text: decoding without special tokens must keep them.
    text = "7".join(TAGS.get(name, ("<answer>", "</answer>")))
    answer = tokenizer.encode(text)
    assert len(answer) == 3 and tokenizer.decode(answer, skip_special_tokens=True) == text
    assert set(tokenizer.all_special_ids) == {config["eos_token_id"], config["pad_token_id"]}


def test_checkpoint_has_the_published_names_and_the_shapes_of_its_config(name, config):
    assert config["num_hidden_layers"] == LAYERS[name]
    assert config["mlp_only_layers"] == [] and config["decoder_sparse_step"] == 1
    assert config["num_experts_per_tok"] == 4 and config["norm_topk_prob"]
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
    file = ASSETS / name / "policy/model.safetensors"
    with safe_open(file, "pt") as tensors:
        found = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118 - not a dict
        assert {key: part.get_shape() for key, part in found.items()} == expected
        assert {part.get_dtype() for part in found.values()} == {"BF16"}
    assert sum(part.stat().st_size for part in (ASSETS / name).rglob("*") if part.is_file()) <= 12_000_000


def test_every_expert_has_work(report, config):
    load = report["expert_load"]
    assert load["unused_experts"] == [0] * config["num_hidden_layers"]
    # Expert parallelism 2 gives each rank one half of the experts.
    assert np.allclose(load["lower_half_share"], 0.5, atol=0.1)


def test_help_does_not_wait_for_torch():
    command = [sys.executable, "-X", "importtime", "tools/dev/make_tiny_policy.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "About ten minutes" in done.stdout and "| argparse" in done.stderr
    assert "torch" not in done.stderr and "transformers" not in done.stderr


@pytest.mark.parametrize(
    "name", ["tiny_moe", "tiny_tool", pytest.param("tiny_gym", marks=pytest.mark.long)], indirect=True
)
def test_transformers_loads_the_policy_whole_and_it_passes_as_often_as_recorded(name, report, tmp_path):
    import torch
    from transformers import Qwen3MoeForCausalLM

    from tools.dev import arithmetic_policy, calculator_policy, gym_policy
    from tools.dev.tiny_policy import try_out

    if name == "tiny_gym":
        pytest.importorskip("reasoning_gym")
    makers = {"tiny_moe": arithmetic_policy, "tiny_gym": gym_policy, "tiny_tool": calculator_policy}
    lesson = makers[name].lesson(tmp_path)
    torch.set_num_threads(1)
    folder = ASSETS / name / "policy"
    policy, info = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    judged, _, _ = try_out(policy.eval(), lesson, prompts=64, samples=8, seed=5)
    passed = [verdict.passed for group in judged for verdict in group]
    # 512 samples of 64 prompts: the standard error is about 0.04, prompts and samples together.
    assert abs(np.mean(passed) - report["float32"]["pass_rate"]) < 0.12
