"""Tensors that published checkpoints store in fewer bits, with scales beside them.

fp8    X in float8 e4m3, X_scale_inv one float32 for each 128 x 128 block (DeepSeek-V3)
mxfp4  X_blocks [..., rows, groups, 16] two 4-bit floats a byte, X_scales [..., rows, groups] one 8-bit exponent for
       each 32 of them (gpt-oss); X itself is [..., columns, rows]
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_rl.models.safetensors_header import Tensor

FP8_BLOCK = 128
FP4_GROUP = 32


def unpacked(found: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors as if none were packed, those that are as "BF16"; and {name of a packed one: fp8 or mxfp4}.

    What lacks its other half, or does not fit it, is left as it was found.
    """
    tensors, packing = dict(found), {}
    for name, (dtype, shape, file) in found.items():
        if dtype == "F8_E4M3" and len(shape) == 2:
            scales = tuple(-(-size // FP8_BLOCK) for size in shape)
            if found.get(f"{name}_scale_inv", ("", (), ""))[:2] == ("F32", scales):
                del tensors[f"{name}_scale_inv"]
                tensors[name], packing[name] = ("BF16", shape, file), "fp8"
        elif name.endswith("_blocks") and dtype == "U8" and len(shape) >= 3 and 2 * shape[-1] == FP4_GROUP:
            whole = name.removesuffix("_blocks")
            if found.get(f"{whole}_scales", ("", (), ""))[:2] == ("U8", shape[:-1]):
                del tensors[name], tensors[f"{whole}_scales"]
                *outer, rows, groups, _ = shape
                tensors[whole], packing[whole] = ("BF16", (*outer, groups * FP4_GROUP, rows), file), "mxfp4"
    return tensors, packing
