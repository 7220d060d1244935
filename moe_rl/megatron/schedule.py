"""Runs microbatches through the model with the Megatron schedule that fits the layout: one after the other, 1F1B, or
interleaved 1F1B. A training pass can also use combined 1F1B, which alternates the forward of one microbatch and the
backward of another, layer by layer.

The handle to its routes travels with each microbatch, so no order of the schedule is assumed. Microbatches of only
padding, which fill up the rounds of an interleaved schedule, have a handle too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region

from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from moe_rl.megatron.cpu import mode_left_behind
from moe_rl.megatron.microbatch import Microbatch
from moe_rl.objectives.logprobs import hidden_scores
from moe_rl.replay.replay_pass import ReplayPass, require_open
from moe_rl.whereabouts import HERE

# (microbatch number, logprobs [N] with gradient) -> the microbatch's share of the loss, divided by its denominator.
# If entropies are requested, they are a third argument [N], also with gradient. If the microbatch has head ids, the
# keyword argument `head` [K, N] holds their logprobs, also with gradient.
LossFunction = Callable[..., torch.Tensor]


@torch.no_grad()
def logprobs(
    chunks: list[torch.nn.Module],
    microbatches: list[Microbatch],
    replay: ReplayPass | None,
    temperature: float,
    *,
    entropy: bool = False,
) -> list[torch.Tensor]:
    """Return the logprobs [1, N] float32 of each microbatch's completion tokens, without gradients.

    All pipeline stages get the values. With `entropy` the result is [2, N]; the second row is the entropy of each
    token's distribution, in nats.
    """
    sizes = [len(microbatch.sequence_ids) for microbatch in microbatches]
    results = [torch.empty(1 + entropy, size, device=world.device()) for size in sizes]

    def score(microbatch, output):
        return completion_logprobs(microbatch, output, temperature, entropy=entropy)

    def collect(number, microbatch, values, non_loss_data=True):
        results[number] = values

    with mode_left_behind() as begun:
        get_forward_backward_func()(
            **_arguments(chunks, microbatches, replay, score, collect, begun),
            forward_only=True,
            collect_non_loss_data=True,
        )
    return list(world.share_from_last_stage(torch.cat(results, 1)).split(sizes, 1))


def training_pass(
    chunks: list[torch.nn.Module],
    microbatches: list[Microbatch],
    replay: ReplayPass | None,
    loss: LossFunction,
    temperature: float,
    begun: Callable[[], object],
    *,
    entropy: bool = False,
) -> dict[str, object]:
    """Return the arguments of Megatron's schedule for a pass that adds the gradient of the summed losses.

    Gradients are added to the chunks' main gradients. On the last stage, the schedule then returns for each microbatch
    whether its loss is finite, as a bool []. The caller starts the schedule itself,
    `get_forward_backward_func()(**training_pass(...))`, so that this function is not in the call stack of the loss.

    Args:
        loss: Called on the last stage only.
        begun: Called before each microbatch's forward pass.
        entropy: Also pass entropies to the loss.
    """

    def score(microbatch, output):
        return completion_logprobs(microbatch, output, temperature, entropy=entropy, head=True)

    def loss_of(number, microbatch, values):
        others = {} if microbatch.head_ids is None else {"head": values[1 : len(values) - entropy]}
        value = loss(number, values[0], *values[len(values) - entropy :], **others)
        return value, torch.zeros([], dtype=torch.int), value.detach().isfinite()

    return {**_arguments(chunks, microbatches, replay, score, loss_of, begun), "forward_only": False}


def _arguments(chunks, microbatches, replay, score, after_forward, begun) -> dict[str, object]:
    """Return the arguments that every pass gives to Megatron's schedule.

    Args:
        score: Called with (microbatch, output) on the last stage, instead of the output layer.
        after_forward: Called with (number, microbatch, what `score` returned) on the last stage.
        begun: Called before each microbatch's forward pass.
    """
    require_open(replay)
    in_a_round = world.microbatches_in_a_round()
    if len(microbatches) % in_a_round:
        raise ReplayError(
            "with interleaved stages, the number of microbatches must be a multiple of the number of stages",
            got=f"{len(microbatches)} microbatches",
            expected=f"a multiple of {in_a_round}",
            do="add empty microbatches with planning.packing.fill_rounds",
        )
    _, ranks = world.context_parallel()
    for number, microbatch in enumerate(microbatches):
        if sum(microbatch.lengths) != microbatch.tokens.shape[1] * ranks:
            raise ReplayError(
                "a microbatch is not split over the context-parallel ranks",
                where={"microbatch": number},
                got=f"{microbatch.tokens.shape[1]} of {sum(microbatch.lengths)} rows",
                expected=f"1/{ranks} of its rows",
                do="pass world.context_parallel() to pack",
            )

    def forward_step(iterator, model, return_schedule_plan=False):
        begun()
        number, microbatch = next(iterator)
        HERE.begin_microbatch(number)
        params = microbatch.begin_forward(replay, number)
        # Combined 1F1B requests the parts of the forward, and runs them before it requests those of the next
        # microbatch.
        forward = model.build_schedule_plan if return_schedule_plan else model
        output = forward(
            microbatch.tokens,
            microbatch.positions,
            None,
            packed_seq_params=params,
            output_processor=lambda **arguments: score(microbatch, Output.gathered(**arguments)),
        )
        return output, partial(after_forward, number, microbatch)

    iterators = [enumerate(microbatches) for _ in chunks]
    return {
        "forward_step_func": forward_step,
        "data_iterator": iterators if len(chunks) > 1 else iterators[0],
        "model": chunks,
        "num_microbatches": len(microbatches),
        "seq_length": max(m.tokens.shape[1] for m in microbatches),
        "micro_batch_size": 1,
    }


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Holds what Megatron's output layer computes logits from: hidden states [T, H] and the matrix [V / TP, H]."""

    hidden: torch.Tensor
    matrix: torch.Tensor

    @classmethod
    def gathered(
        cls,
        hidden_states: torch.Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: torch.Tensor | None,
        **_: object,
    ) -> Output:
        """Gather the hidden states [T / TP, 1, H] of all tensor-parallel ranks, whose gradients it sums."""
        if output_layer.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        return cls(hidden_states[:, 0], output_layer.weight if output_weight is None else output_weight)


