"""Reads the pickles in Megatron's checkpoints safely: they may name only the classes that its metadata is made of.

A pickle may call anything that it can name, and torch allows it: `.metadata` is read with `pickle.load`, and values in
the `.distcp` files that are not tensors with `torch.load(weights_only=False)`. The digests in state.json have no key.
They detect damage, but whoever can write into a run's folder can also write matching digests.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

from moe_rl.checkpoint_folder import to_resume_instead
from moe_rl.errors import CheckpointError

_METADATA, _PLANNER = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"
ALLOWED = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
        *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties")),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }
)
"""(module, name) of the classes and functions that `.metadata` may contain, in addition to torch's dtypes."""

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class _Metadata(pickle.Unpickler):
    """Unpickler that raises CheckpointError for a name that no metadata contains."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file)
        self._path = Path(file.name)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(
            "a checkpoint file names a class or function that no checkpoint contains, and is not read",
            where={"file": self._path},
            got=f"{module}.{name}",
            expected="classes of torch.distributed.checkpoint",
            do=f"find out who wrote it; {to_resume_instead(self._path.parent)}",
        )


@contextmanager
def restricted(path: Path, piece: Callable[[IO[bytes], int, int], IO[bytes]]) -> Iterator[None]:
    """Within this context, read the files of the checkpoint in `path` without trusting them.

    Metadata may name only what is ALLOWED; everything else must be tensors and plain values. Anything else raises
    CheckpointError, and is not called.

    Args:
        piece: Reads so many bytes of a file from an offset on, a value as torch saved it, or raises CheckpointError.
    """
    unpickles, views = filesystem.pickle, filesystem._create_file_view
    forced = os.environ.get(_WEIGHTS_ONLY)
    refused: list[CheckpointError] = []

    def load(file: IO[bytes]) -> Any:
        try:
            return _Metadata(file).load()
        except Exception as error:  # torch would replace this error with another
            refused.append(error if isinstance(error, CheckpointError) else _refused(Path(file.name), error))
            raise

    def view(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
        try:
            return piece(file, offset, length)
        except CheckpointError as error:
            refused.append(error)
            raise

    filesystem.pickle = SimpleNamespace(load=load, dump=unpickles.dump)
    filesystem._create_file_view = view
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    except (CheckpointException, pickle.UnpicklingError) as error:
        if refused:
            raise refused[0] from None
        failures = error.failures if isinstance(error, CheckpointException) else {}
        for reason in (error, *(failure for failure, _ in failures.values())):
            if isinstance(reason, pickle.UnpicklingError):
                raise _refused(path, reason) from None
        raise
    finally:
        filesystem.pickle, filesystem._create_file_view = unpickles, views
        if forced is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = forced


def _refused(path: Path, error: Exception) -> CheckpointError:
    """Return an error with what torch or pickle says about a file, without torch's advice to trust the file."""
    lines = str(error).splitlines()
    told = next((line.strip() for line in lines if "GLOBAL" in line or "Unsupported" in line), "".join(lines[:1]))
    return CheckpointError(
        "a checkpoint file is damaged, or holds more than tensors and plain values, and is not read",
        where={"file": path},
        got=f"{type(error).__name__}: {told[:300]}",
        do=f"find out who wrote it; {to_resume_instead(path if path.is_dir() else path.parent)}",
    )
