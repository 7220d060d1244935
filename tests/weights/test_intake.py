"""Tests every wrong update: each is refused, and incomplete weights never count as whole. Each fault has a witness.

The tensors travel by files and by shared memory, as in a run. Tests with an engine are in tests/rollout.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch

from moe_rl.errors import WeightSyncError
from moe_rl.weights.update import Broadcast, Received, SenderAt, SharedMemory, TensorInfo, decode, encode
from tests.support.refusals import refused
from tests.weights.conftest import ATTENTION, EXPERT
from tests.weights.sending import by_disk, by_memory, part
from tests.weights.taking import Taker

WAYS = ("disk", "memory")


@pytest.fixture
def put(tmp_path):
    """put(way, tensors, ...) puts the tensors in place and returns the parts of the update."""
    with ExitStack() as stack:

        def put(way, tensors, *, parts=1, version=1, **about):
            if way == "disk":
                return [by_disk(tmp_path, tensors, version=version, **about)]
            return [stack.enter_context(one) for one in by_memory(tensors, parts=parts, version=version, **about)]

        yield put


def changed(update, **changes):
    return msgspec.structs.replace(update, **changes)


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def is_refused(taker, parts, *, whole=True, **facts):
    """Check that the last part is refused, and no earlier one. `whole`: the old weights must remain whole."""
    version = taker.intake.holding().version
    for one in parts[:-1]:
        taker.update_weights(one)
    with refused(WeightSyncError, **facts):
        taker.update_weights(parts[-1])
    holding = taker.intake.holding()
    return (holding.version, holding.whole) == (version, whole)


@pytest.mark.parametrize("way, parts", [("disk", 1), ("memory", 1), ("memory", 5)])
def test_an_update_brings_every_tensor(taker, put, others, way, parts):
    for one in put(way, others, parts=parts, version=3):
        assert not taker.weights or parts > 1
        taker.update_weights(one)
    assert equal(taker.weights, others)
    holding = taker.intake.holding()
    assert (holding.version, holding.whole) == (3, True) and len(holding.digest) == 32


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


SETS = {
    "missing": (lambda t: without(t, EXPERT.format(1, 3)), {"fault": "missing", "got": ("1.mlp.experts.3.up_proj",)}),
    "extra": (lambda t: t | {"surplus": torch.zeros(1)}, {"fault": "unknown", "got": "surplus"}),
    "shape": (
        lambda t: t | {"model.norm.weight": torch.zeros(5)},
        {"fault": "shape", "got": ("model.norm.weight (5,)",)},
    ),
    "transposed": (
        lambda t: t | {EXPERT.format(0, 3): t[EXPERT.format(0, 3)].T},
        {"fault": "shape", "got": ("(6, 4)", "(4, 6)")},
    ),
    "reshaped": (
        lambda t: t | {EXPERT.format(0, 3): t[EXPERT.format(0, 3)].view(3, 8)},
        {"fault": "shape", "got": ("experts.3",)},
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", SETS)
def test_another_set_of_tensors_is_refused_before_anything_is_touched(taker, put, others, way, fault):
    change, facts = SETS[fault]
    assert is_refused(taker, put(way, change(others)), **facts) and not taker.weights


def swapped(tensors, one, other):
    """Exchange the tensors of two names."""
    return {name: tensors[{one: other, other: one}.get(name, name)] for name in tensors}


def flipped(tensor, bit=0):
    out = tensor.clone()
    out.view(-1).view(torch.uint8)[13] ^= 1 << bit
    return out


BYTES = {
    "bit": lambda t: t | {EXPERT.format(0, 3): flipped(t[EXPERT.format(0, 3)])},
    "two bits": lambda t: t | {n: flipped(t[n], 7) for n in (EXPERT.format(0, 3), EXPERT.format(0, 4))},
    "experts": lambda t: swapped(t, EXPERT.format(1, 3), EXPERT.format(1, 5)),
    "experts of two layers": lambda t: swapped(t, EXPERT.format(0, 3), EXPERT.format(1, 3)),
    "layers": lambda t: swapped(t, ATTENTION.format(0), ATTENTION.format(1)),
    "rows": lambda t: t | {EXPERT.format(0, 3): t[EXPERT.format(0, 3)].roll(1, 0)},
    "transposed square": lambda t: t | {ATTENTION.format(1): t[ATTENTION.format(1)].T},
    "zeros": lambda t: t | {EXPERT.format(0, 3): torch.zeros(4, 6)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", BYTES)
def test_other_bytes_than_the_trainer_meant_are_refused(taker, put, others, way, fault):
    """The trainer's digests are right, but the bytes at the source are not."""
    (meant,), (update,) = put(way, others), put(way, BYTES[fault](others))
    wrong = [a.name for a, b in zip(meant.tensors, update.tensors, strict=True) if a.digest != b.digest]
    assert 1 <= len(wrong) <= 2, "the fault was not planted"
    assert is_refused(taker, [changed(update, tensors=meant.tensors)], fault="digest", tensor=wrong[0])
    assert not taker.weights


