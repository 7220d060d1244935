"""Names the adapters of a model as the library `peft` does, and checks a folder of adapters that it wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from moe_rl.errors import About, ConfigError, Problem, describe, first_of
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import layer_weights
from moe_rl.models.safetensors_header import read_header
from moe_rl.models.weight_table import Shape, Weight

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
# Settings of peft under which an adapter is more than alpha / rank * B A, or another one in some modules.
_OTHER_KINDS = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")


def of_first_expert(name: str) -> str:
    """Return the name of the same tensor or module of the layer's first expert, under which all experts' is stored."""
    return re.sub(r"\.experts\.\d+\.", ".experts.0.", name)


def target_of(weight: Weight) -> str:
    """Return which target an adapter of this weight belongs to: attention, mlp (dense layers and shared experts) or
    experts; "" if it gets none."""
    module, _, kind = weight.parameter.rpartition(".")
    if kind != "weight" or ".linear_" not in module:
        return ""
    return "attention" if module.startswith("self_attention.") else "experts" if weight.experts else "mlp"


def adapter_tensors(facts: ModelFacts, rank: int, targets: Collection[str]) -> dict[str, Shape]:
    """Return the shapes of all adapters by name: A [rank, inputs] and B [outputs, rank]."""
    shapes: dict[str, Shape] = {}
    for layer in range(facts.layers):
        for weight in layer_weights(facts, layer):
            if target_of(weight) not in targets:
                continue
            for number in range(facts.num_experts) if weight.experts else (0,):
                for name, (outputs, inputs) in weight.tensors.items():
                    module = f"{PREFIX}model.layers.{layer}.{name.format(expert=number).removesuffix('.weight')}"
                    shapes[f"{module}.lora_A.weight"] = (rank, inputs)
                    shapes[f"{module}.lora_B.weight"] = (outputs, rank)
    return shapes


def folder_problems(
    folder: Path, facts: ModelFacts, rank: int, alpha: float, targets: Collection[str], *, key: str
) -> Iterator[Problem]:
    """Yield why a run cannot begin with the adapters in a folder. Reads no tensor.

    Args:
        key: The setting that names the folder.
    """
    where: About = {"key": key, "folder": folder}
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        got = {name: config[name] for name in ("r", "lora_alpha")}
        header = read_header(folder / WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        yield describe(
            "it has no adapters of peft", where=where, got=repr(error)[:200], expected=f"{CONFIG} and {WEIGHTS}"
        )
        return
    if got != (expected := {"r": rank, "lora_alpha": alpha}):
        yield describe("its adapters have another rank or scale", where=where, got=got, expected=expected)
        return
    if other := [name for name in _OTHER_KINDS if config.get(name)]:
        yield describe("its adapters are of another kind", where=where, got=", ".join(other), expected="plain LoRA")
    due, held = adapter_tensors(facts, rank, targets), {name: shape for name, (_, shape, *_) in header.items()}
    wrong = [f"no {name}" for name in due if name not in held]
    wrong += [f"{name}, which train.lora.targets does not name" for name in held if name not in due]
    wrong += [f"{name} of shape {held[name]}" for name in due if name in held and tuple(held[name]) != due[name]]
    if wrong:
        yield describe(
            "its adapters are not those that the run trains",
            where=where,
            got=first_of(wrong),
            expected=f"{len(due)} tensors of the targets {', '.join(targets)}",
        )
