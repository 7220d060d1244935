"""Runs forward passes over one set of sequences, with the trainer's own packing, routes, pass and model.

All ranks call everything together. Results are gathered from all ranks and equal on each: per-token values in the order
of the sequences, whichever rank, microbatch, pipeline stage or slice computed them.

Legend: B sequences, N completion tokens, R forwarded tokens (rows), L MoE layers of the model, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.comparison.quantities import Choices, soft_kl
from moe_rl.config.schema import Config
from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy
from moe_rl.planning.packing import pack
from moe_rl.replay.replay_pass import Mode, PassSeen, Watch
from moe_rl.replay.tables import Compared, MicrobatchRoutes
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.train.shares import Shares
from moe_rl.types import Sequence, held_together

LOGITS = "router_logits"


@dataclass(frozen=True, slots=True, eq=False)
class TokenOwners:
    """Maps each value of a pass to its sequence.

    Attributes:
        tokens: int [N], number of the sequence of each completion token.
        rows: int [R], number of the sequence of each row.
        prompt: bool [R], rows of prompt tokens.
        rollout_logprobs: float32 [N], from the sampler.
        prompts: int [B], number of the prompt of each sequence.
    """

    sequences: int
    tokens: np.ndarray
    rows: np.ndarray
    prompt: np.ndarray
    rollout_logprobs: np.ndarray
    prompts: np.ndarray

    @classmethod
    def of(cls, sequences: list[Sequence]) -> TokenOwners:
        numbers: dict[tuple[int, ...], int] = {}
        prompts = [numbers.setdefault(s.prompt_token_ids, len(numbers)) for s in sequences]
        prompt = [np.arange(s.forwarded) < len(s.prompt_token_ids) for s in sequences]
        return cls(
            len(sequences),
            np.repeat(np.arange(len(sequences)), [len(s.token_ids) for s in sequences]),
            np.repeat(np.arange(len(sequences)), [s.forwarded for s in sequences]),
            np.concatenate(prompt),
            np.concatenate([s.rollout_logprobs for s in sequences]),
            np.array(prompts),
        )

    @property
    def lengths(self) -> np.ndarray:
        """Return int [B], the number of completion tokens of each sequence."""
        return np.bincount(self.tokens, minlength=self.sequences)

    def part(self, name: str) -> np.ndarray:
        """Return bool [R], the "all", "prompt" or "completion" rows."""
        return np.ones_like(self.prompt) if name == "all" else self.prompt if name == "prompt" else ~self.prompt


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Holds the results of one forward pass.

    Attributes:
        logprobs: float32 [N], from the trainer.
        choices: The routers' own choices compared with the record, in all rows and layers.
        router_kl: float64 [L, R], KL(sampler || trainer) of the router's distribution; NaN in rows whose logits the
            sampler did not store. None if it stored none, or if it was not requested.
        applied_mismatch, applied_checked: (sequence, layer) pairs, summed over ranks; 0 without replay.
        consumed, expected: How often routes were taken, and how often they should be; 0 without replay.
    """

    logprobs: np.ndarray
    choices: Choices
    router_kl: np.ndarray | None
    applied_mismatch: int
    applied_checked: int
    consumed: int
    expected: int


