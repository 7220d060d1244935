"""Hugging Face checkpoint folders: parts of their tensors read, and folders written by many ranks together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from moe_rl.errors import ConfigError, describe
from moe_rl.megatron import world
from moe_rl.models.hf import ModelFacts, checkpoint_tensors, decoder_problems, is_mtp_tensor
from moe_rl.models.safetensors_header import FP8_BLOCK, unpacked

Index = tuple[slice, ...]

# The 16 values of a 4-bit float, e2m1 (Open Compute Project, microscaling formats 1.0, table 6).
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class CheckpointReader:
    """Reads parts of the tensors of a Hugging Face checkpoint folder. Packed ones are unpacked, to float32.

    Opening reads the headers and raises ConfigError naming tensors that are missing, extra or misshapen. `bytes_read`
    counts what was asked for since, as it is stored: of a mapped file nothing else is touched, but for whole pages.
    """

    def __init__(self, path: str | Path, facts: ModelFacts):
        self.path = Path(path)
        self.stored = checkpoint_tensors(self.path)
        self.tensors, self.packing = unpacked(self.stored)
        problems = decoder_problems(self.tensors, facts, str(path))
        if problems:
            raise ConfigError(problems)
        self.bytes_read = 0
        self._files: dict[str, safe_open] = {}

    def read(self, name: str, index: Index) -> torch.Tensor:
        """The part of a tensor, one slice for each of its axes."""
        packing = self.packing.get(name)
        if packing == "fp8":
            return self._fp8(name, index)
        if packing == "mxfp4":
            return self._mxfp4(name, index)
        return self._stored(name, index)

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor."""
        return self.read(name, tuple(slice(0, size) for size in self.tensors[name][1]))

    def _stored(self, name: str, index: Index) -> torch.Tensor:
        file = self.stored[name][2]
        if file not in self._files:
            self._files[file] = safe_open(self.path / file, framework="pt")
        part = self._files[file].get_slice(name)[index].contiguous()
        self.bytes_read += part.nbytes
        return part

    def _fp8(self, name: str, index: Index) -> torch.Tensor:
        blocks = tuple(slice(one.start // FP8_BLOCK, -(-one.stop // FP8_BLOCK)) for one in index)
        scales = self._stored(f"{name}_scale_inv", blocks)
        for axis, one in enumerate(index):
            block_of = torch.arange(one.start, one.stop) // FP8_BLOCK - one.start // FP8_BLOCK
            scales = scales.index_select(axis, block_of)
        return self._stored(name, index).float() * scales

    def _mxfp4(self, name: str, index: Index) -> torch.Tensor:
        *outer, columns, rows = index
        if columns != slice(0, self.tensors[name][1][-2]):
            raise ValueError("a group of 4-bit floats is read whole")
        blocks = self.stored[f"{name}_blocks"][1]
        inner = (*outer, rows, slice(0, blocks[-2]))
        codes = self._stored(f"{name}_blocks", (*inner, slice(0, blocks[-1])))
        exponents = self._stored(f"{name}_scales", inner).int() - 127
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)  # the first of a pair is the low half
        values = torch.ldexp(_FP4[pairs.int()], exponents[..., None])
        return values.flatten(-2).transpose(-1, -2)


class Trained:
    """The tensors of a checkpoint that are trained, as a policy in `dtype` takes them."""

    def __init__(self, path: str | Path, facts: ModelFacts, dtype: torch.dtype):
        self._reader, self._dtype = CheckpointReader(path, facts), dtype
        self.names = [name for name in self._reader.tensors if not is_mtp_tensor(facts, name)]

    def whole(self, name: str) -> torch.Tensor:
        """All of one, rounded to the policy's precision."""
        return self._reader.whole(name).to(stored_dtype(name, self._dtype))


def write_checkpoint(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    facts: ModelFacts,
    source: CheckpointReader,
    dtype: torch.dtype,
    *,
    shard_bytes: int = 4 << 30,
) -> None:
    """Write a Hugging Face checkpoint folder, which is there when all of it is. All ranks call it.

    tensors: what this rank gives, see `hf_map.export`; every name from one rank. Each goes into the rank's own files,
    none larger than shard_bytes unless a tensor is, and no rank sees what another holds. source: whose config,
    tokenizer and multi-token-prediction layers, which nobody trained, are taken over. dtype: of all but expert biases,
    which are float32, and of what is taken over as it is.

    Raises ConfigError when the folder exists or its parent does not, before any work, and on all ranks when tensors are
    missing, doubled, extra or misshapen.
    """
    folder, rank = Path(folder), dist.get_rank()
    hidden = folder.with_name(f".{folder.name}.tmp")
    if folder.exists() or not folder.absolute().parent.is_dir():
        raise ConfigError(
            describe("a checkpoint gets a folder of its own", got=folder, do="give one that is not there yet")
        )
    dist.barrier()
    if rank == 0:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
        for file in source.path.iterdir():
            if file.is_file() and not file.name.startswith(".") and ".safetensors" not in file.name:
                shutil.copy(file, hidden / file.name)
        _write_config(source.path, hidden, dtype)
    dist.barrier()
    cast = ((name, tensor.to("cpu", stored_dtype(name, dtype))) for name, tensor in tensors)
    _write_shards(hidden, f"rank{rank:05d}", cast, shard_bytes)
    if rank == 0:
        untrained = (name for name in source.tensors if is_mtp_tensor(facts, name))
        kept = ((n, source.whole(n).to(dtype) if n in source.packing else source.whole(n)) for n in untrained)
        _write_shards(hidden, "untrained", kept, shard_bytes)
    dist.barrier()
    problems = None
    if rank == 0:
        problems = _index(hidden, facts)
        if not problems:
            hidden.rename(folder)
    problems = world.broadcast(problems, list[str])
    if problems:
        raise ConfigError(problems)


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Expert biases are float32 in a model of any precision."""
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def _write_shards(folder: Path, name: str, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        save_file(shard, folder / f"{name}-{number:05d}.safetensors", metadata={"format": "pt"})


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor.contiguous().clone()  # parts of one storage would be written as one
        held += tensor.nbytes
    if shard:
        yield shard


def _index(folder: Path, facts: ModelFacts) -> list[str]:
    """Number the files that the ranks wrote and write the index; or what is wrong with them."""
    files = sorted(folder.glob("*.safetensors"))
    weight_map: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            twice = sorted(set(names) & weight_map.keys())
            if twice:
                return [describe(f"two ranks gave the tensor {twice[0]}", where=str(folder))]
            weight_map |= dict.fromkeys(names, name)
            size += sum(opened.get_tensor(one).nbytes for one in names)
        file.rename(folder / name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    )
    return decoder_problems(checkpoint_tensors(folder), facts, str(folder))


def _write_config(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """config.json with the dtype that is written, and without how the source's tensors were packed."""
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw.pop("quantization_config", None)
    raw["dtype" if "dtype" in raw else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
