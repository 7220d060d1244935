"""Weights as a sampler of lower precision than the trainer holds them, emulated where there are no such kernels.

The sampler gets values that float8 can hold, in the precision it computes in. What is emulated is the weights' loss of
precision; float8 activations are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rl.errors import describe

BLOCK = 128
"""Rows and columns of a weight matrix that share one scale."""

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max  # 448


def is_rounded(name: str) -> bool:
    """Whether a Hugging Face tensor is held in float8: the matrices of attention, experts and dense layers.

    Routers, embeddings, the output head and norms stay as they are.
    """
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def fp8_rounded(weight: Tensor) -> Tensor:
    """The nearest values to weight [rows, columns] that float8 e4m3 holds, in the weight's dtype, contiguous.

    Each block of 128 x 128 has a float32 scale that maps its largest |value| to 448 (DeepSeek-V3, arXiv 2412.19437,
    section 3.3.2).

    Raises ValueError for a tensor that is no matrix or is not finite.
    """
    if weight.ndim != 2 or not weight.isfinite().all():
        got = f"shape {tuple(weight.shape)}" if weight.ndim != 2 else "values that are not finite"
        raise ValueError(describe("this cannot be rounded to float8", got=got, expected="a finite matrix"))
    rows, columns = weight.shape
    blocks = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = blocks.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3), keepdim=True) / _LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    held = (blocks / scale).clamp(-_LARGEST, _LARGEST).to(_FP8).float() * scale
    return held.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(weight.dtype).contiguous()
