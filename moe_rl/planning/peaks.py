"""Implements `--plan --trace`: finds the row counts that recorded batches would need. Imports no torch.

Batches are packed as the run would pack them.

Also computes from known routes how many rows each rank's experts get, so that buffers can have a fixed, exact size.

Without known routes there are three choices: a buffer of dispatched rows for the worst case (every token goes to the
experts of one rank), a smaller buffer that drops rows, or a step that is run again. Known routes give the smallest size
that holds every row. A row is a (token, expert) pair. Padding has rows too.

Legend: S sources (ranks or data-parallel shares that dispatch to the same experts), M microbatches, L layers, E
experts, P expert-parallel ranks, n = E/P experts on each, K top-k. The module uses only NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from moe_rl.config.layout import make_layout, stage_layers
from moe_rl.config.schema import Config
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import Problem, TraceError, describe
from moe_rl.models.facts import ModelFacts
from moe_rl.planning.activations import expert_row_bytes
from moe_rl.planning.balance import Plan, check_division, load_of, pack_by_load
from moe_rl.planning.memory import DTYPE_BYTES
from moe_rl.planning.packing import (
    PAD_MULTIPLE,
    pack,
    padded_lengths,
    padding_experts,
    row_multiple,
    split_groups,
)
from moe_rl.planning.plan_table import Row, aligned, bytes_text
from moe_rl.trace.inspection import references, select
from moe_rl.types import RouteRef


@dataclass(frozen=True, slots=True)
class Budget:
    """Holds row counts, each the maximum over microbatches, layers and ranks.

    Attributes:
        rank: rows that the experts of a rank get in a layer of a microbatch.
        expert: rows that one expert gets in a layer of a microbatch.
        sent: rows that one expert gets from one source.
        microbatch: rows that the experts of a rank get in a microbatch, summed over layers.
        even: the value of `rank` if the rows of every layer were spread evenly.
        worst: the value of `rank` if every token chose as many experts of one rank as it can.
        source: rows that a source sends in a layer of a microbatch, K for each token.
    """

    rank: int = 0
    expert: int = 0
    sent: int = 0
    microbatch: int = 0
    even: int = 0
    worst: int = 0
    source: int = 0

    def expert_capacity_factor(self, experts: int) -> float:
        """Return the smallest `moe_expert_capacity_factor` for which Megatron drops no row of microbatches of `source`
        rows.

        Megatron keeps ceil(source / E * factor) rows from each source to each expert, and sends this number with
        `moe_pad_expert_input_to_capacity`. The factor is computed for half a row less, so that rounding up gives
        `sent`.
        """
        return (self.sent - 0.5) * experts / self.source if self.source else 0.0

    def rank_capacity_factor(self) -> float:
        """Return the smallest `moe_expert_rank_capacity_factor` for which Megatron drops no row of microbatches of
        `source` rows.

        Megatron holds int(source * factor) rows on each rank. The factor is computed for half a row more, so that
        rounding down gives `rank`.
        """
        return (self.rank + 0.5) / self.source if self.source else 0.0


def budget(counts_SMLE: np.ndarray, *, expert_parallel: int, top_k: int) -> Budget:
    """Compute the budget of ranks that dispatch to each other's experts from non-negative rows per expert [S, M, L, E].

    The ranks hold consecutive experts, the same number each.

    Raises:
        ValueError: the experts do not divide among the ranks.
    """
    counts = np.asarray(counts_SMLE)
    check_division(counts, "SMLE", expert_parallel)
    if not counts.size:
        return Budget()
    local = counts.shape[3] // expert_parallel
    received = counts.sum(axis=0, dtype=np.int64)
    ranks = received.reshape(*received.shape[:2], expert_parallel, local).sum(axis=3)
    pairs = int(received.sum(axis=2).max())
    return Budget(
        rank=int(ranks.max()),
        expert=int(received.max()),
        sent=int(counts.max()),
        microbatch=int(ranks.sum(axis=1).max()),
        even=-(-pairs // expert_parallel),
        worst=pairs // top_k * min(top_k, local),
        source=int(counts.sum(axis=3, dtype=np.int64).max()),
    )


def most(budgets: Iterable[Budget]) -> Budget:
    """Return the element-wise maximum of several budgets."""
    budgets = list(budgets) or [Budget()]
    return Budget(*(max(getattr(counts, field.name) for counts in budgets) for field in fields(Budget)))


def microbatch_counts(
    plan: Plan,
    lengths: list[int],
    counts_SLE: np.ndarray,
    *,
    top_k: int,
    context: int,
    expert_parallel: int,
    multiple: int = PAD_MULTIPLE,
) -> np.ndarray:
    """Return int64 [D, M, L, E]: rows for each expert from each of D data-parallel shares in each microbatch.

    Padding of microbatches is included.

    Args:
        plan: the result of `packing.pack` or `balance.pack_by_load`.
        lengths: the number of tokens of each sequence.
        counts_SLE: how often the tokens of each sequence chose each expert.
        context: the number of context-parallel ranks.
        multiple: the number of which a rank's rows are a multiple.
    """
    _, layers, experts = counts_SLE.shape
    result = np.zeros((len(plan), len(plan[0]), layers, experts), np.int64)
    for share, microbatches in enumerate(plan):
        for number, members in enumerate(microbatches):
            tokens = [lengths[index] for index in members]
            padding = sum(padded_lengths(tokens, context, multiple)) - sum(tokens)
            chosen = padding_experts(padding, experts, top_k, expert_parallel)
            result[share, number] = counts_SLE[members].sum(axis=0, dtype=np.int64)
            result[share, number] += np.bincount(chosen.ravel(), minlength=experts)
    return result


@dataclass(frozen=True, slots=True)
class Peaks:
    """Holds the peak row counts of the fullest rank over the batches of a trace.

    Attributes:
        rows: see `Budget`. Its `sent` and `source` count a data-parallel share, whose rows are sent by
            `parallel.tensor` x `parallel.context` ranks in parts.
        batches: steps of the trace, see `_batches`.
        layers: MoE layers of the fullest stage.
        row_bytes: bytes that the experts keep of a row for the backward pass, without recomputation.
        exact: False where the ranks of a share dispatch to different copies of the experts. Each copy is then assumed
            to get all rows of the share, which is an upper bound.
    """

    batches: int
    sequences: int
    layers: int
    rows: Budget
    row_bytes: int
    exact: bool


def dispatching_groups(parallel: ParallelConfig, shares: int) -> list[slice]:
    """Return, for each copy of the experts, the data-parallel shares that send rows to it."""
    ranks, of_one_share = parallel.expert * parallel.expert_tensor, parallel.tensor * parallel.context
    ends = range(ranks, shares * of_one_share + 1, ranks)
    return [slice((end - ranks) // of_one_share, -(-end // of_one_share)) for end in ends]


def peaks(config: Config, facts: ModelFacts, world_size: int, trace: str) -> Peaks:
    """Find the peaks over all steps at `trace`, a store or one shard. All sequences count as trained on, in key order.

    Raises:
        TraceError: the store does not exist or is empty, or a record is damaged or belongs to another model.
        ConfigError: a sequence does not fit into a microbatch.
    """
    parallel, stages = config.parallel, stage_layers(facts, config.parallel)
    columns = [[facts.moe_layers.index(layer) for layer in stage if layer in facts.moe_layers] for stage in stages]
    ranks = make_layout(parallel, facts, world_size).data
    budgets, batches, sequences = [], 0, 0
    for groups, lengths, counts in _batches(trace, facts, config.rollout.prompts_per_step):
        batches, sequences = batches + 1, sequences + len(lengths)
        for chosen in filter(None, split_groups(groups, config.train.updates_per_step)):
            tokens = [lengths[index] for index in chosen]
            plan = _packed(config, tokens, counts[chosen], ranks)
            rows = microbatch_counts(
                plan, tokens, counts[chosen], top_k=facts.top_k, context=parallel.context,
                expert_parallel=parallel.expert, multiple=row_multiple(config.train, parallel),
            )  # fmt: skip
            for together in dispatching_groups(parallel, ranks):
                for stage in columns:
                    of_stage = rows[together][:, :, stage]
                    budgets.append(budget(of_stage, expert_parallel=parallel.expert, top_k=facts.top_k))
    if not sequences:
        raise TraceError("the trace has no records", where={"folder": trace}, do="give the trace folder of a run")
    return Peaks(
        batches=batches,
        sequences=sequences,
        layers=max(map(len, columns)),
        rows=most(budgets),
        row_bytes=expert_row_bytes(facts, parallel.expert_tensor, DTYPE_BYTES[config.train.dtype]),
        exact=parallel.expert * parallel.expert_tensor % (parallel.tensor * parallel.context) == 0,
    )


def _batches(trace: str, facts: ModelFacts, prompts: int) -> Iterator[tuple[list[str], list[int], np.ndarray]]:
    """Yield for each step the groups of its sequences, their lengths, and counts [S, L, E], in key order.

    The shards of a step, from several rounds, samplers or pipeline stages, begin with its name. A group that was
    sampled alone has no step: `prompts` such groups in turn make one. Any other shard is a step. A record that another
    one continues to its end, as a turn continues the turn before, is no sequence.
    """
    selection, shape = select(trace), (len(facts.moe_layers), facts.num_experts)
    steps: dict[str, dict[str, RouteRef]] = {}
    for ref in references(selection):
        step = steps.setdefault(_step_of(ref.parts[0].shard, prompts), {})
        other = step.get(ref.key)
        staged = other is not None and ".pp" in ref.parts[0].shard
        step[ref.key] = replace(ref, parts=(*other.parts, *ref.parts)) if other and staged else ref
    for step in steps.values():
        refs = [*step.values()]
        continued = {(parent.key, parent.rows) for parent in selection.store.parents(refs) if parent is not None}
        refs = [ref for ref in refs if (ref.key, ref.rows) not in continued]
        refs.sort(key=lambda ref: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", ref.key)])
        counts = np.zeros((len(refs), *shape), np.int32)
        for record, ref in zip(counts, refs, strict=True):
            stored = selection.store.expert_counts(ref)
            if stored.shape != shape or stored.sum() != ref.rows * shape[0] * facts.top_k:
                raise TraceError(
                    "a record belongs to another model",
                    where={"record": ref.key},
                    got=f"{stored.sum()} choices of {stored.shape[1]} experts in {stored.shape[0]} layers",
                    expected=f"{facts.top_k} of {shape[1]} experts in {shape[0]} layers for {ref.rows} tokens",
                    do="give the trace of a run of model.path",
                )
            record[:] = stored
        yield [ref.key.rpartition("/")[0] for ref in refs], [ref.rows for ref in refs], counts


def _step_of(shard: str, prompts: int) -> str:
    """Return a name that all shards of a step share."""
    name = re.match(r"(step|group)(\d{6,})", shard)
    if name is None:
        return shard
    return name[0] if name[1] == "step" else f"groups {int(name[2]) // prompts}"


def _packed(config: Config, lengths: list[int], counts: np.ndarray, ranks: int) -> Plan:
    tokens = config.train.microbatch_tokens
    if config.train.packing == "length":
        return pack(lengths, ranks=ranks, microbatch_tokens=tokens)
    parallel, loads = config.parallel, load_of(counts, config.parallel.expert)
    shares, rest = divmod(parallel.expert * parallel.expert_tensor, parallel.tensor * parallel.context)
    exchange = 1 if rest else shares  # the same as world.dispatching_shares
    return pack_by_load(lengths, loads, ranks=ranks, microbatch_tokens=tokens, exchange=exchange)[0]


def limit_problem(peaks: Peaks, config: Config) -> Problem | None:
    """Say why a run on such batches would be refused by `replay.max_rows`; None when it would not."""
    limit = config.replay.max_rows
    if limit is None or peaks.rows.rank <= limit:
        return None
    return describe(
        "the trace's routes give a rank too many rows",
        where={"key": "replay.max_rows"},
        got=peaks.rows.rank,
        expected=f"at most {limit}",
        do="lower train.microbatch_tokens, try train.packing: load, or raise replay.max_rows",
    )


def render(peaks: Peaks, config: Config, experts: int) -> str:
    """Format the peaks as a table."""
    rows, cut = peaks.rows, config.parallel.tensor * config.parallel.context
    holds = f"moe_expert_rank_capacity_factor {cut * rows.rank_capacity_factor():.4f} holds them"
    pads = f"; moe_expert_capacity_factor {rows.expert_capacity_factor(experts):.4f} pads to them" if cut == 1 else ""
    in_layers = (rows.microbatch, rows.even * peaks.layers, rows.worst * peaks.layers)
    kept, even, worst = (count * peaks.row_bytes for count in in_layers)
    table: list[Row] = [
        ("rows of a rank", rows.rank, f"in a layer of a microbatch{'' if peaks.exact else ', or fewer'}; {holds}"),
        ("  if they were even", rows.even, ""),
        ("  worst case", rows.worst, "every token to the experts of one rank"),
        ("rows of an expert", rows.expert, "in a layer of a microbatch"),
        ("rows sent to an expert", rows.sent, f"by one data-parallel share{pads}"),
        ("rows of a microbatch", rows.microbatch, f"of a rank, over its {peaks.layers} MoE layers"),
        (
            "activations of these rows",
            bytes_text(kept),
            "kept by the experts for the backward pass, without recomputation",
        ),
        ("  if they were even", bytes_text(even), ""),
        ("  worst case", bytes_text(worst), ""),
    ]
    lines = [f"the trace: {peaks.sequences:,} sequences in {peaks.batches:,} batches, packed by {config.train.packing}"]
    if config.placement.experts != "natural":
        lines[0] += ", experts in the order of their numbers"  # the run decides the placement
    if config.placement.copies:
        lines[0] += ", without copies of experts"
    return "\n".join(lines + aligned(table))
