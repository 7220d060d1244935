"""Multiplies on a CPU as exactly as another device does.

A GPU's tensor cores round what they multiply. TransformerEngine lets them round float32 to TF32, which keeps 10 of 23
bits of the fraction; everything else stays float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Precision = Literal["float32", "tf32", "bfloat16"]

_ATEN = torch.ops.aten
_PRODUCTS = {
    *(_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default, _ATEN._grouped_mm.default),
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
_DROPPED_BITS = 13


def to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Round float32 to the nearest TF32."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + (1 << _DROPPED_BITS - 1)) & -(1 << _DROPPED_BITS)).view(torch.float32)


class Tf32(TorchDispatchMode):
    """Rounds what is multiplied, forward and backward."""

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _PRODUCTS:
            floats = [isinstance(value, torch.Tensor) and value.dtype is torch.float32 for value in args]
            args = tuple(to_tf32(value) if rounds else value for value, rounds in zip(args, floats, strict=True))
        return function(*args, **(kwargs or {}))
