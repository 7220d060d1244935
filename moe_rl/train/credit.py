"""From rewards to the advantages in every rank's microbatches, once all that a reward may contain is known.

It stands between the passes without a gradient and the updates: a KL in the reward is of the policy that the step
began with. Every rank has all rewards, learns the KL of the sequences of other ranks, and computes the advantages of
the whole batch alike.
"""

from __future__ import annotations

import math

import torch

from moe_rl.config.objective import ObjectiveConfig
from moe_rl.errors import MoeRLError, describe
from moe_rl.megatron import world
from moe_rl.objectives.advantages import advantages
from moe_rl.objectives.penalties import KL_ESTIMATORS
from moe_rl.train.shares import UpdateShare
from moe_rl.types import Sequence


def give_credit(
    objective: ObjectiveConfig, sequences: list[Sequence], group_ids: list[int], shares: list[UpdateShare]
) -> dict[str, float]:
    """Set the advantages of every microbatch of `shares`. All ranks call it; returns metrics, equal on all of them.

    sequences, group_ids: the whole batch. With `kl_in: reward`, R'_i = R_i - kl_coef * sum_t k(l_old_t, l_ref_t) over
    the completion tokens of i, k the chosen estimator of KL(policy || reference); shares then have old_logprobs and
    ref_logprobs. A sequence that no share has (its routes are missing, and it was dropped) has no KL then, and enters
    no statistic. A KL that is not finite makes every advantage nan, so that the guards skip the step's updates.
    """
    rewards: list[float | None] = [sequence.reward for sequence in sequences]
    metrics = {}
    if objective.kl_in == "reward":
        kl = _sequence_kl(objective.kl_estimator, sequences, shares)
        measured = [(value, len(s.token_ids)) for value, s in zip(kl, sequences, strict=True) if value is not None]
        nonempty = [value / length for value, length in measured if length]
        metrics["objective/kl_ref"] = math.fsum(nonempty) / max(len(nonempty), 1)
        metrics["reward/kl_penalty"] = -objective.kl_coef * math.fsum(v for v, _ in measured) / len(measured)
        rewards = [
            None if value is None else sequence.reward - objective.kl_coef * value
            for sequence, value in zip(sequences, kl, strict=True)
        ]
    if all(reward is None or math.isfinite(reward) for reward in rewards):
        lengths = [len(sequence.token_ids) for sequence in sequences]
        values = advantages(objective.advantage, rewards, group_ids, lengths)
    else:
        values = [math.nan] * len(rewards)
    # A sequence without one is in no share.
    of = {sequence.key: value for sequence, value in zip(sequences, values, strict=True) if value is not None}
    for share in shares:
        for work in share.work:
            work.microbatch.give_advantages([of[key] for key in share.keys])
    known = [value for value in values if value is not None]
    return metrics | {"objective/zero_advantage_fraction": sum(value == 0 for value in known) / len(known)}


def _sequence_kl(estimator: str, sequences: list[Sequence], shares: list[UpdateShare]) -> list[float | None]:
    """Sum of the estimates over each sequence's completion, in nats; None for a sequence that is in no share, NaN for
    one that is not finite.

    Each is taken from one of the ranks that have the sequence. Raises MoeRLError when two speak for the same one.
    """
    where = {sequence.key: number for number, sequence in enumerate(sequences)}
    sums, speakers = [0.0] * len(sequences), [0] * len(sequences)
    for share in shares if world.speaks_for_its_sequences() else ():
        for work in share.work:
            microbatch = work.microbatch
            if not microbatch.indices:
                continue
            assert work.ref_logprobs is not None  # a KL brings the reference, whose pass came before
            tokens = KL_ESTIMATORS[estimator](work.ref_logprobs.double() - work.old_logprobs.double())
            # The tokens of a sequence lie together, in the order of the sequences.
            counts = torch.bincount(microbatch.sequence_ids, minlength=len(microbatch.indices))
            sums_here = torch.segment_reduce(tokens, "sum", lengths=counts, initial=0)
            for index, total in zip(microbatch.indices, sums_here.tolist(), strict=True):
                number = where[share.keys[index]]
                sums[number], speakers[number] = total, speakers[number] + 1
    reduced = world.all_reduce([*sums, *speakers])
    totals, spoke = reduced[: len(sequences)], reduced[len(sequences) :]
    if max(spoke) > 1:
        number = spoke.index(max(spoke))
        raise MoeRLError(
            describe(
                "ranks do not share the sequences of a step out",
                where=f"sequence {sequences[number].key}",
                got=f"{spoke[number]:.0f} that speak for it",
                expected=1,
            )
        )
    # An infinity becomes NaN, since there is no sum of two with different signs.
    return [total - (total - total) if count else None for total, count in zip(totals, spoke, strict=True)]
