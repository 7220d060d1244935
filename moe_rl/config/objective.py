"""Defines the section `objective`, with one model for each loss: a parameter of another loss is an unknown key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from moe_rl.config.section import NotNegative, Positive, Section, chosen_by, members
from moe_rl.errors import About, Problem, describe

# For each rule: the bounds that it needs, and those that it accepts in addition.
_BOUNDS = {
    "truncate": ({"high"}, set()),
    "vtrace": ({"high"}, set()),
    "mask": ({"high"}, {"low"}),
    "reject": (set(), {"low", "high"}),
    "veto": ({"low"}, set()),
}


class CorrectionConfig(Section):
    """Defines a weight that corrects the mismatch of sampler and trainer (moe_rl/objectives/corrections.py)."""

    level: Literal["token", "sequence", "geometric"]
    """Ratio of the trainer's old policy to the sampler that the rule uses. token: the ratio of the token. sequence: the
    product of the ratios of all tokens of the sequence. geometric: their geometric mean."""
    rule: Literal["truncate", "vtrace", "mask", "reject", "veto"]
    """Weight computed from the ratio. truncate: the ratio, but at most `high`. vtrace: the same; where turns have their
    own rewards, what a turn led to is also weighed by the ratios of the turns in between. mask: the ratio inside the
    bounds, and 0 outside. reject: 1 inside the bounds, and 0 outside. veto: 0 for the whole sequence if the ratio of
    any of its tokens is below `low`."""
    low: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Lower bound of the ratio. Optional for mask and reject, required for veto. A ratio of 1 is always inside the
    bounds."""
    high: Annotated[float, Field(ge=1.0)] | None = None
    """Upper bound of the ratio. Required for truncate, vtrace and mask, optional for reject."""

    @property
    def weighs(self) -> bool:
        """Return whether the weight is the ratio itself."""
        return self.rule in ("truncate", "vtrace", "mask")

    def bound_problems(self, key: str) -> Iterator[Problem]:
        """Yield the problems of the bounds and the level. key: this correction's, for messages."""
        rule = self.rule
        needed, allowed = _BOUNDS[rule]
        bounds = {bound for bound in ("low", "high") if getattr(self, bound) is not None}
        for bound in sorted(needed - bounds):
            yield describe(f"{rule} needs it", where={"key": f"{key}.{bound}"}, got="no value")
        for bound in sorted(bounds - needed - allowed):
            yield describe(
                f"rule {rule} has no such bound",
                where={"key": f"{key}.{bound}"},
                got=getattr(self, bound),
                expected=f"only {' and '.join(sorted(needed))}",
            )
        if not needed and not bounds:
            yield describe(f"{rule} without a bound keeps everything", where={"key": key}, got="neither low nor high")
        if self.low == self.high == 1:
            yield describe(
                "the bounds leave a single ratio", where={"key": key}, got="low 1 and high 1", expected="low < high"
            )
        if rule == "veto" and self.level != "token":
            yield describe(
                "a veto works on single tokens",
                where={"key": f"{key}.level"},
                got=self.level,
                expected="token",
                do=f"take level {self.level} with rule reject to drop a sequence by its own ratio",
            )
        if rule == "vtrace" and self.level != "sequence":
            yield describe(
                "vtrace weighs turns by their products of token ratios",
                where={"key": f"{key}.level"},
                got=self.level,
                expected="sequence",
                do="take rule truncate for another level",
            )


ClipLow = Annotated[
    float, Field(gt=0.0, lt=1.0, description="The ratio is clipped to the range [1 - clip_low, 1 + clip_high].")
]
ClipHigh = Annotated[
    float, Field(gt=0.0, description="The ratio is clipped to the range [1 - clip_low, 1 + clip_high].")
]
WeightCap = Annotated[float, Field(ge=1.0, description="Largest weight. Larger ones are truncated to it.")]
DualClip = Annotated[
    Annotated[float, Field(gt=1.0)] | None,
    Field(
        description="Largest ratio of a token with a negative advantage (dual clip, arXiv 1912.09729). A larger ratio "
        "is clipped to it, so that no token adds more than this factor times its advantage. null: no limit."
    ),
]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]


class ObjectiveConfig(Section):
    """Defines the keys that all losses share."""

    weighs_by_sampler: ClassVar[bool] = False
    """Whether the loss itself contains the ratio to the sampler."""
    centers: ClassVar[bool] = False
    """Whether the loss weights a token only by its ratio to the sampler, so that its score can be centered."""
    counted_by_token: ClassVar[str] = ""
    """For a loss with one term per sequence: the similar loss that accepts weights of single tokens."""

    name: str
    """Name of the loss."""
    advantage: Literal["group_std", "group_mean", "leave_one_out", "batch_std", "reinforce_pp"] = "group_std"
    """How advantages follow from rewards (formulas: moe_rl/objectives/advantages.py). group_std: reward minus the mean
    of its group, divided by the group's standard deviation. group_mean: the same without the division. leave_one_out:
    reward minus the mean of the other members of its group. batch_std: reward minus the mean of its group, divided by
    the standard deviation of the batch. reinforce_pp: mean and standard deviation are taken over all tokens of the
    batch."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Source of the old log-probabilities, the denominator of the ratio. trainer: the weights at the step's beginning.
    The first update's own forward gives those of its sequences; an extra pass before it computes those of later
    updates. sampler: the values that came with the completions."""
    corrections: tuple[CorrectionConfig, ...] = ()
    """Weights of tokens and sequences that correct the mismatch of sampler and trainer. They are multiplied. Tokens of
    weight 0 stay in the denominator."""
    off_policy_delta: Positive | None = None
    """Limit in nats per token, for sequences with a negative advantage (DeepSeek-V3.2). Such a sequence is masked when
    the current policy finds its tokens less likely than the sampler did, on average by more than the limit. null: no
    sequence is masked."""
    second_moment_limit: Positive | None = None
    """Limit of the mean squared log-ratio of the trainer's old policy to the sampler (M2PO). The mean is over the
    tokens of an update that the loss pushes further away from the sampler. While it is above the limit, the token with
    the largest square is masked. null: no token is masked."""
    score_centering: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of the sampler's likeliest tokens that are recorded at every token, to center the score of cispo or
    dppo_tv (arXiv 2609.20807). Each costs 8 bytes of trace before compression. null: not centered."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL to the frozen initial policy, which routes natively. With every loss it is the mean over the
    tokens of a sequence, then over sequences. 0: no reference model is built."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL at one token. moe_rl/objectives/penalties.py gives the value and gradient of each."""
    kl_unbiased: bool = False
    """Whether each token's estimate is multiplied by the ratio of new to old policy (DeepSeek-V3.2). The gradient flows
    through the ratio too. k1 and k3 then have the gradient of KL(policy || reference) on average."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the KL is a term of the loss. reward: kl_coef times the KL, summed over the completion, is subtracted from
    the reward before advantages are computed. The KL is that of the policy before the first update of the step."""
    entropy_coef: NotNegative = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss and so encouraged. The entropy is the mean over
    the completion tokens of an update, in nats, at the sampling temperature, over the tokens that keep_sampling_mask
    leaves. 0: off."""

    @property
    def corrected(self) -> bool:
        """Return whether any correction gives tokens weights."""
        return bool(self.corrections) or self.off_policy_delta is not None or self.second_moment_limit is not None

    @property
    def needs_old_first(self) -> bool:
        """Return whether something needs the trainer's old logprobs of all sequences before the first update."""
        vtrace = any(correction.rule == "vtrace" for correction in self.corrections)
        return vtrace or self.kl_in == "reward" or self.second_moment_limit is not None

    @property
    def parameters(self) -> dict[str, float | None]:
        """Return the parameters of the loss by name."""
        return {key: getattr(self, key) for key in LOSS_PARAMETERS[self.name]}

    def problems(self) -> Iterator[Problem]:
        yield from self._correction_problems()
        yield from self._centering_problems()
        yield from self._kl_problems()

    def _correction_problems(self) -> Iterator[Problem]:
        for number, correction in enumerate(self.corrections):
            key = f"objective.corrections.{number}"
            yield from correction.bound_problems(key)
            yield from self._loss_problems(key, correction)
        if self.second_moment_limit is not None:
            yield from self._second_moment_problems()
        weighing = [correction for correction in self.corrections if correction.weighs]
        if len(weighing) > 1:
            yield describe(
                "more than one correction weighs by the ratio to the sampler; the ratio would count twice",
                where={"key": "objective.corrections"},
                got=" and ".join(f"{correction.level} {correction.rule}" for correction in weighing),
                expected="at most one truncate, vtrace or mask",
                do="use reject for the others, which is mask without the weight",
            )
        pairs = [(correction.level, correction.rule) for correction in self.corrections if not correction.weighs]
        for level, rule in sorted({pair for pair in pairs if pairs.count(pair) > 1}):
            yield describe(
                "the same level and rule twice",
                where={"key": "objective.corrections"},
                got=f"{level} {rule}",
                do="keep the one with the narrower bounds",
            )

    def _loss_problems(self, key: str, correction: CorrectionConfig) -> Iterator[Problem]:
        rule = correction.rule
        where: About = {"given": f"objective.name is {self.name}"}
        if self.old_logprobs == "sampler":
            yield describe(
                "the old policy is the sampler, so every ratio that it uses is 1",
                where={"key": key, "given": "objective.old_logprobs is sampler"},
                got=f"{correction.level} {rule}",
                expected="objective.old_logprobs trainer, or no correction; objective.off_policy_delta works with both",
            )
            return
        if self.weighs_by_sampler and correction.weighs:
            yield describe(
                "the loss already contains the ratio to the sampler, which would count twice",
                where={"key": f"{key}.rule", **where},
                got=rule,
                expected="reject or veto",
                do="use reject to drop what is out of bounds; objective.weight_cap truncates the loss's own weight",
            )
        if self.counted_by_token and correction.level == "token" and rule != "veto":
            yield describe(
                "the loss has one term per sequence, and this gives each token its own weight",
                where={"key": f"{key}.level", **where},
                got=f"token {rule}",
                expected="level sequence or geometric, or a veto",
                do=f"use {self.counted_by_token}, or a sequence-level correction",
            )

    def _second_moment_problems(self) -> Iterator[Problem]:
        if self.old_logprobs != "trainer":
            yield describe(
                "it compares the trainer's policy before the update with the sampler",
                where={
                    "key": "objective.second_moment_limit",
                    "given": f"objective.old_logprobs is {self.old_logprobs}",
                },
                got=self.second_moment_limit,
                expected="objective.old_logprobs trainer, or null",
            )
        elif self.counted_by_token:
            yield describe(
                "the loss has one term per sequence, and this masks single tokens",
                where={"key": "objective.second_moment_limit", "given": f"objective.name is {self.name}"},
                got=self.second_moment_limit,
                do=f"use {self.counted_by_token}, or a sequence-level correction",
            )

    def _centering_problems(self) -> Iterator[Problem]:
        if self.score_centering is not None and not (self.centers and self.old_logprobs == "sampler"):
            yield describe(
                "the weights that the loss would give to other tokens are not known",
                where={
                    "key": "objective.score_centering",
                    "given": f"objective.name is {self.name}, objective.old_logprobs is {self.old_logprobs}",
                },
                got=self.score_centering,
                expected="objective.name cispo or dppo_tv, with objective.old_logprobs sampler",
                do="set these, or remove objective.score_centering",
            )

    def _kl_problems(self) -> Iterator[Problem]:
        if self.kl_coef == 0:
            for key in ("kl_estimator", "kl_unbiased", "kl_in"):
                if (value := getattr(self, key)) != ObjectiveConfig.model_fields[key].default:
                    yield describe(
                        "has no effect while objective.kl_coef is 0",
                        where={"key": f"objective.{key}"},
                        got=str(value).lower(),
                        do="remove it, or set objective.kl_coef",
                    )
        elif self.kl_in == "reward":
            if self.old_logprobs != "trainer":
                yield describe(
                    "a KL in the reward is that of the trainer's policy before the step's first update",
                    where={"key": "objective.old_logprobs", "given": "objective.kl_in is reward"},
                    got=self.old_logprobs,
                    expected="trainer",
                )
            if self.kl_unbiased:
                yield describe(
                    "it changes the gradient of the KL, and a KL in the reward has no gradient",
                    where={"key": "objective.kl_unbiased", "given": "objective.kl_in is reward"},
                    got="true",
                    expected="false",
                )
        elif self.kl_estimator == "k1" and not self.kl_unbiased:
            yield describe(
                "the gradient of k1 in a loss is 0 on average, so nothing holds the policy",
                where={"key": "objective.kl_estimator"},
                got="k1",
                expected="k2 or k3, or objective.kl_unbiased, whose ratio gives k1 the gradient of the KL",
            )
        elif self.kl_estimator == "k2" and self.kl_unbiased:
            yield describe(
                "k2 times the ratio has neither the value nor the gradient of the KL",
                where={"key": "objective.kl_unbiased", "given": "objective.kl_estimator is k2"},
                got="true",
                expected="false, or k1 or k3",
            )


class GspoConfig(ObjectiveConfig):
    """Clips one ratio per sequence and takes the mean over sequences (arXiv 2507.18071)."""

    counted_by_token = "gspo_token"
    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class GspoTokenConfig(ObjectiveConfig):
    """Works like gspo, but gives each token its own term, with the ratio of its sequence."""

    name: Literal["gspo_token"]
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class GrpoConfig(ObjectiveConfig):
    """Clips one ratio per token and takes the mean over a sequence, then over sequences."""

    name: Literal["grpo"]
    clip_low: ClipLow = Field(examples=[0.2])
    clip_high: ClipHigh = Field(examples=[0.2])
    dual_clip: DualClip = Field(default=None, examples=[3.0])


class DrGrpoConfig(ObjectiveConfig):
    """Works like grpo, but sums over tokens and divides by sequences x rollout.max_completion_tokens."""

    name: Literal["dr_grpo"]
    clip_low: ClipLow = Field(examples=[0.2])
    clip_high: ClipHigh = Field(examples=[0.2])
    dual_clip: DualClip = Field(default=None, examples=[3.0])
    advantage: Literal["group_mean"] = "group_mean"
    """Fixed by the method: reward minus the mean of its group, not divided."""


class DapoConfig(ObjectiveConfig):
    """Works like grpo, but takes the mean over all tokens."""

    name: Literal["dapo"]
    clip_low: ClipLow = Field(examples=[0.2])
    clip_high: ClipHigh = Field(examples=[0.28])
    dual_clip: DualClip = Field(default=None, examples=[3.0])