@pytest.mark.parametrize("way", WAYS)
def test_names_that_changed_places_on_the_way_are_seen(taker, put, others, way):
    """Bytes and digests stay while the names are exchanged: a digest depends on the name too."""
    (update,) = put(way, others)
    one, other = EXPERT.format(0, 2), EXPERT.format(0, 4)
    names = {one: other, other: one}
    tensors = [TensorInfo(names.get(i.name, i.name), i.dtype, i.shape, i.digest) for i in update.tensors]
    assert tensors != update.tensors
    assert is_refused(taker, [changed(update, tensors=tensors)], fault="digest")


@pytest.mark.parametrize(
    "fault, facts",
    [
        ("cut", {"fault": "damaged", "file": ("v1-1.safetensors",)}),
        ("gone", {"fault": "damaged", "file": ("v1-1.safetensors",)}),
        ("twice", {"file": ("v1-0.safetensors",)}),
        ("half", {"fault": "names"}),
        ("surplus", {"fault": "names", "tensor": "surplus"}),
        ("of the version before", {"fault": "digest"}),
        ("of another precision", {"fault": "kind", "got": ("bfloat16",), "expected": ("float32",)}),
    ],
)
def test_damaged_files_are_refused(taker, put, weights, others, fault, facts):
    (update,) = put("disk", others)
    paths = [Path(path) for path in update.source.paths]
    if fault == "cut":
        paths[1].write_bytes(paths[1].read_bytes()[:-1])
    elif fault == "gone":
        paths[1].unlink()
    elif fault == "twice":
        update.source.paths.append(update.source.paths[0])
    elif fault == "half":
        del update.source.paths[1]
    elif fault == "surplus":
        update = changed(put("disk", others | {"surplus": torch.zeros(1)})[0], tensors=update.tensors)
    elif fault == "of the version before":
        put("disk", weights)  # under the same names
    else:
        put("disk", {name: tensor.bfloat16() for name, tensor in others.items()})
    assert is_refused(taker, [update], **facts) and not taker.weights


@pytest.mark.parametrize(
    "fault, facts",
    [
        ("gone", {"fault": "unmapped", "file": ("fd/100000",)}),
        ("dead", {"fault": "unmapped", "file": ("/proc/4194305/",)}),
        ("short", {"fault": "unmapped"}),
        ("cut", {"fault": "short"}),
        ("half", {"fault": "count", "got": 8, "expected": 16}),
        ("of the version before", {"fault": "digest"}),
    ],
)
def test_damaged_segments_are_refused(taker, put, weights, others, fault, facts):
    (update,) = put("memory", others)
    second = update.source.segments[1]
    change = {
        "gone": {"descriptor": 100_000},
        "dead": {"pid": (1 << 22) + 1},
        "short": {"size": second.size + (1 << 20)},
        "cut": {"size": second.size - 100},
    }
    if fault in change:
        update.source.segments[1] = msgspec.structs.replace(second, **change[fault])
    elif fault == "half":
        del update.source.segments[1]
    else:
        update.source.segments[:] = put("memory", weights)[0].source.segments
    assert is_refused(taker, [update], **facts) and not taker.weights


