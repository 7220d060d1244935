"""A job for ranks: cases of the proof, also with planted faults, each of which must be refused by name.

Arguments and output as of `moe_rl.proof.rank`. A case with a fault writes what `refused` returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from moe_rl.comparison.faults import SWAPPED, wrong_tables
from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.proof import rank
from moe_rl.proof.cases import Case
from tests.distributed.ranks import Leave

# Faults that end the processes of their ranks: one is refused in a layer while another waits for it, who is told so.
ENDING = ("key lost on one rank", "key of another chunk")

Fired = Callable[[], None]


@dataclass(frozen=True)
class Planted(Case):
    """A case with a fault: a name of FAULTS."""

    fault: str = ""

    @property
    def name(self) -> str:
        return f"{super().name} fault={self.fault}"


@dataclass(frozen=True, slots=True)
class Fault:
    """plant: into a policy; it calls its second argument whenever what it planted takes effect. training: the pass that
    it runs in is an update, behind a forward-only pass without it, else a forward-only pass. everywhere: planted on all
    ranks, else on the last."""

    plant: Callable[[Policy, Fired], None]
    training: bool = True
    everywhere: bool = True


def main(checkpoint: Path, out: Path, cases: Path) -> None:
    for number, fields in enumerate(json.loads(cases.read_text())):
        fault = fields.pop("fault", "")
        case = Case(**fields)
        world.lay_out(case.parallel_config, seed=1)
        seen = refused(fault, case, checkpoint) if fault else rank.run(case, checkpoint)
        torch.save(seen, out / f"{number}-rank{dist.get_rank()}.pt")
        if fault in ENDING:
            raise Leave(None)  # sockets and all, whatever still holds them: those who wait are told by that


def refused(name: str, case: Case, checkpoint: Path) -> dict[str, object]:
    """Plant a fault and run. error: message of the ReplayError that this rank ended with, None without one. fired: how
    often the fault took effect here. deserted: another rank ended while this one waited for it."""
    fault, fired = FAULTS[name], [0]
    error, deserted = None, False

    def fires() -> None:
        fired[0] += 1

    with rank.begun(case, checkpoint) as trial:
        try:
            if fault.training:
                trial.first_pass()
            if fault.everywhere or dist.get_rank() == dist.get_world_size() - 1:
                fault.plant(trial.policy, fires)
            if fault.training:
                trial.update(trial.tables)
            else:
                trial.policy.score(trial.work(trial.tables, "replay"), "replay", "logprobs")
        except ReplayError as refusal:
            error = str(refusal)
        except RuntimeError as broken:
            if name not in ENDING or "by peer" not in str(broken):
                raise
            deserted = True
    return {"error": error, "fired": fired[0], "deserted": deserted}


def _layers(policy: Policy) -> list[torch.nn.Module]:
    """The layers of all its chunks, in the model's order."""
    return [layer for chunk in policy.chunks for layer in unwrap(chunk).decoder.layers]


def _swapped(policy: Policy, fires: Fired) -> None:
    """Other experts than recorded reach the dispatcher."""
    router = _layers(policy)[0].mlp.router
    whole = router.routing

    def swapped(*args, **kwargs):
        fires()
        probs, chosen = whole(*args, **kwargs)
        return probs, chosen.roll(1, -1)

    router.routing = swapped


def _repeated(policy: Policy, fires: Fired) -> None:
    """A router runs twice."""
    layer = _layers(policy)[-1].mlp
    route = layer.route

    def repeated(*args, **kwargs):
        fires()
        route(*args, **kwargs)
        return route(*args, **kwargs)

    layer.route = repeated


def _lost_key(policy: Policy, fires: Fired) -> None:
    """A router has lost the microbatch it works on, as one of a model that nobody forwards through would have."""
    layer = _layers(policy)[0].mlp
    route = layer.route

    def forget(*args, **kwargs):
        fires()
        layer.router.handle = None
        return route(*args, **kwargs)

    layer.route = forget


