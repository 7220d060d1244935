"""Tests updates that bring adapters only: the sampler makes the trainer's weights from its checkpoint, or refuses."""

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from moe_rl.errors import WeightSyncError
from moe_rl.weights.digest import dtype_name, info_of
from moe_rl.weights.update import Merge, TensorInfo
from tests.support.refusals import refused
from tests.weights.conftest import ATTENTION, EXPERT
from tests.weights.sending import by_disk, by_memory
from tests.weights.taking import Taker

SCALE = 1.5
ADAPTED = (ATTENTION.format(1), EXPERT.format(0, 3))
FIRST_B = f"base_model.model.{ADAPTED[0].removesuffix('.weight')}.lora_B.weight"


def adapters(weights, seed):
    generator, found = torch.Generator().manual_seed(seed), {}
    for name in ADAPTED:
        (outputs, inputs), module = weights[name].shape, f"base_model.model.{name.removesuffix('.weight')}"
        found[f"{module}.lora_A.weight"] = torch.randn(2, inputs, generator=generator)
        found[f"{module}.lora_B.weight"] = torch.randn(outputs, 2, generator=generator)
    return found


def made(weights, pairs):
    """W + SCALE * B A of every tensor."""
    found = dict(weights)
    for name in ADAPTED:
        a, b = (pairs[f"base_model.model.{name.removesuffix('.weight')}.lora_{one}.weight"] for one in "AB")
        found[name] = (weights[name].double() + SCALE * (b.double() @ a.double())).float()
    return found


def merge_of(weights, pairs):
    whole = [info_of(*item) for item in made(weights, pairs).items()]
    return Merge(
        SCALE, "float32", [TensorInfo(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in pairs.items()], whole
    )


@pytest.fixture
def weights(weights):
    return {name: tensor.float() for name, tensor in weights.items()}


def sent(taker, parts, merge):
    for number, one in enumerate(parts):
        taker.update_weights(one if number else msgspec.structs.replace(one, merge=merge))


def test_the_sampler_makes_what_the_trainer_has(taker, weights, tmp_path):
    for version, seed in ((1, 1), (2, 2)):
        pairs = adapters(weights, seed)
        update = by_disk(tmp_path, pairs, version=version, replaces=version - 1)
        sent(taker, [update], merge_of(weights, pairs))
        expected = made(weights, pairs)
        assert taker.weights.keys() == expected.keys()
        assert all(torch.equal(taker.weights[name], expected[name]) for name in expected)
    whole = taker.intake.holding().digest
    taker.intake.forget()
    taker.update_weights(by_disk(tmp_path, expected, version=1))
    assert taker.intake.holding().digest == whole  # the same version, however it came


def test_it_makes_them_from_several_parts(taker, weights):
    pairs = adapters(weights, 1)
    merge = merge_of(weights, pairs)
    for number, context in enumerate(by_memory(pairs, parts=3, version=1)):
        with context as one:
            taker.update_weights(one if number else msgspec.structs.replace(one, merge=merge))
    assert torch.equal(taker.weights[ADAPTED[0]], made(weights, pairs)[ADAPTED[0]])


def without(pairs, name):
    return {key: tensor for key, tensor in pairs.items() if key != name}


# {fault: (the adapters that travel, of versions 1 and 2, what the error names)}
FAULTS = {
    "never delivered": (lambda old, new: without(new, FIRST_B), {"fault": "missing", "got": FIRST_B}),
    "not one delivered": (lambda old, new: {}, {"fault": "missing", "got": (FIRST_B,)}),
    "of the version before": (lambda old, new: old, {"fault": "stale", "tensor": ADAPTED[1], "got": ("version 1",)}),
    "one of the version before": (
        lambda old, new: new | {FIRST_B: old[FIRST_B]},
        {"fault": "merge", "tensor": ADAPTED[0]},
    ),
    "of a module that has none": (
        lambda old, new: new | {FIRST_B.replace("q_proj", "k_proj"): new[FIRST_B]},
        {"fault": "unknown"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_adapters_are_named(taker, weights, tmp_path, fault):
    old, new = adapters(weights, 1), adapters(weights, 2)
    sent(taker, [by_disk(tmp_path, old, version=1)], merge_of(weights, old))
    travels, facts = FAULTS[fault]
    update = by_disk(tmp_path, travels(old, new), version=2, replaces=1)
    with refused(WeightSyncError, **facts):
        sent(taker, [update], merge_of(weights, new))
    holding = taker.intake.holding()
    assert (holding.version, holding.whole) == (1, True)  # nothing was loaded
    sent(taker, [by_disk(tmp_path, new, version=2, replaces=1)], merge_of(weights, new))  # the witness
    assert taker.intake.holding().version == 2


def test_adapters_that_come_twice_are_named(taker, weights):
    pairs = adapters(weights, 1)
    first, second = by_memory(pairs, parts=2, version=1)
    with first as one, second as two:
        taker.update_weights(msgspec.structs.replace(one, merge=merge_of(weights, pairs)))
        with refused(WeightSyncError, fault="twice", got=(FIRST_B,)):
            taker.update_weights(msgspec.structs.replace(one, number=1))
        del two


def test_an_update_that_changes_nothing_is_stale(taker, weights, tmp_path):
    pairs = adapters(weights, 1)
    sent(taker, [by_disk(tmp_path, pairs, version=1)], merge_of(weights, pairs))
    with refused(WeightSyncError, fault="stale"):
        sent(taker, [by_disk(tmp_path, pairs, version=2, replaces=1)], merge_of(weights, pairs))


def test_the_checkpoint_is_rounded_to_the_precision_of_the_training(taker, weights, tmp_path):
    """Before an adapter is added, and the sum after; but not an expert bias, which the trainer holds in float32."""
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    weights = weights | {bias: torch.full((6,), 1 + 2**-20)}
    save_file(weights, tmp_path / "checkpoint" / "model.safetensors")
    taker = Taker(tmp_path / "checkpoint", "float32")
    pairs = {name: tensor.bfloat16() for name, tensor in adapters(weights, 1).items()}
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
    whole = {name: tensor.bfloat16().float() for name, tensor in made(rounded, pairs).items()} | {bias: weights[bias]}
    merge = msgspec.structs.replace(
        merge_of(weights, pairs), dtype="bfloat16", tensors=[info_of(*item) for item in whole.items()]
    )
    sent(taker, [by_disk(tmp_path, pairs, version=1)], merge)
    assert all(torch.equal(taker.weights[name], whole[name]) for name in whole)
    name = ADAPTED[0]
    assert not torch.equal(whole[name], made(weights, pairs)[name].bfloat16().float())  # the witness


def test_a_tensor_that_the_trainer_does_not_name_is_missed(taker, weights, tmp_path):
    pairs = adapters(weights, 1)
    merge = merge_of(weights, pairs)
    left = [info for info in merge.tensors if info.name != "model.norm.weight"]
    with refused(WeightSyncError, fault="missing", got="model.norm.weight"):
        sent(taker, [by_disk(tmp_path, pairs, version=1)], msgspec.structs.replace(merge, tensors=left))


def test_another_checkpoint_is_named(taker, weights, tmp_path):
    """As on a host whose copy of the model differs in one number of one tensor."""
    pairs, name = adapters(weights, 1), EXPERT.format(1, 5)
    other = {key: tensor.clone() for key, tensor in weights.items()}
    other[name][0, 0] += 1
    save_file(other, tmp_path / "checkpoint" / "model.safetensors")
    with refused(WeightSyncError, fault="merge", tensor=name):
        sent(taker, [by_disk(tmp_path, pairs, version=1)], merge_of(weights, pairs))