def test_stale_updates_are_refused(taker, put, others):
    (first,) = put("memory", others, version=4)
    taker.update_weights(first)
    moved = {name: tensor * 1.25 for name, tensor in others.items()}
    for version in (3, 4):
        stale = put("memory", moved, version=version, replaces=4)
        assert is_refused(taker, stale, fault="stale", got=(version,), expected=("4",))
    assert is_refused(taker, [first], fault="version", got=("0",), expected=("4",))
    again = {"version": 5, "replaces": 4}
    assert is_refused(taker, put("memory", others, **again), fault="stale", got=("4", "5"))
    assert equal(taker.weights, others)
    (same,) = put("memory", others, changed=False, **again)  # a trainer that did not move may say so
    taker.update_weights(same)
    assert taker.intake.holding().version == 5


def test_a_sampler_that_was_started_again_is_not_taken_for_the_old_one(taker, put, others):
    update = put("memory", others, version=8, replaces=7)
    assert is_refused(taker, update, fault="version", got=("7",), expected=("0",))


def test_the_weights_it_starts_with_may_be_replaced_under_their_number(taker, put, others):
    (update,) = put("memory", others, version=0, changed=False)
    taker.update_weights(update)
    assert taker.intake.holding().version == 0 and equal(taker.weights, others)


def misstated(infos):
    """Replace the first digest."""
    return [TensorInfo(infos[0].name, infos[0].dtype, infos[0].shape, "0" * 32), *infos[1:]]


def test_what_another_run_left_is_not_whole_and_its_versions_do_not_count(taker, put, others):
    taker.update_weights(*put("memory", others, version=9))
    taker.intake.forget()
    assert taker.intake.holding().version == 0 and not taker.intake.holding().whole
    taker.update_weights(*put("memory", others, version=1))
    assert taker.intake.holding().version == 1 and taker.intake.holding().whole


TORN = {
    "lost": (lambda p: [p[0], p[1], p[3]], {"fault": "order", "got": ("part 3", "version 1"), "expected": ("part 2",)}),
    "repeated": (
        lambda p: [p[0], p[1], p[1]],
        {"fault": "order", "got": ("part 1", "version 1"), "expected": ("part 2",)},
    ),
    "out of order": (
        lambda p: [p[0], p[2]],
        {"fault": "order", "got": ("part 2", "version 1"), "expected": ("part 1",)},
    ),
    "of another version": (
        lambda p: [p[0], changed(p[1], version=9)],
        {"fault": "order", "got": ("part 1", "version 9"), "expected": ("part 1",)},
    ),
    "of another trainer": (lambda p: [p[0], changed(p[1], replaces=9)], {"fault": "order"}),
    "ends early": (lambda p: [p[0], changed(p[1], final=True)], {"fault": "missing"}),
    "brings tensors again": (lambda p: [p[0], changed(p[0], number=1)], {"fault": "twice"}),
    "with a wrong digest": (lambda p: [*p[:3], changed(p[3], tensors=misstated(p[3].tensors))], {"fault": "digest"}),
}


@pytest.mark.parametrize("fault", TORN)
def test_a_torn_update_is_refused_and_nothing_is_whole_until_a_whole_one(taker, put, others, fault):
    change, facts = TORN[fault]
    assert is_refused(taker, change(put("memory", others, parts=4)), whole=False, **facts)
    again = put("memory", others, parts=3, version=2)
    for one in again[:-1]:
        taker.update_weights(one)
        assert not taker.intake.holding().whole
    taker.update_weights(again[-1])
    assert taker.intake.holding().whole and equal(taker.weights, others)


def test_a_part_after_one_that_could_not_be_read_continues_nothing(taker, put, others):
    parts = put("memory", others, parts=4)
    segments = parts[1].source.segments
    gone = msgspec.structs.replace(segments[0], descriptor=100_000)
    lost = changed(parts[1], source=SharedMemory([gone, segments[1]]))
    assert is_refused(taker, [parts[0], lost], whole=False, fault="unmapped")
    assert is_refused(taker, [parts[2]], whole=False, fault="order", got=("part 2", "version 1"), expected=("part 0",))


