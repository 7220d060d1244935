"""Defines this rank's part of an optimizer update: microbatches with their routes and plans, and what passes compute
for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from moe_rl.megatron.microbatch import Microbatch
from moe_rl.replay.plans import LayerPlan
from moe_rl.replay.replay_pass import PassSeen
from moe_rl.replay.tables import MicrobatchRoutes
from moe_rl.types import Sequence


@dataclass(slots=True, eq=False)
class Work:
    """Holds a microbatch of this rank, and everything that a step computes for it.

    Attributes:
        table: The routes that its passes take or are compared with.
        old_logprobs: float32 [N], the denominators of the ratios; at first the sampler's logprobs.
        ref_logprobs: float32 [N], from the reference policy, if there is one.
        lags: int64 [N], each token's lag: by how many versions the weights that sampled it, or sampled an earlier token
            of its sequence whose keys the sampler kept, are older than the trainer's.
        trusted: bool [N], which tokens the second-moment limit keeps, if there is one.
        plan: How these routes are dispatched, if that is planned.
    """

    microbatch: Microbatch
    table: MicrobatchRoutes
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None = None
    lags: torch.Tensor | None = None
    trusted: torch.Tensor | None = None
    plan: dict[int, LayerPlan] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Holds this rank's part of one optimizer update.

    Attributes:
        denominator, sequences, tokens: Divisors of the policy loss, the KL penalty and the entropy bonus, for the whole
            update on all ranks. The segments of a completion count as one sequence, and each turn with its own reward
            as one.
        all: All sequences of the update on all ranks. The microbatches' indices refer to these.
        credit: Advantages of the units of each sequence, by its key, once they are known.
    """

    work: list[Work]
    denominator: int
    sequences: int
    tokens: int
    all: tuple[Sequence, ...] = ()
    credit: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredWork:
    """Holds the results of a pass over some microbatches of this rank.

    Attributes:
        logprobs: For each microbatch float32 [N], of its completion tokens. None on ranks that compute no loss, if the
            pass was that of an update.
        entropies: For each microbatch float32 [N], in nats, of the distributions that the tokens were drawn from; none
            unless requested. Both are computed over the tokens' sampling supports, if the microbatches have them.
        seen: What the pass showed.
    """

    work: Seq[Work]
    logprobs: Seq[torch.Tensor]
    entropies: Seq[torch.Tensor]
    seen: PassSeen

    @property
    def pairs(self) -> list[tuple[Work, torch.Tensor]]:
        """Return each microbatch with its logprobs; nothing on ranks that have none."""
        return list(zip(self.work, self.logprobs, strict=True)) if self.logprobs else []
