"""Makes a planned MoE layer compute while its rows are exchanged between ranks, within one microbatch.

Megatron's layer runs router, dispatch, experts and combine one after the other: where the rows go is known only after
the router has run. A plan knows it before. So the rows are sent first, and the router runs meanwhile; only the experts'
weights are sent after it. With several chunks, the experts compute one chunk while the next one arrives and the
previous one returns. In this picture of three chunks, `>` begins an all-to-all and `.` ends it:

    rows 0 >                   . experts 0 > back                . sum
    router    =====>weights    .
    shared experts  ========
    rows 1                   >              . experts 1 > back                . sum
    rows 2                                >              . experts 2 > back     . sum

The backward pass runs in exactly the reverse order, and no code arranges this. Among the nodes whose gradients are
ready, autograd runs the one that was created last. Every node here needs only gradients of nodes that were created
later. An all-to-all consists of two nodes, its begin and its end. In the backward, the end node begins the all-to-all
of the gradients and the begin node ends it. Between these two run the backward of the router, of the shared experts and
of other chunks.

All ranks begin the same exchanges in the same order, given by their plans. If the pass must refuse a key or a number
of rows, it does so when the plan is requested, before any exchange.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from moe_rl.errors import ConfigError
from moe_rl.megatron.dispatcher import places_of, spread, summed
from moe_rl.replay.plans import ChunkPlan, LayerPlan
from moe_rl.replay.replay_pass import MicrobatchHandle


def forward(moe: MoELayer, hidden_states: torch.Tensor, handle: MicrobatchHandle, plan: LayerPlan) -> torch.Tensor:
    """Compute MoELayer.forward of [S, B, H] for one microbatch with its overlapped plan.

    With one chunk, the result and all gradients are equal bit for bit to Megatron's. With more, the same rows go to the
    same experts and the outputs of a row are summed in the same order. But the experts' matrix products have fewer rows
    each, and the gradients of their weights are summed over chunks, so results are equal up to the rounding of these
    sums.

    Raises:
        ConfigError: The layer has settings that this function does not support.
    """
    _refuse(moe)
    dispatcher = moe.token_dispatcher
    dispatcher.plan = plan
    to_experts, to_router, to_shared = _Fork.apply(hidden_states)
    chunks = _chunks(moe, plan, to_experts.view(-1, hidden_states.shape[-1]))
    chunks[0].send()
    probs, routing_map = moe.route(to_router)
    handle.replay.check_dispatch(handle.microbatch, moe.layer_number - 1, routing_map)
    weights = probs.reshape(-1).index_select(0, plan.entries)
    for chunk, values in zip(chunks, weights.split([len(chunk.order) for chunk in chunks]), strict=True):
        chunk.send_weights(values)
    shared = moe.shared_experts_compute(to_shared)
    outputs = []
    for number, chunk in enumerate(chunks):
        if number + 1 < len(chunks):
            chunks[number + 1].send()
        dispatcher.follow(chunk.plan, routing_map, probs)
        chunk.compute()
        if number:
            outputs.append(chunks[number - 1].result())
    outputs.append(chunks[-1].result())
    output = torch.cat(outputs).view(hidden_states.shape)
    return output if shared is None else output + shared


def _refuse(moe: MoELayer) -> None:
    """Refuse settings that Megatron implements in methods that are not called here."""
    settings = ("moe_shared_expert_overlap", "moe_latent_size", "overlap_dispatch_backward_with_experts_wgrad")
    enabled = [name for name in settings if getattr(moe.config, name)]
    if enabled:
        raise ConfigError(
            "an overlapped dispatch plan does not support this setting",
            where={"setting": enabled[0], "layer": moe.layer_number - 1},
            got=", ".join(f"{name}={getattr(moe.config, name)}" for name in enabled),
            expected="off",
            do="set replay.overlap_chunks to 0, or turn the setting off",
        )


class _Chunk:
    """Sends some rows [R, H] of a microbatch to the experts, through them, and back."""

    def __init__(self, moe: MoELayer, plan: ChunkPlan, rows: torch.Tensor, order: torch.Tensor):
        """Args: `order`, int64 [R * K], gives the rows in sending order."""
        self.moe, self.plan, self.rows, self.order = moe, plan, rows, order
        self.places = places_of(order, len(rows))

    def send(self) -> None:
        self.arriving = self._exchange(spread(self.rows, self.order, self.places))

    def send_weights(self, weights: torch.Tensor) -> None:
        """Send the expert weights [R * K], in the order in which rows are sent."""
        self.weights = self._exchange(weights)

    def compute(self) -> None:
        """Run the experts, for which the dispatcher must follow this chunk's plan, and send their outputs back."""
        rows, weights = _end(self.arriving), _end(self.weights)
        del self.arriving, self.weights
        output, _ = self.moe.routed_experts_compute(rows, weights)
        self.returning = self._exchange(output, back=True)

    def result(self) -> torch.Tensor:
        """Return [R, H], for every row the sum of its experts' outputs."""
        rows = _end(self.returning)
        del self.returning
        return summed(rows, self.order, self.places)

    def _exchange(self, rows: torch.Tensor, *, back: bool = False) -> tuple[torch.Tensor, Exchange]:
        sent, got = (self.plan.got, self.plan.sent) if back else (self.plan.sent, self.plan.got)
        exchange = Exchange(self.moe.ep_group, sent, got)
        return _Begin.apply(rows, exchange), exchange


