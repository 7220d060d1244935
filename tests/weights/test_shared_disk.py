"""Tests files of weights on a disk: each is complete or does not exist, and nothing else is left behind."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_rl.weights.shared_disk as module
from moe_rl.errors import WeightSyncError
from moe_rl.weights.shared_disk import checkpoint_shapes, read_parts, write_part
from tests.support.refusals import refused
from tests.weights.test_digest import some_tensors


def test_round_trip_in_any_cut(tmp_path):
    tensors = some_tensors()
    names = list(tensors)
    for cuts in ([names], [names[2:], names[:2]]):
        paths = [tmp_path / f"{len(cuts)}-{at}" for at in range(len(cuts))]
        for path, cut in zip(paths, cuts, strict=True):
            write_part(path, {name: tensors[name] for name in cut})
        read = dict(read_parts(paths))
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensors[name]) for name in names)
        assert all(read[name].dtype == tensors[name].dtype for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-0", "2-0", "2-1"]


def test_views_are_written_as_their_values(tmp_path):
    fused = torch.arange(24.0).reshape(6, 4)
    views = {"q": fused[:2], "k": fused[2:4].T, "v": fused[:, 1]}
    write_part(tmp_path / "part", views)
    read = load_file(tmp_path / "part")
    assert all(torch.equal(read[name], view) for name, view in views.items())


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    parts = [tmp_path / "0", tmp_path / "1"]
    write_part(parts[0], {"a": torch.zeros(1), "b": torch.zeros(1)})
    write_part(parts[1], {"c": torch.zeros(1), "b": torch.zeros(1)})
    with refused(WeightSyncError, tensor="b", file=parts[1]):
        list(read_parts(parts))


def test_damaged_parts_are_named(tmp_path):
    write_part(tmp_path / "good", some_tensors())
    content = (tmp_path / "good").read_bytes()
    for length in (0, 7, 8, 100, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:length])
        with refused(WeightSyncError, file=tmp_path / "cut"):
            list(read_parts([tmp_path / "good", tmp_path / "cut"]))


def test_a_failed_write_leaves_the_old_part_and_nothing_else(tmp_path, monkeypatch):
    write_part(tmp_path / "part", some_tensors())
    before = (tmp_path / "part").read_bytes()

    def fail(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(WeightSyncError, match="No space left"):
        write_part(tmp_path / "part", {"a": torch.ones(2)})
    assert (tmp_path / "part").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


def test_the_set_of_tensors_is_that_of_the_checkpoint(tmp_path):
    save_file(some_tensors(), tmp_path / "model-00001-of-00002.safetensors")
    save_file({"z": torch.zeros(2, 3)}, tmp_path / "model-00002-of-00002.safetensors")
    shapes = checkpoint_shapes(tmp_path)
    assert shapes == {"a.weight": (7,), "b.weight": (6, 5), "c.scale": (), "d.weight": (3, 4), "z": (2, 3)}
