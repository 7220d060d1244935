"""The numbers of a model, and how config.json is searched for them: what every model family shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from moe_rl.errors import About, Problem, describe


@dataclass(frozen=True, slots=True)
class LatentAttentionSizes:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads come from
    kv_rank numbers a token, queries from q_rank (0: from the hidden state). A head's queries and keys are nope_dim
    dimensions without position and rope_dim with; the latter of keys are one for all heads. Values have value_dim.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (arXiv 2309.00071): angles of slow dimensions are divided by `factor`, those of fast ones are not.

    positions: the model's before it was stretched. fast, slow: turns over these between which the two are mixed.
    truncate: whether the bounds of this mixture are whole dimensions. mscale, mscale_all_dim: with m(s) = 0.1 s
    ln(factor) + 1, rotated vectors are m(mscale) / m(mscale_all_dim) as large, and latent attention's logits the square
    of m(mscale_all_dim); None, both: the vectors are m(1) as large, as in the paper, and the logits as they were.
    """

    factor: float
    positions: int
    fast: float
    slow: float
    truncate: bool
    mscale: float | None
    mscale_all_dim: float | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The numbers of a model. architecture: as config.json names it. moe_layers: 0-based numbers of the layers with
    experts.

    score_function: what makes the router's logits into scores, over all experts. norm_topk_prob: the weights of the
    chosen experts are their scores divided by the sum of these. routed_scaling: factor on the weights, last of all.
    expert_bias: a number per expert, kept in float32, is added to the scores where experts are chosen and nowhere else.
    groups, top_groups: the experts are in so many groups of equal size; a token chooses from its best top_groups. 1, 1:
    from all. shared_intermediate_size: width of the expert that every token passes besides; 0: none.
    rotary_fraction: share of a head's dimensions that are rotated. mtp_layers: multi-token-prediction layers behind the
    decoder, which are not trained.
    latent: multi-head latent attention; kv_heads is then heads, head_dim that of queries and keys. yarn: None where
    angles are plain. window, windowed_layers: a token of these layers sees so many, itself included. sinks: each head
    has a logit more, learned, that takes part in the softmax and of no token. linear_bias: attention's output, routers
    and experts have biases. glu_clamp: a SwiGLU whose gate g is at most this and sigmoid(1.702 g) g, and whose linear
    part is within plus and minus this and then 1 larger; None: the plain one.
    eos_token_ids: of config.json, then those only generation_config.json adds. fingerprint: hex sha256 of config.json
    with sorted keys and without the keys that say who wrote it.
    """

    architecture: str
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
    latent: LatentAttentionSizes | None = None
    yarn: Yarn | None = None
    window: int = 0
    windowed_layers: tuple[int, ...] = ()
    sinks: bool = False
    linear_bias: bool = False
    glu_clamp: float | None = None

    @property
    def cache_width(self) -> int:
        """Numbers that a sampler's KV cache holds of a token and layer."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim


class Fields:
    """Typed look-ups in config.json that collect what is wrong instead of stopping at the first."""

    def __init__(self, raw: dict[str, Any], where: About):
        self.raw, self.where = raw, where
        self.problems: list[Problem] = []

    def wrong(self, key: str, got: Any, expected: str) -> None:
        self.problems.append(
            describe(
                "wrong value", where={"key": "model.path", "field": key, **self.where}, got=repr(got), expected=expected
            )
        )

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

    def plain_rope(self, rope: dict[str, Any]) -> None:
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            self.wrong("rope_parameters", rope, "rope_type 'default', nothing else is built")

    def only(self, key: str, supported: Any) -> None:
        value = self.raw.get(key, supported)
        if value != supported:
            self.wrong(key, value, f"{supported!r}, nothing else is built")


def yarn(read: Fields, rope: dict[str, Any]) -> Yarn | None:
    """Read the numbers of YaRN; None where angles are plain. Problems are left in `read`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        read.wrong("rope_parameters", rope, "rope_type 'default' or 'yarn', nothing else is built")
        return None
    if rope.get("attention_factor") is not None:
        read.wrong("rope_parameters.attention_factor", rope["attention_factor"], "none: it follows from the others")

    def number(key: str, default: float | None = None) -> float:
        return read.number(f"rope_parameters.{key}", rope.get(key, default))

    positions = rope.get("original_max_position_embeddings")
    if type(positions) is not int or positions < 1:
        read.wrong("rope_parameters.original_max_position_embeddings", positions, "a whole number from 1")
        positions = 1
    scales = [rope.get(key) or None for key in ("mscale", "mscale_all_dim")]
    if scales.count(None) == 1:
        read.wrong("rope_parameters.mscale and .mscale_all_dim", scales, "both or none: one is read in different ways")
    return Yarn(
        factor=number("factor"),
        positions=positions,
        fast=number("beta_fast", 32.0),
        slow=number("beta_slow", 1.0),
        truncate=rope.get("truncate", True) is not False,
        mscale=number("mscale") if scales[0] else None,
        mscale_all_dim=number("mscale_all_dim") if scales[1] else None,
    )


def sigmoid_routing(read: Fields, *, layers: int, top_k: int, dense_default: int) -> dict[str, Any]:
    """Read the routing that DeepSeek-V3 brought: the fields of ModelFacts about layers with experts.

    Scores are sigmoids, a bias acts where experts are chosen, experts lie in groups, shared experts and leading dense
    layers stand beside them (arXiv 2412.19437, section 2.1.2). dense_default: leading dense layers where config.json
    names no number.
    """
    dense = read.count("first_k_dense_replace", default=dense_default, least=0)
    if dense >= layers:
        read.wrong("first_k_dense_replace", dense, f"below num_hidden_layers = {layers}: no layer has routes to replay")
    experts = read.count("n_routed_experts", "num_local_experts", least=2, most=2048)
    # Megatron always divides a token's sigmoid scores by their sum, but does not for one expert a token.
    read.only("norm_topk_prob", True)
    if top_k == 1:
        read.wrong("num_experts_per_tok", 1, "at least 2: the one expert's weight is always the same, no router learns")
    groups, top_groups = _groups(read, experts, top_k)
    width = read.count("moe_intermediate_size")
    return {
        "moe_layers": tuple(range(dense, layers)),
        "num_experts": experts,
        "moe_intermediate_size": width,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling": read.number("routed_scaling_factor", read.raw.get("routed_scaling_factor", 1.0)),
        "expert_bias": True,
        "groups": groups,
        "top_groups": top_groups,
        "shared_intermediate_size": width * read.count("n_shared_experts", default=1),
    }


def _groups(read: Fields, experts: int, top_k: int) -> tuple[int, int]:
    """Return (n_group, topk_group); (1, 1) where tokens choose from all groups."""
    groups, top_groups = read.count("n_group", default=1), read.count("topk_group", default=1)
    if experts % groups:
        read.wrong("n_group", groups, f"a divisor of n_routed_experts = {experts}")
    elif top_groups > groups:
        read.wrong("topk_group", top_groups, f"at most n_group = {groups}")
    elif top_groups * (experts // groups) < top_k:
        read.wrong("topk_group", top_groups, f"groups with num_experts_per_tok = {top_k} experts together")
    elif top_groups == groups:
        return 1, 1
    # A group's score is the sum of its two best experts'.
    elif experts // groups < 2:
        read.wrong("n_group", groups, f"groups of at least 2 of the n_routed_experts = {experts}")
    return groups, top_groups
