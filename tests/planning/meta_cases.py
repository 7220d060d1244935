"""Lists models and layouts whose planned bytes are compared with those of megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_rl.config.load import load_config
from moe_rl.config.training import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.models.facts import LatentAttentionSizes, ModelFacts
from moe_rl.models.hf import read_published

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    name: str
    facts: ModelFacts
    parallel: ParallelConfig
    train: TrainConfig
    world_size: int
    ranks: Sequence[int]


def _train(**changes) -> TrainConfig:
    return TrainConfig(microbatch_tokens=40, optimizer=OptimizerConfig(lr=1e-3), **changes)


def tiny_cases() -> list[Case]:
    """Use sizes that are no multiples of megatron's alignment."""
    from tests.megatron.models import facts

    glm = facts(
        architecture="Glm4MoeForCausalLM", layers=4, moe_layers=(1, 2, 3), shared_intermediate_size=8,
        expert_bias=True, attention_bias=True, qk_norm=False, score_function="sigmoid",
    )  # fmt: skip
    latent = LatentAttentionSizes(q_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, value_dim=6)
    deepseek = facts(
        architecture="DeepseekV3ForCausalLM", layers=2, moe_layers=(1,), shared_intermediate_size=8, expert_bias=True,
        qk_norm=False, score_function="sigmoid", kv_heads=2, head_dim=10, latent=latent,
    )  # fmt: skip
    gpt_oss = facts(
        architecture="GptOssForCausalLM", qk_norm=False, attention_bias=True, linear_bias=True, sinks=True,
        glu_clamp=7.0, kv_heads=2, window=8, windowed_layers=(0,),
    )  # fmt: skip
    tied = facts(kv_heads=2, tie_word_embeddings=True)
    shared, whole = ParallelConfig(tensor=2, expert=2, expert_tensor=2), ParallelConfig(tensor=2, expert_tensor=2)
    runs = ParallelConfig(expert=2, pipeline=2, virtual_pipeline=2, context=2)
    tied_stages = ParallelConfig(expert=2, pipeline=2, tensor=2)
    uneven = ParallelConfig(expert=2, pipeline=3, layers_per_run=(2, 1, 1))
    return [
        Case("qwen", facts(), ParallelConfig(expert=2), _train(), 4, (0, 1, 3)),
        Case("glm, stages in runs", glm, runs, _train(), 8, (0, 3, 4, 7)),
        Case("glm, uneven stages", glm, uneven, _train(), 6, (0, 3, 5)),
        Case("no expert parallelism", facts(kv_heads=2), whole, _train(), 4, (0, 3)),
        Case("tied, float32", tied, shared, _train(dtype="float32"), 8, (0, 5)),
        Case("tied, two stages", tied, tied_stages, _train(), 8, (0, 5)),
        Case("whole optimizer", facts(), ParallelConfig(expert=2), _train(distributed_optimizer=False), 4, (0, 3)),
        Case("deepseek", deepseek, ParallelConfig(tensor=2, expert=4), _train(), 8, (0, 3, 6)),
        Case("gpt-oss", gpt_oss, ParallelConfig(tensor=2, expert=2), _train(), 4, (0, 3)),
    ]


def real_cases() -> list[Case]:
    """Return the shipped configs at their real size, for the last rank, whose stage also has the output matrix. What
    they pass to Megatron's optimizer is left out: it needs a GPU and TransformerEngine."""
    models = {file.stem: read_published(file) for file in (ROOT / "configs/models").glob("*.json")}
    found = []
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        config, facts = load_config(file), next((models[name] for name in models if file.stem.startswith(name)), None)
        if config.cluster is not None and facts is not None:
            gpus, train = config.cluster.gpus, config.train.model_copy(update={"megatron_optimizer": {}})
            found.append(Case(file.stem, facts, config.parallel, train, gpus, (gpus - 1,)))
    return found


def cases() -> list[Case]:
    return tiny_cases() + real_cases()
