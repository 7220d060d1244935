"""Sends an update through a shared disk, in safetensors files that appear complete or not at all.

A rank holds one of its buckets and one tensor at a time; the sampler maps the files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_rl.disk import refusal
from moe_rl.errors import WeightSyncError, describe
from moe_rl.weights.digest import info_of
from moe_rl.weights.update import Bucket, Files


class DiskWay:
    """Sends tensors in safetensors files in a shared folder.

    The sampler is called once, when all files are written, so it checks everything before it loads anything.
    """

    one_call, on_host = True, True

    def __init__(self, folder: Path, rank: int):
        self._folder, self._rank, self._written = folder / "update", rank, 0

    def begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._written = 0

    def bucket(self, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
        """Write the tensors to a file; on return the file is in place."""
        held = dict(tensors)
        if not held:
            return Bucket([], None)
        path = self._folder / f"rank{self._rank:05d}-{self._written:05d}.safetensors"
        self._written += 1
        infos = [info_of(name, tensor) for name, tensor in held.items()]
        write_part(path, held)
        return Bucket(infos, str(path.absolute()))

    def spread(self, buckets: Sequence[Bucket]) -> None:
        """Do nothing: the sampler sees the folder."""

    def source(self, buckets: Sequence[Bucket]) -> Files:
        """Tell the sampler where to find the buckets of all ranks, in order."""
        return Files([bucket.place for bucket in buckets if isinstance(bucket.place, str)])

    def end(self) -> None:
        """Clean up: the update is over on all ranks."""
        if self._rank == 0:
            shutil.rmtree(self._folder)


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write HF-named host tensors as one safetensors file that appears at `path` complete or not at all.

    The file is not synced to disk: it is read at once and then deleted.
    """
    held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(held, temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        size = sum(tensor.nbytes for tensor in held.values())
        raise WeightSyncError(
            refusal(error, "weights for the sampler could not be written", path, size=size)
        ) from error


def read_parts(parts: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield every (name, tensor) of the files; tensors are mapped, not copied.

    Raises:
        WeightSyncError: a file is damaged, or a tensor is in two files.
    """
    seen: set[str] = set()
    for part in parts:
        with _Part(part) as opened:
            for name in opened.keys():  # noqa: SIM118
                if name in seen:
                    message = "A tensor is in two parts, the second is named here"
                    raise WeightSyncError(message, where={"tensor": name, "file": part})
                seen.add(name)
                yield name, opened.get_tensor(name)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of all tensors in a Hugging Face checkpoint folder: the set that an update must bring."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in sorted(folder.glob("*.safetensors")):
        with _Part(part) as opened:
            shapes.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    return shapes


class _Part:
    """Wraps safe_open to report a damaged file as WeightSyncError."""

    def __init__(self, path: Path):
        try:
            self._opened = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            message = describe(
                "A file of the weights is missing or damaged", where={"file": path}, got=error, fault="damaged"
            )
            raise WeightSyncError(message) from error

    def __enter__(self):
        return self._opened.__enter__()

    def __exit__(self, *exception) -> None:
        self._opened.__exit__(*exception)
