"""Tests that any difference between two tensors changes the digest, by the host's and by the device's formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.weights.digest import tensor_digest, tensor_digests, total_digest, word_sum


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "b.weight": torch.randn(6, 5, generator=generator),
        "a.weight": torch.randn(7, generator=generator).bfloat16(),
        "c.scale": torch.tensor(3.5),
        "d.weight": torch.randn(3, 4, generator=generator).bfloat16(),
    }


def total(tensors):
    return total_digest(tensor_digests(tensors.items()))


def test_the_order_of_names_and_the_layout_in_memory_do_not_matter():
    tensors = some_tensors()
    assert total(dict(reversed(tensors.items()))) == total(tensors)
    strided = torch.zeros(5, 12)[:, ::2].T.copy_(tensors["b.weight"])
    assert not strided.is_contiguous() and total(tensors | {"b.weight": strided}) == total(tensors)


def of_device(tensor):
    return word_sum(tensor.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("digest", [lambda t: tensor_digest("a", t), of_device])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_flipped_bit_is_seen(digest, data):
    tensor = some_tensors()[data.draw(st.sampled_from(sorted(some_tensors())))]
    before, octets = digest(tensor), tensor.reshape(-1).view(torch.uint8)
    at = st.tuples(st.integers(0, len(octets) - 1), st.integers(0, 7))
    # Two changes as well: the highest bits of two words would cancel in a sum modulo 2**32.
    for byte, bit in data.draw(st.sets(at, min_size=1, max_size=2)):
        octets[byte] ^= 1 << bit
    assert digest(tensor) != before


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
    assert total(change(some_tensors())) != total(some_tensors())


def test_words_that_changed_places_are_seen_within_and_between_runs():
    """With the device's formula, which sums the words in blocks of 2**20."""
    words = torch.arange(3 << 20, dtype=torch.int32)
    before = of_device(words)
    for one, other in ((0, 1), (5, (1 << 20) + 5), (1 << 20, 2 << 20), (17, (3 << 20) - 1)):
        swapped = words.clone()
        swapped[[one, other]] = words[[other, one]]
        assert of_device(swapped) != before
    assert of_device(torch.cat((words[1 << 20 : 2 << 20], words[: 1 << 20], words[2 << 20 :]))) != before
    assert of_device(words) == before


def test_the_sum_of_a_device_is_what_it_is_said_to_be():
    """The definition is computed here in plain integers, with the last word padded."""
    import numpy as np

    octets = torch.tensor([1, 0, 0, 128, 255, 7], dtype=torch.uint8)
    first, second = (int(np.random.PCG64(seed).random_raw()) | 1 for seed in (1, 2))
    next_ = int(np.random.PCG64(1).random_raw(2)[1]) | 1
    expected = ((1 - 2**31) * first + (255 + 7 * 256) * next_) * second
    assert (int(word_sum(octets)) - expected) % 2**64 == 0


def test_the_sum_of_a_device_copies_no_tensor_that_it_can_read_in_place():
    """A GPU filled by the model has no room for a copy of its largest tensor."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            out = function(*arguments, **(keywords or {}))
            tensors = (one for one in tree_leaves(out) if isinstance(one, torch.Tensor))
            made.extend(one.nbytes for one in tensors if one.untyped_storage().data_ptr() != place)
            return out

    octets = torch.randint(0, 256, (4 * 3_000_000 + 8,), dtype=torch.uint8)
    place, before = octets.untyped_storage().data_ptr(), word_sum(octets[4:-4])
    with Watch():
        assert word_sum(octets[4:-4]) == before
    assert len(made) > 10 and max(made) <= 8 << 20
    shifted = torch.cat((octets[:1], octets[4:-4]))[1:]
    assert shifted.storage_offset() % 4 and word_sum(shifted) == before
