"""Packs tensors into one run of bytes, in which they travel, and cuts such a run into its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moe_rl.weights.update import TensorInfo


def packed(infos: Sequence[TensorInfo], tensors: Iterable[Tensor], device: torch.device, *, after: int = 0) -> Tensor:
    """Copy tensors, which must be as announced by `infos`, into uint8 [their bytes + after], one behind the other.

    They are taken one at a time. The last `after` bytes are left for the caller.
    """
    octets = torch.empty(sum(info.size for info in infos) + after, dtype=torch.uint8, device=device)
    start = 0
    for info, tensor in zip(infos, tensors, strict=True):
        octets[start : start + info.size] = tensor.contiguous().reshape(-1).view(torch.uint8)
        start += info.size
    return octets


def unpacked(octets: Tensor, infos: Sequence[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of each tensor in `octets`, which are those that `infos` announce. They share its memory."""
    start = 0
    for info in infos:
        piece = octets[start : start + info.size]
        start += info.size
        # A tensor may start at an offset that is not a multiple of its item size; a view needs an aligned copy then.
        dtype = getattr(torch, info.dtype)
        aligned = piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
        yield info.name, aligned.view(dtype).view(info.shape)
