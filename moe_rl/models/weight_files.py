"""Reads which tensors a Hugging Face checkpoint folder has, and compares them with its config.json. Without torch.

Only headers are read. They are untrusted input: file names may not leave the folder.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.errors import About, ConfigError, Problem, describe, first_of
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import expected_tensors, is_mtp_tensor, read_json
from moe_rl.models.quantised import packing_problems, unpacked
from moe_rl.models.safetensors_header import Tensor, read_header, stored_bytes
from moe_rl.models.weight_table import EMBEDDING, HEAD

FLOAT_DTYPES = ("F32", "BF16", "F16")
# Buffers that older model versions saved, and that transformers and vLLM skip.
_DERIVED = re.compile(
    r"(^|\.)((rotary(_pos)?(_emb)?|rope)\.freqs|\w*inv_freq|_?(cos|sin)_cached|cos_sin_cache|freqs_cis|position_ids"
    r"|(causal|attn)_mask|_extra_state|(self_attn|attn|attention)\.(bias|masked_bias))$"
)


def checkpoint_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint folder: name -> (safetensors dtype such as "BF16", shape, file name).

    Reads only headers, of the files that model.safetensors.index.json names, or else of model.safetensors.

    Raises:
        ConfigError: a file is damaged or incomplete.
    """
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if not (folder / "model.safetensors").is_file():
            raise ConfigError(
                "no model.safetensors and no model.safetensors.index.json",
                where={"key": "model.path", "folder": folder},
            )
        return read_header(folder / "model.safetensors")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError("the index has no weight_map", where={"key": "model.path", "file": index})
    files = sorted({str(file) for file in weight_map.values()})
    outside = [file for file in files if os.path.basename(file) != file or not file.endswith(".safetensors")]
    if outside:
        raise ConfigError(
            "the index names a file that is not a *.safetensors file of this folder",
            where={"key": "model.path", "file": index},
            got=repr(outside[0]),
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, entry in read_header(folder / file).items():
            if weight_map.get(name) != file and not is_derived(name):
                raise ConfigError(
                    "a tensor is in another file than the index says",
                    where={"key": "model.path", "file": index, "tensor": name},
                    got=f"in {file}",
                    expected=f"in {weight_map.get(name, 'no file')} as the index says",
                )
            tensors[name] = entry
    absent = [name for name in weight_map if name not in tensors and not is_derived(name)]
    if absent:
        raise ConfigError(
            "the index names tensors that its files lack",
            where={"key": "model.path", "file": index},
            got=_some(absent),
        )
    return tensors


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Describes the tensors of a checkpoint folder that fits its config.json.

    Attributes:
        stored: all tensors as they are in the files.
        tensors: the trained tensors and those of multi-token prediction, unpacked.
        packing: how a packed tensor is packed, see `quantised.unpacked`.
    """

    stored: dict[str, Tensor]
    tensors: dict[str, Tensor]
    packing: dict[str, str]


def read_checkpoint(path: str | Path, facts: ModelFacts) -> WeightFiles:
    """Read the headers of a checkpoint folder, and compare them with config.json.

    Raises:
        ConfigError: with every problem. A checkpoint that cannot be unpacked has a single problem, which names the
            format.
    """
    folder = Path(path)
    stored = checkpoint_tensors(folder)
    tensors, packing = unpacked({name: tensor for name, tensor in stored.items() if not is_left_out(facts, name)})
    expected = expected_tensors(facts)
    without_mtp = {name: tensor for name, tensor in tensors.items() if not is_mtp_tensor(facts, name)}
    others = {dtype for dtype, _, _ in without_mtp.values()} - {*FLOAT_DTYPES}
    problems = packing_problems(packing, without_mtp.keys() - expected.keys(), others, _quantisation(folder), folder)
    problems = problems or tensor_problems(expected, without_mtp, {"folder": folder})
    if facts.tie_word_embeddings and {EMBEDDING, HEAD} <= stored.keys():
        first, second = (stored_bytes(folder / stored[name][2], name) for name in (EMBEDDING, HEAD))
        if not np.array_equal(first, second):
            problems.append(
                describe(
                    f"config.json says that {HEAD} is {EMBEDDING}, but their values differ",
                    where={"key": "model.path", "field": "tie_word_embeddings", "folder": folder},
                    got=True,
                    expected="false for these files",
                    do="set it to false in config.json to train both, or leave the output matrix out of the files",
                )
            )
    if problems:
        raise ConfigError(problems)
    return WeightFiles(stored, tensors, packing)


def _quantisation(folder: Path) -> dict[str, Any]:
    """Return the quantisation settings that vLLM would read; empty if there are none."""
    file, field = folder / "config.json", "quantization_config"
    settings = read_json(file).get(field)
    apart = folder / "hf_quant_config.json"
    if from_modelopt := settings is None and apart.is_file():
        file, field = apart, "quantization"
        settings = read_json(file).get(field)
    if not isinstance(settings, dict | None):
        raise ConfigError(
            "wrong value", where={"key": "model.path", "field": field, "file": file}, got=settings, expected="a mapping"
        )
    return {"quant_method": "modelopt", **(settings or {})} if from_modelopt else settings or {}


def is_left_out(facts: ModelFacts, name: str) -> bool:
    """Return whether a tensor of a checkpoint is not used: a derived buffer, or the copy of a tied embedding."""
    return is_derived(name) or (facts.tie_word_embeddings and name == HEAD)


def is_derived(name: str) -> bool:
    """Return whether `name` is a buffer that software recomputes: rotary angles, causal masks, positions."""
    return _DERIVED.search(name) is not None


def notes(path: str | Path, facts: ModelFacts) -> list[str]:
    """Return notes on the tensors of the checkpoint folder `path` that are not trained."""
    left = [name for name in checkpoint_tensors(path) if is_left_out(facts, name)]
    kinds = Counter(name.removeprefix("model.").rpartition("self_attn.")[2] for name in left)
    out = [f"{count} tensors of the checkpoint are not used: {kind}" for kind, count in kinds.items()]
    if facts.mtp_layers:
        out.append("the model's multi-token-prediction layers are not trained and not sent to the sampler")
    return out


def tensor_problems(
    expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, Tensor], where: About
) -> list[Problem]:
    """List missing, extra and misshapen tensors and unsupported dtypes, one message for each kind. where: the
    folder."""
    kinds = {
        "lacks tensors that config.json asks for": [name for name in expected if name not in stored],
        "has tensors that config.json does not ask for": [name for name in stored if name not in expected],
        "has tensors of another shape than config.json asks for": [
            f"{name} {list(stored[name][1])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in stored and stored[name][1] != shape
        ],
        f"has tensors that are not {', '.join(FLOAT_DTYPES)}": [
            f"{name} {stored[name][0]}" for name in expected if name in stored and stored[name][0] not in FLOAT_DTYPES
        ],
    }
    return [
        describe(f"the checkpoint {kind}", where={"key": "model.path", **where}, got=_some(names))
        for kind, names in kinds.items()
        if names
    ]


def _some(names: list[str]) -> str:
    return f"{len(names)}: {first_of(names, separator=', ')}"
