"""Refuses settings of megatron-core under which it would not compute with the recorded routes."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from moe_rl.errors import ConfigError, describe


def refuse_bypasses(config: TransformerConfig) -> None:
    """Raise ConfigError for settings that bypass or change replayed routes, or corrupt the pass; one message per
    setting."""
    # (setting, whether it must be refused, what it would do, what to set instead)
    settings = [
        (
            "moe_router_fusion",
            config.moe_router_fusion,
            "the fused router chooses experts without using the recorded ones",
            "off",
        ),
        (
            "moe_router_load_balancing_type",
            config.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"),
            "this balancing chooses its own experts and ignores the recorded ones",
            "none or an auxiliary loss",
        ),
        (
            "moe_expert_capacity_factor",
            config.moe_expert_capacity_factor is not None,
            "a full expert drops recorded assignments",
            "off",
        ),
        (
            "moe_expert_rank_capacity_factor",
            config.moe_expert_rank_capacity_factor is not None,
            "a full rank drops recorded assignments",
            "off",
        ),
        (
            "moe_router_force_load_balancing",
            config.moe_router_force_load_balancing,
            "the weights of the recorded experts would come from random logits",
            "off",
        ),
        (
            "moe_router_force_biased",
            config.moe_router_force_biased is not None,
            "the weights of the recorded experts would come from logits with a random bias",
            "off",
        ),
        (
            "moe_enable_routing_replay",
            config.moe_enable_routing_replay,
            "megatron's own replay would have no effect, because the replay session replaces it",
            "off",
        ),
        (
            "moe_token_dispatcher_type",
            config.moe_token_dispatcher_type != "alltoall",
            "dispatch plans work with the all-to-all dispatcher only",
            "alltoall",
        ),
        (
            "moe_permute_fusion",
            config.moe_permute_fusion,
            "the fused permutation needs its own row map, which a dispatch plan does not contain",
            "off",
        ),
        (
            "moe_router_padding_for_quantization",
            config.moe_router_padding_for_quantization,
            "rows would be sent to experts that were not recorded, after the comparison with the record",
            "off",
        ),
        (
            "cuda_graph_impl",
            config.cuda_graph_impl != "none",
            "a captured graph repeats the routes of the pass that it was captured in",
            "none",
        ),
        (
            "batch_p2p_comm",
            config.batch_p2p_comm
            and config.pipeline_model_parallel_size == 2
            and config.virtual_pipeline_model_parallel_size is not None,
            "with two interleaved stages both neighbours are one rank, which confuses their batched messages",
            "off",
        ),
    ]
    found = [
        describe(reason, where={"setting": name}, got=getattr(config, name), expected=instead)
        for name, refused, reason, instead in settings
        if refused
    ]
    if found:
        raise ConfigError(found)
