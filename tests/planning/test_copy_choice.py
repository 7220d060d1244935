"""Tests which experts are copied: how even the ranks become, and how many rows stay within a node."""

import numpy as np
import pytest

from moe_rl.planning.copy_choice import choose_copies, with_copies


def received(counts, chosen):
    """Rows from rank to rank [G, P] of the only layer."""
    ranks = chosen.slot.shape[-2]
    return with_copies(counts, chosen)[:, 0].reshape(len(counts), ranks, -1).sum(-1)


def test_one_expert_with_all_rows_is_shared_by_all_ranks():
    """Four ranks, two experts each; without copies the first rank computes all 400 rows."""
    counts = np.zeros((4, 1, 8), int)
    counts[..., 0] = 100
    chosen = choose_copies(counts, 4, 1, 1)
    assert received(counts, chosen).sum(0).tolist() == [100, 100, 100, 100]
    assert chosen.slot[0, :, 0].tolist() == [-1, 0, 0, 0]


def test_few_rows_are_not_worth_a_copy():
    counts = np.array([[[3, 3, 2, 2]]] * 2)
    assert choose_copies(counts, 2, 1, 2).slot.tolist() == [[[-1], [0]]]
    assert not choose_copies(counts, 2, 1, 3).used.any()


@pytest.mark.parametrize("ranks", [8, 32, 64])
def test_two_copies_a_rank_bring_popular_experts_within_a_few_points_of_even(ranks):
    """128 experts whose popularity falls as a power of their rank: without copies the fullest of 64 ranks has several
    times its share."""
    rows = (1e6 / np.arange(1, 129) ** 0.8).astype(np.int64)[np.random.default_rng(0).permutation(128)]
    counts = np.tile(rows, (ranks, 1, 1))
    before, after = (
        counts.reshape(ranks, ranks, -1).sum((0, 2)),
        received(counts, choose_copies(counts, ranks, 2, 1)).sum(0),
    )
    assert before.max() > 1.3 * before.mean() and after.max() < 1.05 * after.mean()


def test_copies_keep_rows_within_their_node():
    """Two nodes of two ranks, one expert each. Every node takes copies of the other's experts, and no row leaves."""
    counts = np.full((4, 1, 4), 1_000)
    nodes = np.array([0, 0, 1, 1])
    assert not choose_copies(counts, 4, 1, 100).used.any()  # the ranks are even already
    chosen = choose_copies(counts, 4, 1, 100, nodes)
    assert sorted(chosen.slot[0, :2, 0]) == [2, 3] and sorted(chosen.slot[0, 2:, 0]) == [0, 1]
    rows = received(counts, chosen)
    assert rows[:2, 2:].sum() == rows[2:, :2].sum() == 0 and rows.sum(0).tolist() == [4_000] * 4
    assert not choose_copies(counts, 4, 1, 2_001, nodes).used.any()  # 2,000 rows a copy are not worth its weights


def test_rows_are_shared_by_a_node_where_a_rank_alone_would_get_too_many():
    """All rows of two nodes are for one expert. The ranks of the other node take their own node's rows."""
    counts = np.zeros((4, 1, 4), int)
    counts[..., 0] = 1_000
    chosen = choose_copies(counts, 4, 1, 10, np.array([7, 7, 3, 3]))
    rows = received(counts, chosen)
    assert rows.sum(0).tolist() == [1_000] * 4
    assert rows[:2, 2:].sum() == rows[2:, :2].sum() == 0


@pytest.mark.parametrize("ranks", [16, 32, 64])
def test_known_nodes_lower_what_the_slowest_link_carries(ranks):
    """128 experts whose popularity falls as a power of their rank and differs between senders; nodes of eight."""
    rng, node = np.random.default_rng(1), np.arange(ranks) // 8
    popular = rng.permutation(1e5 / np.arange(1, 129) ** 0.5)
    counts = (popular * np.exp(0.3 * rng.standard_normal((ranks, 1, 128)))).astype(np.int64)
    apart = node[:, None] != node

    def slowest(rows):
        away = rows * apart
        leaving = np.bincount(node, away.sum(1)).max() / 8
        return rows.sum(0).max() + 4 * max(away.sum(0).max(), leaving)

    plain, known = (received(counts, choose_copies(counts, ranks, 2, 1_000, nodes)) for nodes in (None, node))
    assert slowest(known) < 0.99 * slowest(plain)
    assert known.sum(0).max() <= counts.reshape(ranks, ranks, -1).sum((0, 2)).max()  # as without copies


def test_all_ranks_choose_the_same_from_axes_of_any_shape():
    counts = np.random.default_rng(0).integers(0, 900, (4, 3, 2, 8))
    nodes = np.array([0, 0, 1, 1])
    together = choose_copies(counts, 4, 2, 5, nodes)
    for at in np.ndindex(3, 2):
        alone, part = choose_copies(counts[:, *at], 4, 2, 5, nodes), together.at(*at)
        assert all((getattr(alone, key) == getattr(part, key)).all() for key in ("slot", "first", "end", "node"))
    assert together.used.any()
    none = choose_copies(counts, 4, 0, 5, nodes)
    assert none.slot.shape == (3, 2, 4, 0) and (with_copies(counts, none) == counts).all()
