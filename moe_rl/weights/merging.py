"""Makes the weights of a version in the sampler from its own checkpoint and the adapters that the trainer sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from moe_rl.models.peft import PREFIX
from moe_rl.weights.digest import stored_dtype
from moe_rl.weights.shared_disk import read_parts
from moe_rl.weights.update import Merge

_BYTES = 1 << 28
"""Bytes of tensors that are made before they are confirmed and loaded."""


def merged(
    checkpoint: Path, merge: Merge, adapters: Mapping[str, Tensor], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Yield all tensors of `merge`, some at a time: W + scale * B A, computed in float64 and rounded once.

    This is the arithmetic of the trainer's export, so the bits are the same.

    Args:
        checkpoint: folder of the sampler's checkpoint.
        adapters: A [rank, inputs] and B [outputs, rank] under the names of `peft`.
        device: where the tensors are made.

    Raises:
        WeightSyncError: a file of the checkpoint is damaged.
    """
    infos, train = {info.name: info for info in merge.tensors}, getattr(torch, merge.dtype)
    some: dict[str, Tensor] = {}
    for name, stored in read_parts(sorted(checkpoint.glob("*.safetensors"))):
        if name not in infos:  # a layer or a buffer that is not trained
            continue
        weight = stored.to(device).to(stored_dtype(name, train))
        module = PREFIX + name.removesuffix(".weight")
        if (a := adapters.get(f"{module}.lora_A.weight")) is not None:
            b = adapters[f"{module}.lora_B.weight"]
            weight = (weight.double() + merge.scale * (b.to(device).double() @ a.to(device).double())).to(weight.dtype)
        some[name] = weight.to(getattr(torch, infos[name].dtype)).contiguous()
        if sum(one.nbytes for one in some.values()) >= _BYTES:
            yield some
            some = {}
    if some:
        yield some
