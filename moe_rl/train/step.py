"""Does one training step on one rank: pack the batch, read the routes, compare sampler and trainer, update the policy.

Every rank holds the tokens of the whole batch, but reads the routes of its own sequences only.

Also checks that an update learns from each of its sequences exactly once, and from what was sampled and judged.

    sampler --seal--> completion --verdict--> batch --> credit --> microbatches --> loss --> optimizer
               |                    |                     |                          |
               `--------------------+----- compared ------+--------- compared -------'

A completion is sealed when it is made, and a verdict's digest is made when its reward and group are joined to it
(`types.py`). `check_batch` compares both before anything is computed. `check_update` recomputes the seals from the
tensors of the loss: those of the later updates before the first one, and those of each update after its gradient is
computed and before the optimizer moves a weight. All digests are made on the host.

Also checks in a process's first update that sampler and trainer have one temperature, and in a run's first that the
reference has the policy's weights.

Both checks compare values from the run's own passes, so a correct setting that has no effect is noticed too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.clock import Clock
from moe_rl.config.schema import Config
from moe_rl.errors import ReplayError, first_of
from moe_rl.megatron import world
from moe_rl.megatron.frozen_policy import BaseOfAdapters, ReferencePolicy
from moe_rl.megatron.microbatch import ScoredWork, Share, Work
from moe_rl.megatron.policy import Policy
from moe_rl.planning.expert_placement import natural_order
from moe_rl.replay.alignment import AlignmentTest
from moe_rl.replay.claims import History
from moe_rl.replay.replay_pass import Mode, Watch
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train.credit import give_credit
from moe_rl.train.guards import Guards, computes_alike
from moe_rl.train.loss import UpdateLoss
from moe_rl.train.samples import View, gather_views
from moe_rl.train.shares import ExpertPlacement, Shares
from moe_rl.train.step_metrics import Shown, mismatch_of, step_metrics
from moe_rl.types import Sequence

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
        for chunk, other in zip(policy.chunks, reference.chunks, strict=True):
            of_reference = dict(_weights(other))
            for name, weight in _weights(chunk):
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


def _weights(chunk: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters, and the biases of the experts, which no gradient moves."""
    biases = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")]
    return [*chunk.named_parameters(), *biases]


