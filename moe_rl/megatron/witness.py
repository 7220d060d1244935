"""Witnesses for tests and proofs: they record at the dispatchers what goes in, what comes out, and what the host waits
for, independently of the replay pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rl.megatron.model import unwrap

_READS = {
    *(torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__bool__),
    *(torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.nonzero, torch.nonzero),
    *(torch.Tensor.masked_select, torch.masked_select, torch.Tensor.unique, torch.unique),
}

# The stages of an MoE layer: in Megatron's order, or overlapped.
_STAGES = ("route", "preprocess", "dispatch", "routed_experts_compute", "combine", "postprocess", "overlapped")


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """Records one dispatch.

    Attributes:
        with_grad: Whether gradients were enabled. In the first pass of a recomputed layer they are not.
        routing_map: bool [R, E], rows of this rank to experts.
        received: int64 [E], rows that this rank got from all ranks for the expert in each slot, as its owner or for a
            copy.
    """

    microbatch: int
    layer: int
    with_grad: bool
    routing_map: torch.Tensor
    received: torch.Tensor


@dataclass(slots=True, eq=False)
class DispatchWitness:
    """Records every routing map at the dispatchers of a policy's MoE layers, by wrapping their methods."""

    seen: list[Dispatch] = field(default_factory=list)

    def attach(self, chunks: list[torch.nn.Module]) -> DispatchWitness:
        """Watch the MoE layers of these model chunks, and return this object."""
        for chunk in chunks:
            for layer in unwrap(chunk).decoder.layers:
                if layer.is_moe_layer:
                    self._watch(layer.mlp)
        return self

    def forwards(self, since: int = 0) -> dict[tuple[int, int], int]:
        """Count how often each (microbatch, layer) was dispatched, from dispatch number `since` on.

        Dispatches with and without gradients are counted separately, because a recomputed layer has both; the larger
        count is returned.
        """
        dispatches = self.seen[since:]
        without = Counter((d.microbatch, d.layer) for d in dispatches if not d.with_grad)
        return dict(Counter((d.microbatch, d.layer) for d in dispatches if d.with_grad) | without)

    def _watch(self, moe: torch.nn.Module) -> None:
        dispatcher = moe.token_dispatcher
        preprocess, postprocess, follow = (
            dispatcher.dispatch_preprocess,
            dispatcher.dispatch_postprocess,
            dispatcher.follow,
        )
        before: list[_Begun] = []

        def begin(routing_map, chunks):
            handle = moe.router.handle
            microbatch = None if handle is None else handle.microbatch
            before.append(_Begun(microbatch, torch.is_grad_enabled(), routing_map.detach().bool().clone(), chunks))

        def dispatch_preprocess(hidden_states, routing_map, probs):
            begin(routing_map, 1)
            return preprocess(hidden_states, routing_map, probs)

        def following(chunk, routing_map, probs):
            # The rows of an overlapped plan are sent before there is a map, and no method is called with all chunks at
            # once.
            if dispatcher.plan.overlapped and chunk is dispatcher.plan.chunks[0]:
                begin(routing_map, len(dispatcher.plan.chunks))
            return follow(chunk, routing_map, probs)

        def by_slot(received):
            copies, rank, local = dispatcher.copies, moe.ep_group.rank(), moe.num_local_experts
            slots = [*range(rank * local, (rank + 1) * local), *(() if copies is None else copies[rank].clip(0))]
            rows = received.new_zeros(dispatcher.num_experts)
            return rows.index_add_(0, torch.tensor(slots, device=rows.device), received)

        def dispatch_postprocess(*args, **kwargs):
            hidden_states, received, probs = postprocess(*args, **kwargs)
            begun = before[0]
            begun.received = begun.received + by_slot(torch.as_tensor(received).detach().long())
            begun.chunks -= 1
            if not begun.chunks:
                del before[0]
                if begun.microbatch is not None:
                    self.seen.append(
                        Dispatch(
                            begun.microbatch, moe.layer_number - 1, begun.with_grad, begun.routing_map, begun.received
                        )
                    )
            return hidden_states, received, probs

        dispatcher.dispatch_preprocess, dispatcher.dispatch_postprocess = dispatch_preprocess, dispatch_postprocess
        dispatcher.follow = following


@dataclass(slots=True, eq=False)
class _Begun:
    """Holds a dispatch whose rows have not all arrived.

    Attributes:
        microbatch: None for a microbatch without routes, which only fills up a round.
        chunks: Number of chunks still to arrive.
    """

    microbatch: int | None
    with_grad: bool
    routing_map: torch.Tensor
    chunks: int
    received: torch.Tensor | int = 0