def completion_logprobs(
    microbatch: Microbatch, output: Output, temperature: float, *, entropy: bool, head: bool = False
) -> torch.Tensor:
    """Return the logprobs [1, N] float32 of the completion tokens, without making all logits.

    The result is equal on all tensor-parallel and context-parallel ranks. With `head` the logprobs [K, N] of the
    microbatch's head ids follow, if it has any. With `entropy` the last row is the entropy of each token's distribution
    in nats. All are computed over the token's sampling support, if the microbatch has one. If all ranks compute the
    same loss from the result, each rank gets the gradient for its own part of the vocabulary and its own tokens.
    """
    values = hidden_scores(
        output.hidden,
        output.matrix,
        microbatch.predicts,
        microbatch.targets,
        temperature,
        entropy=entropy,
        others=microbatch.head_ids if head else None,
        support=microbatch.support,
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    return _Gathered.apply(values, microbatch.predicted, len(microbatch.sequence_ids))


class _Gathered(torch.autograd.Function):
    """Places values [S, n] at `places` [n] of [S, total]; other context-parallel ranks fill the other places."""

    @staticmethod
    def forward(ctx, values: torch.Tensor, places: torch.Tensor, total: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(len(values), total).index_copy_(1, places, values)
        if total:  # adding zeros changes no bit of a rank's values
            dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        return whole

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        (places,) = ctx.saved_tensors
        # Not summed over the ranks: each rank computes the same loss, so it has the whole gradient already.
        return gradient.index_select(1, places), None, None
