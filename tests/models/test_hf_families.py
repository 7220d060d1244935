"""Tests what is read from config.json of DeepSeek-V3, Moonlight and gpt-oss, and the tensors their checkpoints must
have.
"""

import json
import math

import pytest

from moe_rl.config.layout import layout_problems
from moe_rl.config.training import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.errors import ConfigError
from moe_rl.models.facts import LatentAttentionSizes, Yarn
from moe_rl.models.hf import expected_tensors, parameter_count, read_model
from moe_rl.models.weight_files import checkpoint_tensors
from tests.support.refusals import refused, tells

MOONLIGHT = {"nulls": ("q_lora_rank", "rope_scaling")}


def test_facts_of_latent_attention(tmp_path, write_deepseek):
    facts = read_model(write_deepseek(tmp_path, num_nextn_predict_layers=1))
    assert facts.latent == LatentAttentionSizes(q_rank=6, kv_rank=4, nope_dim=4, rope_dim=2, value_dim=3)
    assert facts.yarn == Yarn(40.0, 4096, 32.0, 1.0, True, 1.0, 1.0)
    assert (facts.kv_heads, facts.head_dim, facts.cache_width, facts.moe_layers) == (4, 6, 4 + 2, (1, 2))
    assert (facts.score_function, facts.expert_bias, facts.shared_intermediate_size, facts.mtp_layers) == (
        "sigmoid", True, 12, 1,
    )  # fmt: skip
    moonlight = read_model(write_deepseek(tmp_path / "moonlight", **MOONLIGHT))
    assert (moonlight.latent.q_rank, moonlight.yarn) == (0, None)


def test_facts_of_gpt_oss(tmp_path, write_gpt_oss):
    facts = read_model(write_gpt_oss(tmp_path))
    assert facts.yarn == Yarn(32.0, 4096, 32.0, 1.0, False, None, None)
    assert (facts.window, facts.windowed_layers, facts.sinks, facts.linear_bias) == (8, (0, 2), True, True)
    assert (facts.moe_layers, facts.moe_intermediate_size, facts.glu_clamp) == ((0, 1, 2), 12, 7.0)
    assert (facts.norm_topk_prob, facts.score_function, facts.cache_width) == (True, "softmax", 2 * 2 * 4)


@pytest.mark.parametrize(
    ("writer", "name", "changes"),
    [
        ("write_deepseek", "DeepseekV3", {}),
        ("write_deepseek", "DeepseekV3", MOONLIGHT),
        ("write_gpt_oss", "GptOss", {}),
    ],
)
def test_expected_tensors_are_those_of_transformers(tmp_path, request, writer, name, changes):
    import transformers

    model = request.getfixturevalue(writer)(tmp_path / "ours", **changes)
    config = getattr(transformers, f"{name}Config").from_pretrained(model)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / "theirs")
    saved = {tensor: shape for tensor, (_, shape, _) in checkpoint_tensors(tmp_path / "theirs").items()}
    facts = read_model(model)
    assert saved == expected_tensors(facts)
    count = parameter_count(facts)
    assert count.total == sum(math.prod(shape) for shape in saved.values())
    assert count.expert == sum(math.prod(shape) for tensor, shape in saved.items() if ".mlp.experts." in tensor)


@pytest.mark.parametrize(
    ("writer", "changes", "parts"),
    [
        ("write_deepseek", {"v_head_dim": 7}, ["v_head_dim", "qk_nope_head_dim + qk_rope_head_dim"]),
        ("write_deepseek", {"q_lora_rank": None}, ["q_lora_rank", "null"]),
        ("write_deepseek", {"qk_rope_head_dim": 3}, ["qk_rope_head_dim", "got 3"]),
        ("write_deepseek", {"rope_interleave": False}, ["rope_interleave", "got False"]),
        ("write_deepseek", {"topk_method": "greedy"}, ["topk_method", "noaux_tc"]),
        ("write_deepseek", {"scoring_func": None}, ["scoring_func", "vLLM"]),
        ("write_deepseek", {"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_scaling.rope_type", "'yarn'"]),
        ("write_gpt_oss", {"layer_types": ["full_attention"]}, ["layer_types", "sliding_attention and full_attention"]),
        ("write_gpt_oss", {"attention_bias": False}, ["attention_bias", "got False"]),
        ("write_gpt_oss", {"swiglu_alpha": 1.0}, ["swiglu_alpha", "1.702"]),
        ("write_gpt_oss", {"layer_types": ["sliding_attention"] * 3}, ["layer_types", "in turn"]),
        ("write_gpt_oss", {"swiglu_limit": 6.0}, ["swiglu_limit", "7.0"]),
        ("write_gpt_oss", {"rms_norm_eps": 1e-6}, ["rms_norm_eps", "1e-05"]),
        ("write_gpt_oss", {"rope_scaling": None}, ["rope_parameters.rope_type", "vLLM"]),
    ],
)
def test_what_is_not_built_is_refused(tmp_path, request, writer, changes, parts):
    model = request.getfixturevalue(writer)(tmp_path)
    raw = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    field, *pieces = parts
    with refused(ConfigError, *pieces, key="model.path", field=field):
        read_model(model)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"mscale_all_dim": 0}, "mscale"),
        ({"attention_factor": 1.2}, "attention_factor"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"truncate": False}, "rope_scaling.truncate"),
        ({"factor": "40"}, "rope_scaling.factor"),
    ],
)
def test_numbers_of_yarn_that_are_read_in_no_one_way_are_refused(tmp_path, write_deepseek, changes, part):
    model = write_deepseek(tmp_path)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"rope_scaling": raw["rope_scaling"] | changes}))
    with refused(ConfigError, key="model.path", field=(part,)):
        read_model(model)


def test_experts_with_biases_are_not_cut(tmp_path, write_gpt_oss):
    facts = read_model(write_gpt_oss(tmp_path))
    train = TrainConfig(microbatch_tokens=40, optimizer=OptimizerConfig(lr=1e-3))
    cut = ParallelConfig(tensor=2, expert_tensor=2)
    (problem,) = layout_problems(cut, train, facts, 2)
    tells(problem, key="parallel.expert_tensor", got=2)
    assert not list(layout_problems(ParallelConfig(tensor=2, expert=2, expert_tensor=1), train, facts, 2))
