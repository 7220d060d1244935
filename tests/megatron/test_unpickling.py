"""A checkpoint with correct digests whose files call a function when they are read: nothing may be called.

tests/distributed/test_state.py tests whole checkpoints in every layout, and which classes they name.
"""

from __future__ import annotations

import io
import os
import pickle
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _create_file_view

from moe_rl.errors import CheckpointError
from moe_rl.megatron import checkpoint


class Hostile:
    """Creates a folder when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def wanted() -> dict:
    return {"weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(4))}


@pytest.fixture
def saved(one_rank, tmp_path):
    """Write a checkpoint of one tensor with Megatron."""
    path = tmp_path / "step-000001"
    path.mkdir()
    full = {"weight": ShardedTensor.from_rank_offsets("weight", torch.ones(4)), "rate": 0.5}
    dist_checkpointing.save(full, str(path))
    return path


def read(path: Path) -> torch.Tensor:
    return checkpoint._read_tensors(path, wanted(), StrictHandling.RAISE_UNEXPECTED, Matching(path))["weight"]


class Matching(dict):
    """Digests that always agree: whoever writes the files can write them too."""

    def __init__(self, path: Path):
        self.path = path

    def get(self, name, _):
        return SimpleNamespace(get=lambda span, _: checkpoint.digest(self.path / name, *map(int, span.split("-"))))


def in_the_metadata(path: Path, canary: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(canary)))


def beside_the_metadata(path: Path, canary: Path) -> None:
    """Add a call to metadata that is otherwise correct."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = Hostile(canary)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def instead_of(name: str, path: Path, canary: Path, **how) -> None:
    """Put another pickle where the metadata says that the item `name` is."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (index,) = (index for index in metadata.storage_data if index.fqn.startswith(name))
    place, held = metadata.storage_data[index], io.BytesIO()
    torch.save([Hostile(canary)], held, **how)
    with (path / place.relative_path).open("ab") as file:
        place.offset, place.length = file.tell(), file.write(held.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def in_what_is_no_tensor(path: Path, canary: Path) -> None:
    instead_of("common_state", path, canary)


def in_what_is_no_tensor_of_old(path: Path, canary: Path) -> None:
    instead_of("common_state", path, canary, _use_new_zipfile_serialization=False)


def in_a_tensor(path: Path, canary: Path) -> None:
    instead_of("weight", path, canary)


def in_a_file_of_old(path: Path, canary: Path) -> None:
    torch.save({"rate": Hostile(canary)}, path / "common.pt")


PLACES = [in_the_metadata, beside_the_metadata, in_what_is_no_tensor, in_what_is_no_tensor_of_old]
PLACES += [in_a_tensor, in_a_file_of_old]


@pytest.mark.parametrize("plant", PLACES, ids=lambda plant: plant.__name__)
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(saved, tmp_path, plant):
    canary = tmp_path / "canary"
    assert read(saved).tolist() == [1.0] * 4
    plant(saved, canary)
    with pytest.raises(
        CheckpointError, match="^a checkpoint file .* and is not read.*mkdir.*Find out who wrote it"
    ) as told:
        read(saved)
    assert str(saved) in str(told.value) and "weights_only" not in str(told.value)
    assert not canary.exists()


@pytest.mark.parametrize("plant", PLACES[:4], ids=lambda plant: plant.__name__)
def test_without_the_restriction_it_is_called(saved, tmp_path, plant):
    """The control: torch's own reader executes these pickles."""
    canary = tmp_path / "canary"
    plant(saved, canary)
    with suppress(Exception, CheckpointException):  # raised after the call
        dist_checkpointing.load(wanted(), str(saved))
    assert canary.is_dir()


@pytest.mark.parametrize(
    "names",
    [
        "cos\nsystem\n.",
        "cbuiltins\ngetattr\n.",
        "ctorch\nload\n.",
        "ctorch.serialization\nload\n.",
        "ctorch\nos.system\n.",
    ],
)
def test_no_name_but_those_of_metadata_is_found(saved, names):
    (saved / ".metadata").write_bytes(names.encode())
    module, name = names[1:-2].split("\n")
    with pytest.raises(CheckpointError, match=rf"\.metadata.*got {module}\.{name}"):
        read(saved)


def test_a_damaged_pickle_is_refused_by_name(saved):
    text = (saved / ".metadata").read_bytes()
    for damaged in (b"", text[: len(text) // 2], b"\x80\x05.", b"no pickle"):
        (saved / ".metadata").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"file is damaged.*{saved}/\.metadata.*Error"):
            read(saved)


def test_afterwards_all_is_as_it_was(saved, monkeypatch):
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    read(saved)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert filesystem.pickle is pickle and filesystem._create_file_view is _create_file_view


def test_any_byte_of_a_piece_that_changes_is_refused_with_its_file(saved):
    """By the digests of before the change. Nothing of the piece is unpickled."""
    (file,) = saved.glob("*.distcp")
    places = pickle.loads((saved / ".metadata").read_bytes()).storage_data.values()
    spans = [(place.offset, place.offset + place.length) for place in places]
    pieces = {file.name: {f"{begin}-{end}": checkpoint.digest(file, begin, end) for begin, end in spans}}
    whole = file.read_bytes()
    assert sorted(spans)[0][0] == 0 and sum(end - begin for begin, end in spans) == len(whole)
    for position in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=rf"^a checkpoint file is damaged \({file}\): got [0-9a-f]{{32}}"):
            checkpoint._read_tensors(saved, wanted(), StrictHandling.RAISE_UNEXPECTED, pieces)
    file.write_bytes(whole)
    assert read(saved).tolist() == [1.0] * 4
    with pytest.raises(CheckpointError, match="expected no such piece"):
        checkpoint._read_tensors(saved, wanted(), StrictHandling.RAISE_UNEXPECTED, {})
