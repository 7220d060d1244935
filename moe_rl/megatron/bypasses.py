"""Settings of megatron-core under which it would not compute with the recorded routes: refused up front."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from moe_rl.errors import ConfigError, describe


def refuse_bypasses(config: TransformerConfig) -> None:
    """Raise ConfigError, one message for each setting that bypasses or alters replayed routes, or corrupts the pass."""
    # (setting, whether it is one to refuse, what it would do, what to set instead)
    settings = [
        (
            "moe_router_fusion",
            config.moe_router_fusion,
            "the fused router chooses experts before it looks at recorded ones",
            "off",
        ),
        (
            "moe_router_load_balancing_type",
            config.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"),
            "this balancing chooses experts of its own and never looks at recorded ones",
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
            "megatron's own replay, in whose place the session's stands, would be without effect",
            "off",
        ),
        (
            "moe_token_dispatcher_type",
            config.moe_token_dispatcher_type != "alltoall",
            "what a dispatch plan tells is what the all-to-all dispatcher asks for, and no other",
            "alltoall",
        ),
        (
            "moe_permute_fusion",
            config.moe_permute_fusion,
            "the fused permutation keeps a row map of its own, which a dispatch plan does not have",
            "off",
        ),
        (
            "moe_router_padding_for_quantization",
            config.moe_router_padding_for_quantization,
            "rows would be sent to experts that were not recorded, behind the comparison with the record",
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
            "with interleaved stages both neighbours are the same rank, and batched messages to it pair up crosswise",
            "off",
        ),
    ]
    found = [
        describe(f"{name}: {reason}", where="megatron config", got=getattr(config, name), expected=instead)
        for name, refused, reason, instead in settings
        if refused
    ]
    if found:
        raise ConfigError(found)
