"""Finds what cannot run with adapters (`train.lora`): settings that need trained weights, and settings under which no
test has shown that adapters learn what they should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_rl.config.schema import Config
from moe_rl.errors import Problem, describe
from moe_rl.models.facts import ModelFacts
from moe_rl.models.peft import folder_problems

_FROZEN = "routers are frozen beside adapters"
_UNPROVEN = "not tested with adapters"


def lora_problems(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield the problems of a config that trains adapters. facts None: not known."""
    lora, train = config.train.lora, config.train
    if lora is None:
        return
    yield from lora.problems()
    refused: tuple[tuple[str, Any, Any, str], ...] = (
        ("train.router_aux_loss", train.router_aux_loss, 0, _FROZEN),
        ("train.expert_bias_rate", train.expert_bias_rate, 0, _FROZEN),
        ("train.delay_wgrad_compute", train.delay_wgrad_compute, False, "TransformerEngine's layers get no adapters"),
        ("train.megatron", train.megatron, {}, _UNPROVEN),
        ("train.megatron_optimizer", train.megatron_optimizer, {}, _UNPROVEN),
        ("placement.experts", config.placement.experts, "natural", "adapters do not move with their experts"),
        ("placement.copies", config.placement.copies, 0, "adapters are not copied with their experts"),
        ("model.from_run", config.model.from_run, None, "another run's checkpoint has no adapters of this one"),
    )
    for key, got, expected, what in refused:
        if got != expected:
            do = "change it, or set train.lora to null"
            yield describe(what, where={"key": key, "given": "train.lora is set"}, got=got, expected=expected, do=do)
    if lora.sync == "adapter" and config.rollout.weights != "exact":
        yield describe(
            "a sampler that merges adapters itself does not round the sum to another precision",
            where={"key": "rollout.weights", "given": "train.lora.sync is adapter"},
            got=config.rollout.weights,
            expected="exact",
            do="set train.lora.sync to merged",
        )
    if facts is None:
        return
    if facts.linear_bias:
        yield describe(
            "not tested with adapters: its linear layers have biases, and its experts are stacked in shared tensors",
            where={"key": "train.lora", "folder": config.model.path},
            got="a model of this family",
            expected="null",
        )
    dense = len(facts.moe_layers) < facts.layers or facts.shared_intermediate_size
    if "mlp" in lora.targets and not dense:
        yield describe(
            "the model has neither dense layers nor shared experts",
            where={"key": "train.lora.targets", "folder": config.model.path},
            got=list(lora.targets),
            expected="attention and experts only",
        )
    if lora.start is not None:
        yield from folder_problems(lora.start, facts, lora.rank, lora.alpha, lora.targets, key="train.lora.start")
