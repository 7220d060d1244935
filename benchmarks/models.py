"""Makes random Qwen3-MoE checkpoints for benchmarks, to be loaded by the real code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4},
    "deep": {"hidden_size": 64, "num_hidden_layers": 24, "num_experts": 8, "num_experts_per_tok": 2},
    "mid": {"hidden_size": 256, "num_hidden_layers": 12, "num_experts": 64, "num_experts_per_tok": 8},
    # its checkpoint has 1.4 GB, with float32 weights and Adam's moments
    "large": {"hidden_size": 512, "num_hidden_layers": 6, "num_experts": 32, "num_experts_per_tok": 4},
    # the experts are so narrow that on a CPU sending a row takes about as long as computing it
    "narrow": {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 32,
    },
    # 4 of its 48 layers, with a small vocabulary: 2.5 billion parameters, 45 GB with gradients and Adam's moments
    "qwen3_30b_a3b": {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}


def make_model(shape: str, folder: Path) -> Path:
    """Save a random model of SHAPES[shape] in bfloat16 and return its folder."""
    from transformers import Qwen3MoeConfig

    sizes = SHAPES[shape]
    unless_given = {
        "intermediate_size": 2 * sizes["hidden_size"],
        "moe_intermediate_size": sizes["hidden_size"] // 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    config = Qwen3MoeConfig(
        vocab_size=8192,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.1,
        **unless_given | sizes,
    )
    return save_random(config, folder)


def save_random(config: PretrainedConfig, folder: Path) -> Path:
    """Save a random Qwen3-MoE of this config in bfloat16 and return its folder."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a host takes a minute for random numbers
        model = Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder
