"""Adapts the policy losses to the hooks of verl and slime, so that their trainers use these losses unchanged.

Read at verl-project/verl 1dda039b: `register_policy_loss` and `agg_loss` in `verl/trainer/ppo/core_algos.py`, and their
caller `ppo_loss` in `verl/workers/utils/losses.py`. Read at THUDM/slime 624b824a: `loss_function` and
`policy_loss_function` in `slime/backends/megatron_utils/loss.py`.

Both trainers average gradients over data-parallel ranks, and scale losses so that the average is the gradient of the
whole batch. Their setting for the aggregation must be the one that the loss defines, since their own terms (entropy,
KL) follow it. They count sequences without a trained token; `global_denominator` does so only for dr_grpo, minirl and
topr.

Legend: B sequences of a microbatch, R response tokens with padding, T trained tokens.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.objectives.losses import TOKEN_MEANS, USE_ROLLOUT_LOGPROBS, check_name, policy_loss

ONE_TERM_PER_SEQUENCE = ("gspo", "gmpo")
SEQUENCE_SUMS = ("minirl", "topr")


def verl_loss(name: str, **parameters: float) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Return the loss called `name` as verl's registry of policy losses wants it. parameters: as in `policy_loss`.

    Raises:
        ConfigError: the loss needs the sampler's logprobs, which verl does not pass on. When it is called: the
            `loss_agg_mode` is not the loss's own, the batch has no global counts, or the tokens of a sequence have
            different advantages, or for gspo and gmpo different weights.
    """
    check_name(name)
    if name in USE_ROLLOUT_LOGPROBS:
        raise ConfigError(
            "verl does not pass the sampler's logprobs to a policy loss",
            where={"given": name},
            do="choose another loss; verl's bypass mode makes the sampler's logprobs the old ones",
        )
    mode = "seq-mean-token-mean"
    if name in TOKEN_MEANS:
        mode = "token-mean"
    elif name == "dr_grpo" or name in SEQUENCE_SUMS:
        mode = "seq-mean-token-sum-norm" if name == "dr_grpo" else "seq-mean-token-sum"

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the microbatch's loss and its metrics. Tensors are [B, R]."""
        _refuse_unless("loss_agg_mode", loss_agg_mode, mode, name)
        mask = response_mask.bool()
        count, ranks, of = *_counted(config.global_batch_info, mask, mode), mask.nonzero()[:, 0]
        weights = None if rollout_is_weights is None else rollout_is_weights[mask].double()
        if weights is not None and name in ONE_TERM_PER_SEQUENCE:
            _of_sequences("rollout_is_weights", weights, of, len(mask))
        now, old = log_prob[mask], old_log_prob[mask].to(log_prob.dtype)
        result = policy_loss(
            name,
            now,
            old,
            _of_sequences("advantages", advantages[mask].to(log_prob.dtype), of, len(mask)),
            of,
            rollout_logprobs=old,  # not used by these losses
            denominator=max(1, count),
            weights=weights,
            **parameters,
        )
        clipped = result.clip_events / result.clip_units.clamp(min=1)
        drift = (old - now.detach()).sum() / max(1, len(now))
        return result.loss * ranks, {"actor/pg_clipfrac": clipped.item(), "actor/ppo_kl": drift.item()}

    return loss


def _counted(batch: Mapping[str, Any], mask: Tensor, mode: str) -> tuple[int, int]:
    """Return what verl divides a sum by in this mode, and its data-parallel ranks. mask: [B, R]."""
    ranks, key = batch.get("dp_size") or 1, "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    count = batch.get(key)
    if count is None and ranks > 1:
        raise ConfigError("verl did not count the global batch", where={"key": key}, got="None")
    if count is None:
        count = mask.sum() if mode == "token-mean" else mask.any(-1).sum()
    longest = batch.get("loss_scale_factor") or mask.shape[-1]
    return int(count) * (longest if mode == "seq-mean-token-sum-norm" else 1), ranks


def slime_loss(
    name: str, logprobs: Callable[[Namespace, Mapping[str, Any], Tensor], Sequence[Tensor]], **parameters: float
) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Return the loss called `name` as slime's `--custom-loss-function-path` wants it.

    Args:
        logprobs: returns the current logprobs [R] of each sample's response, from slime's args, batch and logits.
        parameters: as in `policy_loss`.

    Raises:
        ConfigError: when it is called: slime's flags name another aggregation than the loss's own, or a term that the
            custom loss replaces; the batch lacks what the loss needs; a sequence is in parts on several ranks or
            samples; or the tokens of a sequence have different advantages.
    """
    check_name(name)
    of_tokens = name in TOKEN_MEANS

    def loss(
        args: Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the microbatch's sum, which slime divides by its global counts, and its metrics."""
        _refuse_unless("calculate_per_token_loss", bool(args.calculate_per_token_loss), of_tokens, name)
        for flag in ("use_tis", "get_mismatch_metrics", "use_opsm", "entropy_coef", "kl_loss_coef"):
            if flag != "kl_loss_coef" or args.use_kl_loss:
                _refuse_unless(flag, bool(getattr(args, flag)), False, name)
        masks, current = [loss_mask.bool() for loss_mask in batch["loss_masks"]], logprobs(args, batch, logits)
        sums = [int(loss_mask.sum()) for loss_mask in masks]
        _refuse_parts(batch, list(map(len, current)), None if of_tokens else sums)
        mask, whole = torch.cat(masks), torch.cat(list(current))
        of = torch.repeat_interleave(torch.arange(len(masks), device=mask.device), torch.tensor(sums).to(mask.device))

        def tokens(key: str) -> Tensor | None:
            return torch.cat(list(batch[key]))[mask].to(whole.dtype) if batch.get(key) else None

        rollout, now = tokens("rollout_log_probs"), whole[mask]
        old = rollout if args.use_rollout_logprobs else tokens("log_probs")
        if rollout is None and (args.use_rollout_logprobs or name in USE_ROLLOUT_LOGPROBS):
            raise ConfigError("the batch has no logprobs of the sampler", where={"given": name})
        old, advantages = now.detach() if old is None else old, tokens("advantages")
        assert advantages is not None
        result = policy_loss(
            name,
            now,
            old,
            _of_sequences("advantages", advantages, of, len(masks)),
            of,
            rollout_logprobs=old if rollout is None else rollout,
            denominator=args.rollout_max_response_len if name == "dr_grpo" else 1,
            **parameters,
        )
        drift = torch.zeros_like(whole.detach()).masked_scatter(mask, old - now.detach())
        clipped = result.clip_events / result.clip_units.clamp(min=1) * (sum(sums) if of_tokens else len(masks))
        return result.loss, {
            "loss": result.loss.detach(),
            "pg_clipfrac": clipped.detach(),
            "ppo_kl": sum_of_sample_mean(drift),
        }

    return loss


def _refuse_parts(batch: Mapping[str, Any], lengths: list[int], tokens: list[int] | None) -> None:
    """Refuse samples that are not whole: of which this rank has `lengths`, or whose rollouts have more than `tokens`
    (None: that does not matter)."""
    if lengths != list(batch["response_lengths"]):
        raise ConfigError(
            "sequences are in parts on several ranks",
            got=lengths,
            expected=list(batch["response_lengths"]),
            do="train without context parallelism",
        )
    if tokens is not None and (wholes := [int(mask_sum) for mask_sum in batch["rollout_mask_sums"]]) != tokens:
        raise ConfigError(
            "several samples are one rollout",
            got=f"{tokens} tokens of rollouts of {wholes}",
            do="give every sample its own rollout, or use a loss that is a mean over tokens",
        )


def _of_sequences(what: str, values: Tensor, of: Tensor, sequences: int) -> Tensor:
    """Return [B], the value that all tokens of a sequence have, 0 for a sequence without tokens. values, of: [T]."""
    by_sequence = values.new_zeros(sequences).scatter(0, of, values)
    if not torch.equal(by_sequence[of], values):
        sequence = int(of[(by_sequence[of] != values).nonzero()[0, 0]])
        raise ConfigError(
            f"tokens of a sequence have different {what}",
            where={"sequence": sequence},
            got=f"{values[of == sequence].min():g} to {values[of == sequence].max():g}",
            expected="one number for each sequence",
            do="use an estimator that gives a completion one advantage, such as GRPO's; for weights, gspo_token",
        )
    return by_sequence


def _refuse_unless(key: str, got: object, expected: object, name: str) -> None:
    if got != expected:
        raise ConfigError(
            "setting does not belong to this loss", where={"given": name, "key": key}, got=got, expected=expected
        )
