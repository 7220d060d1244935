"""Parts of weights: the digest is of what was meant, and sees every difference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moe_rl.errors import WeightSyncError
from moe_rl.sync.weights import (
    actual_digest,
    check_complete,
    checkpoint_shapes,
    expected_digest,
    read_parts,
    write_part,
)


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "b.weight": torch.randn(6, 5, generator=generator),
        "a.weight": torch.randn(7, generator=generator).bfloat16(),
        "c.scale": torch.tensor(3.5),
        "d.weight": torch.randn(3, 4, generator=generator).bfloat16(),
    }


def test_round_trip_in_any_cut(tmp_path):
    tensors = some_tensors()
    whole = [tmp_path / "whole"]
    write_part(whole[0], tensors)
    names = list(tensors)
    cut = [tmp_path / "cut0", tmp_path / "cut1"]
    write_part(cut[0], {name: tensors[name] for name in names[2:]})
    write_part(cut[1], {name: tensors[name] for name in names[:2]})
    digest = expected_digest(whole)
    assert expected_digest(cut) == expected_digest(cut[::-1]) == digest
    for parts in (whole, cut):
        read = dict(read_parts(parts))
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensors[name]) for name in names)
        assert all(read[name].dtype == tensors[name].dtype for name in names)
        assert actual_digest(read_parts(parts)) == digest
    assert actual_digest(reversed(tensors.items())) == digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut0", "cut1", "whole"]


def test_views_are_written_as_their_values(tmp_path):
    fused = torch.arange(24.0).reshape(6, 4)
    views = {"q": fused[:2], "k": fused[2:4].T, "v": fused[:, 1]}
    write_part(tmp_path / "part", views)
    read = load_file(tmp_path / "part")
    assert all(torch.equal(read[name], view) for name, view in views.items())
    assert actual_digest(read.items()) == expected_digest([tmp_path / "part"]) == actual_digest(views.items())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_flipped_bit_is_seen(data):
    tensors = some_tensors()
    digest = actual_digest(tensors.items())
    name = data.draw(st.sampled_from(sorted(tensors)))
    octets = tensors[name].reshape(-1).view(torch.uint8)
    octets[data.draw(st.integers(0, len(octets) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert actual_digest(tensors.items()) != digest


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors | {"b.weight": tensors["b.weight"].reshape(5, 6)},
        lambda tensors: tensors | {"a.weight": tensors["a.weight"].view(torch.float16)},
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "c.scale"},
        lambda tensors: tensors | {"e": torch.zeros(0)},
        lambda tensors: tensors | {"a.weight": tensors["d.weight"], "d.weight": tensors["a.weight"]},
        lambda tensors: {name.replace("c.", "x."): tensor for name, tensor in tensors.items()},
    ],
    ids=["shape", "dtype", "missing", "extra", "swapped", "renamed"],
)
def test_every_other_difference_is_seen(change):
    assert actual_digest(change(some_tensors()).items()) != actual_digest(some_tensors().items())


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    parts = [tmp_path / "0", tmp_path / "1"]
    write_part(parts[0], {"a": torch.zeros(1), "b": torch.zeros(1)})
    write_part(parts[1], {"c": torch.zeros(1), "b": torch.zeros(1)})
    for read in (expected_digest, lambda parts: list(read_parts(parts))):
        with pytest.raises(WeightSyncError, match=rf"tensor b lies in two parts .*{parts[1]}"):
            read(parts)


def test_damaged_parts_are_named(tmp_path):
    write_part(tmp_path / "good", some_tensors())
    content = (tmp_path / "good").read_bytes()
    for length in (0, 7, 8, 100, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:length])
        for read in (expected_digest, lambda parts: list(read_parts(parts))):
            with pytest.raises(WeightSyncError, match=f"missing or damaged.*{tmp_path / 'cut'}"):
                read([tmp_path / "good", tmp_path / "cut"])
    save_file(some_tensors(), tmp_path / "plain")
    with pytest.raises(WeightSyncError, match=f"no digests.*{tmp_path / 'plain'}"):
        expected_digest([tmp_path / "plain"])
    save_file({"a": torch.zeros(1)}, tmp_path / "alien", metadata={"moe_rl.digests": '{"b": "00"}'})
    with pytest.raises(WeightSyncError, match="for other tensors"):
        expected_digest([tmp_path / "alien"])


def test_the_digest_is_of_what_was_meant_not_of_what_was_stored(tmp_path):
    part = tmp_path / "part"
    write_part(part, some_tensors())
    meant = expected_digest([part])
    content = bytearray(part.read_bytes())
    content[-3] ^= 16
    part.write_bytes(content)
    assert expected_digest([part]) == meant
    assert actual_digest(read_parts([part])) != meant


def test_a_failed_write_leaves_the_old_part_and_nothing_else(tmp_path, monkeypatch):
    import moe_rl.sync.weights as module

    write_part(tmp_path / "part", some_tensors())
    before = (tmp_path / "part").read_bytes()

    def fail(tensors, path, metadata):
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
    check_complete(dict(shapes), shapes)
    for wrong, message in (
        ({name: shape for name, shape in shapes.items() if name > "b"}, "lack tensors of the model: got a.weight"),
        (shapes | {"y": (1,)}, "has not: got y"),
        (shapes | {"z": (3, 2)}, r"another shape: got z \(3, 2\) for \(2, 3\)"),
        ({}, "lack tensors.*a.weight, b.weight, c.scale, d.weight, z"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            check_complete(wrong, shapes)