class TemperatureProbe:
    """Scores tokens of a process's first update at two temperatures: the config's, and 1, or 2 if the config's is 1.

    The passes take the same routes as the update. All ranks create it together, and call `check` together.
    """

    def __init__(self, policy: Policy, work: list[Work], mode: Mode, temperature: float):
        """Args: `work` is this rank's part of the first update, of which the first round of microbatches is scored."""
        self.temperature, self.other = temperature, 1.0 if temperature != 1 else 2.0
        self._work = work[: world.microbatches_in_a_round()]
        self._scored = [
            policy.score(self._work, mode, f"temperature {value:g}", temperature=value).logprobs
            for value in (self.temperature, self.other)
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
            for slot, logprobs in ((0, seen[number][0].double()), (2, work.microbatch.rollout_logprobs.double())):
                sums[slot] += (logprobs - right).abs().sum()
                sums[slot + 1] += (logprobs - other).abs().sum()
            sums[4] += (right - other).abs().sum()
            sums[5] += (right < _UNCERTAIN).sum()
        trainer, trainer_other, sampler, sampler_other, apart, uncertain = world.all_reduce(sums.tolist())
        distances = {"trainer": (trainer, trainer_other), "sampler": (sampler, sampler_other)}
        for side, (here, there) in distances.items():
            if there < here and apart > _CLEAR * there:
                raise self._wrong(f"the {side}'s log-probabilities are those of temperature {self.other:g}")
        if uncertain and not apart:
            raise self._wrong("the temperature changes no log-probability of the trainer")

    def _wrong(self, what: str) -> ReplayError:
        return ReplayError(
            what,
            where={"key": "rollout.temperature"},
            got=f"other values at temperature {self.temperature:g} than in the update",
            expected=f"{self.temperature:g} on both sides",
            do="look for a pass that does not divide its logits by the temperature",
            fault="temperature",
        ).by_all()


_REPORT = "weights are as they were before this update. Look for what changes, exchanges or repeats sequences"


def check_batch(sequences: Seq[Sequence], group_ids: Seq[int], before: Collection[str]) -> None:
    """Check that a batch has no sequence twice, and that each sequence has the reward and group of its own verdict.

    Args:
        group_ids: For each sequence, the number of its prompt.
        before: Keys of sequences that earlier steps have trained on.

    Raises:
        ReplayError: A sequence came twice, or with the reward or group of another sequence. The message names it.
    """
    counts = Counter(sequence.key for sequence in sequences)
    counts.update(key for key in before if key in counts)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise ReplayError(
            "a sequence was delivered more than once",
            where={"request": twice[0]},
            got=f"{len(twice)} repeated sequences: {first_of(twice)}",
            expected="each sequence in one step, once",
            do="look for a group that the feed gave twice, or rollouts of another step",
            fault="delivered twice",
        ).by_all()
    wrong = [
        sequence.key
        for sequence, group in zip(sequences, group_ids, strict=True)
        if sequence.verdict != sequence.verdict_of(group)
    ]
    if wrong:
        raise ReplayError(
            "a sequence does not have the reward and the group that it was judged with",
            where={"request": wrong[0]},
            got=f"{len(wrong)} of {len(sequences)} sequences: {first_of(wrong)}",
            expected="the digest of completion, rewards and group that was made with the verdict",
            do="look for what exchanges rewards or groups between the verifiers and the trainer",
            fault="verdict",
        ).by_all()


def check_update(share: Share, calls: Mapping[int, int] | None = None) -> None:
    """Check what an update learned from. All ranks call this together, before the optimizer moves a weight.

    Args:
        share: This rank's part of the update.
        calls: How often the loss of each microbatch was computed on this rank; None before the update: once.

    Raises:
        ReplayError: A sequence did not enter the loss exactly once, or entered it with tokens, log-probabilities,
            places, weight versions or advantages that are not its own. Raised on all ranks, naming the sequence.
    """
    place = {sequence.key: index for index, sequence in enumerate(share.all)}
    counts, wrong = (np.zeros(len(share.all)) for _ in range(2))
    computes = world.is_last_stage()
    for number, work in enumerate(share.work):
        packed = [share.all[i] for i in work.microbatch.indices]
        for sequence in packed:
            counts[place[sequence.key]] += 1 if calls is None or not computes else calls.get(number, 0)
        if computes:
            seals, credit = work.microbatch.seals(packed), work.microbatch.given_advantages()
            for sequence, seal, advantages in zip(packed, seals, credit, strict=True):
                expected = np.asarray(share.credit[sequence.key], np.float32)
                if seal != sequence.seal or not np.array_equal(advantages, expected, equal_nan=True):
                    wrong[place[sequence.key]] += 1
    ranks = dist.get_world_size() // world.data_parallel()[1]  # that work on the same sequences
    reduced = np.array(world.all_reduce([*counts, *wrong])).reshape(2, -1)
    if uneven := np.flatnonzero(reduced[0] != ranks).tolist():
        times = [f"{share.all[index].key} {reduced[0, index] / ranks:g} times" for index in uneven]
        raise ReplayError(
            "an update did not learn from each of its sequences exactly once",
            where={"request": share.all[uneven[0]].key},
            got=f"{len(uneven)} of {len(share.all)} sequences: {first_of(times)}",
            expected="once each, over all ranks and microbatches",
            do=f"{_REPORT}: a microbatch was replaced, repeated or left out after the batch was divided",
            fault="not once",
        ).by_all()
    if other := [share.all[index].key for index in np.flatnonzero(reduced[1])]:
        raise ReplayError(
            "an update learned from something other than what was sampled and judged",
            where={"request": other[0]},
            got=f"{len(other)} of {len(share.all)} sequences: {first_of(other)}",
            expected="the sampled tokens with their log-probabilities and weight versions, each predicted by the row "
            "before it, and the advantage of its sequence",
            do=f"{_REPORT}, or a loss mask that is shifted",
            fault="not as sampled",
        ).by_all()


class TrainStep:
    """Does the training half of a step on one rank."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        reference: ReferencePolicy | BaseOfAdapters | None,
        store: TraceStore,
        spec: TraceSpec,
    ):
        self.config, self.policy, self.reference, self.spec = config, policy, reference, spec
        self.shares = Shares(config, policy.layers, store, spec, vocabulary=policy.facts.vocab)
        self.placement = ExpertPlacement(config, policy, store, spec)
        if config.placement.copies:
            policy.check_copies()
        # What the last steps showed of the routes, by number of the update.
        self.histories = [History() for _ in range(config.train.updates_per_step)]
        self.guards = Guards(config.guards, exact=computes_alike(config))
        self.views: dict[str, list[View]] = {}  # what the ranks saw of the last step's samples
        self.work: list[Work] = []  # of the step that runs, with the routes to replay
        self._trained: dict[int, list[str]] = {}  # keys of what the last steps trained on, by step
        self._probed = False  # whether this process has checked the temperature

    def run(
        self,
        sequences: list[Sequence],
        group_ids: list[int],
        *,
        step: int,
        weight_version: int,
        measure_native: bool,
        clock: Clock,
        samples: Seq[str] = (),
    ) -> dict[str, float]:
        """Train on one rollout batch.

        Args:
            sequences: The whole batch, the same on every rank.
            group_ids: For each sequence, the number of its prompt.
            step: Number of the step, from 1.
            weight_version: Version of the trainer's weights at the start of the step.
            measure_native: Also score the batch with native routing.
            clock: Records how long each part takes.
            samples: Keys of the sequences that `views` shows afterwards.

        Returns:
            The step's metrics, equal on every rank. `report/metrics.py` explains each key.
        """
        replay, objective, policy = self.config.replay.mode, self.config.objective, self.policy
        self.work, shown = [], Shown()
        check_batch(sequences, group_ids, [key for past, keys in self._trained.items() if past != step for key in keys])
        # The first update's forward pass runs on the step's starting weights. So it also gives the old logprobs of its
        # own sequences, unless these, or the routes that r2 records in such a pass, are needed before it.
        own_old = objective.old_logprobs == "trainer" and replay != "r2" and not objective.needs_old_first
        unmoved = (policy.placement == natural_order(*policy.placement.shape)).all()  # as the reference's experts
        if policy.updates == policy.moves == 0 and unmoved and isinstance(self.reference, ReferencePolicy):
            check_reference(policy, self.reference)
        with clock("placement"):
            placement = self.placement.start_step(step, sequences)
        with clock("routes"):
            shares, fallback = self.shares.divide(sequences, group_ids, weight_version, policy.placement)
            work = [item for share in shares for item in share.work]
            later = [item for share in shares[own_old:] for item in share.work]
            mode: Mode = "observe" if replay == "off" else "replay"
            # All routes are tested before the first update, or those of each update before it if no pass runs earlier.
            together = [work] if objective.old_logprobs == "trainer" else [share.work for share in shares]
            aligns: list[AlignmentTest] = []
            if replay == "r3":
                self.work = work
                if self.config.guards.alignment:
                    aligns = [self._alignment(tested, number) for number, tested in enumerate(together)]
                in_turn = later + work[: len(work) - len(later)]
                shown.peak_rows, shown.copied_excess = self.shares.plan_rows(policy, in_turn, step)
        with clock("logprobs"):
            if objective.old_logprobs == "trainer" and later:
                watch = Watch(native=True, align=aligns[0] if aligns else None, align_from=len(work) - len(later))
                scored = policy.score(
                    later, "record" if replay == "r2" else mode, f"step {step} old logprobs", watch, entropies=True
                )
                shown.tallies.append(scored.seen.tally)
                shown.add(scored)
                shown.align(scored.seen.alignment)
                for item, logprobs in zip(later, scored.logprobs, strict=True):
                    item.old_logprobs = logprobs
                if replay == "r2":
                    for item, table in zip(later, scored.seen.recorded, strict=True):
                        item.table = table
                    shown.peak_rows, shown.copied_excess = self.shares.plan_rows(policy, work, step)
            if measure_native and replay == "r3":
                scored = policy.score(together[0], "observe", f"step {step} native logprobs", Watch(native=True))
                shown.native = mismatch_of(scored.pairs), scored.seen.tally
            if self.reference is not None:
                self.reference.score(work)
            probe = None
            if not self._probed:
                probe = TemperatureProbe(policy, shares[0].work, mode, self.config.rollout.temperature)
                self._probed = True
        credit = give_credit(objective, sequences, group_ids, shares)
        with clock("train"):
            for share in shares[1:]:  # a fault in a later one must not show after the first has moved the weights
                check_update(share)
            for number, share in enumerate(shares):
                observed = number == 0 and (own_old or objective.old_logprobs != "trainer")
                align = aligns[number] if number < len(aligns) and (observed or number) else None
                loss = UpdateLoss(objective, share, shown.sums, own_old=own_old and number == 0)
                result, seen = policy.update(
                    share.work,
                    loss,
                    mode,
                    f"step {step} update {number}",
                    Watch(native=observed or align is not None, align=align),
                    entropies=observed or objective.entropy_coef > 0,
                    learned=partial(_check_learned, share, loss, probe if number == 0 else None),
                )
                shown.results.append(result)
                shown.tallies.append(seen.tally if observed else seen.tally.without_native())
                shown.align(seen.alignment)
                if observed:
                    shown.add(ScoredWork(share.work, *loss.scored(), seen))
                self.guards.after_update(result, step=step, update=number)
        # Sequences of still earlier steps were sampled by weights that are too old: the validator refuses them.
        keys, oldest = {step: [sequence.key for sequence in sequences]}, step - self.config.pipeline.lag
        self._trained = {past: of_step for past, of_step in (self._trained | keys).items() if past > oldest}
        self.views = gather_views(samples, shown.passes)
        metrics = step_metrics(self.config, self.spec, shown, by_layer=measure_native)
        self.work = []  # the device may be the sampler's next
        if replay != "off":
            metrics |= fallback
        return metrics | credit | placement | {"optim/updates": policy.updates}

    def _alignment(self, work: list[Work], update: int) -> AlignmentTest:
        """Return the test of the routes of `work`. update: how many updates of the step are made before it runs."""
        places = [item.table.places for item in work]
        if update:  # its weights have moved by a part of a step: the rows count as older by a whole one
            places = [replace(rows, lag=rows.lag + 1) for rows in places]
        return AlignmentTest(
            self.policy.layers,
            places,
            world.device(),
            groups=self.policy.facts.groups,
            moves=(self.policy.lr or self.config.train.optimizer.lr) * self.config.train.updates_per_step,
            history=self.histories[update],
        )


def _check_learned(share: Share, loss: UpdateLoss, probe: TemperatureProbe | None) -> None:
    """Make the last checks of an update, after its gradient is computed and before a weight moves."""
    check_update(share, loss.calls)
    if probe is not None:
        probe.check(loss.seen)
