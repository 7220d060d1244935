"""Checks what only the first update of a run can show: sampler, trainer and reference have the same weights.

Both checks compare values from the run's own passes, so a correct setting that has no effect is noticed too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from moe_rl.megatron.frozen_policy import ReferencePolicy
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.share import Work
from moe_rl.replay.replay_pass import Mode

# Two temperatures can be told apart if their log-probabilities are this many times farther from each other than the
# checked ones are from the nearer temperature's. Otherwise the check passes: rounding exceeds the difference.
_CLEAR = 4.0
# Log-probabilities of 0 do not depend on the temperature.
_UNCERTAIN = -1e-3


def check_reference(policy: Policy, reference: ReferencePolicy) -> None:
    """Check, before an update and before experts move, that the reference has the weights of the policy.

    Raises:
        ReplayError: A weight differs. Raised on all ranks, with its name in Megatron's model.
    """
    with world.agreed("reference policy"):
        for own, other in zip(policy.chunks, reference.chunks, strict=True):
            of_reference = dict(other.named_parameters())
            for name, weight in own.named_parameters():
                name = name.removeprefix("module.")
                if not torch.equal(weight, of_reference[name]):
                    raise ReplayError(
                        "the reference policy does not have the weights that the run began with",
                        where={"tensor": name},
                        got=f"{int((weight != of_reference[name]).sum())} of {weight.numel()} elements that differ",
                        expected="the policy's, which no update has changed",
                        do="look for what loads or changes the reference's weights; objective.kl_coef=0 needs none",
                        fault="reference",
                    )


class TemperatureProbe:
    """Scores some of the first update's tokens at two temperatures: the config's, and 1, or 2 if the config's is 1.

    The passes take the same routes as the update. All ranks create it together, and call `check` together.
    """

    def __init__(self, policy: Policy, work: list[Work], mode: Mode, temperature: float):
        """Args: `work` is this rank's part of the first update, of which the first round of microbatches is scored."""
        self.temperature, self.other = temperature, 1.0 if temperature != 1 else 2.0
        self._work = work[: world.microbatches_in_a_round()]
        self._scored = [
            policy.score(self._work, mode, f"temperature {at:g}", temperature=at).logprobs
            for at in (self.temperature, self.other)
        ]

    def check(self, seen: Mapping[int, tuple[torch.Tensor, ...]]) -> None:
        """Compare both scores with what the update's loss got, and with the sampler's log-probabilities.

        Args:
            seen: For each microbatch, first the logprobs that its loss got; empty where no loss is computed.

        Raises:
            ReplayError: One side has a temperature other than the config's. Raised on all ranks.
        """
        sums = torch.zeros(6, dtype=torch.float64, device=world.device())
        for number, work in enumerate(self._work if world.speaks_for_its_sequences() else ()):
            right, other = (scores[number].double() for scores in self._scored)
            for at, given in ((0, seen[number][0].double()), (2, work.microbatch.rollout_logprobs.double())):
                sums[at] += (given - right).abs().sum()
                sums[at + 1] += (given - other).abs().sum()
            sums[4] += (right - other).abs().sum()
            sums[5] += (right < _UNCERTAIN).sum()
        trainer, trainer_other, sampler, sampler_other, apart, uncertain = world.all_reduce(sums.tolist())
        found = {"trainer": (trainer, trainer_other), "sampler": (sampler, sampler_other)}
        for side, (here, there) in found.items():
            if there < here and apart > _CLEAR * there:
                raise self._wrong(f"the {side}'s log-probabilities are those of temperature {self.other:g}")
        if uncertain and not apart:
            raise self._wrong("the temperature changes no log-probability of the trainer")

    def _wrong(self, what: str) -> ReplayError:
        return ReplayError(
            what,
            where={"key": "rollout.temperature", "update": 0},
            got=f"other values at temperature {self.temperature:g} than in the update",
            expected=f"{self.temperature:g} on both sides",
            do="look for a pass that does not divide its logits by the temperature",
            fault="temperature",
        ).by_all()
