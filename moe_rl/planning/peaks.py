"""Implements `--plan --trace`: finds the row counts that recorded batches would need. Imports no torch.

Batches are packed as the run would pack them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moe_rl.config.layout import make_layout, stage_layers
from moe_rl.config.schema import Config
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import Problem, TraceError, describe
from moe_rl.models.facts import ModelFacts
from moe_rl.planning.activations import expert_row_bytes
from moe_rl.planning.balance import Plan, load_of, pack_by_load
from moe_rl.planning.budgets import Budget, budget, microbatch_counts, most
from moe_rl.planning.memory import DTYPE_BYTES
from moe_rl.planning.packing import pack, split_groups
from moe_rl.planning.plan_table import bytes_text
from moe_rl.trace.inspection import references, select


@dataclass(frozen=True, slots=True)
class Peaks:
    """Holds the peak row counts of the fullest rank over the batches of a trace.

    Attributes:
        rows: see `planning.budgets.Budget`. Its `sent` and `source` count a data-parallel share, whose rows are sent by
            `parallel.tensor` x `parallel.context` ranks in parts.
        batches: shards of the trace; each counts as one step.
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
    """Find the peaks over all shards at `trace`, a store or one shard. All records count as trained on, in key order.

    Raises:
        TraceError: the store does not exist or is empty, or a record is damaged or belongs to another model.
        ConfigError: a sequence does not fit into a microbatch.
    """
    parallel, stages = config.parallel, stage_layers(facts, config.parallel)
    columns = [[facts.moe_layers.index(layer) for layer in stage if layer in facts.moe_layers] for stage in stages]
    ranks = make_layout(parallel, facts, world_size).data
    found, batches, sequences = [], 0, 0
    for groups, lengths, counts in _batches(trace, facts):
        batches, sequences = batches + 1, sequences + len(lengths)
        for chosen in filter(None, split_groups(groups, config.train.updates_per_step)):
            tokens = [lengths[index] for index in chosen]
            plan = _packed(config, tokens, counts[chosen], ranks)
            rows = microbatch_counts(
                plan, tokens, counts[chosen], top_k=facts.top_k, context=parallel.context,
                expert_parallel=parallel.expert,
            )  # fmt: skip
            for together in dispatching_groups(parallel, ranks):
                for stage in columns:
                    of_stage = rows[together][:, :, stage]
                    found.append(budget(of_stage, expert_parallel=parallel.expert, top_k=facts.top_k))
    if not sequences:
        raise TraceError("the trace has no records", where={"folder": trace}, do="give the trace folder of a run")
    return Peaks(
        batches=batches,
        sequences=sequences,
        layers=max(map(len, columns)),
        rows=most(found),
        row_bytes=expert_row_bytes(facts, parallel.expert_tensor, DTYPE_BYTES[config.train.dtype]),
        exact=parallel.expert * parallel.expert_tensor % (parallel.tensor * parallel.context) == 0,
    )


def _batches(trace: str, facts: ModelFacts) -> Iterator[tuple[list[str], list[int], np.ndarray]]:
    """Yield for each shard the groups of its sequences, their lengths, and counts [S, L, E], in key order."""
    selection, shape = select(trace), (len(facts.moe_layers), facts.num_experts)
    for shard in selection.shards:
        refs = [ref for ref in references(selection) if ref.parts[0].shard == shard]
        refs.sort(key=lambda ref: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", ref.key)])
        counts = np.zeros((len(refs), *shape), np.int32)
        for one, ref in zip(counts, refs, strict=True):
            found = selection.store.expert_counts(ref)
            if found.shape != shape or found.sum() != ref.rows * shape[0] * facts.top_k:
                raise TraceError(
                    "a record belongs to another model",
                    where={"record": ref.key},
                    got=f"{found.sum()} choices of {found.shape[1]} experts in {found.shape[0]} layers",
                    expected=f"{facts.top_k} of {shape[1]} experts in {shape[0]} layers for {ref.rows} tokens",
                    do="give the trace of a run of model.path",
                )
            one[:] = found
        yield [ref.key.rpartition("/")[0] for ref in refs], [ref.rows for ref in refs], counts


def _packed(config: Config, lengths: list[int], counts: np.ndarray, ranks: int) -> Plan:
    tokens = config.train.microbatch_tokens
    if config.train.packing == "length":
        return pack(lengths, ranks=ranks, microbatch_tokens=tokens)
    parallel, loads = config.parallel, load_of(counts, config.parallel.expert)
    dispatching, of_one_share = parallel.expert * parallel.expert_tensor, parallel.tensor * parallel.context
    exchange = (
        dispatching // of_one_share if dispatching % of_one_share == 0 else 1
    )  # the same as world.dispatching_shares
    return pack_by_load(lengths, loads, ranks=ranks, microbatch_tokens=tokens, exchange=exchange)[0]


def limit_problem(found: Peaks, config: Config) -> Problem | None:
    """Say why a run on such batches would be refused by `replay.max_rows`; None when it would not."""
    limit = config.replay.max_rows
    if limit is None or found.rows.rank <= limit:
        return None
    return describe(
        "the trace's routes give a rank too many rows",
        where={"key": "replay.max_rows"},
        got=found.rows.rank,
        expected=f"at most {limit}",
        do="lower train.microbatch_tokens, try train.packing: load, or raise replay.max_rows",
    )


def render(found: Peaks, config: Config, experts: int) -> str:
    """Format the peaks as a table."""
    rows, cut = found.rows, config.parallel.tensor * config.parallel.context
    holds = f"moe_expert_rank_capacity_factor {cut * rows.rank_capacity_factor():.4f} holds them"
    pads = f"; moe_expert_capacity_factor {rows.expert_capacity_factor(experts):.4f} pads to them" if cut == 1 else ""
    in_layers = (rows.microbatch, rows.even * found.layers, rows.worst * found.layers)
    kept, even, worst = (count * found.row_bytes for count in in_layers)
    table = [
        ("rows of a rank", rows.rank, f"in a layer of a microbatch{'' if found.exact else ', or fewer'}; {holds}"),
        ("  if they were even", rows.even, ""),
        ("  worst case", rows.worst, "every token to the experts of one rank"),
        ("rows of an expert", rows.expert, "in a layer of a microbatch"),
        ("rows sent to an expert", rows.sent, f"by one data-parallel share{pads}"),
        ("rows of a microbatch", rows.microbatch, f"of a rank, over its {found.layers} MoE layers"),
        (
            "activations of these rows",
            bytes_text(kept),
            "kept by the experts for the backward pass, without recomputation",
        ),
        ("  if they were even", bytes_text(even), ""),
        ("  worst case", bytes_text(worst), ""),
    ]
    shown = [(label, value if isinstance(value, str) else f"{value:,}", note) for label, value, note in table]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    lines = [f"the trace: {found.sequences:,} sequences in {found.batches:,} batches, packed by {config.train.packing}"]
    if config.placement.experts != "natural":
        lines[0] += ", experts in the order of their numbers"  # the run decides the placement
    if config.placement.copies:
        lines[0] += ", without copies of experts"
    return "\n".join(lines + [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in shown])