def _rebound(layer: torch.nn.Module, key: Callable) -> None:
    """The layer works with key(its microbatch's own)."""
    whole = layer._forward_attention

    def rebound(*args, packed_seq_params, **kwargs):
        packed_seq_params = replace(packed_seq_params, replay=key(packed_seq_params.replay))
        return whole(*args, packed_seq_params=packed_seq_params, **kwargs)

    layer._forward_attention = rebound


def _previous_key(policy: Policy, fires: Fired) -> None:
    """A key arrives when the router has gone on with that of the microbatch before."""
    bound = []

    def previous(own):
        bound.append(own)
        if len(bound) == 1:
            return own
        fires()
        return bound[-2]

    _rebound(_layers(policy)[-1], previous)


def _exchanged_keys(policy: Policy, fires: Fired) -> None:
    """Two microbatches have each other's key."""

    def exchanged(own):
        if own.microbatch > 1:
            return own
        fires()
        return replace(own, microbatch=1 - own.microbatch)

    for layer in _layers(policy):
        _rebound(layer, exchanged)


def _key_of_another_chunk(policy: Policy, fires: Fired) -> None:
    """The layers of a chunk work with the key of whatever went through the chunk before it last."""
    latest = []
    *_, before, last = policy.chunks

    def remembered(own):
        latest.append(own)
        return own

    def others(own):
        if latest[-1] != own:
            fires()
        return latest[-1]

    for chunk, key in ((before, remembered), (last, others)):
        for layer in unwrap(chunk).decoder.layers:
            _rebound(layer, key)


def _exchanged_layers(policy: Policy, fires: Fired) -> None:
    """Two layers take each other's routes, each once. The plans that go with them are their own."""

    def takes(mine: torch.nn.Module, other: torch.nn.Module) -> None:
        recorded, own, wrong = mine.router_replay, mine.layer_number, other.layer_number
        choose = recorded.get_replay_topk

        def chosen(*args, **kwargs):
            fires()
            mine.layer_number = wrong
            try:
                return choose(*args, **kwargs)
            finally:
                mine.layer_number = own

        recorded.get_replay_topk = chosen

    *_, one, other = (layer.mlp.router for layer in _layers(policy))
    takes(one, other)
    takes(other, one)


def _other_rows_read(policy: Policy, fires: Fired) -> None:
    """The sequences of a microbatch have each other's rows, exchanged before the trainer summed up what it read."""
    replay = policy._replay

    def begun(work, *given, **options):
        fires()
        wrong = zip(work, wrong_tables(SWAPPED, [one.table for one in work]), strict=True)
        work = [replace(one, table=replace(table, source=one.table.source)) for one, table in wrong]
        return replay(work, *given, **options)

    policy._replay = begun


def _key_bound_in_forward(policy: Policy, fires: Fired) -> None:
    """The key is bound where the layer is called, which combined 1F1B does not do."""
    layer = _layers(policy)[-1]
    plain = super(type(layer), layer)._forward_attention

    def unbound(*args, **kwargs):
        fires()
        return plain(*args, **kwargs)

    def bind(module, args, kwargs):
        layer.mlp.router.handle = kwargs["packed_seq_params"].replay

    layer._forward_attention = unbound
    layer.register_forward_pre_hook(bind, with_kwargs=True)


FAULTS = {
    "swapped": Fault(_swapped, training=False, everywhere=False),
    "repeated": Fault(_repeated, training=False, everywhere=False),
    "lost key": Fault(_lost_key, training=False),
    "key lost on one rank": Fault(_lost_key, everywhere=False),
    "previous key": Fault(_previous_key),
    "exchanged keys": Fault(_exchanged_keys),
    "key of another chunk": Fault(_key_of_another_chunk),
    "exchanged layers": Fault(_exchanged_layers),
    "key bound in forward": Fault(_key_bound_in_forward),
    "other rows read": Fault(_other_rows_read, training=False, everywhere=False),
}
