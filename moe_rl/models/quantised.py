"""Recognises how published checkpoints store tensors with fewer bits, and which of them can be unpacked.

Two of these formats are unpacked:
fp8    X in float8 e4m3, X_scale_inv one float32 or bfloat16 for each 128 x 128 block (DeepSeek-V3, Qwen3-MoE)
mxfp4  X_blocks [..., rows, groups, 16] two 4-bit floats per byte, X_scales [..., rows, groups] one 8-bit exponent for
       each 32 of them (gpt-oss); X itself is [..., columns, rows]
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from moe_rl.errors import About, Problem, describe
from moe_rl.models.safetensors_header import Tensor

FP8_BLOCK = 128
FP4_GROUP = 32

# For each format: a pattern for tensor names that only it has, and the values of quant_method that name it in
# config.json. The first format that matches counts.
_FORMATS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("bitsandbytes", r"\.(quant_state\.bitsandbytes__\w+|absmax|quant_map|SCB|weight_format)$", ("bitsandbytes",)),
    ("compressed-tensors", r"\.weight_(packed|shape|global_scale)$", ("compressed-tensors",)),
    ("NVFP4 (modelopt)", r"\.weight_scale_2$", ("modelopt", "modelopt_fp4", "modelopt_mixed")),
    ("GPTQ", r"\.g_idx$", ("gptq", "auto_gptq", "gptq_marlin")),
    ("AWQ", r"\.qzeros$", ("awq", "auto_awq", "awq_marlin")),
    ("MXFP4", r"_blocks$", ("mxfp4", "gpt_oss_mxfp4")),
    ("FP8 in blocks", r"\.weight_scale_inv$", ("fp8",)),
    ("FP8 or INT8 (compressed-tensors, modelopt)", r"\.weight_scale$", ("compressed-tensors", "modelopt", "fp8")),
    ("scales of a quantised KV cache", r"\.(k|v|kv|q|prob|output)_scale$", ()),
    ("MLX", r"\.biases$", ("mlx",)),
)
_UNPACKED = {"fp8": "FP8 in blocks", "mxfp4": "MXFP4"}
_SUFFIX = re.compile(
    r"([-_.](fp8|nvfp4|mxfp4|fp4|awq|gptq|int[48]|[48]-?bit|bnb|w[48]a(8|16)|quantized|dynamic|block|mlx|hqq|eetq))+$",
    re.IGNORECASE,
)


def unpacked(stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors as they are after unpacking, and {name of a packed tensor: "fp8" or "mxfp4"}.

    Unpacked tensors have the dtype "BF16". A packed tensor without fitting scales is returned unchanged.
    """
    tensors, packing = dict(stored), {}
    for name, (dtype, shape, file) in stored.items():
        if dtype == "F8_E4M3" and len(shape) == 2:
            scales = tuple(-(-size // FP8_BLOCK) for size in shape)
            if stored.get(f"{name}_scale_inv", ("", (), ""))[:2] in ((kind, scales) for kind in ("F32", "BF16")):
                del tensors[f"{name}_scale_inv"]
                tensors[name], packing[name] = ("BF16", shape, file), "fp8"
        elif name.endswith("_blocks") and dtype == "U8" and len(shape) >= 3 and 2 * shape[-1] == FP4_GROUP:
            whole = name.removesuffix("_blocks")
            if stored.get(f"{whole}_scales", ("", (), ""))[:2] == ("U8", shape[:-1]):
                del tensors[name], tensors[f"{whole}_scales"]
                *outer, rows, groups, _ = shape
                tensors[whole], packing[whole] = ("BF16", (*outer, groups * FP4_GROUP, rows), file), "mxfp4"
    return tensors, packing


def packing_problems(
    packed: Mapping[str, str],
    left: Collection[str],
    other_dtypes: Collection[str],
    settings: Mapping[str, Any],
    folder: Path,
) -> list[Problem]:
    """Return why the tensors of a checkpoint cannot be read, or do not match config.json.

    Args:
        packed: the packed tensors, see `unpacked`.
        left: names of the tensors that are neither unpacked nor part of the model.
        other_dtypes: dtypes of unpacked tensors other than floats of 16 or 32 bits.
        settings: `quantization_config` of the model; empty without one.
    """
    where: About = {"key": "model.path", "field": "quantization_config", "folder": folder}
    stated = " ".join(str(settings[key]) for key in ("quant_method", "quant_algo", "format") if settings.get(key))
    base = _SUFFIX.sub("", folder.name)
    do = "take the checkpoint in bfloat16 that this one was made from" + (f": {base}" if base != folder.name else "")
    unreadable = next((name for name, pattern, _ in _FORMATS if any(re.search(pattern, tensor) for tensor in left)), "")
    if settings and other_dtypes:
        unreadable = (
            unreadable or f"tensors of {' and '.join(sorted(other_dtypes))} without the scales of a known format"
        )
    if unreadable:
        return [
            describe(
                "the checkpoint is quantised in a way that cannot be unpacked here",
                where=where,
                got=f"{unreadable}, and in config.json {stated or 'nothing'}",
                expected="tensors in bfloat16, FP8 in blocks of 128 x 128, or MXFP4",
                do=do,
            )
        ]
    if settings and not packed:
        return [
            describe(
                "config.json says that the checkpoint is quantised, but its tensors are not: vLLM would quantise them",
                where=where,
                got=stated or dict(settings),
                expected="no such key with these tensors",
                do=f"remove the key from config.json, and hf_quant_config.json if there is one; or {do}",
            )
        ]
    actual = {_UNPACKED[packing] for packing in packed.values()}
    declared = {name for name, _, methods in _FORMATS if settings.get("quant_method") in methods}
    block = settings.get("weight_block_size") or [FP8_BLOCK, FP8_BLOCK]
    if settings and (not actual <= declared or block != [FP8_BLOCK, FP8_BLOCK]):
        return [
            describe(
                "the tensors are quantised in another way than config.json says",
                where=where,
                got=" and ".join(sorted(actual)),
                expected=f"{stated}, blocks {block}",
                do=f"copy config.json and the tensors from the same checkpoint, or {do}",
            )
        ]
    return []
