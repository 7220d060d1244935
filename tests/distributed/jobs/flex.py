"""A job for two ranks with expert parallelism 2: Megatron's flex dispatcher and its fused permutation, under replay.

DeepEP, HybridEP and TransformerEngine's permutation need GPUs. Stubs do what these kernels do, with gloo and torch;
everything around them is Megatron's own.
"""

from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from moe_rl.megatron.model import unwrap
from moe_rl.proof import rank
from moe_rl.proof.cases import Case
from moe_rl.proof.trial import whole_gradients

FLEX = {"moe_token_dispatcher_type": "flex"}
SETTINGS = {
    "alltoall": {},
    "deepep": FLEX | {"moe_flex_dispatcher_backend": "deepep"},
    "hybridep": FLEX | {"moe_flex_dispatcher_backend": "hybridep", "moe_hybridep_pad_uneven_dispatch_inputs": True},
    "permute fusion": {"moe_permute_fusion": True},
}
FADED = 3
"""The expert whose weight underflows."""


class _Rows:
    """Brings the rows of all ranks of a group together, and gives a rank's own rows back, with gradients."""

    def __init__(self, rows, group):
        counts = [None] * group.size()
        dist.all_gather_object(counts, rows, group)
        self.group, self.before, self.own = group, sum(counts[: group.rank()]), rows
        self.after = sum(counts) - self.before - rows

    def all(self, values):
        ends = [values.new_zeros(count, values.shape[1]) for count in (self.before, self.after)]
        return torch.distributed.nn.all_reduce(torch.cat([ends[0], values, ends[1]]), group=self.group)

    def mine(self, places, values):
        whole = values.new_zeros(self.before + self.own + self.after, values.shape[1]).index_add(0, places, values)
        return torch.distributed.nn.all_reduce(whole, group=self.group)[self.before : self.before + self.own]


def deepep_dispatch(x, token_indices, token_probs, num_experts, group, async_finish, allocate_on_comm_stream):
    """A token goes once to each rank that has one of its experts, which are local numbers there, or -1."""
    assert token_probs.dtype == torch.float32
    rows, local = _Rows(len(x), group), num_experts // group.size()
    indices = rows.all(token_indices) - group.rank() * local
    indices = indices.masked_fill((indices < 0) | (indices >= local), -1)
    here = (indices >= 0).any(1).nonzero()[:, 0]
    counts = torch.bincount(indices[indices >= 0], minlength=local)
    return rows.all(x)[here], indices[here], rows.all(token_probs)[here], counts, (rows, here)


def deepep_combine(x, group, handle, async_finish, allocate_on_comm_stream):
    rows, here = handle
    return rows.mine(here, x), None


def hybrid_dispatch(x, routing_map, probs, group, num_local_experts, **options):
    """A token goes to each of its experts, in the order of the experts, then of the tokens."""
    rows, first = _Rows(len(x), group), group.rank() * num_local_experts
    here = rows.all(routing_map.long())[:, first : first + num_local_experts].T.nonzero()
    experts, places = here.unbind(1)
    counts = torch.bincount(experts, minlength=num_local_experts)
    return rows.all(x)[places], rows.all(probs)[places, first + experts], None, counts, (rows, places)


def hybrid_combine(x, handle, **options):
    rows, places = handle
    return rows.mine(places, x)


def _not_fused(function):
    return lambda *args, fused=False, **options: function(*args, **options)


STUBS = {
    "fused_dispatch": deepep_dispatch,
    "fused_combine": deepep_combine,
    "set_deepep_num_sms": lambda number: None,
    "hybrid_ep_dispatch": hybrid_dispatch,
    "hybrid_ep_combine": hybrid_combine,
    **{name: _not_fused(getattr(moe_utils, name)) for name in ("permute", "unpermute", "sort_chunks_by_idxs")},
}
# Megatron asks for these where the config says moe_permute_fusion.
KERNELS = ("fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index", "fused_unpermute")
KERNELS += ("fused_sort_chunks_by_index_with_probs",)


def _on_cpu(make):
    return lambda *size, device=None, **options: make(*size, device=None if device == "cuda" else device, **options)


def run(checkpoint, kind, plant):
    """Return what this rank computes under the settings of a kind, or how replay is refused.

    plant: "faded": the weight of an expert underflows to 0 wherever it was recorded. "plan": dispatch is planned.
    """
    case = Case(2, {"expert": 2}, train={"megatron": SETTINGS[kind]}, plan=plant == "plan")
    world.lay_out(case.parallel_config, seed=1)
    with ExitStack() as stack:
        for name, stub in STUBS.items():
            stack.enter_context(mock.patch.object(token_dispatcher, name, stub))
        for name in KERNELS:
            stack.enter_context(mock.patch.object(moe_utils, name, object()))
        with mock.patch.object(torch, "zeros", _on_cpu(torch.zeros)):  # HybridEP's manager makes one on the GPU
            trial = stack.enter_context(rank.begun(case, checkpoint))
        layers = [
            layer.mlp for chunk in trial.policy.chunks for layer in unwrap(chunk).decoder.layers if layer.is_moe_layer
        ]
        try:
            if plant == "faded":
                for layer in layers:
                    layer.router.gating = _fading(layer.router.gating)
            scored, tables = trial.first_pass()
            result, seen = trial.update(tables)
        except ReplayError as error:
            return {"fault": error.message.fault, "about": dict(error.about), "text": str(error)}
        return {
            "dispatcher": type(layers[0].token_dispatcher).__mro__[1].__name__,
            "logprobs": trial.by_sequence(scored.logprobs),
            "grads": whole_gradients(trial.policy, trial.facts),
            "grad_norm": result.grad_norm,
            "tally": seen.tally,
        }


def _fading(gating):
    def faded(hidden):
        logits = gating(hidden)
        return logits - 500 * torch.nn.functional.one_hot(torch.tensor(FADED), logits.shape[-1])

    return faded
