"""A planned MoE layer that computes while its rows travel, within one microbatch.

Megatron's layer runs router, dispatch, experts and combine one behind the other: when the router has run, it is known
who the rows go to. A plan knows it before. So the rows leave first, and the router runs meanwhile; only the weights of
the experts follow it. With more than one chunk, the experts compute one while the next one arrives and the one before
goes back. `>` begins an all-to-all, `.` ends it; three chunks:

    rows 0 >                   . experts 0 > back                . sum
    router    =====>weights    .
    shared experts  ========
    rows 1                   >              . experts 1 > back                . sum
    rows 2                                >              . experts 2 > back     . sum

The backward pass is the same in reverse, and nothing arranges it but the order of the forward. Autograd runs, of the
nodes whose gradients are there, the one that was made last; every node here needs only nodes that were made later; so
they run in the exact reverse of the order in which they were made. An all-to-all is two nodes, where it begins and
where it ends. In reverse the end begins the gradient's all-to-all and the beginning ends it; what was computed between
them is differentiated between them: the router, the shared experts, other chunks.

All ranks begin the same exchanges in the same order, by their plans. What a session refuses by its key or the number of
its rows, it refuses when it is asked for the plan, before any of them.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import unpermute

from moe_rl.errors import ConfigError, describe
from moe_rl.replay.plans import ChunkPlan, LayerPlan
from moe_rl.replay.session import MicrobatchHandle


def forward(moe: MoELayer, hidden_states: torch.Tensor, handle: MicrobatchHandle, plan: LayerPlan) -> torch.Tensor:
    """What MoELayer.forward computes of [S, B, H] for one microbatch, by its overlapped plan.

    With one chunk the result and all gradients are the same bit for bit. With more, the same rows meet the same experts
    and the outputs of a row are summed in the same order, but the experts' matrix products have fewer rows at once, and
    the gradients of their weights are summed over chunks: equal up to the rounding of these sums.

    Raises ConfigError for a layer that does more around its dispatch.
    """
    _refuse(moe)
    dispatcher = moe.token_dispatcher
    dispatcher.plan = plan
    to_experts, to_router, to_shared = _Fork.apply(hidden_states)
    chunks = _chunks(moe, plan, to_experts.view(-1, hidden_states.shape[-1]))
    chunks[0].send()
    probs, routing_map = moe.route(to_router)
    handle.session.check_dispatch(handle.microbatch, moe.layer_number - 1, routing_map)
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
    """What Megatron's layer computes in the methods that are not called here."""
    settings = ("moe_shared_expert_overlap", "moe_latent_size", "overlap_dispatch_backward_with_experts_wgrad")
    found = [name for name in settings if getattr(moe.config, name)]
    if found:
        raise ConfigError(
            describe(
                "an overlapped dispatch plan does not do what this setting does around a dispatch",
                where=f"megatron config, layer {moe.layer_number - 1}",
                got=", ".join(f"{name}={getattr(moe.config, name)}" for name in found),
                expected="off",
                do="set replay.overlap_chunks to 0, or turn it off",
            )
        )


class _Chunk:
    """Some of a microbatch's rows [R, H] on their way: to the experts, through them, and back."""

    def __init__(self, moe: MoELayer, plan: ChunkPlan, rows: torch.Tensor, order: torch.Tensor):
        """order: int64 [R * K], the rows as they are sent."""
        self.moe, self.plan, self.rows, self.order = moe, plan, rows, order

    def send(self) -> None:
        self.arriving = self._exchange(self.rows.index_select(0, self.order))

    def send_weights(self, weights: torch.Tensor) -> None:
        """weights: [R * K] of the experts, in the order in which rows are sent."""
        self.weights = self._exchange(weights)

    def compute(self) -> None:
        """Through the experts, which the dispatcher follows this chunk's plan for, and off again."""
        rows, weights = _end(self.arriving), _end(self.weights)
        del self.arriving, self.weights
        output, _ = self.moe.routed_experts_compute(rows, weights)
        self.returning = self._exchange(output, back=True)

    def result(self) -> torch.Tensor:
        """[R, H]: of every row the sum of what its experts made of it."""
        rows = _end(self.returning)
        del self.returning
        return unpermute(rows, self.order, restore_shape=self.rows.shape)

    def _exchange(self, rows: torch.Tensor, *, back: bool = False) -> tuple[torch.Tensor, Exchange]:
        sent, got = (self.plan.got, self.plan.sent) if back else (self.plan.sent, self.plan.got)
        exchange = Exchange(self.moe.ep_group, sent, got)
        return _Begin.apply(rows, exchange), exchange


def _chunks(moe: MoELayer, plan: LayerPlan, rows: torch.Tensor) -> list[_Chunk]:
    sizes = [chunk.rows for chunk in plan.chunks]
    orders = moe.token_dispatcher.send_order(plan).split([sum(chunk.sent) for chunk in plan.chunks])
    first, chunks = 0, []
    for chunk, own, order in zip(plan.chunks, rows.split(sizes), orders, strict=True):
        chunks.append(_Chunk(moe, chunk, own, order - first))
        first += chunk.rows
    return chunks


def _end(exchange: tuple[torch.Tensor, Exchange]) -> torch.Tensor:
    return _End.apply(*exchange)


class Exchange:
    """One all-to-all of rows among the ranks of a group, and later that of their gradients: begun, then waited for."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], got: list[int]):
        """sent, got: numbers of rows to and from each rank of the group."""
        self.group, self.sent, self.got = group, sent, got

    def begin(self, rows: torch.Tensor, sent: list[int], got: list[int]) -> torch.Tensor:
        """Where the rows will be: to be read after `wait`."""
        self._leaving = rows.detach().contiguous()  # held for as long as it is read
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
        """The rows that `begin` promised."""
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
        # The engine takes no gradient of another shape than that of the rows that arrived. This one has it, and only
        # says that `_Begin`, which has the gradient from the exchange, may run.
        return gradient, None


class _Fork(torch.autograd.Function):
    """The same tensor for the experts, the router and the shared experts, whose gradients are summed in this order, as
    they are in Megatron's layer: that is where rounding would tell one order of computing from the other."""

    @staticmethod
    def forward(ctx, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(hidden_states.view_as(hidden_states) for _ in range(3))

    @staticmethod
    def backward(ctx, *gradients):
        return functools.reduce(torch.add, [one for one in gradients if one is not None])