class Scorer:
    """Scores sequences whose routes are all recorded. Packing and reading of routes happens once, each rank for its
    share.

    Raises:
        TraceError, RouteValidationError, ReplayError: Routes are missing, damaged or wrong, or come from other weights
            than `weight_version`, the version that sampled. Raised on all ranks.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        store: TraceStore,
        spec: TraceSpec,
        sequences: list[Sequence],
        weight_version: int,
        microbatch_tokens: int | None = None,
    ):
        budget = microbatch_tokens or config.train.microbatch_tokens
        scoring = config.model_copy(
            update={
                "train": config.train.model_copy(update={"updates_per_step": 1, "microbatch_tokens": budget}),
                "replay": config.replay.model_copy(update={"missing": "refuse", "max_fallback_fraction": 0.0}),
            }
        )
        (share,), self.coverage = Shares(scoring, policy.layers, store, spec, vocabulary=policy.facts.vocab).divide(
            sequences, list(range(len(sequences))), weight_version, policy.placement
        )
        self.policy, self.store, self.spec, self.sequences = policy, store, spec, sequences
        self.work, self.budget = share.work, budget
        self.microbatches, self.tables = [item.microbatch for item in share.work], [item.table for item in share.work]
        self.owners = TokenOwners.of(sequences)
        self._first_token = np.cumsum([0, *(len(s.token_ids) for s in sequences)])
        self._first_row = np.cumsum([0, *(s.forwarded for s in sequences)])
        self._logits = self._sampler_logits()
        (known,) = world.all_reduce([sum(len(places) for places, _, _ in self._logits)])
        self.has_router_logits = known > 0

    def run(
        self, mode: Mode, name: str, *, tables: list[MicrobatchRoutes] | None = None, router_kl: bool = False
    ) -> tuple[Pass, PassSeen]:
        """Run one pass under `tables`, by default the recorded routes.

        The routers' own choices are always compared with the record, whatever the tables.

        Args:
            router_kl: Also compare the routers' logits, where the sampler stored its logits.

        Raises:
            ReplayError: The ledger is not exact, or a route was not applied.
        """
        router_kl = router_kl and self.has_router_logits
        work = [replace(item, table=table) for item, table in zip(self.work, tables or self.tables, strict=True)]
        scored = self.policy.score(work, mode, name, Watch(native=True, against=self.tables, logits=router_kl))
        seen, tally = scored.seen, scored.seen.tally
        counts = world.all_reduce([tally.applied_mismatch, tally.applied_checked, tally.consumed, tally.expected])
        return (
            Pass(
                self._gather_logprobs(scored.logprobs),
                self._gather_choices(seen.compared),
                self._gather_router_kl(seen) if router_kl else None,
                *map(int, counts),
            ),
            seen,
        )

    def _gather_logprobs(self, logprobs: Seq[torch.Tensor]) -> np.ndarray:
        whole = torch.zeros(self._first_token[-1], device=world.device())
        if world.speaks_for_its_sequences():
            for microbatch, values in zip(self.microbatches, logprobs, strict=True):
                places = [np.arange(*self._first_token[i : i + 2]) for i in microbatch.indices]
                if places:
                    whole[torch.from_numpy(np.concatenate(places)).to(whole.device)] = values
        dist.all_reduce(whole)  # adding zeros leaves a rank's values bit-identical
        return whole.cpu().numpy()

    def _gather_choices(self, compared: list[Compared]) -> Choices:
        shape = (len(self.spec.moe_layers), self._first_row[-1])
        shared = torch.zeros(shape, dtype=torch.int32, device=world.device())
        margin, counts = torch.zeros(shape, device=world.device()), torch.zeros_like(shared)
        columns = self._columns()
        for places, table, comparison in zip(self._row_places(), self.tables, compared, strict=True):
            positions = columns[:, None], places[table.recorded]
            shared[positions] = comparison.shared.int()
            margin[positions], counts[positions] = comparison.margin, 1
        for tensor in (shared, margin, counts):
            dist.all_reduce(tensor)
        if not bool((counts == 1).all()):
            raise ReplayError(
                "the ranks together did not compare every token in every layer exactly once",
                got=f"{int((counts != 1).sum())} (token, layer) positions compared never or repeatedly",
                expected=f"{counts.numel()} positions compared once",
            )
        return Choices(shared.cpu().numpy(), margin.cpu().numpy(), self.spec.top_k)

    def _gather_router_kl(self, seen: PassSeen) -> np.ndarray:
        shape = (len(self.spec.moe_layers), self._first_row[-1])
        values = torch.zeros(shape, dtype=torch.float64, device=world.device())
        covered = torch.zeros_like(values)
        for number, (places, rows, logits) in enumerate(self._logits):
            for column, layer in zip(self._columns().tolist(), self.policy.layers, strict=True):
                computed = seen.router_logits[number, layer][torch.from_numpy(rows).to(world.device())]
                kl = soft_kl(logits[:, column], computed.float().cpu().numpy(), self.policy.facts.score_function)
                values[column, places] = torch.from_numpy(kl).to(values.device)
                covered[column, places] = 1
        for tensor in (values, covered):
            dist.all_reduce(tensor)
        if not bool(values.isfinite().all()):  # NaN is reserved for rows whose logits the sampler did not store
            layers = [self.spec.moe_layers[index] for index in (~values.isfinite()).any(1).nonzero()[:, 0].tolist()]
            raise ReplayError(
                "router logits are not finite, or give an expert probability 0",
                where={"layers": layers},
                expected="finite logits in sampler and trainer",
            )
        return np.where(covered.cpu().numpy() > 0, values.cpu().numpy(), np.nan)

    def _sampler_logits(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Read the router logits that the sampler stored, for the M rows of this rank that have them. One entry per
        microbatch.

        An entry has the rows' indices int [M] among the R rows, their indices int [M] at this rank's routers, and the
        logits float32 [M, L, E].
        """
        entries = []
        for microbatch, here in zip(self.microbatches, self._row_places(), strict=True):
            row_of = {place: row for row, place in enumerate(here.tolist()) if place >= 0}
            places, logits = [], []
            for i in microbatch.indices:
                ref = self.sequences[i].routes
                if ref is None or LOGITS not in self.store.info(ref).aux:
                    continue
                rows = self.store.aux(ref, f"{LOGITS}_rows").astype(np.int64) + self._first_row[i]
                mine = [index for index, place in enumerate(rows) if place < self._first_row[i + 1] and place in row_of]
                places.append(rows[mine])
                logits.append(self.store.aux(ref, LOGITS)[mine])
            empty = np.empty((0, len(self.spec.moe_layers), self.spec.num_experts), np.float32)
            places = np.concatenate([np.empty(0, np.int64), *places])
            rows = np.array([row_of[place] for place in places], np.int64)
            entries.append((places, rows, np.concatenate([empty, *logits])))
        return entries

    def _columns(self) -> torch.Tensor:
        """Return int64, the indices of this rank's layers among the model's MoE layers."""
        return torch.tensor([self.spec.moe_layers.index(layer) for layer in self.policy.layers], device=world.device())

    def _row_places(self) -> list[torch.Tensor]:
        """Return one tensor per microbatch: for each row at this rank's routers its index among the R rows; -1 for
        padding."""
        places = []
        for microbatch in self.microbatches:
            whole = np.full(sum(microbatch.lengths), -1)
            rows = [np.arange(*self._first_row[i : i + 2]) for i in microbatch.indices]
            if rows:
                whole[: sum(map(len, rows))] = np.concatenate(rows)
            mine = whole[microbatch.routed_rows]
            places.append(torch.from_numpy(mine).to(world.device()))
        return places


def other_budget(sequences: list[Sequence], budget: int) -> int | None:
    """Return a microbatch size in tokens that packs the same sequences differently; None if there is none."""
    lengths = [sum(sequences[i].forwarded for i in places) for places in held_together(sequences)]  # as Shares packs
    ranks = world.data_parallel()[1]
    usual = pack(lengths, ranks=ranks, microbatch_tokens=budget)
    for tokens in (min(budget, sum(lengths) // ranks) // 2, max(lengths), budget * 2):
        if tokens >= max(lengths) and pack(lengths, ranks=ranks, microbatch_tokens=tokens) != usual:
            return tokens
    return None