class CispoConfig(ObjectiveConfig):
    """Weights the log-likelihood by the truncated ratio and takes the mean over all tokens."""

    centers = True
    name: Literal["cispo"]
    weight_cap: WeightCap = Field(examples=[5.0])


class SapoConfig(ObjectiveConfig):
    """Fades each token's ratio out softly instead of clipping it. The mean is that of grpo."""

    name: Literal["sapo"]
    tau_positive: Positive = Field(examples=[1.0])
    """How fast tokens with a positive advantage fade out."""
    tau_negative: Positive = Field(examples=[1.05])
    """How fast tokens with a negative advantage fade out."""


class GmpoConfig(ObjectiveConfig):
    """Clips ratios by token, combines them to one per sequence, and takes the mean over sequences."""

    counted_by_token = "grpo"
    name: Literal["gmpo"]
    clip_low: ClipLow = Field(examples=[0.33])
    clip_high: ClipHigh = Field(examples=[0.49])


class DppoTvConfig(ObjectiveConfig):
    """Works like cispo, but removes tokens whose probability moved too far."""

    centers = True
    name: Literal["dppo_tv"]
    delta_low: Probability = Field(examples=[0.2])
    """Largest drop in probability with which a token keeps its gradient."""
    delta_high: Probability = Field(examples=[0.2])
    """Largest rise in probability with which a token keeps its gradient."""
    weight_cap: WeightCap = Field(examples=[20.0])
    old_logprobs: Literal["sampler"] = "sampler"
    """Fixed by the method: its ratio is to the sampler's policy."""


