"""Faults to plant into a model under replay, each of which must be refused with an error that names it."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from moe_rl.errors import ReplayError
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.proof.share import Share


def error_of(fault: str, share: Share) -> str | None:
    """Plant it and run: the message of the ReplayError that this rank ended with, None without one.

    Faults of one rank are planted on the last, in a forward-only pass whose session needs no other rank at its end.
    """
    try:
        if fault in ONE_RANK:
            if dist.get_rank() == dist.get_world_size() - 1:
                ONE_RANK[fault](share.policy)
            with share.session(share.tables, "replay", "logprobs") as session:
                share.policy.logprobs(share.microbatches, session)
        else:
            share.first_pass()
            EVERY_RANK[fault](share.policy)
            share.update(share.tables)
    except ReplayError as error:
        return str(error)
    return None


def _swapped(policy: Policy) -> None:
    """Other experts than recorded reach the dispatcher."""
    router = unwrap(policy.chunks[0]).decoder.layers[0].mlp.router
    whole = router.routing
    router.routing = lambda *a, **k: (lambda probs, chosen: (probs, chosen.roll(1, -1)))(*whole(*a, **k))


def _repeated(policy: Policy) -> None:
    """A router runs twice."""
    layer = unwrap(policy.chunks[-1]).decoder.layers[-1].mlp
    route = layer.route
    layer.route = lambda *a, **k: (route(*a, **k), route(*a, **k))[1]


def _orphan(policy: Policy) -> None:
    """A router has lost the microbatch it works on, as one of a model that nobody forwards through would have."""
    layer = unwrap(policy.chunks[0]).decoder.layers[0].mlp
    route = layer.route

    def forget(*args, **kwargs):
        layer.router.handle = None
        return route(*args, **kwargs)

    layer.route = forget


def _previous_key(policy: Policy) -> None:
    """A key arrives when the router has gone on with that of the microbatch before."""
    layer = unwrap(policy.chunks[-1]).decoder.layers[-1]
    whole, bound = layer._forward_attention, [None]

    def late(*args, **kwargs):
        out = whole(*args, **kwargs)
        bound.append(layer.mlp.router.handle)
        layer.mlp.router.handle = bound[-2]
        return out

    layer._forward_attention = late


def _key_bound_in_forward(policy: Policy) -> None:
    """The key is bound where the layer is called, which combined 1F1B does not do."""
    layer = unwrap(policy.chunks[-1]).decoder.layers[-1]
    plain = super(type(layer), layer)._forward_attention

    def bind(module, args, kwargs):
        layer.mlp.router.handle = kwargs["packed_seq_params"].replay

    layer._forward_attention = plain
    layer.register_forward_pre_hook(bind, with_kwargs=True)


ONE_RANK: dict[str, Callable[[Policy], None]] = {"swapped": _swapped, "repeated": _repeated, "orphan": _orphan}
EVERY_RANK: dict[str, Callable[[Policy], None]] = {
    "previous key": _previous_key,
    "key bound in forward": _key_bound_in_forward,
}
