"""Does a step's work before its updates, one function each: makes dispatch plans, and runs the passes without
gradients.

All ranks call these functions together. Each puts its results into the microbatches' work and into `Shown`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_rl.config.schema import Config
from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy, ReferencePolicy
from moe_rl.objectives import second_moment
from moe_rl.replay.alignment import AlignmentTest
from moe_rl.replay.plans import load_sums, peak_rows
from moe_rl.replay.session import Mode, ReplaySession
from moe_rl.train.assignment import agreed
from moe_rl.train.samples import PassSeen
from moe_rl.train.shares import MicrobatchWork, UpdateShare
from moe_rl.train.step_metrics import Shown, mismatch_of


def session(
    policy: Policy,
    work: list[MicrobatchWork],
    mode: Mode,
    name: str,
    *,
    compare_native: bool = True,
    align: AlignmentTest | None = None,
    align_from: int = 0,
    training: bool = False,
) -> ReplaySession:
    """Make the session of one pass over this work, with its routes and plans. For the options see `ReplaySession`."""
    return policy.session(
        [one.table for one in work],
        mode=mode,
        name=name,
        plans=[one.plan for one in work] if mode == "replay" else (),
        compare_native=compare_native,
        align=align,
        align_from=align_from,
        training=training,
        agreed=lambda check: agreed(check, "routes that it replays"),
    )


def plan_dispatch(policy: Policy, work: list[MicrobatchWork], config: Config, step: int, shown: Shown) -> None:
    """Make dispatch plans from the microbatches' routes, with one exchange between ranks for all of them.

    `work` is in the order in which passes run it, so that the first pass waits for the plans of its first microbatch
    only.

    Raises:
        ReplayError: A rank would get more rows than `replay.max_rows`. Raised on all ranks.
    """
    settings = config.replay
    if settings.plan is False:
        return
    tables = [one.table for one in work]
    plans = policy.plan_dispatch(
        tables,
        overlap_chunks=settings.overlap_chunks,
        copies=config.placement.copies,
        least_copied_rows=config.placement.least_copied_rows,
        node_ranks=config.placement.node_ranks,
    )
    limit, (peak,) = settings.max_rows, world.all_reduce([peak_rows(plans)], dist.ReduceOp.MAX)
    if limit is not None and peak > limit:
        raise ReplayError(
            "the routes would give a rank too many rows in a layer of a microbatch",
            where={"step": step},
            got=f"{peak:.0f} (token, expert) pairs",
            expected=f"at most {limit} (replay.max_rows)",
            do="lower train.microbatch_tokens, try train.packing: load, or raise replay.max_rows",
        )
    shown.peak_rows = peak
    if config.placement.copies:
        fullest, rows = world.all_reduce(list(load_sums(plans)))
        shown.copied_excess = fullest * config.parallel.expert / rows - 1 if rows else 0.0
    for one, plan in zip(work, plans, strict=True):
        one.plan = plan


def score_old(
    policy: Policy,
    work: list[MicrobatchWork],
    replay: str,
    step: int,
    shown: Shown,
    *,
    align: AlignmentTest | None,
    align_from: int,
) -> None:
    """Compute logprobs on the step's starting weights, for the updates whose forward pass runs on later weights. Under
    r2, the routers' choices become the routes.

    Args:
        align, align_from: As in `ReplaySession`.
    """
    modes: dict[str, Mode] = {"r3": "replay", "r2": "record", "off": "observe"}
    name = f"step {step} old logprobs"
    with session(policy, work, modes[replay], name, align=align, align_from=align_from) as opened:
        scored = policy.logprobs_and_entropies([one.microbatch for one in work], opened)
    shown.tallies.append(opened.tally)
    shown.alignment = opened.alignment
    shown.passes.append(PassSeen.of(work, scored, opened))
    for one, (logprobs, _) in zip(work, scored, strict=True):
        one.old_logprobs = logprobs
    if replay == "r2":
        for one, table in zip(work, opened.recorded_routes(), strict=True):
            one.table = table


def score_natively(policy: Policy, work: list[MicrobatchWork], step: int, shown: Shown) -> None:
    """Score the same tokens with native routing, to measure the mismatch without replay."""
    with session(policy, work, "observe", f"step {step} native logprobs") as opened:
        scored = policy.logprobs([one.microbatch for one in work], opened)
    shown.native = mismatch_of(zip(work, scored, strict=True)), opened.tally


def score_reference(reference: ReferencePolicy, work: list[MicrobatchWork]) -> None:
    """Compute the logprobs of the frozen reference policy, natively routed."""
    for one, values in zip(work, reference.logprobs([one.microbatch for one in work]), strict=True):
        one.ref_logprobs = values


def trust(limit: float, shares: list[UpdateShare]) -> dict[str, float]:
    """Find the tokens of each update that `objective.second_moment_limit` keeps. Needs the advantages.

    Returns:
        Metrics, equal on all ranks.
    """
    means = []
    for share in shares:
        found = []
        for one in share.work:
            batch = one.microbatch
            found.append(
                second_moment.squares(one.old_logprobs, batch.rollout_logprobs, batch.advantages, batch.sequence_ids)
            )
        mine = [values[region] for values, region in found] if world.speaks_for_its_sequences() else []
        empty = torch.empty(0, dtype=torch.float64, device=world.device())
        everyone = world.concatenate(torch.cat([empty, *mine])).cpu().numpy()
        largest = second_moment.largest_kept(everyone, limit)
        for one, (values, region) in zip(share.work, found, strict=True):
            one.trusted = ~region | (values <= largest)
        means.append(everyone.mean() if len(everyone) else 0.0)
    return {"objective/second_moment": sum(means) / len(means)}
