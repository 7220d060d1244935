"""Facts of models without a checkpoint folder, and routes for them."""

import numpy as np
import torch

from moe_rl.config.training import OptimizerConfig, TrainConfig
from moe_rl.models.facts import ModelFacts
from moe_rl.replay.routes import SequenceRoutes, microbatch_routes
from moe_rl.replay.tables import MicrobatchRoutes
from moe_rl.trace import TraceSpec

TRAIN = TrainConfig(dtype="float32", microbatch_tokens=40, optimizer=OptimizerConfig(lr=1e-3))


def facts(**changes) -> ModelFacts:
    """Return facts of two layers with 12 experts, 4 per token, in the style of Qwen3-MoE with these changes."""
    plain = {
        "architecture": "Qwen3MoeForCausalLM",
        "vocab": 96,
        "hidden_size": 16,
        "layers": 2,
        "moe_layers": (0, 1),
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "attention_bias": False,
        "qk_norm": True,
        "rotary_fraction": 1.0,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "shared_intermediate_size": 0,
        "num_experts": 12,
        "top_k": 4,
        "score_function": "softmax",
        "norm_topk_prob": True,
        "routed_scaling": 1.0,
        "expert_bias": False,
        "groups": 1,
        "top_groups": 1,
        "mtp_layers": 0,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_ids": (1,),
        "dtype": "float32",
        "fingerprint": "",
    }
    return ModelFacts(**(plain | changes))


def table(routes: dict[int, torch.Tensor], experts: int) -> MicrobatchRoutes:
    """Make a microbatch of one sequence with these routes, {layer: [T, K]}, without padding."""
    stacked = torch.stack(list(routes.values()), 1).numpy().astype(np.uint8)
    tokens = np.arange(len(stacked))
    spec = TraceSpec.from_layers("test", experts, stacked.shape[2], tuple(routes), max(routes) + 1)
    return microbatch_routes(
        [SequenceRoutes.complete("s", tokens, stacked)],
        spec,
        layers=tuple(routes),
        names=["s"],
        fed=[tokens],
        source=None,
        padded_tokens=len(tokens),
        rows=slice(0, len(tokens)),
        expert_parallel=1,
        device=torch.device("cpu"),
    )
