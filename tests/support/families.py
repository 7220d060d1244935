"""Tiny random checkpoints of every model family."""

import json

import numpy as np
import torch

from moe_rl.proof.batch import batch, quiet

SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
GLM = {"n_routed_experts": 16, "first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
LATENT = GLM | {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_nextn_predict_layers": 0,
}
# Positions so few that dimensions of every kind are there: fast, slow and mixed.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN_YARN = YARN | {"beta_fast": 8, "beta_slow": 1}
OSS_YARN = YARN | {"beta_fast": 8.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"beta_fast": 8, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7}
FIVE = {"num_hidden_layers": 5, "rope_parameters": YARN}
MODELS = {
    # a dense layer between layers with experts; weights renormalised over the chosen experts, and not
    "qwen-mixed": ("Qwen3Moe", {"num_experts": 16, "mlp_only_layers": [2], "norm_topk_prob": True}),
    "qwen-every-second": ("Qwen3Moe", {"num_experts": 16, "decoder_sparse_step": 2, "norm_topk_prob": False}),
    # angles scaled for longer sequences
    "qwen-yarn": ("Qwen3Moe", {"num_experts": 16, "rope_parameters": PLAIN_YARN}),
    # 2 of 4 groups, everything optional on
    "glm-groups": ("Glm4Moe", GLM | {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True}),
    # like the smaller published one: no groups, no query and key norms
    "glm-plain": ("Glm4Moe", GLM | {"attention_bias": True}),
    # groups of which a token takes as many as experts, so that megatron would rank them by one expert; a number of
    # layers that stages cannot share evenly
    "deepseek": ("DeepseekV3", LATENT | FIVE | {"q_lora_rank": 24, "n_group": 8, "topk_group": 4}),
    # queries without a down-projection, plain angles, no groups
    "moonlight": ("DeepseekV3", LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "gpt-oss": ("GptOss", {"num_local_experts": 16, "sliding_window": 4, "rope_parameters": OSS_YARN}),
}
# the embedding is also the output matrix
MODELS |= {
    name.partition("-")[0] + "-tied": (family, settings | {"tie_word_embeddings": True})
    for name in ("qwen-mixed", "glm-groups", "moonlight", "gpt-oss")
    for family, settings in [MODELS[name]]
}


def write_checkpoint(name, folder, seed=0, **sizes):
    """A random model of MODELS, routers and logits sharper and every bias larger than at initialisation.

    sizes: keys of config.json that are to be others."""
    quiet()
    import transformers

    family, settings = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | settings | sizes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.05)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    if family == "DeepseekV3":  # as published, and not as transformers saves it
        config = json.loads((folder / "config.json").read_text())
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def recorded_load(facts):
    """{layer: tokens of the batch that each expert gets, float32 [E]} by the recorded routes."""
    _, routes = batch(facts)
    table = torch.from_numpy(np.concatenate(routes).astype(np.int64))  # [T, L, K]
    loads = (layer.flatten().bincount(minlength=facts.num_experts).float() for layer in table.unbind(1))
    return dict(zip(facts.moe_layers, loads, strict=True))