@dataclass(slots=True, eq=False)
class OrderWitness:
    """Records in which order MoE layers run.

    Attributes:
        events: (what, microbatch, layer). "route" and "combine" are the begin and end of a forward or a recomputation.
            "gradient" is the arrival, in a backward pass, of the gradient of the rows that its experts got.
    """

    events: list[tuple[str, int, int]] = field(default_factory=list)

    def attach(self, chunks: list[torch.nn.Module]) -> OrderWitness:
        """Watch the MoE layers of these model chunks, and return this object."""
        for chunk in chunks:
            for layer in unwrap(chunk).decoder.layers:
                if layer.is_moe_layer:
                    self._watch(layer.mlp)
        return self

    def overlapped(self) -> int:
        """Count the layer forwards during which a gradient of another microbatch arrived."""
        count, running, others = 0, None, False
        for what, *key in self.events:
            if what == "route":
                running, others = key, False
            elif what == "gradient":
                others |= running is not None and key[0] != running[0]
            else:
                count += others and key == running
                running = None
        return count

    def _watch(self, moe: torch.nn.Module) -> None:
        route, dispatch, combine = moe.route, moe.dispatch, moe.combine

        def seen(what, handle):
            if handle is not None:
                self.events.append((what, handle.microbatch, moe.layer_number - 1))

        def routed(*args, **kwargs):
            seen("route", moe.router.handle)
            return route(*args, **kwargs)

        def dispatched(*args, **kwargs):
            handle, (rows, probs) = moe.router.handle, dispatch(*args, **kwargs)
            if rows.requires_grad:
                rows.register_hook(lambda gradient: seen("gradient", handle))
            return rows, probs

        def combined(*args, **kwargs):
            seen("combine", moe.router.handle)
            return combine(*args, **kwargs)

        moe.route, moe.dispatch, moe.combine = routed, dispatched, combined


@dataclass(slots=True, eq=False)
class LayerWaits:
    """Counts what makes the host wait inside MoE layers, from router to combine, in forward and recomputation.

    Attributes:
        counts: Collectives of integers, which exchange numbers of rows.
        waits: Waits for an event on the device, with which Megatron's dispatcher ends its copies to the host.
        reads: Reads of a tensor's values by the host; each is a wait if the tensor is on a device. Values that a plan
            or a dispatcher's constructor keep on the host do not count. On a CPU, values that Megatron's dispatcher
            copies to the host cannot be told from others, and are counted.
        dispatches: All dispatches.
    """

    counts: int = 0
    waits: int = 0
    reads: int = 0
    dispatches: int = 0

    def attach(self, chunks: list[torch.nn.Module]) -> LayerWaits:
        """Watch the MoE layers of these model chunks, and return this object."""
        for chunk in chunks:
            for layer in unwrap(chunk).decoder.layers:
                if layer.is_moe_layer:
                    entered: list[str] = []
                    for name in _STAGES:
                        setattr(layer.mlp, name, self._watched(layer.mlp, getattr(layer.mlp, name), entered))
        return self

    def _watched(self, moe: torch.nn.Module, method, entered: list[str]):
        def watched(*args, **kwargs):
            if entered:  # `overlapped` calls some of the other stages
                return method(*args, **kwargs)
            self.dispatches += method.__name__ in ("dispatch", "overlapped")
            entered.append(method.__name__)
            try:
                with _Reads(self, moe.token_dispatcher), _Collectives(self), self._events():
                    return method(*args, **kwargs)
            finally:
                entered.clear()

        return watched

    @contextmanager
    def _events(self) -> Iterator[None]:
        kind = torch.cuda.Event
        synchronize = kind.synchronize

        def counted(event):
            self.waits += 1
            return synchronize(event)

        kind.synchronize = counted
        try:
            yield
        finally:
            kind.synchronize = synchronize


class _Reads(TorchFunctionMode):
    def __init__(self, total: LayerWaits, dispatcher):
        super().__init__()
        self.total, self.dispatcher = total, dispatcher

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.total.reads += func in _READS and not self._on_host(args[0])
        return func(*args, **(kwargs or {}))

    def _on_host(self, tensor: torch.Tensor) -> bool:
        known = [self.dispatcher.sort_input_by_local_experts, self.dispatcher.restore_output_by_local_experts]
        if self.dispatcher.plan is not None:
            known += [chunk.per_expert for chunk in self.dispatcher.plan.chunks]
        return any(tensor is other for other in known)


class _Collectives(TorchDispatchMode):
    def __init__(self, total: LayerWaits):
        super().__init__()
        self.total = total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)]
            self.total.counts += not any(t.is_floating_point() for t in tensors)
        return func(*args, **(kwargs or {}))
