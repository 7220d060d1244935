"""Defines a microbatch: sequences packed end to end, as tensors on this rank's device.

Legend: T rows of this context-parallel rank, with padding; N completion tokens, n of them predicted on this rank; B
units of the loss: sequences, or turns if these have their own rewards.

Also defines this rank's part of an optimizer update: microbatches with their routes and plans, and what passes compute
for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from moe_rl.megatron.router import ReplaySeqParams
from moe_rl.objectives.device import to_device
from moe_rl.objectives.logprobs import Support
from moe_rl.planning.packing import PAD_MULTIPLE, padded_lengths, rows_of
from moe_rl.replay.plans import LayerPlan
from moe_rl.replay.replay_pass import PassSeen, ReplayPass
from moe_rl.replay.routes import RowPolicy, microbatch_routes, read_routes, source_sum
from moe_rl.replay.tables import MicrobatchRoutes
from moe_rl.trace import MemoryTrace, TraceSpec, TraceStore
from moe_rl.types import SamplerHead, SamplingSupport, Sequence, seal_of


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
            update on all ranks. The segments of a completion count as one sequence unless each is alone, and each turn
            with its own reward as one.
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


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Holds packed sequences on one rank.

    Attributes:
        tokens, positions: int64 [1, T].
        bounds: int32 [sequences + 1], where each packed sequence begins, and the end of the last, in the rows of
            `lengths`.
        lengths: Rows of each packed sequence over all context-parallel ranks. The padding at the end counts as one more
            sequence.
        rows: int64 [T] on the host, the number of each row's token. Numbers run through all sequences, then through the
            padding.
        predicts: int64 [n], rows whose logits predict completion tokens.
        targets: int64 [n], these tokens.
        predicted: int64 [n], which of the N completion tokens they are.
        support: The sampling supports of these n tokens; None if they were drawn from the whole vocabulary.
        head_ids: int64 [n, K], the sampler's likeliest ids at these n tokens; None if they were not recorded.
        sequence_ids: int64 [N], in 0..B-1, of the unit whose loss a token is part of: its turn, its sequence, or the
            first segment of its completion. So no token has the number of a later segment.
        counts: Completion tokens of each packed sequence, N in all.
        units: Units of the loss of each packed sequence, B in all.
        rollout_logprobs: float32 [N].
        versions: int64 [N], of the weights that sampled these tokens.
        head_logprobs: float32 [K, N], the sampler's logprobs of the head ids of all N tokens; None without head ids.
        advantages: float32 [B]; NaN until they are set.
        indices: Which sequences of the batch are packed.
        real_tokens: Rows without padding, over all context-parallel ranks.
        padding: bool [T].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    bounds: torch.Tensor
    lengths: tuple[int, ...]
    rows: np.ndarray
    predicts: torch.Tensor
    targets: torch.Tensor
    predicted: torch.Tensor
    support: Support | None
    head_ids: torch.Tensor | None
    sequence_ids: torch.Tensor
    counts: tuple[int, ...]
    units: tuple[int, ...]
    rollout_logprobs: torch.Tensor
    versions: torch.Tensor
    head_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    indices: tuple[int, ...]
    real_tokens: int
    padding: torch.Tensor

    def begin_forward(self, replay: ReplayPass | None, number: int) -> ReplaySeqParams:
        """Tell the pass that the forward pass of this microbatch, number `number`, begins now.

        Returns:
            The packed sequence parameters for Megatron. Without one, the model routes natively and nothing is
                compared.
        """
        if replay is not None:
            replay.begin_forward(number, self.tokens[0, world.own_rows(self.tokens.shape[1])])
        bounds, longest = self.bounds, max(self.lengths)
        return ReplaySeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            # TransformerEngine needs these under context parallelism. It counts the padding of a sequence as part of
            # the sequence, so there is no padding between sequences, which some of its kernels do not support.
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            pad_between_seqs=False,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=self.lengths,
            tokens=self.real_tokens,
            padding=self.padding,
            replay=None if replay is None else replay.handle(number),
        )

    def give_advantages(self, values: Seq[Seq[float]]) -> None:
        """Set the advantages of the packed sequences. values: those of the units of each sequence of the batch."""
        of_units = [value for i in self.indices for value in values[i]]
        self.advantages.copy_(to_device(np.array(of_units, np.float32), self.advantages.device))

    def given_advantages(self) -> list[np.ndarray]:
        """Return float32 [units] of each packed sequence: the advantages as the loss gets them."""
        return np.split(self.advantages.cpu().numpy(), np.cumsum(self.units)[:-1]) if self.units else []

    def seals(self, sequences: Seq[Sequence]) -> list[str]:
        """Return the seal of each packed sequence, see `types.seal_of`, made from what the loss gets.

        It is "" for a sequence with a token that is not predicted by the row before its own, or has not its own unit of
        the loss or weight version. The row after the one that predicts a token must be the row that the token is fed
        to; the last token is not fed.

        Args:
            sequences: The packed sequences, in packing order. Tokens in rows of other ranks are taken from these.
        """
        if not sequences:
            return []
        targets = np.array([token for sequence in sequences for token in sequence.token_ids], np.int64)
        integers = (self.predicted, self.targets, self.predicts, self.sequence_ids, self.versions)
        ends_of = np.cumsum([len(values) for values in integers])[:-1]
        here, sampled, predicts, units, versions = np.split(torch.cat(integers).cpu().numpy(), ends_of)  # one copy
        targets[here] = sampled
        whose = np.repeat(np.arange(len(sequences)), self.counts)[here]
        ends = np.cumsum([sequence.forwarded for sequence in sequences])
        run = np.concatenate([np.empty(0, np.int64), *self.fed(sequences)])
        rows = self.rows[predicts]
        begins, last = ends[whose] - np.array([s.forwarded for s in sequences], np.int64)[whose], ends[whose] - 1
        final = here == np.cumsum(self.counts)[whose] - 1  # the last sampled token is not fed
        inside = (begins <= rows) & np.where(final, rows == last, rows < last)
        follows = np.append(run, -1)[np.minimum(rows + 1, len(run))]
        placed = inside & (final | (follows == targets[here]))
        labelled = (units == _units(sequences)[0]) & (versions == _versions(sequences))
        misplaced = {*whose[~placed].tolist(), *np.repeat(np.arange(len(sequences)), self.counts)[~labelled].tolist()}
        logprobs, bounds = self.rollout_logprobs.cpu().numpy(), np.cumsum(self.counts)[:-1]
        contents = zip(np.split(targets, bounds), np.split(logprobs, bounds), strict=True)
        pairs = enumerate(zip(sequences, contents, strict=True))
        return ["" if index in misplaced else seal_of(sequence.key, *content) for index, (sequence, content) in pairs]

    def fed(self, sequences: Seq[Sequence]) -> list[np.ndarray]:
        """Return the tokens int64 [T_i] of each packed sequence.

        The tokens in this rank's rows are read back from those rows. The others, which are in the rows of other ranks,
        are taken from `sequences`, the packed sequences in packing order.
        """
        run = np.array([token for s in sequences for token in s.ids[:-1]], np.int64)
        real = self.rows < len(run)
        run[self.rows[real]] = self.tokens[0].cpu().numpy()[real]
        return np.split(run, np.cumsum([s.forwarded for s in sequences], dtype=np.int64))[:-1]

    @property
    def routed_rows(self) -> np.ndarray:
        """Return int64 [R], like `rows`, for the rows that this rank's routers see. Under sequence parallelism these
        are a part of T."""
        return self.rows[world.own_rows(self.tokens.shape[1])]

    def read_routes(
        self,
        store: TraceStore | MemoryTrace,
        sequences: Seq[Sequence],
        spec: TraceSpec,
        *,
        weight_version: int,
        layers: tuple[int, ...] | None = None,
        policy: RowPolicy = RowPolicy(),  # noqa: B008 - frozen
    ) -> MicrobatchRoutes:
        """Read this microbatch's routes, validate them against the tokens in its rows, and cut them to the rows that
        this rank's routers see, for a replay pass.

        Args:
            sequences: The packed sequences, in packing order.
            weight_version: Version of the trainer's weights.
            layers: Global numbers of the MoE layers that this rank holds; None means all of `spec`.
            policy: What to do about missing and stale rows.

        Raises:
            TraceError: Routes are missing or damaged.
            RouteValidationError: Routes are wrong.
            ReplayError: Routes differ from those that left the sampler's engine. All messages name the routes.
        """
        layers = spec.moe_layers if layers is None else layers
        fed = self.fed(sequences)
        here = np.zeros(sum(self.lengths), bool)
        here[self.routed_rows] = True
        masks = np.split(here, np.cumsum([len(tokens) for tokens in fed]))[:-1]
        parts = read_routes(
            store, sequences, spec, layers=layers, fed=fed, here=masks, weight_version=weight_version, policy=policy
        )
        return microbatch_routes(
            parts,
            spec,
            layers=layers,
            names=[sequence.key for sequence in sequences],
            fed=fed,
            source=[source_sum(sequence) for sequence in sequences],
            padded_tokens=sum(self.lengths),
            rows=self.routed_rows,
            expert_parallel=world.expert_parallel(),
            device=self.tokens.device,
        )


def _units(sequences: Seq[Sequence]) -> tuple[np.ndarray, list[int]]:
    """Return `sequence_ids` and `units` of a microbatch of these sequences."""
    ids, begins, units = [np.empty(0, np.int64)], dict[str, int](), list[int]()
    for sequence in sequences:
        done = sum(units)
        if sequence.turns:
            ids.append(np.repeat(np.arange(done, done + len(sequence.turns)), [turn.tokens for turn in sequence.turns]))
        else:
            ids.append(np.full(len(sequence.token_ids), begins.setdefault(sequence.together, done)))
        units.append(len(sequence.turns) or 1)
    return np.concatenate(ids), units


def _versions(sequences: Seq[Sequence]) -> np.ndarray:
    """Return int64 [N], the version of the weights that sampled each token."""
    spans = [span for sequence in sequences for span in sequence.versions]
    return np.repeat(np.array([span.weight_version for span in spans], np.int64), [span.tokens for span in spans])


def pack(
    sequences: Seq[Sequence],
    indices: Seq[int] | None = None,
    device: torch.device | None = None,
    context: tuple[int, int] = (0, 1),
    supports: Seq[SamplingSupport] | None = None,
    heads: Seq[SamplerHead] | None = None,
    multiple: int = PAD_MULTIPLE,
) -> Microbatch:
    """Pack sequences[i] for i in indices. The last token of each is not fed, because nothing is predicted after it.
    Inserted tokens are fed and not predicted.

    Args:
        indices: None packs all sequences.
        device: None means `world.device()`.
        context: (this rank's part of every sequence, number of parts), see `world.context_parallel`.
        supports: Sampling supports of the packed sequences, in the order of `indices`. None if every token was drawn
            from the whole vocabulary.
        heads: The sampler's likeliest tokens of the packed sequences, in the order of `indices`, if they were recorded.
        multiple: The number of which the rows of each part are a multiple, see `planning.packing.row_multiple`.
    """
    indices = range(len(sequences)) if indices is None else indices
    device = world.device() if device is None else device
    chosen = [sequences[i] for i in indices]
    if len(keys := {sequence.key for sequence in chosen}) < len(chosen):
        raise ReplayError(
            "sequences of a microbatch have equal keys, and would be one unit of the loss",
            got=f"{len(keys)} keys for {len(chosen)} sequences",
            do="give each sequence its own key",
            fault="keys",
        )
    lengths = padded_lengths([s.forwarded for s in chosen], context[1], multiple)
    starts = np.cumsum((0, *lengths))
    tokens, is_real = np.zeros(starts[-1], np.int64), np.zeros(starts[-1], bool)
    targets, predicts = (np.empty(sum(len(s.token_ids) for s in chosen), np.int64) for _ in range(2))
    sequence_ids, units = _units(chosen)
    done = 0
    for sequence, start in zip(chosen, starts, strict=False):
        end, completion = start + sequence.forwarded, slice(done, done + len(sequence.token_ids))
        tokens[start:end] = sequence.ids[:-1]
        is_real[start:end] = True
        targets[completion] = sequence.token_ids
        predicts[completion] = start + sequence.positions - 1
        done = completion.stop

    # From here on, keep the rows of this rank only. A token may be predicted on one rank and fed to another.
    own = rows_of(lengths, *context)
    numbers = np.empty(len(tokens), np.int64)
    numbers[np.concatenate([np.flatnonzero(is_real), np.flatnonzero(~is_real)])] = np.arange(len(tokens))
    here = np.full(len(tokens), -1)
    here[own] = np.arange(len(own))
    predicts = here[predicts]
    predicted = np.flatnonzero(predicts >= 0)
    logprobs = np.concatenate([np.empty(0, np.float32), *(s.rollout_logprobs for s in chosen)])
    on_device = partial(to_device, device=device)
    return Microbatch(
        tokens=on_device(tokens[None, own]),
        positions=on_device(np.concatenate([np.arange(n) for n in lengths])[None, own]),
        bounds=on_device(starts.astype(np.int32)),
        lengths=lengths,
        rows=numbers[own],
        predicts=on_device(predicts[predicted]),
        targets=on_device(targets[predicted]),
        predicted=on_device(predicted),
        support=None if supports is None else _support(supports, predicted, device),
        head_ids=None if not heads else on_device(np.concatenate([h.ids for h in heads])[predicted].astype(np.int64)),
        sequence_ids=on_device(sequence_ids),
        counts=tuple(len(s.token_ids) for s in chosen),
        units=tuple(units),
        rollout_logprobs=on_device(logprobs.astype(np.float32)),
        versions=on_device(_versions(chosen)),
        head_logprobs=None if not heads else on_device(np.concatenate([h.logprobs for h in heads]).T),
        advantages=torch.full((sum(units),), torch.nan, device=device),
        indices=tuple(indices),
        real_tokens=sum(s.forwarded for s in chosen),
        padding=on_device(~is_real[own]),
    )


def _support(supports: Seq[SamplingSupport], predicted: np.ndarray, device: torch.device) -> Support:
    """Return the supports of the completion tokens `predicted` [n], ascending, out of all N of the packed sequences."""
    nothing = np.empty(0, np.int64)
    before = itertools.accumulate((len(support.counts) for support in supports), initial=0)
    sets = np.concatenate([nothing, *(support.sets + first for support, first in zip(supports, before, strict=False))])
    counts, ids = ([nothing, *(getattr(support, name) for support in supports)] for name in ("counts", "ids"))
    return Support.of(sets[predicted], np.concatenate(counts), np.concatenate(ids), device)
