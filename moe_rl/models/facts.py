"""Holds the numbers that describe a model, and the look-ups in config.json that all model families share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from moe_rl.errors import About, Problem, describe


@dataclass(frozen=True, slots=True)
class LatentAttentionSizes:
    """Describes multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        kv_rank: numbers per token from which the keys and values of all heads are computed.
        q_rank: numbers per token from which queries are computed. 0: from the hidden state.
        nope_dim: dimensions of a head's queries and keys without position.
        rope_dim: their dimensions with rotary position. All heads share those of the keys.
        value_dim: dimensions of a head's values.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """Describes YaRN (arXiv 2309.00071), which divides the angles of slow dimensions by `factor` and keeps those of
    fast dimensions.

    Attributes:
        positions: the number of positions of the model before YaRN.
        fast, slow: turns over these positions. Dimensions between the two limits mix both kinds of angles.
        truncate: whether the bounds of this mixture are whole dimensions.
        mscale, mscale_all_dim: with m(s) = 0.1 s ln(factor) + 1, rotated vectors are scaled by m(mscale) /
            m(mscale_all_dim), and the logits of latent attention by the square of m(mscale_all_dim). If both are None,
            vectors are scaled by m(1), as in the paper, and the logits are not scaled.
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
    """Holds the numbers that describe a model.

    Attributes:
        architecture: the name in config.json.
        moe_layers: 0-based numbers of the layers with experts.
        score_function: turns the router's logits into scores, over all experts.
        norm_topk_prob: whether the scores of the chosen experts are divided by their sum.
        routed_scaling: a factor on the weights, applied last.
        expert_bias: whether a float32 number per expert is added to the scores for the choice of experts, and only
            there.
        groups, top_groups: the number of expert groups of equal size, and how many of the best a token chooses from. 1,
            1: tokens choose from all experts.
        shared_intermediate_size: width of the shared expert that processes every token; 0 if there is none.
        rotary_fraction: fraction of a head's dimensions that are rotated.
        mtp_layers: number of multi-token-prediction layers after the decoder. They are not trained.
        latent: multi-head latent attention. kv_heads then equals heads, and head_dim is that of queries and keys.
        yarn: None if rotary angles are not scaled.
        window, windowed_layers: in these layers a token attends to the last `window` tokens, itself included.
        sinks: whether each head has a learned extra logit in the softmax that belongs to no token.
        linear_bias: whether attention's output, routers and experts have biases.
        glu_clamp: limit of a clamped SwiGLU. It computes g sigmoid(1.702 g), with g limited from above, times the
            linear part plus 1, with the linear part limited on both sides. None: a plain SwiGLU.
        eos_token_ids: ids of config.json, followed by those that only generation_config.json has.
        fingerprint: hex sha256 of config.json with sorted keys, without the keys that name the software that wrote it.
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
    def longest(self) -> int:
        """Return the number of positions for which vLLM serves the model: with YaRN it has angles for no more than
        factor x positions."""
        most = self.max_position_embeddings
        return most if self.yarn is None else min(most, int(self.yarn.positions * self.yarn.factor))

    @property
    def cache_width(self) -> int:
        """Return the numbers per token and layer in a sampler's KV cache."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim


