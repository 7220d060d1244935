"""Weights on their way from the trainer to a sampler: safetensors parts that carry the digest of what was meant.

The writer digests each tensor in its own memory and stores the digests in the part's metadata; the reader digests the
bytes that it got. Equal totals mean that the sampler holds exactly what the trainer had, whatever the disk did between.

Digest: xxh3-128 over name, dtype, shape and bytes of a tensor; the total is the xxh3-128 of these in name order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_rl.errors import WeightSyncError, describe

_METADATA_KEY = "moe_rl.digests"
_LONGEST_LIST = 5


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write HF-named tensors as one safetensors file that appears at `path` complete or not at all.

    Not synced to disk: a part is read once, by a process of the same machine, and then deleted.
    """
    held = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    digests = {name: _digest(name, tensor) for name, tensor in held.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(held, temporary, metadata={_METADATA_KEY: json.dumps(digests)})
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        message = describe("Weights cannot be written", where=str(path), got=error, do="look for a full disk")
        raise WeightSyncError(message) from error


def expected_digest(parts: Sequence[Path]) -> str:
    """Total digest of what the writers meant, from the metadata of all parts.

    Raises WeightSyncError naming the part that is damaged, or the tensor that lies in two parts.
    """
    digests: dict[str, str] = {}
    for part in parts:
        with _Part(part) as opened:
            try:
                stated = json.loads((opened.metadata() or {})[_METADATA_KEY])
            except (KeyError, ValueError) as error:
                raise WeightSyncError(describe("A part of the weights has no digests", where=str(part))) from error
            if set(stated) != set(opened.keys()):
                raise WeightSyncError(describe("A part's digests are for other tensors", where=str(part)))
            _refuse_repeated(digests, stated, part)
            digests.update(stated)
    return total_digest(digests)


def read_parts(parts: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of the parts; the tensors are mapped from the files, not copied.

    Raises WeightSyncError naming the part that is damaged, or the tensor that lies in two parts.
    """
    seen: dict[str, None] = {}
    for part in parts:
        with _Part(part) as opened:
            names = list(opened.keys())
            _refuse_repeated(seen, names, part)
            seen.update(dict.fromkeys(names))
            for name in names:
                yield name, opened.get_tensor(name)


def actual_digest(tensors: Iterable[tuple[str, Tensor]], on_tensor: Callable[[], None] = lambda: None) -> str:
    """Total digest of the bytes that these tensors hold now. `on_tensor` is called after each."""
    return total_digest(tensor_digests(tensors, on_tensor))


def tensor_digests(
    tensors: Iterable[tuple[str, Tensor]], on_tensor: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """{name: digest} of host tensors. `on_tensor` is called after each."""
    digests: dict[str, str] = {}
    for name, tensor in tensors:
        digests[name] = _digest(name, tensor)
        on_tensor()
    return digests


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a Hugging Face checkpoint folder: the set that an update must bring."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in sorted(folder.glob("*.safetensors")):
        with _Part(part) as opened:
            shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    return shapes


def check_complete(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightSyncError naming tensors that are missing, unknown to the model or of another shape."""
    wrong = sorted(name for name in shapes.keys() & expected.keys() if shapes[name] != expected[name])
    for what, names in (
        ("lack tensors of the model", sorted(expected.keys() - shapes.keys())),
        ("hold tensors that the model has not", sorted(shapes.keys() - expected.keys())),
        ("hold tensors of another shape", [f"{name} {shapes[name]} for {expected[name]}" for name in wrong]),
    ):
        if names:
            more = f" and {len(names) - _LONGEST_LIST} more" if len(names) > _LONGEST_LIST else ""
            raise WeightSyncError(
                describe(
                    f"The new weights {what}",
                    got=", ".join(names[:_LONGEST_LIST]) + more,
                    do="send every tensor of the checkpoint the engine was started with, in one update",
                )
            )


class _Part:
    """safe_open that reports a damaged file as WeightSyncError."""

    def __init__(self, path: Path):
        try:
            self._opened = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            message = describe("A part of the weights is missing or damaged", where=str(path), got=error)
            raise WeightSyncError(message) from error

    def __enter__(self):
        return self._opened.__enter__()

    def __exit__(self, *exception) -> None:
        self._opened.__exit__(*exception)


def _refuse_repeated(seen: Mapping[str, object], names: Iterable[str], part: Path) -> None:
    for name in names:
        if name in seen:
            raise WeightSyncError(describe(f"The tensor {name} lies in two parts", where=f"the second is {part}"))


def _digest(name: str, tensor: Tensor) -> str:
    header = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0"
    state = xxhash.xxh3_128(header.encode())
    state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()


def total_digest(digests: Mapping[str, str]) -> str:
    """The digest of a set of tensors, from those of the tensors."""
    state = xxhash.xxh3_128()
    for name in sorted(digests):
        state.update(f"{name}\0{digests[name]}\0".encode())
    return state.hexdigest()
