"""The numbers of a model, and how config.json is searched for them: what every model family shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from moe_rl.errors import describe


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The numbers of a model. moe_layers: 0-based numbers of the layers with experts.

    score_function: what makes the router's logits into scores, over all experts. norm_topk_prob: the weights of the
    chosen experts are their scores divided by the sum of these. routed_scaling: factor on the weights, last of all.
    expert_bias: a number per expert, kept in float32, is added to the scores where experts are chosen and nowhere else.
    groups, top_groups: the experts are in so many groups of equal size; a token chooses from its best top_groups. 1, 1:
    from all. shared_intermediate_size: width of the expert that every token passes besides; 0: none.
    rotary_fraction: share of a head's dimensions that are rotated. mtp_layers: multi-token-prediction layers behind the
    decoder, which are not trained.
    eos_token_ids: of config.json, then those only generation_config.json adds. fingerprint: hex sha256 of config.json
    with sorted keys and without the keys that say who wrote it.
    """

    vocab: int
    hidden_size: int
    layers: int
    moe_layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    attention_bias: bool
    qk_norm: bool
    rotary_fraction: float
    intermediate_size: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    top_k: int
    score_function: Literal["softmax", "sigmoid"]
    norm_topk_prob: bool
    routed_scaling: float
    expert_bias: bool
    groups: int
    top_groups: int
    mtp_layers: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    fingerprint: str


class Fields:
    """Typed look-ups in config.json that collect what is wrong instead of stopping at the first."""

    def __init__(self, raw: dict[str, Any], where: str):
        self.raw, self.where, self.problems = raw, where, []

    def wrong(self, key: str, got: Any, expected: str) -> None:
        self.problems.append(describe(f"model.path: {key}", where=self.where, got=repr(got), expected=expected))

    def count(self, *keys: str, default: int | None = None, least: int = 1, most: int = 2**31) -> int:
        key = next((key for key in keys if self.raw.get(key) is not None), keys[0])
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            self.wrong(key, value, f"a whole number from {least} to {most}")
            return least
        return value

    def number(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
            self.wrong(key, value, "a number above 0")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if type(value) is not bool:
            self.wrong(key, value, "true or false")
            return default
        return value

    def only(self, key: str, supported: Any) -> None:
        value = self.raw.get(key, supported)
        if value != supported:
            self.wrong(key, value, f"{supported!r}, nothing else is built")
