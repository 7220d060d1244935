"""Checks before the first update that a trainer exports the checkpoint that it was built from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from moe_rl.errors import WeightSyncError, first_of
from moe_rl.weights.conservation import BITS
from moe_rl.weights.stream import Ranks, Round


class Checkpoint(Protocol):
    """Lists what the check needs from a checkpoint: `megatron.hf_files.Trained`."""

    names: list[str]
    """Its tensors that are trained and therefore exported."""

    def whole(self, name: str) -> Tensor:
        """Return a tensor of the checkpoint, rounded to the precision of the training."""


class Seen(msgspec.Struct, frozen=True):
    """Tells the other ranks what one rank exported, and what was wrong with it."""

    names: list[str]
    problems: list[str]


def check_start(rounds: Iterable[Round], checkpoint: Checkpoint, ranks: Ranks) -> int:
    """Compare what all ranks export with the checkpoint, bit for bit. Return the number of tensors.

    rounds: what this rank exports, on the host. Each rank reads from the checkpoint the tensors that it exports, one at
    a time. It keeps none of them.
    Raises WeightSyncError on all ranks if a tensor differs, is not exported, or is not in the checkpoint.
    """
    names: list[str] = []
    problems: list[str] = []
    known = set(checkpoint.names)
    for run in rounds:
        for name, tensor in run.tensors:
            names.append(name)
            # Other tensors are read only for the first wrong one, to say what it looks like.
            if name in known and (problem := _difference(name, tensor, checkpoint, search=not problems)):
                problems.append(problem)
    everyone = ranks.gather(Seen(names, problems), Seen)
    times = Counter(name for report in everyone for name in report.names)
    problems = [problem for report in everyone for problem in report.problems]
    wrong = [first_of(problems)] if problems else []
    wrong += _named("not exported", known - times.keys())
    wrong += _named("exported and not in the checkpoint", times.keys() - known)
    wrong += _named("exported twice", {name for name, count in times.items() if count > 1})
    if wrong:
        raise WeightSyncError(
            "the weights that the trainer exports before its first update are not the checkpoint's",
            where={"version": 0},
            got="; ".join(wrong),
            expected="every trained tensor as model.path has it, bit for bit",
            do="look at how moe_rl/megatron/hf_map.py loads and exports these tensors, and whether the files "
            "have changed since the run read them",
        )
    return len(times)


def _named(what: str, names: set[str]) -> list[str]:
    return [f"{what}: {first_of(sorted(names), separator=', ')}"] if names else []


def _difference(name: str, tensor: Tensor, checkpoint: Checkpoint, *, search: bool) -> str:
    """Say in words how a tensor differs from the checkpoint's. Return "" when it does not."""
    expected = checkpoint.whole(name).to(tensor.dtype)
    if _same(tensor, expected):
        return ""
    if tensor.shape != expected.shape:
        how = f"shape {tuple(tensor.shape)} for {tuple(expected.shape)}"
    else:
        wrong = (_bits(tensor) != _bits(expected)).flatten()
        first = int(wrong.nonzero()[0])
        position = [int(index) for index in torch.unravel_index(torch.tensor(first), expected.shape)]
        values = f"{tensor.flatten()[first].item():.6g} for {expected.flatten()[first].item():.6g}"
        how = f"{int(wrong.sum())} of {expected.numel()} elements, the first at {position}: {values}"
    also = f"; it is {match}" if search and (match := _looks_like(name, tensor, expected, checkpoint)) else ""
    return f"{name}: {how}{also}"


def _looks_like(name: str, tensor: Tensor, expected: Tensor, checkpoint: Checkpoint) -> str:
    if expected.ndim == 2 and _same(tensor, expected.T):
        return "the transpose"
    if not tensor.any():
        return "all zeros"
    parts = name.split(".")
    for other in checkpoint.names:  # tensors whose names differ in one place: layer, expert or kind
        other_parts = other.split(".")
        near = len(other_parts) == len(parts) and sum(a != b for a, b in zip(parts, other_parts, strict=True)) == 1
        if near and _same(tensor, checkpoint.whole(other).to(tensor.dtype)):
            return f"the checkpoint's {other}"
    return ""


def _same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and torch.equal(_bits(tensor), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(BITS[tensor.itemsize])
