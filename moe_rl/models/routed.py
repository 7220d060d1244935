"""Reads the numbers of experts and layers from the config.json of any mixture of experts, trained here or not.

Families that are not trained here spell the keys differently, or have them in a nested config next to that of a vision
tower. They differ too much in how they say which layers have experts, so the user must give these layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# As transformers and vLLM spell them.
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
    "num_moe_experts",
    "n_experts",
    "moe_num_primary_experts",
)
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "experts_per_token",
    "num_selected_experts",
    "moe_num_active_primary_experts",
)
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
# Parts of a model other than the text decoder.
_BESIDE = ("vision", "visual", "audio", "talker", "code2wav", "draft")


@dataclass(frozen=True, slots=True)
class Experts:
    """Holds what a config.json says about experts.

    Attributes:
        where: names of the nested configs that have the keys, joined by dots; "" for the file itself.
        top_k: experts per token; None if not given.
        layers: decoder layers; None if not given.
    """

    where: str
    num_experts: int
    top_k: int | None
    layers: int | None

    def __str__(self) -> str:
        within = f" in {self.where}" if self.where else ""
        return f"{self.num_experts} experts{within}, {self.top_k or 'an unknown number'} of them for a token"


def find_experts(raw: dict[str, Any]) -> Experts | None:
    """Return the experts of a model's decoder, None for a dense model. raw: its config.json."""
    for names, sections in _sections(raw):
        experts = _number(sections[:1], _EXPERTS)
        # A dense model may have the keys of its family with null, 0 or 1.
        if experts is not None and experts > 1 and sections[0].get("enable_moe_block") is not False:
            return Experts(".".join(names), experts, _number(sections, _TOP_K), _number(sections, _LAYERS))
    return None


def family_name(raw: dict[str, Any]) -> str:
    """Return the class of a model, or its type if config.json names no class."""
    classes = raw.get("architectures")
    named = classes if isinstance(classes, list) and classes else [raw.get("model_type", "no architecture")]
    return ", ".join(map(str, named))


def _sections(raw: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    """Yield (names, [section, its parent, ..., the file]) for the file and its nested configs, outer first, without
    those of parts other than the text decoder."""
    level: list[tuple[tuple[str, ...], list[dict[str, Any]]]] = [((), [raw])]
    while level:
        yield from level
        level = [
            ((*names, name), [section, *outer])
            for names, outer in level
            for name, section in outer[0].items()
            if isinstance(section, dict) and not any(part in name for part in _BESIDE)
        ]


def _number(sections: Sequence[dict[str, Any]], keys: Sequence[str]) -> int | None:
    """Return the first whole number under one of the keys. A list, one number per layer or modality, counts if all its
    numbers are equal."""
    for section in sections:
        for key in keys:
            value = section.get(key)
            if isinstance(value, list) and value and all(one == value[0] for one in value):
                value = value[0]
            if type(value) is int:
                return value
    return None
