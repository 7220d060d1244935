"""Builds models of TransformerEngine's layers where its compiled extension is not, and tries what needs only their
names and shapes: `python -m tests.support.stubbed_te FOLDER`.

The Python part of TransformerEngine must be importable. Nothing can be computed. For each family, weights are loaded
from a checkpoint and exported again, compared with sums of the live parameters, experts are moved to other slots and
back, and a sharded checkpoint is saved and loaded into a model with other weights. Parameters that tensor-parallel
ranks split must be marked. Prints one line of JSON: {family: what differs, or "" if nothing}.
"""

from __future__ import annotations

import enum
import json
import os
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch


def stub() -> None:
    """Put objects that can be named, and not used, in place of the compiled extension."""

    class Extension(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            setattr(self, name, MagicMock(name=name))
            return getattr(self, name)

    extension = Extension("transformer_engine_torch")
    # These two are compared with their copies in Python.
    kinds = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
    backends = "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8"
    extension.DType = enum.IntEnum("DType", kinds, start=0)
    extension.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", backends, start=0)
    extension.get_cublasLt_version, extension.get_cudnn_version = (lambda: 130100), (lambda: 92000)
    extension.get_num_cublas_streams = lambda: 4
    sys.modules[extension.__name__] = extension
    exports = "transformer_engine.pytorch.onnx_extensions"  # it needs packages that nothing here uses
    sys.modules[exports] = Extension(exports)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it does not look for its compiled core
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda *_: None
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.is_available = lambda: "/transformer_engine/" in sys._getframe(1).f_code.co_filename
    import transformer_engine.pytorch  # noqa: F401 - megatron looks for it


def differences(name: str, folder: Path) -> str:
    """Return what differs for one family; "" if nothing."""
    from megatron.core import dist_checkpointing

    from moe_rl.megatron import expert_order, hf_map, live_weights, model, world
    from moe_rl.models.hf import read_model
    from moe_rl.proof.cases import Case
    from moe_rl.weights import conservation
    from tests.support.families import write_checkpoint

    case, facts = Case(1), read_model(write_checkpoint(name, folder / name, seed=1))
    world.lay_out(case.parallel_config, seed=1)

    def built(checkpoint: Path) -> torch.nn.Module:
        config = model.transformer_config(facts, case.train_config, case.parallel_config)
        config.use_cpu_initialization = True
        (chunk,) = model.build_model(facts, config, checkpoint)
        return model.unwrap(chunk)

    def exported(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        pairs = hf_map.export([module], facts, dense=True, experts=True)
        return {key: value.clone() for key, value in pairs}

    def unlike_live(module: torch.nn.Module) -> str:
        """Say where sums of the parameters, which know TransformerEngine's names too, differ from those exported."""
        tensors = exported(module)
        parts = conservation.parts_of({key: value.shape for key, value in tensors.items()})
        held = live_weights.LiveWeights([module], facts, parts).content(torch.float32, [], updated=False)
        sums = conservation.PartSums(parts, torch.device("cpu"))
        for key, value in tensors.items():
            for part, piece in conservation.cut(key, value):
                sums.add(part, piece, value.dtype)
        return conservation.difference(sums.content(), held, None, version=1)

    ours = built(folder / name)
    before = exported(ours)
    layers = [layer.mlp for layer in ours.decoder.layers if layer.is_moe_layer]
    kinds = {type(layer.experts).__name__ for layer in layers}
    moments = {one: {kind: torch.zeros_like(one) for kind in ("exp_avg", "exp_avg_sq")} for one in ours.parameters()}
    optimizer = types.SimpleNamespace(optimizer=types.SimpleNamespace(state=moments))
    turned = np.arange(facts.num_experts)[::-1].copy()
    for moe in layers:
        expert_order.move(moe, turned, [optimizer])
    moved, live = exported(ours), unlike_live(ours)
    for moe in layers:
        expert_order.move(moe, np.arange(facts.num_experts), [optimizer])
    write_checkpoint(name, folder / f"{name} other", seed=2)
    other = built(folder / f"{name} other")
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}
    saved = folder / f"{name} sharded"
    saved.mkdir()
    dist_checkpointing.save(ours.sharded_state_dict(metadata=metadata), str(saved))
    unlike = _differing(before, exported(other))
    other.load_state_dict(
        dist_checkpointing.load(other.sharded_state_dict(metadata=metadata), str(saved)), strict=False
    )
    found = {
        "no TransformerEngine": [] if kinds == {"TEGroupedMLP"} else sorted(kinds),
        "moved experts": _differing(before, moved),
        "live weights": [live] if live else [],
        "experts moved back": _differing(before, exported(ours)),
        "loaded again": _differing(before, exported(other)),
        "nothing to load": [] if unlike else ["all weights are equal"],
        "split, and not marked": [
            entry.names[0]
            for entry in hf_map.entries(ours, facts)
            if entry.weight.axis is not None and not all(map(live_weights._is_cut, entry.parameters))
        ],
    }
    return "; ".join(f"{what}: {names[:3]}" for what, names in found.items() if names)


def _differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if key not in one or key not in other
                  or not torch.equal(one[key], other[key]))  # fmt: skip


def main() -> int:
    warnings.filterwarnings("ignore")
    stub()
    from moe_rl.megatron import world
    from moe_rl.megatron.specs import HAVE_TE
    from tests.support.families import MODELS

    if not HAVE_TE:
        sys.exit("Megatron does not find TransformerEngine")
    world.join(timeout_seconds=60)
    print(json.dumps({name: differences(name, Path(sys.argv[1])) for name in MODELS}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
