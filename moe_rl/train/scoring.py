"""What a step does before its updates: dispatch plans, and the passes without a gradient. One function each.

All ranks call them together, and each leaves what it found in the microbatches' work and in `Shown`.
"""

from __future__ import annotations

import torch.distributed as dist

from moe_rl.config.sampling_keys import ReplayConfig
from moe_rl.errors import ReplayError, describe
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy, ReferencePolicy
from moe_rl.replay.plans import peak_rows
from moe_rl.replay.session import Mode, ReplaySession
from moe_rl.train.shares import MicrobatchWork
from moe_rl.train.step_metrics import Shown, mismatch_of


def session(
    policy: Policy,
    work: list[MicrobatchWork],
    mode: Mode,
    name: str,
    *,
    compare_native: bool = True,
    align: bool = False,
    training: bool = False,
) -> ReplaySession:
    """The session of one pass over this work, under its routes and plans. Options: see `ReplaySession`."""
    return policy.session(
        [one.table for one in work],
        mode=mode,
        name=name,
        plans=[one.plan for one in work] if mode == "replay" else (),
        compare_native=compare_native,
        align=align,
        training=training,
    )


def plan_dispatch(policy: Policy, work: list[MicrobatchWork], settings: ReplayConfig, step: int, shown: Shown) -> None:
    """Give the microbatches dispatch plans of their routes, with one exchange between the ranks for all of them.

    Raises ReplayError on all ranks when a rank would get more rows than `replay.max_rows`.
    """
    if settings.plan is False:
        return
    plans = policy.plan_dispatch([one.table for one in work], overlap_chunks=settings.overlap_chunks)
    limit, (peak,) = settings.max_rows, world.all_reduce([peak_rows(plans)], dist.ReduceOp.MAX)
    if limit is not None and peak > limit:
        raise ReplayError(
            describe(
                "the routes would bring a rank more rows than it may get in a layer of a microbatch",
                where=f"step {step}",
                got=f"{peak:.0f} (token, expert) pairs",
                expected=f"at most {limit} (replay.max_rows)",
                do="lower train.microbatch_tokens, try train.packing: load, or raise replay.max_rows",
            )
        )
    shown.peak_rows = peak
    for one, plan in zip(work, plans, strict=True):
        one.plan = plan


def score_old(policy: Policy, work: list[MicrobatchWork], replay: str, step: int, shown: Shown, *, align: bool) -> None:
    """Log-probabilities of the policy that the step begins with. Under r2 its routers' choice becomes the routes.

    align: test the routes that are replayed against the routers' own choice.
    """
    modes: dict[str, Mode] = {"r3": "replay", "r2": "record", "off": "observe"}
    name = f"step {step} old logprobs"
    with session(policy, work, modes[replay], name, align=align) as opened:
        scored, shown.entropies = policy.logprobs_and_entropies([one.microbatch for one in work], opened)
    shown.tallies.append(opened.tally)
    shown.alignment = opened.alignment
    shown.mismatch = mismatch_of(work, scored)
    for one, values in zip(work, scored, strict=True):
        one.old_logprobs = values
    if replay == "r2":
        for one, table in zip(work, opened.recorded_routes(), strict=True):
            one.table = table


def score_natively(policy: Policy, work: list[MicrobatchWork], step: int, shown: Shown) -> None:
    """The same tokens with every router free to choose: what the mismatch would be without replay."""
    with session(policy, work, "observe", f"step {step} native logprobs") as opened:
        scored = policy.logprobs([one.microbatch for one in work], opened)
    shown.native = mismatch_of(work, scored), opened.tally


def score_reference(reference: ReferencePolicy, work: list[MicrobatchWork]) -> None:
    """Log-probabilities of the frozen policy, natively routed."""
    for one, values in zip(work, reference.logprobs([one.microbatch for one in work]), strict=True):
        one.ref_logprobs = values
