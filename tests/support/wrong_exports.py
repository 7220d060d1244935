"""Exports that are wrong and well formed: right names, shapes and digests, and not what the trainer holds.

    fired = plant(policy, FAULTS["two routers swapped"], at=2)        # of one policy
    fired = plant(Policy, FAULTS["two routers swapped"], at=2)        # of whatever policy this process makes: a run's

`at` counts the exports of the process from 0. A run that is not resumed exports once before it samples, to compare with
the checkpoint, and from then on once a step: export N is version N (with rollout.weights=fp8_e4m3 or with servers,
version N - 1). `fired` counts the tensors that were changed on this rank: a rank changes what it has of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

Tensors = dict[str, torch.Tensor]

ROUTER = r"model\.layers\.\d+\.mlp\.(gate|router)\.weight"
UP = r"model\.layers\.\d+\.mlp\.experts\.(\d+\.up_proj\.weight|gate_up_proj)"
EXPERTS = r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(.+)"
STACKED = r"(model\.layers\.\d+\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)"


@dataclass(frozen=True, slots=True)
class Fault:
    """change(what is exported, what the export before gave) -> tensors in place of those of the same name. says: what
    the error says, as patterns. start: it shows in the first export, else only behind an update."""

    change: Callable[[Tensors, Tensors], Tensors]
    says: tuple[str, ...]
    start: bool = False


def plant(policy, fault: Fault, *, at: int) -> list[str]:
    """Have a policy, or the class of all, export wrongly once. Returns the names that were changed, filled then."""
    export_rounds, fired, number, before = policy.export_rounds, [], [0], {}

    def wrong(*arguments, **named):
        rounds, here = export_rounds(*arguments, **named), number[0]
        number[0] += 1
        if here not in (at - 1, at):
            return rounds
        given: list[Tensors] = []

        def all_of_them() -> list[Tensors]:
            if not given:  # ranks that share tensors make them together: all at once, as soon as one is asked for
                given.extend({name: tensor.clone() for name, tensor in run.tensors} for run in rounds)
                whole = {name: tensor for run in given for name, tensor in run.items()}
                if here == at:
                    changed = fault.change(whole, before)
                    fired.extend(changed)
                    for run in given:
                        run |= {name: tensor for name, tensor in changed.items() if name in run}
                else:
                    before.update(whole)
            return given

        def tensors(at_round):
            yield from all_of_them()[at_round].items()

        return [replace(run, tensors=tensors(at_round)) for at_round, run in enumerate(rounds)]

    policy.export_rounds = wrong
    return fired


def _names(tensors: Tensors, pattern: str) -> list[str]:
    return [name for name in tensors if re.fullmatch(pattern, name)]


def _exchanged(tensors: Tensors, one: str, other: str) -> Tensors:
    return {one: tensors[other].clone(), other: tensors[one].clone()}


def _routers_swapped(now: Tensors, before: Tensors) -> Tensors:
    names = _names(now, ROUTER)
    return _exchanged(now, *names[:2]) if names else {}


def _first_expert(now: Tensors, change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> Tensors:
    """change(of the first expert, of the second) of one layer, each of their tensors. Both of one rank."""
    changed = {}
    if stacked := _names(now, STACKED):
        layer = re.fullmatch(STACKED, stacked[0])[1]
        for name in (name for name in stacked if name.startswith(layer)):
            changed[name] = now[name].clone()
            changed[name][0], changed[name][1] = (one.clone() for one in change(now[name][0], now[name][1]))
        return changed
    found = [re.fullmatch(EXPERTS, name) for name in _names(now, EXPERTS)]
    if not found:
        return {}
    layer = found[0][1]
    one, other, *_ = dict.fromkeys(name[2] for name in found if name[1] == layer)
    for kind in dict.fromkeys(name[3] for name in found if name[1] == layer):
        names = [f"{layer}.{expert}.{kind}" for expert in (one, other)]
        changed |= dict(zip(names, change(*(now[name].clone() for name in names)), strict=True))
    return {name: tensor for name, tensor in changed.items() if not torch.equal(tensor, now[name])}


def _stale(pattern: str, most: int | None) -> Callable[[Tensors, Tensors], Tensors]:
    def change(now: Tensors, before: Tensors) -> Tensors:
        moved = [name for name in _names(now, pattern) if not torch.equal(now[name], before[name])]
        return {name: before[name] for name in moved[:most]}

    return change


def _transposed(now: Tensors, before: Tensors) -> Tensors:
    square = [n for n, t in now.items() if t.ndim == 2 and t.shape[0] == t.shape[1] and not torch.equal(t, t.T)]
    return {name: now[name].T.contiguous() for name in square[:1]}


def _keys_and_values(now: Tensors, before: Tensors) -> Tensors:
    names = _names(now, r"model\.layers\.\d+\.self_attn\.[kv]_proj\.weight")
    return _exchanged(now, *names[:2]) if names else {}


def _queries_and_keys(now: Tensors, before: Tensors) -> Tensors:
    """The first rows of the queries, as many as there are of keys, change places with these."""
    names = _names(now, r"model\.layers\.\d+\.self_attn\.[qk]_proj\.weight")
    if not names:
        return {}
    queries, keys = now[names[0]].clone(), now[names[1]].clone()
    rows = len(keys)
    return {names[0]: torch.cat((keys, queries[rows:])), names[1]: queries[:rows].clone()}


OTHER = r"what layer \d+, .* (is|was in version \d+)"
FAULTS = {
    "two routers swapped": Fault(
        _routers_swapped,
        (r"2 of \d+ parts", rf"layer (\d+), mlp.\w+.weight: {OTHER}; layer (\d+), mlp.\w+.weight: {OTHER}"),
        start=True,
    ),
    "two experts permuted": Fault(
        lambda now, _: _first_expert(now, lambda one, other: (other, one)),
        (r"expert \d+, gate_proj.weight: what layer \d+, expert \d+, gate_proj.weight is",),
        start=True,
    ),
    "one expert zeroed": Fault(
        lambda now, _: _first_expert(now, lambda one, other: (torch.zeros_like(one), other)),
        (r"expert \d+, gate_proj.weight: only zeros",),
        start=True,
    ),
    "all routers of the previous version": Fault(
        _stale(ROUTER, None), (r"layer \d+, mlp.\w+.weight: stale, what it was in version \d+",)
    ),
    "one tensor of the previous version": Fault(
        _stale(UP, 1), (r"expert \d+, up_proj.weight: stale, what it was in version \d+",)
    ),
    "keys and values exchanged": Fault(
        _keys_and_values, (r"k_proj.weight: what layer \d+, self_attn.v_proj.weight is",), start=True
    ),
}
"""Those that are refused behind an update, in which a tensor's elements may come in any order, and at the start."""

START = {
    "a matrix transposed": Fault(_transposed, (r"it is the transpose",), start=True),
    "queries and keys exchanged": Fault(_queries_and_keys, (r"self_attn.q_proj.weight: \d+ of",), start=True),
}
"""Those that only the comparison with the checkpoint sees."""