_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_YARN = _ROPE | {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
_YARN |= {"attention_factor", "mscale", "mscale_all_dim"}
# Keys of other families, which vLLM or transformers reads for these too, and the only value that changes nothing.
FOREIGN: dict[str, Any] = {
    "is_causal": True,
    # Another description of the decoder, of its layers, or of its weights
    "text_config": None,
    "decoder": None,
    "generator": None,
    "text_encoder": None,
    "llm_config": None,
    "per_layer_config": None,
    "block_configs": None,
    "compression_config": None,
    # Another attention
    "attn_type_list": None,
    "alibi": None,
    "attn_config": None,
    "canvas_length": None,
    "dual_chunk_attention_config": None,
    "is_encoder_decoder": False,
    "is_mm_prefix_lm": None,
    "llama_4_scaling": None,
    "num_kv_heads": None,
    "n_head_kv": None,
    "rswa_window": None,
    # Another rotary position
    "rotary_pct": None,
    "rotary_emb_fraction": None,
    "rotary_emb_base": None,
    "mrope_section": None,
    "xdrope_section": None,
    # Logits of another precision
    "head_dtype": None,
}
# Keys of other families that vLLM only looks for: null has the same effect as a value.
UNWANTED = ("index_topk", "compress_ratios")
# Other names of max_position_embeddings. vLLM takes the smallest, and model_max_length before all others.
LENGTHS = (
    "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions", "max_sequence_length",
    "max_seq_length", "seq_len",
)  # fmt: skip


class Fields:
    """Looks up typed values in config.json, and collects all problems instead of stopping at the first.

    vLLM reads the same file through the config classes of transformers. Each value here is the value that these classes
    use; if we do not know it, the file is refused. So a null key is not an absent key, and two spellings of a key must
    not contradict each other. tests/models/test_config_json.py compares the two for every key.
    """

    def __init__(self, raw: dict[str, Any], where: About):
        self.raw, self.where = raw, where
        self.problems: list[Problem] = []

    def wrong(self, key: str, got: Any, expected: str) -> None:
        self.problems.append(
            describe(
                "wrong value", where={"key": "model.path", "field": key, **self.where}, got=repr(got), expected=expected
            )
        )

    def get(self, *keys: str, default: Any = None) -> tuple[str, Any]:
        """Return the spelling of a key that the file has, and its value; the first spelling and `default` if it has
        none."""
        values = {key: self.raw[key] for key in keys if key in self.raw}
        if len({repr(value) for value in values.values()}) > 1:
            self.wrong(" and ".join(values), list(values.values()), "one value: software disagrees on which key counts")
        return next(iter(values.items()), (keys[0], default))

    def count(self, *keys: str, default: int | None = None, least: int = 1, most: int = 2**31) -> int:
        key, value = self.get(*keys, default=default)
        if type(value) is not int or not least <= value <= most:
            self.wrong(key, value, f"a whole number from {least} to {most}")
            return least
        return value

    def number(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
            self.wrong(key, value, "a number above 0")
            return 1.0
        return float(value)

    def fraction(self, key: str, default: float | None = None) -> float:
        """Return a number that must have a decimal point: transformers refuses one without."""
        value = self.raw.get(key, default)
        if type(value) is not float:
            self.wrong(key, value, "a number with a decimal point")
            return 1.0
        return self.number(key, value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if type(value) is not bool:
            self.wrong(key, value, "true or false")
            return default
        return value

    def only(self, key: str, supported: Any, *, why: str = "") -> None:
        value = self.raw.get(key, supported)
        if type(value) is not type(supported) or value != supported:
            self.wrong(key, value, f"{supported!r}, the only supported value{why and f': {why}'}")


@dataclass(frozen=True, slots=True)
class Rope:
    """Holds what config.json says about rotary position.

    Attributes:
        key: where the file says it: rope_parameters, or rope_scaling in older files.
        given: the values there. `rope_type` is always among them.
        theta, fraction: `rope_theta` and `partial_rotary_factor`, given there or at the top level.
    """

    key: str
    given: dict[str, Any]
    theta: float
    fraction: float

    @classmethod
    def of(cls, read: Fields, *, theta: float, fraction: float) -> Rope:
        """Read both keys. theta, fraction: defaults. `read` collects the problems."""
        base = {
            "rope_theta": read.raw.get("rope_theta", theta),
            "partial_rotary_factor": read.raw.get("partial_rotary_factor", fraction),
        }
        sections = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = read.raw.get(key)
            if not isinstance(value, dict | None):
                read.wrong(key, value, "a mapping")
            elif value:
                sections[key] = base | {"rope_type": value.get("type", "default")} | value
                if value.get("type", sections[key]["rope_type"]) != sections[key]["rope_type"]:
                    read.wrong(f"{key}.rope_type and .type", [value["rope_type"], value["type"]], "one value")
                sections[key].pop("type", None)
        # transformers takes rope_scaling first, other software rope_parameters.
        if len(sections) > 1 and sections["rope_scaling"] != sections["rope_parameters"]:
            got = {key: read.raw[key] for key in sections}
            read.wrong(
                "rope_parameters and rope_scaling", got, "one of the two: software disagrees on which one counts"
            )
        key, settings = next(iter(sections.items()), ("rope_parameters", base | {"rope_type": "default"}))
        if unused := settings.keys() - (_ROPE if settings["rope_type"] == "default" else _YARN):
            names = ", ".join(sorted(unused))
            read.wrong(f"{key}.rope_type", settings["rope_type"], f"one that uses {names}, or no {names}")
        return cls(
            key,
            settings,
            read.number("rope_theta", settings["rope_theta"]),
            read.number("partial_rotary_factor", settings["partial_rotary_factor"]),
        )

    def plain(self, read: Fields) -> None:
        """Refuse scaled rotary angles."""
        if self.given["rope_type"] != "default":
            read.wrong(f"{self.key}.rope_type", self.given["rope_type"], "'default', the only supported one")

    def whole(self, read: Fields) -> None:
        """Refuse partly rotated heads: vLLM would rotate a part, transformers all of each head."""
        if self.fraction != 1:
            read.wrong("partial_rotary_factor", self.fraction, "1.0, the only supported value")


def yarn(read: Fields, rope: Rope) -> Yarn | None:
    """Read the numbers of YaRN; None if rotary angles are not scaled. Problems are collected in `read`."""
    given, kind = rope.given, rope.given["rope_type"]
    if kind == "default":
        return None
    if kind != "yarn":
        read.wrong(f"{rope.key}.rope_type", kind, "'default' or 'yarn', the supported ones")
        return None

    def number(key: str, default: float | None = None) -> float:
        return read.number(f"{rope.key}.{key}", given.get(key, default))

    if given.get("attention_factor") is not None:
        read.wrong(f"{rope.key}.attention_factor", given["attention_factor"], "no value: it follows from the others")
    positions = given.get("original_max_position_embeddings")
    if type(positions) is not int or positions < 1:
        read.wrong(f"{rope.key}.original_max_position_embeddings", positions, "a whole number from 1")
        positions = 1
    read.only("original_max_position_embeddings", positions, why=f"{rope.key} has it")
    truncate = given.get("truncate", True)
    if type(truncate) is not bool:
        read.wrong(f"{rope.key}.truncate", truncate, "true or false")
    scales = [key for key in ("mscale", "mscale_all_dim") if key in given]
    if len(scales) == 1:
        read.wrong(
            f"{rope.key}.mscale and .mscale_all_dim",
            [given.get("mscale"), given.get("mscale_all_dim")],
            "both or none: software disagrees on what one alone means",
        )
    return Yarn(
        factor=number("factor"),
        positions=positions,
        fast=number("beta_fast", 32.0),
        slow=number("beta_slow", 1.0),
        truncate=truncate is not False,
        mscale=number("mscale") if scales else None,
        mscale_all_dim=number("mscale_all_dim") if scales else None,
    )


def yarn_without_scales(read: Fields, rope: Rope) -> Yarn | None:
    """Read YaRN as `yarn`, and refuse mscale, which only latent attention has."""
    scaled = yarn(read, rope)
    if scaled is not None and scaled.mscale is not None:
        read.wrong(f"{rope.key}.mscale and .mscale_all_dim", scaled.mscale, "no value: software reads them differently")
    return scaled


@dataclass(frozen=True, slots=True)
class SigmoidDefaults:
    """Holds the defaults of transformers' config classes for keys that config.json lacks."""

    first_k_dense_replace: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float


def sigmoid_routing(read: Fields, *, layers: int, top_k: int, default: SigmoidDefaults) -> dict[str, Any]:
    """Read the routing that DeepSeek-V3 introduced: the fields of ModelFacts about layers with experts.

    Scores are sigmoids, a bias affects only the choice of experts, and experts form groups. The model also has shared
    experts and leading dense layers (arXiv 2412.19437, section 2.1.2).

    """
    dense = read.count("first_k_dense_replace", default=default.first_k_dense_replace, least=0)
    if dense >= layers:
        read.wrong(
            "first_k_dense_replace",
            dense,
            f"below num_hidden_layers = {layers}: without layers with experts there are no routes to replay",
        )
    experts = read.count("n_routed_experts", "num_local_experts", least=2, most=2048)
    # Megatron always divides a token's sigmoid scores by their sum, except with one expert per token.
    read.only("norm_topk_prob", True)
    if top_k == 1:
        read.wrong(
            "num_experts_per_tok", 1, "at least 2: with one expert its weight is constant and the router cannot learn"
        )
    groups, top_groups = _groups(read, experts, top_k, default)
    width = read.count("moe_intermediate_size")
    return {
        "moe_layers": tuple(range(dense, layers)),
        "num_experts": experts,
        "moe_intermediate_size": width,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling": read.fraction("routed_scaling_factor", default.routed_scaling_factor),
        "expert_bias": True,
        "groups": groups,
        "top_groups": top_groups,
        "shared_intermediate_size": width * read.count("n_shared_experts", default=1),
        "mtp_layers": read.count("num_nextn_predict_layers", "num_mtp_layers", default=1, least=0, most=8),
    }


def _groups(read: Fields, experts: int, top_k: int, default: SigmoidDefaults) -> tuple[int, int]:
    """Return (n_group, topk_group), or (1, 1) if tokens choose from all groups."""
    groups = read.count("n_group", default=default.n_group)
    top_groups = read.count("topk_group", default=default.topk_group)
    if experts % groups:
        read.wrong("n_group", groups, f"a divisor of n_routed_experts = {experts}")
    elif top_groups > groups:
        read.wrong("topk_group", top_groups, f"at most n_group = {groups}")
    elif top_groups * (experts // groups) < top_k:
        read.wrong("topk_group", top_groups, f"groups that hold num_experts_per_tok = {top_k} experts together")
    elif top_groups == groups:
        return 1, 1
    # The score of a group is the sum of its two best experts.
    elif experts // groups < 2:
        read.wrong("n_group", groups, f"groups of at least 2 of the n_routed_experts = {experts}")
    return groups, top_groups
