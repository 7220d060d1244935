"""The sums that an export is held by: every change of what a part holds changes them, the order does not."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.weights import conservation
from moe_rl.weights.conservation import Content, PartSums, cut, difference, parts_of

WORDS = {torch.bfloat16: (torch.int16, 16), torch.float32: (torch.int32, 32)}


def of_words(words, dtype):
    kind, bits = WORDS[dtype]
    signed = [word - (word >> bits - 1 << bits) for word in words]
    return torch.tensor(signed, dtype=kind).view(dtype)


def mixed(values):
    count = PartSums({"a": 0}, torch.device("cpu"))
    count.add("a", values, values.dtype)
    return count.content().table[0, 0]


def by_definition(words, bits):
    """In Python's integers; words of bfloat16 count as signed numbers of 32 bits."""
    total = 0
    for word in words:
        signed = word - (word >> bits - 1 << bits)
        term = signed * (conservation._A * signed + conservation._B) % 2**32
        total += term - (term >> 31 << 32)
    return total


@pytest.mark.parametrize("dtype", WORDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_sum_is_as_defined_whatever_the_order_and_every_change_changes_it(dtype, data):
    bits = WORDS[dtype][1]
    words = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=20))
    total = by_definition(words, bits)
    assert int(mixed(of_words(words, dtype))) == total
    assert int(mixed(of_words(data.draw(st.permutations(words)), dtype))) == total
    at, other = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 2**bits - 1))
    changed = words[:at] + [other] + words[at + 1 :]
    assert (int(mixed(of_words(changed, dtype))) == total) == (other == words[at])


def test_every_bfloat16_has_a_term_of_its_own():
    count = PartSums({str(word): word for word in range(2**16)}, torch.device("cpu"))
    for word, one in enumerate(torch.arange(2**16).to(torch.int16).view(torch.bfloat16).split(1)):
        count.add(str(word), one, torch.bfloat16)
    assert len(count.content().table[0].unique()) == 2**16


@pytest.mark.parametrize("small, chunk", [(0, 5), (200, 200), (200, 1 << 18), (40, 100)])
def test_it_makes_no_difference_how_elements_are_put_together(small, chunk, monkeypatch):
    monkeypatch.setattr(conservation, "_CHUNK", chunk)
    monkeypatch.setattr(conservation, "_SMALL", small)
    generator = torch.Generator().manual_seed(1)
    parts = {f"p{number}": number for number in range(9)}
    given = [(f"p{number % 8}", torch.randn(number % 5 * 3, 11, generator=generator)) for number in range(40)]
    count, sums, elements = PartSums(parts, torch.device("cpu")), [0] * 9, [0] * 9
    for part, values in given:
        dtype = (torch.bfloat16, torch.float32)[parts[part] % 2]
        count.add(part, values.T, dtype)
        sums[parts[part]] += int(mixed(values.flatten().to(dtype)))
        elements[parts[part]] += values.numel()
    assert count.content().table.tolist() == [sums, elements] == count.content().table.tolist()
    assert elements[8] == 0 and sum(map(bool, sums)) > 5


def test_what_experts_share_is_told_apart():
    shapes = {"model.norm.weight": (3,), "model.layers.2.mlp.experts.gate_up_proj": (2, 3, 4),
              "model.layers.2.mlp.experts.gate_up_proj_bias": (2, 4), "model.layers.2.mlp.experts.down_proj": (2, 2, 3),
              "model.layers.1.mlp.experts.1.gate_proj.weight": (2, 2)}  # fmt: skip
    parts = parts_of(shapes)
    experts = "model.layers.2.mlp.experts."
    assert list(parts) == [
        "model.norm.weight",
        *(f"{experts}{e}.{one}_proj.weight" for e in (0, 1) for one in ("gate", "up")),
        *(f"{experts}{e}.{one}_proj.bias" for e in (0, 1) for one in ("gate", "up")),
        *(f"{experts}{e}.down_proj.weight" for e in (0, 1)),
        "model.layers.1.mlp.experts.1.gate_proj.weight",
    ]
    tensor = torch.arange(24).view(2, 3, 4)
    pieces = dict(cut("model.layers.2.mlp.experts.gate_up_proj", tensor))
    assert pieces[f"{experts}1.up_proj.weight"].tolist() == [[13, 15], [17, 19], [21, 23]]
    assert dict(cut("model.norm.weight", tensor)).keys() == {"model.norm.weight"}


PARTS = {f"model.layers.{layer}.mlp.gate.weight": layer for layer in range(4)} | {"model.norm.weight": 4}


def content(*columns):
    return Content(PARTS, torch.tensor(columns).T)


HELD = [(11, 6), (12, 6), (13, 6), (14, 6), (15, 2)]
BEFORE = [(21, 6), (22, 6), (23, 6), (24, 6), (15, 2)]


@pytest.mark.parametrize(
    "exported, says",
    [
        ({0: (21, 6)}, "1 of 5 parts.*layer 0, mlp.gate.weight: stale, what it was in version 7"),
        ({0: (12, 6), 1: (11, 6)}, "layer 0, .*: what layer 1, .* is; layer 1, .*: what layer 0, mlp.gate.weight is"),
        ({2: (24, 6)}, "layer 2, mlp.gate.weight: what layer 3, mlp.gate.weight was in version 7"),
        ({3: (0, 6)}, "layer 3, mlp.gate.weight: only zeros"),
        ({4: (0, 0)}, "model.norm.weight: nothing,"),
        ({4: (15, 4)}, "model.norm.weight: 4 elements for 2"),
        ({1: (99, 6)}, "layer 1, mlp.gate.weight: other values"),
        ({at: (90 + at, 6) for at in range(4)}, "4 of 5 parts"),
    ],
)  # fmt: skip
def test_a_part_that_is_exported_wrongly_is_named_with_what_it_is_instead(exported, says):
    columns = [exported.get(at, one) for at, one in enumerate(HELD)]
    told = difference(content(*columns), content(*HELD), (7, content(*BEFORE)), 8)
    assert re.search(says, told) and "version 8" in told
    assert not difference(content(*HELD), content(*HELD), (7, content(*BEFORE)), 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("planted", ["positive", "negative", "of both signs", "but one"])
def test_zeros_are_called_so_whatever_their_signs(dtype, planted):
    """What was multiplied by 0 keeps its signs."""
    values = torch.randn(40, 50, generator=torch.Generator().manual_seed(3))
    sign = {"positive": values.abs(), "negative": -values.abs()}.get(planted, values)
    zeros = sign * 0
    if planted == "but one":
        zeros[3, 4] = 1e-30
    sums = {}
    for name, tensor in (("held", values), ("exported", zeros)):
        count = PartSums({"model.norm.weight": 0}, torch.device("cpu"))
        count.add("model.norm.weight", tensor, dtype)
        sums[name] = count.content()
    told = difference(sums["exported"], sums["held"], None, 1)
    assert ("model.norm.weight: only zeros" in told) == (planted != "but one"), told


def test_without_a_version_before_nothing_is_called_stale():
    told = difference(content((21, 6), *HELD[1:]), content(*HELD), None, 8)
    assert "layer 0, mlp.gate.weight: other values" in told


def test_two_sums_of_random_weights_do_not_meet():
    """20000 parts as large as small experts, and all their sums are different."""
    generator = np.random.default_rng(1)
    values = torch.from_numpy(generator.standard_normal((20000, 64)).astype(np.float32))
    count = PartSums({str(number): number for number in range(20000)}, torch.device("cpu"))
    for number, row in enumerate(values):
        count.add(str(number), row, torch.bfloat16)
    assert len(count.content().table[0].unique()) == 20000
