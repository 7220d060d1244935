"""Routing replay inside megatron-core, plugged in through the module spec: no global list, no action switch, no order.

    ReplaySeqParams   PackedSeqParams that also carries the microbatch's handle into the replay session
    ReplayLayer       binds the handle to its MoE layer where every schedule and the recomputation of layers pass first
    ReplayRouter      TopKRouter that takes the recorded experts; their weights come from the live logits
    ReplayMoELayer    shows the routing map to the session on its way to the dispatcher, which gets its plan here; keeps
                      the handle for its own recomputation

The weights are computed by megatron's own score function from dense scores gathered at the recorded experts, so the
router's gradient lives however far the replayed set is from the live one.
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

from moe_rl.errors import ReplayError, describe
from moe_rl.megatron import overlap, world
from moe_rl.megatron.dispatcher import PlannedDispatcher
from moe_rl.megatron.expert_order import relocated
from moe_rl.replay.plans import LayerPlan
from moe_rl.replay.session import MicrobatchHandle, refuse_lost_key


@dataclass
class ReplaySeqParams(PackedSeqParams):
    """Packed sequences and the key to their routes.

    lengths: of the packed sequences, the padding at the end as a sequence of its own, on all context-parallel ranks
    together. tokens: how many of these rows are no padding. padding: bool [T], of the rows of this context-parallel
    rank. replay: None routes natively.
    """

    lengths: tuple[int, ...] = ()
    tokens: int = 0
    padding: torch.Tensor | None = None
    replay: MicrobatchHandle | None = None


class _RecordedTopK:
    """Stands where megatron's score function asks for the top-k (its `router_replay` argument)."""

    def __init__(self, router: ReplayRouter):
        self.router = router

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        def choose(scores):
            allowed = _of_best_groups(scores, num_groups, group_topk) if group_topk else scores
            return default_compute_topk(allowed, topk)

        handle, layer = self.router.handle, self.router.layer_number - 1
        if handle is None:
            return choose(scores)
        session, microbatch = handle.session, handle.microbatch
        if session.mode != "replay":
            values, indices = choose(scores)
            session.observe_native(microbatch, layer, indices, scores)
            if session.mode == "record":
                session.record(microbatch, layer, indices)
            return values, indices
        indices, without_route = session.take(microbatch, layer, scores.shape[0]), session.native_rows(microbatch)
        if session.compare_native or without_route is not None:
            _, native = choose(scores.detach())
            session.observe_native(microbatch, layer, native, scores)
            if without_route is not None:
                indices = torch.where(without_route[:, None], native, indices)
        return scores.gather(1, indices), indices


def _of_best_groups(scores: torch.Tensor, groups: int, top_groups: int) -> torch.Tensor:
    """Scores [T, E], minus infinity outside each token's best groups. A group is as good as the sum of its two best
    experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2); megatron takes its best top_k // top_groups instead."""
    grouped = scores.unflatten(1, (groups, -1))
    best = grouped.topk(2, -1).values.sum(-1).topk(top_groups, -1).indices
    left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(left_out[..., None], -torch.inf).flatten(1)


class ReplayRouter(TopKRouter):
    """TopKRouter whose top-k comes from the replay session when its microbatch has one.

    Groups of experts limit the router's own choice, never a recorded one. What a router keeps the balance by:

    Expert-bias statistics (`local_tokens_per_expert`) count what is dispatched, hence what was recorded: the bias evens
    out the load of the sampler.
    The auxiliary loss compares the router's mean scores with its own live top-k over all experts, without bias and
    groups, never with the recorded choice: a gradient can only move what the router itself prefers. In a microbatch
    with T tokens it is E / K * sum_e (tokens that choose e / T) * (mean score of e), 1 when balanced (Switch
    Transformers, arXiv 2101.03961, equation 4, for K choices); an update's microbatches weigh as their tokens.

    Either sees real tokens only, once each in a training pass, however often it is recomputed, and none of a
    forward-only pass.
    """

    def __init__(self, config, pg_collection=None, **kwargs):
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        self.handle: MicrobatchHandle | None = None
        self.seq_params: ReplaySeqParams | None = None
        self.tokens_of_update = 0  # real ones, of all ranks; set before an update with an auxiliary loss
        self.aux_loss = torch.zeros([], device=world.device())  # this rank's part of it, without its weight
        self.router_replay = _RecordedTopK(self)

    def routing(self, logits, padding_mask=None):
        if self.handle is not None:
            self.handle.session.observe_logits(self.handle.microbatch, self.layer_number - 1, logits)
        elif not self.is_mtp_layer:
            refuse_lost_key(self.layer_number - 1)
        if torch.is_grad_enabled() and (self.enable_expert_bias or self.is_aux_loss_enabled()):
            padding = self.seq_params.padding
            padding_mask = padding[world.own_rows(len(padding))]
        return super().routing(logits, padding_mask=padding_mask)

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        # Megatron's own masking takes the mask [T] for one of experts.
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        super()._apply_expert_bias(routing_map)

    def _apply_aux_loss(self, probs, *args, **kwargs):
        if not self.seq_params.tokens:  # a mean over nothing
            return probs
        return super()._apply_aux_loss(probs, *args, **kwargs)

    def attach_and_log_load_balancing_loss(self, activation, aux_loss_coeff, aux_loss, *args, **kwargs):
        # Megatron would undo a division by the number of tokens, which the loss here does not go through, and count
        # equal shares of them for ranks whose numbers of real tokens differ. aux_loss is this rank's part of a sum.
        aux_loss = aux_loss * (self.seq_params.tokens / self.tokens_of_update)
        self.aux_loss += aux_loss.detach() / aux_loss_coeff
        return MoEAuxLossAutoScaler.apply(activation, aux_loss)