def test_a_sampler_takes_no_weights_of_less_precision_than_it_computes_in(weights, others, put, taker, tmp_path):
    """Digests and dtypes agree: the trainer rounded before it announced."""
    float32 = Taker(tmp_path / "checkpoint", "float32")
    as_float32 = {name: tensor.float() for name, tensor in others.items()}
    rounded = as_float32 | {"model.norm.weight": as_float32["model.norm.weight"].bfloat16()}
    facts = {"tensor": "model.norm.weight", "got": ("bfloat16", "1 of 16"), "expected": "float32"}
    assert is_refused(float32, put("disk", rounded), fault="precision", **facts) and not float32.weights
    (update,) = put("disk", as_float32)
    float32.update_weights(update)
    taker.update_weights(put("disk", as_float32)[0])  # of bfloat16: more is welcome, as float32 biases are
    assert equal(float32.weights, as_float32) and equal(taker.weights, as_float32)


def test_a_trainer_that_is_gone_in_the_middle_leaves_nothing_whole(taker, put, others):
    for one in put("memory", others, parts=4)[:3]:
        taker.update_weights(one)
    assert not taker.intake.holding().whole and taker.intake.holding().version == 0


def test_digests_that_come_after_the_bytes_are_compared(taker, others):
    """The digests come in a later part, as with a broadcast."""
    infos = [TensorInfo(i.name, i.dtype, i.shape) for i in part(others, Received(), version=1).tensors]
    stream = Broadcast([SenderAt(0, "127.0.0.1", 1)], [(0, len(infos))], 2, 1)
    announced = changed(part(others, stream, version=1, final=False), tensors=infos)
    confirmation = part(others, Received(), version=1, number=1)
    for fault in (None, "bit", "experts", "half", "of nothing"):
        taker.intake.admit(announced)
        taker.intake.touch()
        came = others if fault in (None, "half", "of nothing") else BYTES[fault](others)
        came = dict(list(came.items())[: len(came) // 2]) if fault == "half" else came
        taker.intake.received([] if fault == "of nothing" else came.items(), lambda: None)
        if fault is None:
            taker.intake.admit(confirmation)
            taker.intake.confirm_received()
            taker.intake.finish()
            assert taker.intake.holding().whole and taker.intake.holding().version == 1
            announced = changed(announced, version=2, replaces=1, changed=False)
            confirmation = changed(confirmation, version=2, replaces=1, changed=False)
        else:
            with refused(WeightSyncError, fault={"digest", "names"}):
                taker.intake.admit(confirmation)
                taker.intake.confirm_received()
            assert not taker.intake.holding().whole


def test_an_update_is_plain_values(put, others):
    (update,) = put("memory", others)
    assert decode(encode(update)) == update and encode(update).startswith(b'{"version":1')
    for old, new in ((b"}", b""), (b'"number":0', b'"number":-1'), (b'"final"', b'"fin"'), (b"float32", b"float8")):
        damaged = encode(update).replace(old, new)
        assert damaged != encode(update)
        with pytest.raises(msgspec.MsgspecError):
            decode(damaged)


def test_the_handle_of_a_cuda_buffer_travels_without_pickle():
    """The handle has the fields that torch makes for a run of bytes. Mapping it on a GPU was never tried."""
    from moe_rl.weights.handles import arguments_of, buffer_of
    from moe_rl.weights.update import CudaIpc

    made_by_torch = (
        *(torch.Tensor, torch.Size([1000]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 3, b"handle\x00\xff"),
        *(2097152, 512, False, b"counter", 64, b"event", True),
    )
    update = part({}, CudaIpc([buffer_of("GPU-1", made_by_torch)]), version=1)
    (buffer,) = decode(encode(update)).source.buffers
    assert arguments_of(buffer) == made_by_torch
