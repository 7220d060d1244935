"""Megatron's all-to-all dispatcher, told by a plan how many rows go where.

For each MoE layer and microbatch Megatron's asks all ranks of its group for their counts (an all-gather), makes the
host wait until these are there (the sizes of what is sent and received must be known to it), and sorts a table of rows
by experts. A plan has all three results beforehand. The rows that are then exchanged, their order, and the sums over
them are Megatron's own, so that nothing changes by a bit.
"""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from moe_rl.errors import ReplayError, describe
from moe_rl.megatron import world
from moe_rl.replay.plans import ChunkPlan, LayerPlan


class PlannedDispatcher(MoEAlltoAllTokenDispatcher):
    """MoEAlltoAllTokenDispatcher that follows `plan`, set for each dispatch before it; None: Megatron's own way.

    It alone knows where experts lie, see `place`: routing maps and their weights have a column for each expert, by its
    number, whatever slot it lies in.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._plan: LayerPlan | None = None
        self.place(np.arange(self.num_experts))

    @property
    def plan(self) -> LayerPlan | None:
        """Raises ReplayError when it is set to a plan for experts that lie elsewhere."""
        return self._plan

    @plan.setter
    def plan(self, plan: LayerPlan | None) -> None:
        if plan is not None and not np.array_equal(plan.order, self.order):
            raise ReplayError(
                describe(
                    "a dispatch plan was made for another placement of the experts",
                    got=plan.order.tolist(),
                    expected=self.order.tolist(),
                    do="make plans after experts have moved, with `Policy.order`",
                )
            )
        self._plan = plan

    def place(self, order: np.ndarray) -> None:
        """order: int64 [E], the expert in each slot; of R ranks, rank r has the slots from r * E / R on."""
        self.order = order
        natural = (order == np.arange(len(order))).all()
        self._columns = None if natural else torch.from_numpy(order).to(world.device())

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor):
        """Rows [S, B, H] in the order in which they are sent [S * B * K, H], and their weights [S * B * K]."""
        if self.plan is None:
            if self._columns is not None:
                routing_map, probs = routing_map.index_select(1, self._columns), probs.index_select(1, self._columns)
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        self.hidden_shape, rows = hidden_states.shape, hidden_states.view(-1, hidden_states.shape[-1])
        self.hidden_shape_before_permute = rows.shape
        (whole,) = self.plan.chunks
        self.follow(whole, routing_map, probs)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.reversed_local_input_permutation_mapping = order = self.send_order(self.plan)
        return rows.index_select(0, order), probs.reshape(-1).index_select(0, self.plan.entries)

    def send_order(self, plan: LayerPlan) -> torch.Tensor:
        """int64 [S * B * K]: the rows of the microbatch in the order in which the plan sends them."""
        return torch.div(plan.entries, self.num_experts, rounding_mode="floor").long()

    def follow(self, chunk: ChunkPlan, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """Take the numbers of the rows that go next from the plan, and not from the map, which they agree with."""
        self.routing_map, self.probs = routing_map, probs
        self.input_splits, self.output_splits, self.output_splits_tp = chunk.sent, chunk.got, chunk.gathered
        self.num_global_tokens_per_local_expert, self.tokens_per_expert = chunk.received, chunk.per_expert

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert=None):
        # A plan's sizes are on the host: there is nothing to copy, and nothing to wait for.
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert) if self.plan is None else tokens_per_expert
