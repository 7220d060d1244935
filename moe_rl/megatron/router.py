"""Implements routing replay inside megatron-core, installed through the module spec. It uses no global list and no call
order.

    ReplaySeqParams   PackedSeqParams that also carry the handle of the microbatch in the replay pass
    ReplayLayer       TransformerLayer that passes the handle to its router, in every schedule and recomputation
    ReplayRouter      TopKRouter that uses the recorded experts; their weights come from the live logits
    ReplayMoELayer    MoELayer that gives the dispatcher its plan, reports the routing map to the pass, and keeps the
                      handle for its own recomputation

Megatron's own score function computes the expert weights from dense scores gathered at the recorded experts. So the
router gets a gradient even where the recorded experts differ from its own choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from moe_rl.errors import ReplayError
from moe_rl.megatron import overlap, world
from moe_rl.megatron.dispatcher import FlexDispatcher, PlannedDispatcher
from moe_rl.megatron.expert_order import relocated
from moe_rl.megatron.layers import GroupedExperts
from moe_rl.replay.choice import of_best_groups
from moe_rl.replay.plans import LayerPlan
from moe_rl.replay.replay_pass import MicrobatchHandle, refuse_lost_key
from moe_rl.whereabouts import HERE


@dataclass
class ReplaySeqParams(PackedSeqParams):
    """Holds packed sequences with the handle to their routes.

    Attributes:
        lengths: Lengths of the packed sequences, over all context-parallel ranks. Padding at the end is a sequence too.
        tokens: Number of these rows that are not padding.
        padding: bool [T], which rows of this context-parallel rank are padding.
        replay: Handle into the replay pass; None routes natively.
    """

    lengths: tuple[int, ...] = ()
    tokens: int = 0
    padding: torch.Tensor | None = None
    replay: MicrobatchHandle | None = None


class _RecordedTopK:
    """Replaces the top-k inside Megatron's score function, which accepts it as its `router_replay` argument."""

    def __init__(self, router: ReplayRouter):
        self.router = router

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        def choose(scores):
            allowed = of_best_groups(scores, num_groups, group_topk) if group_topk else scores
            # Megatron sorts the chosen experts in passes with gradients only. The order decides how their weights are
            # rounded, and a pass without gradients must compute what an update computes.
            with torch.enable_grad():
                return default_compute_topk(allowed, topk)

        handle, layer = self.router.handle, self.router.layer_number - 1
        if handle is None:
            return choose(scores)
        replay, microbatch = handle.replay, handle.microbatch
        if replay.mode != "replay":
            values, indices = choose(scores)
            replay.observe_native(microbatch, layer, indices, scores)
            if replay.mode == "record":
                replay.record(microbatch, layer, indices, scores)
            return values, indices
        indices, without_route = replay.take(microbatch, layer, scores.shape[0]), replay.native_rows(microbatch)
        if replay.watch.native or without_route is not None:
            _, native = choose(scores.detach())
            replay.observe_native(microbatch, layer, native, scores)
            if without_route is not None:
                indices = torch.where(without_route[:, None], native, indices)
        return scores.gather(1, indices), indices


class ReplayRouter(TopKRouter):
    """TopKRouter whose top-k comes from the replay pass, if its microbatch has one.

    Expert groups limit the router's own choice, never a recorded one. Load balancing sees real tokens only, each once
    per training pass, even when layers are recomputed; a forward-only pass does not count. There are two kinds:

    - Expert-bias statistics (`local_tokens_per_expert`) count the dispatched experts, which are the recorded ones: the
      bias evens out the sampler's load.
    - The auxiliary loss compares the router's mean scores with its own live top-k over all experts, without bias and
      groups. It never uses the recorded choice: a gradient can only move what the router itself prefers. For a
      microbatch with T tokens it is E / K * sum_e (tokens that choose e / T) * (mean score of e), which is 1 when
      balanced (Switch Transformers, arXiv 2101.03961, equation 4, for K choices). The microbatches of an update are
      weighted by their tokens.
    """

    def __init__(self, config, pg_collection=None, **kwargs):
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        self.handle: MicrobatchHandle | None = None
        self.seq_params: ReplaySeqParams | None = None
        self.tokens_of_update = 0  # real tokens of all ranks; a Policy sets it before an update with an auxiliary loss
        # this rank's part of the auxiliary loss, without its coefficient
        self.aux_loss = torch.zeros([], device=world.device())
        self.router_replay = _RecordedTopK(self)

    def routing(self, logits, padding_mask=None):
        if self.handle is not None:
            self.handle.replay.observe_logits(self.handle.microbatch, self.layer_number - 1, logits)
        elif not self.is_mtp_layer:
            refuse_lost_key(self.layer_number - 1)
        if torch.is_grad_enabled() and (self.enable_expert_bias or self.is_aux_loss_enabled()):
            padding = self.seq_params.padding
            padding_mask = padding[world.own_rows(len(padding))]
        return super().routing(logits, padding_mask=padding_mask)

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        # Megatron's own masking expects the mask [T] to be a mask of experts.
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        super()._apply_expert_bias(routing_map)

    def _apply_aux_loss(self, probs, *args, **kwargs):
        if not self.seq_params.tokens:  # the mean of no tokens is undefined
            return probs
        return super()._apply_aux_loss(probs, *args, **kwargs)

    def attach_and_log_load_balancing_loss(self, activation, aux_loss_coeff, aux_loss, *args, **kwargs):
        # Megatron would undo a division by the number of tokens, which this loss does not contain, and would weight
        # ranks equally although their numbers of real tokens differ. `aux_loss` is this rank's part of a sum. A loop
        # without a Policy divides gradients as Megatron expects.
        if not self.tokens_of_update:
            return super().attach_and_log_load_balancing_loss(activation, aux_loss_coeff, aux_loss, *args, **kwargs)
        aux_loss = aux_loss * (self.seq_params.tokens / self.tokens_of_update)
        self.aux_loss += aux_loss.detach() / aux_loss_coeff
        return MoEAuxLossAutoScaler.apply(activation, aux_loss)