class ReplayMoELayer(MoELayer):
    """MoELayer that lets the session compare what is dispatched with what was recorded, also when it is recomputed."""

    def __init__(self, *args, pg_collection=None, **kwargs):
        pg_collection = pg_collection or get_default_pg_collection()
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        self.token_dispatcher = PlannedDispatcher(
            self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection
        )
        if self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)
        # The checkpoint is taken here, around the whole forward, instead of inside of it.
        self.recomputed, self.moe_layer_recompute = self.moe_layer_recompute, False

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """As Megatron's, but an expert has the place of its logical number in the checkpoint, not that of its slot."""
        whole, experts = super().sharded_state_dict(prefix, sharded_offsets, metadata), f"{prefix}experts."
        placed = {name: entry for name, entry in whole.items() if name.startswith(experts)}
        return whole | relocated(placed, self.token_dispatcher.order, axis=len(sharded_offsets))

    def forward(self, hidden_states, intermediate_tensors=None, padding_mask=None):
        if not (self.recomputed and self.training):
            return self._forward(hidden_states, intermediate_tensors, padding_mask)
        # The recomputation starts behind the attention, which binds the microbatch; by then the router may have seen
        # the forward of later ones.
        bound = self.router.seq_params, self.router.handle

        def run(hidden_states, padding_mask):
            self.router.seq_params, self.router.handle = bound
            return self._forward(hidden_states, intermediate_tensors, padding_mask)

        return tensor_parallel.checkpoint(run, False, hidden_states, padding_mask)

    def _forward(self, hidden_states, intermediate_tensors, padding_mask):
        plan = self._plan(hidden_states[..., 0].numel())
        if plan is not None and plan.overlapped:  # the router knows the padding without the mask
            return self.overlapped(hidden_states, plan), None
        return super().forward(hidden_states, intermediate_tensors, padding_mask)

    def overlapped(self, hidden_states: torch.Tensor, plan: LayerPlan) -> torch.Tensor:
        """The layer's output [S, B, H], computed while rows travel: see `overlap`."""
        return overlap.forward(self, hidden_states, self.router.handle, plan)

    def _plan(self, rows: int) -> LayerPlan | None:
        handle = self.router.handle
        return None if handle is None else handle.session.plan(handle.microbatch, self.layer_number - 1, rows)

    def preprocess(self, hidden_states, probs, routing_map):
        handle = self.router.handle
        self.token_dispatcher.plan = self._plan(len(routing_map))
        if handle is not None:
            handle.session.check_dispatch(handle.microbatch, self.layer_number - 1, routing_map)
        return super().preprocess(hidden_states, probs, routing_map)


class ReplayLayer(TransformerLayer):
    """TransformerLayer that hands its microbatch's key to its router.

    A multi-token-prediction layer routes natively: the sampler records the decoder, and megatron numbers both from 1.
    `_forward_attention` is the one method that runs first in the plain schedule, in the recomputation of whole layers
    and in the combined 1F1B schedule alike, and that always receives the packed sequence parameters.
    """

    def _forward_attention(self, *args, packed_seq_params=None, **kwargs):
        if self.is_moe_layer:
            if not isinstance(packed_seq_params, ReplaySeqParams):
                raise ReplayError(
                    describe(
                        "a microbatch came without its replay key",
                        where=f"layer {self.layer_number - 1}",
                        got=type(packed_seq_params).__name__,
                        expected="ReplaySeqParams",
                    )
                )
            self.mlp.router.seq_params = packed_seq_params
            self.mlp.router.handle = None if self.is_mtp_layer else packed_seq_params.replay
        return super()._forward_attention(*args, packed_seq_params=packed_seq_params, **kwargs)
