"""Hugging Face tensors and their shards: which rank holds what, and back."""

from types import SimpleNamespace

import pytest
import torch

from moe_rl.megatron.hf_map import join, split

FACTS = SimpleNamespace(kv_heads=4, heads=8, head_dim=3)


def rows(start, count):
    """A matrix [count, 5] in which each row says who it is."""
    return torch.arange(start, start + count)[:, None].repeat(1, 5)


def test_a_rank_holds_whole_groups_of_heads():
    q, k, v = rows(0, 24), rows(100, 12), rows(200, 12)  # 4 groups: 2 query heads of 3 rows, k and v of 3
    second = join([q, k, v], "qkv", 0, FACTS, part=1, parts=2)[:, 0].tolist()
    group2 = [*range(12, 18), *range(106, 109), *range(206, 209)]
    group3 = [*range(18, 24), *range(109, 112), *range(209, 212)]
    assert second == group2 + group3


def test_a_rank_holds_its_rows_of_gate_above_its_rows_of_up():
    gate, up = rows(0, 6), rows(100, 6)
    assert join([gate, up], "gate_up", 0, FACTS, part=1, parts=2)[:, 0].tolist() == [3, 4, 5, 103, 104, 105]


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(
    "layout, axis, shapes",
    [
        ("copy", None, [(7,)]),
        ("copy", 0, [(8, 5)]),
        ("copy", 1, [(5, 8)]),
        ("gate_up", 0, [(8, 5), (8, 5)]),
        ("qkv", 0, [(24, 5), (12, 5), (12, 5)]),
    ],
)
def test_what_the_ranks_hold_makes_the_whole_again(layout, axis, shapes, parts):
    whole = [torch.randn(shape) for shape in shapes]
    shards = [join(whole, layout, axis, FACTS, part=part, parts=parts) for part in range(parts)]
    assert axis is None or sum(shard.numel() for shard in shards) == sum(t.numel() for t in whole)
    again = split(shards, layout, axis, FACTS)
    assert len(again) == len(whole) and all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
