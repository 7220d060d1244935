"""Lists tiny shapes whose activations are measured."""

from __future__ import annotations

from dataclasses import dataclass

from moe_rl.config.training import OptimizerConfig, TrainConfig
from moe_rl.models.facts import LatentAttentionSizes, ModelFacts
from moe_rl.types import LOGITS_AT_ONCE

EVEN = ((64, 64), (64, 64), (64, 64), (64, 65))
LONG_PROMPTS = ((200, 56), (240, 16))
EVERY = ("attention", "mlp", "experts")
UNEVEN = ((200, 56), (10, 90))


@dataclass(frozen=True)
class Case:
    """lengths: (prompt, completion) of each sequence of the microbatch. logits_at_once: of a rank."""

    name: str
    facts: ModelFacts
    train: TrainConfig
    lengths: tuple[tuple[int, int], ...]
    logits_at_once: int = LOGITS_AT_ONCE


def cases() -> list[Case]:
    from tests.megatron.models import facts

    plain = {
        "hidden_size": 64, "heads": 8, "kv_heads": 2, "head_dim": 16, "moe_intermediate_size": 48,
        "intermediate_size": 160, "vocab": 256, "num_experts": 8, "top_k": 2, "max_position_embeddings": 512,
        "layers": 4, "moe_layers": (0, 1, 2, 3),
    }  # fmt: skip
    sigmoid = {"score_function": "sigmoid", "expert_bias": True, "shared_intermediate_size": 48, "qk_norm": False}
    glm = sigmoid | {"architecture": "Glm4MoeForCausalLM", "moe_layers": (1, 2, 3)}
    latent = LatentAttentionSizes(q_rank=48, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)
    deepseek = sigmoid | {"architecture": "DeepseekV3ForCausalLM", "kv_heads": 8, "head_dim": 24, "latent": latent}
    gpt_oss = {
        "architecture": "GptOssForCausalLM", "qk_norm": False, "attention_bias": True, "linear_bias": True,
        "sinks": True, "glu_clamp": 7.0, "window": 32, "windowed_layers": (0, 2),
    }  # fmt: skip

    def case(name, model=(), lengths=EVEN, logits_at_once=LOGITS_AT_ONCE, **train):
        train = TrainConfig(microbatch_tokens=512, optimizer=OptimizerConfig(lr=1e-3), **train)
        return Case(name, facts(**(plain | dict(model))), train, lengths, logits_at_once)

    uniform, many = {"recompute": "uniform"}, {"num_experts": 32, "top_k": 8, "moe_intermediate_size": 24}
    return [
        case("everything kept"),
        case("float32", dtype="float32"),
        case("dense layers", {"moe_layers": (3,)}),
        case("uniform", **uniform),
        case("uniform, float32", dtype="float32", **uniform),
        case("uniform, two layers together", recompute_layers=2, **uniform),
        case("block", recompute="block", recompute_layers=2),
        case("moe", recompute="moe"),
        case("large vocabulary, long prompts", {"vocab": 4096}, LONG_PROMPTS, **uniform),
        case("logits in chunks", {"vocab": 8192}, logits_at_once=1 << 18, **uniform),
        case("logits in chunks, float32", {"vocab": 8192}, logits_at_once=1 << 18, dtype="float32", **uniform),
        case("many experts, uneven lengths", many, UNEVEN, **uniform),
        case("glm", glm),
        case("deepseek", deepseek),
        case("deepseek, uniform", deepseek, **uniform),
        case("adapters", lora={"rank": 8, "alpha": 16}),
        case("adapters, uniform", lora={"rank": 8, "alpha": 16}, **uniform),
        case("adapters of many experts, float32", many, UNEVEN, dtype="float32", lora={"rank": 8, "alpha": 16}),
        case(
            "adapters, logits in chunks",
            {"vocab": 8192},
            logits_at_once=1 << 18,
            lora={"rank": 8, "alpha": 16},
            **uniform,
        ),
        case("adapters, glm, moe", glm, recompute="moe", lora={"rank": 8, "alpha": 16, "targets": EVERY}),
        case("adapters of experts that share", lora={"rank": 8, "alpha": 16, "shared_outer": True}),
        case("gpt-oss", gpt_oss),
        case("gpt-oss, uniform", gpt_oss, **uniform),
    ]