def _chunks(moe: MoELayer, plan: LayerPlan, rows: torch.Tensor) -> list[_Chunk]:
    sizes = [chunk.rows for chunk in plan.chunks]
    orders = moe.token_dispatcher.send_order(plan).split([sum(chunk.sent) for chunk in plan.chunks])
    first, chunks = 0, []
    for chunk, chunk_rows, order in zip(plan.chunks, rows.split(sizes), orders, strict=True):
        chunks.append(_Chunk(moe, chunk, chunk_rows, order - first))
        first += chunk.rows
    return chunks


def _end(exchange: tuple[torch.Tensor, Exchange]) -> torch.Tensor:
    return _End.apply(*exchange)


class Exchange:
    """Runs one all-to-all of rows among the ranks of a group, and later one of their gradients, each with a begin and a
    wait."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], got: list[int]):
        """Keep the numbers of rows sent to and received from each rank of the group."""
        self.group, self.sent, self.got = group, sent, got

    def begin(self, rows: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        """Start the all-to-all, and return the tensor that holds the received rows after `wait`."""
        self._leaving = rows.detach().contiguous()  # kept alive until the exchange has read it
        self._arriving = rows.new_empty(sum(got), *rows.shape[1:])
        self._work = dist.all_to_all_single(
            self._arriving,
            self._leaving,
            output_split_sizes=got,
            input_split_sizes=sent,
            group=self.group,
            async_op=True,
        )
        return self._arriving

    def wait(self) -> torch.Tensor:
        """Wait for the all-to-all, and return the received rows."""
        self._work.wait()
        arrived = self._arriving
        del self._work, self._leaving, self._arriving
        return arrived


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows, exchange.sent, exchange.got)

    @staticmethod
    def backward(ctx, _):
        return ctx.exchange.wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return rows

    @staticmethod
    def backward(ctx, gradient):
        exchange = ctx.exchange
        exchange.begin(gradient, exchange.got, exchange.sent)
        # Autograd requires a gradient of the same shape as the rows that arrived. This one only triggers `_Begin`,
        # which returns the exchanged gradient.
        return gradient, None


class _Fork(torch.autograd.Function):
    """Copies a tensor for the experts, the router and the shared experts. The gradients of the copies are summed in
    this order, as in Megatron's layer, because another order would round differently."""

    @staticmethod
    def forward(ctx, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(hidden_states.view_as(hidden_states) for _ in range(3))

    @staticmethod
    def backward(ctx, *gradients):
        return functools.reduce(torch.add, [gradient for gradient in gradients if gradient is not None])
