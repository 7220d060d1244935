"""Weights on a disk that trainer and sampler share: safetensors parts, complete or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_rl.errors import WeightSyncError, describe


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write HF-named host tensors as one safetensors file that appears at `path` complete or not at all.

    Not synced to disk: a part is read at once, and then deleted.
    """
    held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(held, temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        message = describe("Weights cannot be written", where=str(path), got=error, do="look for a full disk")
        raise WeightSyncError(message) from error


def read_parts(parts: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every (name, tensor) of the parts; the tensors are mapped from the files, not copied.

    Raises WeightSyncError naming the part that is damaged, or the tensor that lies in two parts.
    """
    seen: set[str] = set()
    for part in parts:
        with _Part(part) as opened:
            for name in opened.keys():  # noqa: SIM118
                if name in seen:
                    message = f"The tensor {name} lies in two parts"
                    raise WeightSyncError(describe(message, where=f"the second is {part}"))
                seen.add(name)
                yield name, opened.get_tensor(name)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a Hugging Face checkpoint folder: the set that an update must bring."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in sorted(folder.glob("*.safetensors")):
        with _Part(part) as opened:
            shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    return shapes


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
