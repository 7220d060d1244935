"""Reads the numbers of experts and layers from the config.json of any mixture of experts, trained here or not.

Families that are not trained here spell the keys differently, or have them in a nested config next to that of a vision
tower. They differ too much in how they say which layers have experts, so the user must give these layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Names of keys: a number of experts, such as num_experts, moe_num_experts, n_routed_experts, expert_num and
# num_experts_list; a number of experts per token, such as num_experts_per_tok, moe_topk and top_k_experts.
_EXPERTS = re.compile(r"(.*_)?((num|n|nb|total)_(.*_)?experts?(_list|_count)?|experts?_(num|number|count)|experts)")
_TOP_K = re.compile(
    r"(.*_)?(experts?_per_tok(en)?(_list)?|top_?k_experts?|experts?_(top_?k|used|used_count)|(moe|router)_(.*_)?(top_?)?k"
    r"|(selected|active|activated|used)_(.*_)?experts)"
)
_OTHER = re.compile("shared|redundant|zero|mtp|draft|vision|audio|used|(^|_)(per|top|selected|active|activated)(_|$)")
_BARE_TOP_K = re.compile("top_?k")  # outside of a section about experts these are settings of sampling
_LAYERS = re.compile("num_hidden_layers|n_layers|num_layers|n_layer")
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
    parts: list[Experts] = []
    for names, sections in _sections(raw):
        experts = _number(sections[:1], _EXPERTS, but=_OTHER)
        # A dense model may have the keys of its family with null, 0 or 1.
        if experts is not None and experts > 1 and sections[0].get("enable_moe_block") is not False:
            top_k = _number(sections, _TOP_K)
            if top_k is None and any("moe" in name for name in names):
                top_k = _number(sections[:1], _BARE_TOP_K)
            parts.append(Experts(".".join(names), experts, top_k, _number(sections, _LAYERS)))
    alike = [part for part in parts if part.where == parts[0].where]  # one section for each layer
    return max(alike, key=lambda part: part.num_experts, default=None)


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
            for name, value in outer[0].items()
            for section in (value if isinstance(value, list) else [value])
            if isinstance(section, dict) and not any(part in name for part in _BESIDE)
        ]


def _number(
    sections: Sequence[dict[str, Any]], keys: re.Pattern[str], but: re.Pattern[str] | None = None
) -> int | None:
    """Return the largest whole number under one of the keys, in the first section that has any. A list has one number
    per layer or modality."""
    for section in sections:
        values = [value for key, value in section.items() if keys.fullmatch(key) and not (but and but.search(key))]
        flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
        if numbers := [item for item in flat if type(item) is int]:
            return max(numbers)
    return None
