"""Refuses settings of megatron-core under which it would not compute with the recorded routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moe_rl.errors import Fact, Problem, describe

_OFF = "off"
# {setting: (whether a value must be refused, what it would do, what to set instead)}
_BYPASSES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "moe_router_fusion": (bool, "the fused router chooses experts without using the recorded ones", _OFF),
    "moe_router_load_balancing_type": (
        lambda kind: kind in ("sinkhorn", "quantile_balancing"),
        "this balancing chooses its own experts and ignores the recorded ones",
        "none or an auxiliary loss",
    ),
    "moe_expert_capacity_factor": (lambda factor: factor is not None, "a full expert drops recorded assignments", _OFF),
    "moe_expert_rank_capacity_factor": (
        lambda factor: factor is not None,
        "a full rank drops recorded assignments",
        _OFF,
    ),
    "moe_token_dropping": (bool, "a full expert drops recorded assignments", _OFF),
    "moe_input_jitter_eps": (
        lambda size: size is not None,
        "the weights of the recorded experts would come from noisy inputs",
        _OFF,
    ),
    "moe_router_force_load_balancing": (
        bool,
        "the weights of the recorded experts would come from random logits",
        _OFF,
    ),
    "moe_router_force_biased": (
        lambda bias: bias is not None,
        "the weights of the recorded experts would come from logits with a random bias",
        _OFF,
    ),
    "moe_enable_routing_replay": (
        bool,
        "megatron's own replay would have no effect, because the replay pass replaces it",
        _OFF,
    ),
    "moe_token_dispatcher_type": (
        lambda kind: kind not in ("alltoall", "flex"),
        "what this dispatcher exchanges cannot be compared with the record",
        "alltoall or flex",
    ),
    "moe_router_padding_for_quantization": (
        bool,
        "rows would be sent to experts that were not recorded, after the comparison with the record",
        _OFF,
    ),
    "moe_router_padding_for_fp8": (
        bool,
        "rows would be sent to experts that were not recorded, after the comparison with the record",
        _OFF,
    ),
    "cuda_graph_impl": (
        lambda kind: kind != "none",
        "a captured graph repeats the routes of the pass that it was captured in",
        "none",
    ),
    "mrope_section": (
        lambda section: section is not None,
        "the rotary angles of a packed run would be those of other tokens",
        "null",
    ),
    "enable_cuda_graph": (bool, "a captured graph repeats the routes of the pass that it was captured in", _OFF),
    "external_cuda_graph": (bool, "a captured graph repeats the routes of the pass that it was captured in", _OFF),
}

# {setting: (whether a value lets the dispatcher follow no plan, why)}
NO_PLAN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "moe_token_dispatcher_type": (
        lambda kind: kind == "flex",
        "dispatch plans work with the all-to-all dispatcher only",
    ),
    "moe_permute_fusion": (bool, "the fused permutation needs its own row map, which a dispatch plan does not contain"),
}


def bypasses(settings: Mapping[str, Any], lead: Fact = "setting", front: str = "") -> Iterator[Problem]:
    """Yield a problem for each setting that bypasses or changes replayed routes, or corrupts the pass.

    Args:
        settings: Settings of Megatron's TransformerConfig, all or some.
        lead, front: How messages name a setting: as this fact, with this text before it.
    """
    rules = {name: rule for name, rule in _BYPASSES.items() if name in settings and rule[0](settings[name])}
    if (
        settings.get("batch_p2p_comm")
        and settings.get("pipeline_model_parallel_size") == 2
        and settings.get("virtual_pipeline_model_parallel_size") is not None
    ):
        reason = "with two interleaved stages both neighbours are one rank, which confuses their batched messages"
        rules["batch_p2p_comm"] = (bool, reason, _OFF)
    for name, (_, reason, instead) in rules.items():
        yield describe(reason, where={lead: f"{front}{name}"}, got=settings[name], expected=instead)
