"""Reads parts of tensors from Hugging Face checkpoint folders, and writes such folders from many ranks together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from moe_rl.disk import sync, write_json, write_whole
from moe_rl.errors import ConfigError, Problem, describe
from moe_rl.megatron import world
from moe_rl.models.hf import ModelFacts, is_mtp_tensor
from moe_rl.models.quantised import FP8_BLOCK
from moe_rl.models.safetensors_header import read_header
from moe_rl.models.weight_files import read_checkpoint
from moe_rl.weights.digest import stored_dtype
from moe_rl.whereabouts import HERE

Index = tuple[slice, ...]

# Largest size of a file, unless a single tensor is larger.
SHARD_BYTES = 4 << 30

# The 16 values of a 4-bit float, e2m1 (Open Compute Project, microscaling formats 1.0, table 6).
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class CheckpointReader:
    """Reads parts of the tensors of a Hugging Face checkpoint folder. Packed tensors are unpacked to float32.

    Opening a folder reads only the headers.

    Attributes:
        bytes_read: Stored bytes read so far. Files are memory-mapped, so only the pages of these bytes are touched.

    Raises:
        ConfigError: Tensors are missing, extra, quantised, or have a wrong shape. The message names them.
    """

    def __init__(self, path: str | Path, facts: ModelFacts):
        self.path = Path(path)
        checkpoint = read_checkpoint(self.path, facts)
        self.stored, self.tensors, self.packing = checkpoint.stored, checkpoint.tensors, checkpoint.packing
        self.bytes_read = 0
        self._files: dict[str, safe_open] = {}

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Read a part of a tensor. `index` has one slice for each of its axes."""
        packing = self.packing.get(name)
        if packing == "fp8":
            return self._fp8(name, index)
        if packing == "mxfp4":
            return self._mxfp4(name, index)
        return self._stored(name, index)

    def whole(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        return self.read(name, tuple(slice(0, size) for size in self.tensors[name][1]))

    def _stored(self, name: str, index: Index) -> torch.Tensor:
        file = self.stored[name][2]
        if file not in self._files:
            self._files[file] = safe_open(self.path / file, framework="pt")
        HERE.leave()  # a rank that reads on is no hang, however large the model
        part = self._files[file].get_slice(name)[index].contiguous()
        self.bytes_read += part.nbytes
        return part

    def _fp8(self, name: str, index: Index) -> torch.Tensor:
        blocks = tuple(slice(span.start // FP8_BLOCK, -(-span.stop // FP8_BLOCK)) for span in index)
        scales = self._stored(f"{name}_scale_inv", blocks).float()
        for axis, span in enumerate(index):
            block_of = torch.arange(span.start, span.stop) // FP8_BLOCK - span.start // FP8_BLOCK
            scales = scales.index_select(axis, block_of)
        return self._stored(name, index).float() * scales

    def _mxfp4(self, name: str, index: Index) -> torch.Tensor:
        *outer, columns, rows = index
        if columns != slice(0, self.tensors[name][1][-2]):
            raise ValueError("a group of 4-bit floats can only be read whole")
        blocks = self.stored[f"{name}_blocks"][1]
        inner = (*outer, rows, slice(0, blocks[-2]))
        codes = self._stored(f"{name}_blocks", (*inner, slice(0, blocks[-1])))
        exponents = self._stored(f"{name}_scales", inner).int() - 127
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)  # the low half is the first of a pair
        values = torch.ldexp(_FP4[pairs.int()], exponents[..., None])
        return values.flatten(-2).transpose(-1, -2)


class Trained:
    """Reads the trained tensors of a checkpoint, in the precision in which a policy of `dtype` holds them."""

    def __init__(self, path: str | Path, facts: ModelFacts, dtype: torch.dtype):
        self._reader, self._dtype = CheckpointReader(path, facts), dtype
        self.names = [name for name in self._reader.tensors if not is_mtp_tensor(facts, name)]

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor, rounded to the policy's precision."""
        return self._reader.whole(name).to(stored_dtype(name, self._dtype))


def write_checkpoint(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    facts: ModelFacts,
    source: CheckpointReader,
    dtype: torch.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face checkpoint folder. The folder appears when it is complete. All ranks call this together.

    Each tensor goes into the files of the rank that gives it; no rank sees the tensors of another.

    Args:
        tensors: The tensors that this rank gives, see `hf_map.export`. Exactly one rank gives each name.
        source: The checkpoint whose config, tokenizer and multi-token-prediction layers (which are not trained) are
            copied.
        dtype: The dtype of all trained tensors except expert biases, which are float32. Copied tensors keep theirs.
        shard_bytes: Largest size of a file, unless a single tensor is larger.

    Raises:
        ConfigError: The folder exists, or its parent does not: raised before any work. Or tensors are missing, given
            twice, extra, or have a wrong shape. Raised on all ranks.
    """
    folder, rank = Path(folder), dist.get_rank()
    hidden = folder.with_name(f".{folder.name}.tmp")
    if folder.exists() or not folder.absolute().parent.is_dir():
        raise ConfigError(
            "a checkpoint must be written into a new folder", got=folder, do="name a new folder inside an existing one"
        )
    dist.barrier()
    if rank == 0:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
    dist.barrier()
    write_part(hidden, rank, on_host(tensors, dtype), shard_bytes=shard_bytes)
    if rank == 0:
        write_untrained(hidden, facts, source, dtype, shard_bytes=shard_bytes)
    dist.barrier()
    problems: list[str] | None = None
    if rank == 0:
        problems = [*write_index(hidden, facts)]
        if not problems:
            sync(hidden)
            hidden.rename(folder)
            sync(folder.absolute().parent)
    all_problems: list[str] = world.broadcast(problems, list[str])
    if all_problems:
        raise ConfigError(all_problems)


def on_host(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the tensors as they are stored. They share no memory: safetensors stores tensors that share
    memory as one."""
    for name, tensor in tensors:
        yield name, tensor.to("cpu", stored_dtype(name, dtype), copy=True).contiguous()


def write_part(
    hidden: Path, rank: int, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write and sync the files of a rank into the folder of a checkpoint that is not complete yet. `tensors`: as
    `on_host` yields them."""
    _write_shards(hidden, f"rank{rank:05d}", tensors, shard_bytes)


def write_untrained(
    hidden: Path, facts: ModelFacts, source: CheckpointReader, dtype: torch.dtype, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write and sync what `write_checkpoint` takes from the source: config, tokenizer, chat template, untrained
    layers."""
    for file in source.path.iterdir():
        if file.is_file() and not file.name.startswith(".") and ".safetensors" not in file.name:
            shutil.copy(file, hidden / file.name)
            sync(hidden / file.name)
    _write_config(source.path, hidden, dtype)
    untrained = (name for name in source.tensors if is_mtp_tensor(facts, name))
    kept = ((n, source.whole(n).to(dtype) if n in source.packing else source.whole(n)) for n in untrained)
    _write_shards(hidden, "untrained", kept, shard_bytes)


def _write_shards(folder: Path, name: str, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        file = folder / f"{name}-{number:05d}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        sync(file)


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
    if shard:
        yield shard


def write_index(hidden: Path, facts: ModelFacts) -> list[Problem]:
    """Number the files that the ranks wrote, and write the index. Returns what is wrong with them, if anything."""
    files = sorted(hidden.glob("*.safetensors"))
    weight_map: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = read_header(file)
        twice = sorted(tensors.keys() & weight_map.keys())
        if twice:
            return [describe("two ranks wrote the same tensor", where={"tensor": twice[0], "folder": hidden})]
        weight_map |= dict.fromkeys(tensors, name)
        with open(file, "rb") as stream:
            size += file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")
        file.rename(hidden / name)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_whole(hidden / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")
    try:
        read_checkpoint(hidden, facts)
    except ConfigError as error:
        return error.problems
    return []


def _write_config(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json with the new dtype, and without the entry on how the source's tensors were packed."""
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw.pop("quantization_config", None)
    raw["dtype" if "dtype" in raw else "torch_dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", raw)