class MinirlConfig(ObjectiveConfig):
    """Works like cispo with the ratio to the sampler, and removes tokens whose ratio to the trainer's old policy is
    outside the clip range. It sums over a sequence and takes the mean over sequences."""

    weighs_by_sampler = True
    name: Literal["minirl"]
    clip_low: ClipLow = Field(examples=[0.2])
    clip_high: ClipHigh = Field(examples=[0.27])
    weight_cap: WeightCap = Field(examples=[5.0])
    advantage: Literal["group_mean"] = "group_mean"
    """Fixed by the method: reward minus the mean of its group, not divided."""
    old_logprobs: Literal["trainer"] = "trainer"
    """Fixed by the method: its ratio is to the trainer's policy before the first update of the step."""


class ToprConfig(ObjectiveConfig):
    """Imitates completions with a positive advantage at full weight, and weights the others by the truncated ratio of
    the whole completion to the sampler. It sums over a sequence and takes the mean over sequences."""

    name: Literal["topr"]
    weight_cap: WeightCap = Field(examples=[1.0])
    old_logprobs: Literal["sampler"] = "sampler"
    """Fixed by the method: its ratio is to the sampler's policy."""


class DecoupledConfig(ObjectiveConfig):
    """Works like dapo, multiplied by the truncated ratio of the old policy to the sampler."""

    weighs_by_sampler = True
    name: Literal["decoupled"]
    clip_low: ClipLow = Field(examples=[0.2])
    clip_high: ClipHigh = Field(examples=[0.2])
    weight_cap: WeightCap = Field(examples=[5.0])
    dual_clip: DualClip = Field(default=None, examples=[3.0])
    old_logprobs: Literal["trainer", "interpolated"] = "trainer"  # type: ignore[assignment]
    """Source of the old log-probabilities. trainer: the weights at the step's beginning. interpolated (A-3PO,
    arXiv 2512.06547): (1 - a) times the current policy's plus a times the sampler's, with a = 1 / lag of the token, and
    0 at lag 0. It needs no pass of its own in any update."""


AnyObjective = Annotated[
    Annotated[GspoConfig, Tag("gspo")]
    | Annotated[GspoTokenConfig, Tag("gspo_token")]
    | Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[DrGrpoConfig, Tag("dr_grpo")]
    | Annotated[DapoConfig, Tag("dapo")]
    | Annotated[CispoConfig, Tag("cispo")]
    | Annotated[SapoConfig, Tag("sapo")]
    | Annotated[GmpoConfig, Tag("gmpo")]
    | Annotated[DppoTvConfig, Tag("dppo_tv")]
    | Annotated[MinirlConfig, Tag("minirl")]
    | Annotated[ToprConfig, Tag("topr")]
    | Annotated[DecoupledConfig, Tag("decoupled")],
    chosen_by("name", "gspo"),
]
LOSSES: dict[str, type[ObjectiveConfig]] = members(AnyObjective)
LOSS_PARAMETERS: dict[str, dict[str, float]] = {
    name: {
        key: field.examples[0] if field.examples else field.default
        for key, field in loss.model_fields.items()
        if key not in ObjectiveConfig.model_fields
    }
    for name, loss in LOSSES.items()
}
"""The parameters of each loss, with published or usual values."""


def without_nulls(objective: Any) -> Any:
    """Return the section without loss parameters that are null: an override to null removes a parameter."""
    if not isinstance(objective, dict):
        return objective
    parameters = {key for keys in LOSS_PARAMETERS.values() for key in keys}
    return {key: value for key, value in objective.items() if value is not None or key not in parameters}
