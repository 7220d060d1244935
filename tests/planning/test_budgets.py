import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.planning.dispatch import count
from moe_rl.planning.packing import pack, padded_lengths, padding_experts
from moe_rl.planning.peaks import Budget, budget, microbatch_counts, most
from tests.support.refusals import refused


@st.composite
def routed(draw):
    """Draw routes [S][M] of [R, L, K], experts, and expert-parallel ranks."""
    parts, local = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sources, microbatches, layers = (draw(st.integers(1, 3)) for _ in range(3))
    top_k = draw(st.integers(1, parts * local))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = lambda: (int(rng.integers(1, 9)), layers, parts * local)  # noqa: E731
    tables = [[np.argsort(rng.random(shape()), -1)[..., :top_k] for _ in range(microbatches)] for _ in range(sources)]
    return tables, parts * local, parts


@given(routed())
def test_a_budget_is_what_the_dispatchers_will_count(given_):
    tables, experts, parts = given_
    local, (_, layers, top_k) = experts // parts, tables[0][0].shape
    rank = expert = sent = microbatch = worst = source = 0
    even = 0.0
    for number in range(len(tables[0])):
        here, in_all = [table[number] for table in tables], [0] * parts
        tokens = sum(len(one) for one in here)
        worst, even = max(worst, tokens * min(top_k, local)), max(even, tokens * top_k / parts)
        for layer in range(layers):
            got = [0] * experts
            for one in here:
                own = [int((one[:, layer] == e).sum()) for e in range(experts)]
                sent, source = max(sent, *own), max(source, sum(own))
                got = [a + b for a, b in zip(got, own, strict=True)]
            expert = max(expert, *got)
            for part in range(parts):
                rows = sum(got[part * local : (part + 1) * local])
                rank, in_all[part] = max(rank, rows), in_all[part] + rows
        microbatch = max(microbatch, *in_all)
    counts = np.stack([np.stack([count(one.transpose(1, 0, 2), experts) for one in table]) for table in tables])
    found = budget(counts, expert_parallel=parts, top_k=top_k)
    assert found == Budget(rank, expert, sent, microbatch, math.ceil(even), worst, source)
    assert found.even <= found.rank <= found.worst


@given(st.integers(1, 10**6), st.integers(1, 512), st.data())
def test_capacity_factors_come_to_the_peak_exactly(source, experts, data):
    """Megatron computes ceil(rows / experts * factor) for each expert, and int(tokens * K * factor) for a rank."""
    sent, rank = data.draw(st.integers(1, source)), data.draw(st.integers(1, 64 * source))
    found = Budget(sent=sent, rank=rank, source=source)
    assert math.ceil(source / experts * found.expert_capacity_factor(experts)) == sent
    assert int(source * found.rank_capacity_factor()) == rank


@pytest.mark.parametrize("context", [1, 2])
def test_padding_is_counted_where_it_goes(context):
    rng = np.random.default_rng(2)
    lengths, experts, top_k = [5, 9, 3, 7, 1], 8, 2
    routes = [np.argsort(rng.random((n, 3, experts)), -1)[..., :top_k] for n in lengths]
    counts = np.stack([count(one.transpose(1, 0, 2), experts) for one in routes])
    plan = pack(lengths, ranks=2, microbatch_tokens=12)
    rows = microbatch_counts(plan, lengths, counts, top_k=top_k, context=context, expert_parallel=4)
    assert rows.shape == (2, len(plan[0]), 3, experts)
    for share, microbatches in enumerate(plan):
        for number, members in enumerate(microbatches):
            tokens = [lengths[i] for i in members]
            padded = sum(padded_lengths(tokens, context))
            padding = padding_experts(padded - sum(tokens), experts, top_k, 4)
            whole = np.concatenate([*(routes[i] for i in members), np.repeat(padding[:, None], 3, 1)])
            assert len(whole) == padded
            assert np.array_equal(rows[share, number], count(whole.transpose(1, 0, 2), experts))


def test_what_holds_all_and_what_holds_nothing():
    assert most([]) == budget(np.zeros((1, 0, 2, 4), int), expert_parallel=2, top_k=1) == Budget()
    assert most([Budget(1, 5, 2, 9), Budget(3, 4, 2, 8)]) == Budget(3, 5, 2, 9)
    assert Budget().rank_capacity_factor() == Budget().expert_capacity_factor(8) == 0


def test_experts_that_do_not_divide_are_refused():
    with refused(ValueError, fault="division"):
        budget(np.zeros((1, 1, 1, 6), int), expert_parallel=4, top_k=1)
