"""Does one training step on one rank: pack the batch, read the routes, compare sampler and trainer, update the policy.

Every rank holds the tokens of the whole batch, but reads the routes of its own sequences only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

from moe_rl.clock import Clock
from moe_rl.config.schema import Config
from moe_rl.megatron import world
from moe_rl.megatron.frozen_policy import BaseOfAdapters, ReferencePolicy
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.share import ScoredWork, Share, Work
from moe_rl.replay.alignment import AlignmentTest
from moe_rl.replay.claims import History
from moe_rl.replay.replay_pass import Mode, Watch
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train.account import check_batch, check_update
from moe_rl.train.assignment import ExpertPlacement
from moe_rl.train.credit import give_credit
from moe_rl.train.first_update import TemperatureProbe, check_reference
from moe_rl.train.guards import Guards, computes_alike
from moe_rl.train.loss import UpdateLoss
from moe_rl.train.samples import View, gather_views
from moe_rl.train.shares import Shares
from moe_rl.train.step_metrics import Shown, mismatch_of, step_metrics
from moe_rl.types import Sequence


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
        self.history = History()  # what the last steps showed of the routes
        self.guards = Guards(config.guards, exact=computes_alike(config))
        self.views: dict[str, list[View]] = {}  # what the ranks saw of the last step's samples
        self.work: list[Work] = []  # of the step that runs, with the routes to replay
        self._trained: dict[int, list[str]] = {}  # keys of what the last steps trained on, by step

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
        check_batch(sequences, group_ids, [key for at, keys in self._trained.items() if at != step for key in keys])
        # The first update's forward pass runs on the step's starting weights. So it also gives the old logprobs of its
        # own sequences, unless these, or the routes that r2 records in such a pass, are needed before it.
        own = objective.old_logprobs == "trainer" and replay != "r2" and not objective.needs_old_first
        first, probe = policy.updates == 0, None
        if first and isinstance(self.reference, ReferencePolicy) and policy.moves == 0:
            check_reference(policy, self.reference)
        with clock("placement"):
            placement = self.placement.start_step(step, sequences)
        with clock("routes"):
            shares, fallback = self.shares.divide(sequences, group_ids, weight_version, policy.placement)
            work = [one for share in shares for one in share.work]
            later = [one for share in shares[own:] for one in share.work]
            mode: Mode = "observe" if replay == "off" else "replay"
            align = None
            if replay == "r3":
                self.work = work
                if self.config.guards.alignment:
                    tested = work if objective.old_logprobs == "trainer" else shares[0].work
                    places = [one.table.places for one in tested]
                    align = AlignmentTest(
                        policy.layers,
                        places,
                        world.device(),
                        groups=policy.facts.groups,
                        moves=(policy.lr or 0.0) * self.config.train.updates_per_step,
                        history=self.history,
                    )
                in_turn = later + work[: len(work) - len(later)]
                shown.peak_rows, shown.copied_excess = self.shares.plan_rows(policy, in_turn, step)
        with clock("logprobs"):
            if objective.old_logprobs == "trainer" and later:
                watch = Watch(native=True, align=align, align_from=len(work) - len(later))
                scored = policy.score(
                    later, "record" if replay == "r2" else mode, f"step {step} old logprobs", watch, entropies=True
                )
                shown.tallies.append(scored.seen.tally)
                shown.add(scored)
                for one, logprobs in zip(later, scored.logprobs, strict=True):
                    one.old_logprobs = logprobs
                if replay == "r2":
                    for one, table in zip(later, scored.seen.recorded, strict=True):
                        one.table = table
                    shown.peak_rows, shown.copied_excess = self.shares.plan_rows(policy, work, step)
            if measure_native and replay == "r3":
                scored = policy.score(work, "observe", f"step {step} native logprobs", Watch(native=True))
                shown.native = mismatch_of(scored.pairs), scored.seen.tally
            if self.reference is not None:
                self.reference.score(work)
            if first:
                probe = TemperatureProbe(policy, shares[0].work, mode, self.config.rollout.temperature)
        credit = give_credit(objective, sequences, group_ids, shares)
        with clock("train"):
            for number, share in enumerate(shares):
                observed = number == 0 and (own or objective.old_logprobs != "trainer")
                loss = UpdateLoss(objective, share, shown.sums, own_old=own and number == 0)
                result, seen = policy.update(
                    share.work,
                    loss,
                    mode,
                    f"step {step} update {number}",
                    Watch(native=True, align=align) if observed else Watch(),
                    entropies=observed or objective.entropy_coef > 0,
                    learned=partial(_check_learned, share, loss, probe if number == 0 else None),
                )
                shown.results.append(result)
                shown.tallies.append(seen.tally)
                if observed:
                    shown.add(ScoredWork(share.work, *loss.scored(), seen))
                self.guards.after_update(result, step=step, update=number)
        # Sequences of still earlier steps were sampled by weights that are too old: the validator refuses them.
        keys, oldest = {step: [one.key for one in sequences]}, step - self.config.pipeline.lag
        self._trained = {at: of_step for at, of_step in (self._trained | keys).items() if at > oldest}
        self.views = gather_views(samples, shown.passes)
        metrics = step_metrics(self.config, self.spec, shown, by_layer=measure_native)
        if replay != "off":
            metrics |= fallback
        return metrics | credit | placement | {"optim/updates": policy.updates}


def _check_learned(share: Share, loss: UpdateLoss, probe: TemperatureProbe | None) -> None:
    """Make the last checks of an update, after its gradient is computed and before a weight moves."""
    check_update(share, loss.calls)
    if probe is not None:
        probe.check(loss.seen)
