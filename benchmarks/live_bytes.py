"""Measures the bytes of tensors that are alive at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Counts storages made while the mode is on. peak: the largest number of bytes alive at once.

    there_before: tensors that are not counted.
    """

    def __init__(self, there_before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen = WeakIdKeyDictionary()
        self.there_before = {tensor.untyped_storage().data_ptr() for tensor in there_before}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, result)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self.seen or storage.data_ptr() in self.there_before:
            return
        size = storage.nbytes()
        self.seen[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size
