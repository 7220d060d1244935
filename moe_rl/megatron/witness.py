"""What reaches every token dispatcher, and what comes out of it: seen at the dispatcher itself, not by the session."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_rl.megatron.model import unwrap


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """One dispatch. routing_map bool [R, E]: rows of this rank to experts. received int64 [E of this rank]: rows that
    its experts got from all ranks. with_grad: gradients were enabled; in a first pass that is recomputed they are not.
    """

    microbatch: int
    layer: int
    with_grad: bool
    routing_map: torch.Tensor
    received: torch.Tensor


@dataclass(slots=True, eq=False)
class DispatchWitness:
    """Wraps the dispatchers of a policy's MoE layers, for tests and proofs: it copies and holds every routing map."""

    seen: list[Dispatch] = field(default_factory=list)

    def attach(self, chunks: list[torch.nn.Module]) -> DispatchWitness:
        """Watch the MoE layers of these model chunks. Returns itself."""
        for chunk in chunks:
            for layer in unwrap(chunk).decoder.layers:
                if layer.is_moe_layer:
                    self._watch(layer.mlp)
        return self

    def _watch(self, moe: torch.nn.Module) -> None:
        dispatcher = moe.token_dispatcher
        preprocess, postprocess = dispatcher.dispatch_preprocess, dispatcher.dispatch_postprocess
        before: list[tuple[int, bool, torch.Tensor] | None] = []  # None: a microbatch without routes, a filler

        def dispatch_preprocess(hidden_states, routing_map, probs):
            handle = moe.router.handle
            key = None if handle is None else (handle.microbatch, torch.is_grad_enabled())
            before.append(key and (*key, routing_map.detach().bool().clone()))
            return preprocess(hidden_states, routing_map, probs)

        def dispatch_postprocess(*args, **kwargs):
            hidden_states, received, probs = postprocess(*args, **kwargs)
            if (key := before.pop(0)) is not None:
                microbatch, with_grad, routing_map = key
                counts = torch.as_tensor(received).detach().clone().long()
                self.seen.append(Dispatch(microbatch, moe.layer_number - 1, with_grad, routing_map, counts))
            return hidden_states, received, probs

        dispatcher.dispatch_preprocess, dispatcher.dispatch_postprocess = dispatch_preprocess, dispatch_postprocess
