"""Hugging Face tensors and Megatron's parameters: which rank holds what under which name, and the way back."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.errors import ConfigError
from moe_rl.models.facts import LatentAttentionSizes
from moe_rl.models.hf import expected_tensors
from tests.megatron.models import facts


def rows(start, count):
    """Return a matrix [count, 5] in which each row identifies itself."""
    return torch.arange(start, start + count)[:, None].repeat(1, 5)


def part_of(tensors, layout, axis, part, parts, kv_groups=4):
    from moe_rl.megatron.hf_map import _part, join

    pieces = [tensor[_part(tuple(tensor.shape), axis, part, parts)] for tensor in tensors]
    return join(pieces, layout, kv_groups // parts)


def test_a_rank_holds_whole_groups_of_heads():
    q, k, v = rows(0, 24), rows(100, 12), rows(200, 12)  # 4 groups: 2 query heads of 3 rows, k and v of 3
    second = part_of([q, k, v], "qkv", 0, part=1, parts=2)[:, 0].tolist()
    group2 = [*range(12, 18), *range(106, 109), *range(206, 209)]
    group3 = [*range(18, 24), *range(109, 112), *range(209, 212)]
    assert second == group2 + group3


def test_a_rank_holds_its_rows_of_gate_above_its_rows_of_up():
    gate, up = rows(0, 6), rows(100, 6)
    assert part_of([gate, up], "gate_up", 0, part=1, parts=2)[:, 0].tolist() == [3, 4, 5, 103, 104, 105]


def test_gate_and_up_that_take_turns_are_told_apart():
    turns = torch.tensor([0, 100, 1, 101, 2, 102])
    assert part_of([turns], "gate_up_columns", None, 0, 1).tolist() == [0, 1, 2, 100, 101, 102]
    assert part_of([turns.expand(4, 6)], "gate_up_columns", None, 0, 1)[:, 3].tolist() == [0, 1, 2, 100, 101, 102]


@pytest.mark.parametrize(
    "layout, axis, shapes, parts",
    [
        ("copy", None, [(7,)], 2),
        ("copy", 0, [(8, 5)], 4),
        ("copy", 1, [(5, 8)], 4),
        ("gate_up", 0, [(8, 5), (8, 5)], 4),
        ("qkv", 0, [(24, 5), (12, 5), (12, 5)], 2),
        ("qkv", 0, [(24,), (12,), (12,)], 4),
        ("transposed", None, [(3, 8)], 1),
        ("gate_up_columns", None, [(3, 8)], 1),
        ("gate_up_columns", None, [(8,)], 1),
    ],
)
def test_what_the_ranks_hold_makes_the_whole_again(layout, axis, shapes, parts):
    from moe_rl.megatron.hf_map import split

    whole = [torch.randn(shape) for shape in shapes]
    shards = [part_of(whole, layout, axis, part, parts) for part in range(parts)]
    assert axis is None or sum(shard.numel() for shard in shards) == sum(t.numel() for t in whole)
    pieces = [split(shard, layout, 4 // parts, [shape[0] for shape in shapes]) for shard in shards]
    again = pieces[0] if axis is None else [torch.cat(same, axis) for same in zip(*pieces, strict=True)]
    assert len(again) == len(whole) and all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))


# Names of the parameters of Megatron's TransformerEngine layers, copied from its module specs.
ENDS = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
GROUPED = [
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
]
LATENT = [
    "input_layernorm.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_proj.weight",
]
QK_NORMS = ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
DENSE = ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
EXPERTS = [f"mlp.experts.linear_fc{fc}.weight{expert}" for fc in (1, 2) for expert in range(12)]
ROUTED = ["pre_mlp_layernorm.weight", "mlp.router.weight", *EXPERTS]
SHARED_EXPERTS = [f"mlp.shared_experts.linear_fc{fc}.weight" for fc in (1, 2)]
BIASES = [
    "self_attention.linear_qkv.bias",
    "self_attention.linear_proj.bias",
    "self_attention.core_attention.softmax_offset",
    "mlp.router.bias",
    *(name.replace("weight", "bias") for name in EXPERTS),
]
LATENT_FACTS = {
    "latent": LatentAttentionSizes(q_rank=6, kv_rank=5, nope_dim=4, rope_dim=4, value_dim=6),
    "qk_norm": False,
    "expert_bias": True,
    "score_function": "sigmoid",
    "shared_intermediate_size": 8,
}
OSS_FACTS = {"qk_norm": False, "attention_bias": True, "linear_bias": True, "sinks": True, "moe_layers": (0, 1)}
FUSED = {
    "Qwen3MoeForCausalLM": ({}, [*GROUPED, *QK_NORMS, *DENSE], [*GROUPED, *QK_NORMS, *ROUTED]),
    "DeepseekV3ForCausalLM": (LATENT_FACTS, [*LATENT, *DENSE], [*LATENT, *ROUTED, *SHARED_EXPERTS]),
    "GptOssForCausalLM": (OSS_FACTS, [*GROUPED, *ROUTED, *BIASES], [*GROUPED, *ROUTED, *BIASES]),
}


def model_with(first, second, buffers=()):
    """Return what the map needs of a GPTModel of two layers with these parameters."""
    names = [*ENDS, *(f"decoder.layers.{n}.{name}" for n, layer in enumerate((first, second)) for name in layer)]
    experts = SimpleNamespace(token_dispatcher=SimpleNamespace(order=np.arange(12)))
    return SimpleNamespace(
        named_parameters=lambda: [(name, torch.nn.Parameter(torch.zeros(1))) for name in names],
        named_buffers=lambda: [(name, torch.zeros(1)) for name in buffers],
        decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=n, mlp=experts) for n in (1, 2)]),
        pre_process=True,
        post_process=True,
    )


@pytest.mark.parametrize("architecture", FUSED)
def test_transformer_engines_names_are_the_same_map(one_rank, architecture):
    from moe_rl.megatron.hf_map import entries

    changes, first, second = FUSED[architecture]
    model_facts = facts(**({"architecture": architecture, "moe_layers": (1,)} | changes))
    buffers = ["decoder.layers.1.mlp.router.expert_bias"] if model_facts.expert_bias else []
    model = model_with(first, second, buffers)
    found = [name for entry in entries(model, model_facts, fused=True) for name in entry.names]
    assert sorted(found) == sorted(expected_tensors(model_facts))


def test_megatron_saves_a_norm_under_the_name_that_transformer_engine_has(one_rank):
    """Compares Megatron's own table of the two names with ours."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules

    from moe_rl.models.hf import layer_weights

    theirs = get_gpt_layer_local_submodules(normalization="RMSNorm").sharded_state_dict_keys_map
    weights = layer_weights(facts(moe_layers=(1,)), 0)
    assert {w.parameter: w.fused for w in weights if w.fused} == {
        f"{ours}weight": f"{fused}weight" for ours, fused in theirs.items()
    }


def test_a_parameter_that_is_missing_or_unknown_is_named(one_rank):
    from moe_rl.megatron.hf_map import entries

    _, first, second = FUSED["Qwen3MoeForCausalLM"]
    with pytest.raises(ConfigError, match=r"decoder\.layers\.1\.mlp\.router\.weight"):
        list(entries(model_with(first, [n for n in second if "router" not in n]), facts(moe_layers=(1,)), fused=True))
    with pytest.raises(ConfigError, match=r"decoder\.layers\.0\.mlp\.gate_weight"):
        list(entries(model_with([*first, "mlp.gate_weight"], second), facts(moe_layers=(1,)), fused=True))