class ReplayMoELayer(MoELayer):
    """MoELayer that lets the pass compare the dispatched experts with the recorded ones, also when it is
    recomputed."""

    def __init__(self, *args, pg_collection=None, **kwargs):
        pg_collection = pg_collection or get_default_pg_collection()
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        flex = self.config.moe_token_dispatcher_type == "flex"
        self.token_dispatcher: FlexDispatcher | PlannedDispatcher = (FlexDispatcher if flex else PlannedDispatcher)(
            self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection
        )
        if self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)
        if isinstance(self.experts, GroupedExperts):
            self.experts.dispatcher = self.token_dispatcher
        # This class checkpoints the whole forward itself, instead of Megatron's checkpoint inside it.
        self.recomputed, self.moe_layer_recompute = self.moe_layer_recompute, False

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Do as Megatron does, except that an expert is stored under its logical number, not under the number of its
        slot."""
        whole, experts = super().sharded_state_dict(prefix, sharded_offsets, metadata), f"{prefix}experts."
        placed = {name: entry for name, entry in whole.items() if name.startswith(experts)}
        return whole | relocated(placed, self.token_dispatcher.order, axis=len(sharded_offsets))

    def forward(self, hidden_states, intermediate_tensors=None, padding_mask=None):
        if not (self.recomputed and self.training):
            return self._forward(hidden_states, intermediate_tensors, padding_mask)
        # The recomputation starts after the attention, which binds the microbatch. By then the router may have seen the
        # forward of later microbatches, so the binding is kept here.
        bound = self.router.seq_params, self.router.handle

        def run(hidden_states, padding_mask):
            self.router.seq_params, self.router.handle = bound
            return self._forward(hidden_states, intermediate_tensors, padding_mask)

        return tensor_parallel.checkpoint(run, False, hidden_states, padding_mask)

    def _forward(self, hidden_states, intermediate_tensors, padding_mask):
        plan = self._plan(hidden_states[..., 0].numel())
        if plan is not None and plan.overlapped:  # no mask needed: the router knows the padding
            return self.overlapped(hidden_states, plan), None
        return super().forward(hidden_states, intermediate_tensors, padding_mask)

    def overlapped(self, hidden_states: torch.Tensor, plan: LayerPlan) -> torch.Tensor:
        """Return the layer's output [S, B, H], computed while rows are exchanged between ranks: see `overlap`."""
        return overlap.forward(self, hidden_states, self.router.handle, plan)

    def _plan(self, rows: int) -> LayerPlan | None:
        handle = self.router.handle
        return None if handle is None else handle.replay.plan(handle.microbatch, self.layer_number - 1, rows)

    def preprocess(self, hidden_states, probs, routing_map):
        handle = self.router.handle
        self.token_dispatcher.plan = self._plan(len(routing_map))
        flex = isinstance(self.token_dispatcher, FlexDispatcher)
        if handle is not None and not flex:
            handle.replay.check_dispatch(handle.microbatch, self.layer_number - 1, routing_map)
        rows = super().preprocess(hidden_states, probs, routing_map)
        if handle is not None and flex:
            exchanged, faded = self.token_dispatcher.exchanged(len(routing_map)), (routing_map & (probs == 0)).any()
            handle.replay.check_dispatch(handle.microbatch, self.layer_number - 1, exchanged, faded)
        return rows


class ReplayLayer(TransformerLayer):
    """TransformerLayer that passes the handle of its microbatch to its router.

    A multi-token-prediction layer routes natively: the sampler records the decoder only, and Megatron numbers both
    kinds of layers from 1. The handle is bound in `_forward_attention`, because this method runs first in the plain
    schedule, in the recomputation of whole layers and in the combined 1F1B schedule, and always receives the packed
    sequence parameters.
    """

    def _forward_attention(self, *args, packed_seq_params=None, **kwargs):
        HERE.begin_layer(self.layer_number - 1)
        if self.is_moe_layer:
            if not isinstance(packed_seq_params, ReplaySeqParams):
                raise ReplayError(
                    "a microbatch has no replay handle",
                    where={"layer": self.layer_number - 1},
                    got=type(packed_seq_params).__name__,
                    expected="ReplaySeqParams",
                )
            self.mlp.router.seq_params = packed_seq_params
            self.mlp.router.handle = None if self.is_mtp_layer else packed_seq_params.replay
        return super()._forward_attention(*args, packed_seq_params=packed_seq_params, **kwargs)
