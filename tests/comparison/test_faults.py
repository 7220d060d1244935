"""Planted faults move what they claim to move, keep every expert set valid, and are refused where a check can see
them."""

import numpy as np
import pytest
import torch

from moe_rl.comparison.faults import PERMUTED, SHIFTED, SWAPPED, in_the_trace, wrong_tables
from moe_rl.replay.routes import SequenceRoutes, microbatch_routes
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore, signed
from moe_rl.types import Provenance, Sequence, Span, sampled_by

SPEC = TraceSpec.from_layers("model", 8, 2, (0, 2, 3), 4)
LENGTHS = (4, 3, 5)


def routes(length, seed):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((length, 3, 8)), -1)[..., :2].astype(np.uint8)


@pytest.fixture
def parts():
    return [
        SequenceRoutes.complete(f"s{i}", np.arange(length) + 10 * i, routes(length, i))
        for i, length in enumerate(LENGTHS)
    ]


@pytest.fixture
def table(parts):
    return microbatch_routes(
        parts, SPEC, layers=SPEC.moe_layers, names=[p.key for p in parts], fed=[p.token_ids for p in parts],
        source=None, padded_tokens=16, rows=slice(0, 16), expert_parallel=1, device=torch.device("cpu"),
    )  # fmt: skip


def rows_of(parts, take):
    """Return the expected rows of each sequence; `take(sequence number)` returns [T, L, K]."""
    return np.concatenate([take(i) for i in range(len(parts))])


def test_shifted_rows_are_those_of_the_token_before(parts, table):
    (wrong,) = wrong_tables(SHIFTED, [table])
    want = rows_of(parts, lambda i: np.concatenate([parts[i].routes[-1:], parts[i].routes[:-1]]))
    for column, layer in enumerate(SPEC.moe_layers):
        assert np.array_equal(wrong.routes[layer][:12].numpy(), want[:, column])
        assert torch.equal(wrong.routes[layer][12:], table.routes[layer][12:])  # padding is unchanged


def test_permuted_layers_hold_another_layers_routes(table):
    (wrong,) = wrong_tables(PERMUTED, [table])
    for layer, other in ((0, 3), (2, 0), (3, 2)):
        assert torch.equal(wrong.routes[layer], table.routes[other])
        assert not torch.equal(wrong.routes[layer], table.routes[layer])


def test_swapped_sequences_hold_anothers_rows(parts, table):
    (wrong,) = wrong_tables(SWAPPED, [table])
    want = rows_of(parts, lambda i: parts[(i + 1) % 3].routes[np.arange(LENGTHS[i]) % LENGTHS[(i + 1) % 3]])
    for column, layer in enumerate(SPEC.moe_layers):
        assert np.array_equal(wrong.routes[layer][:12].numpy(), want[:, column])


@pytest.mark.parametrize("fault", [SHIFTED, PERMUTED, SWAPPED])
def test_the_checksums_are_of_the_wrong_routes(table, fault):
    """So no check refuses them; with the honest checksums one would."""
    (wrong,) = wrong_tables(fault, [table])
    for layer in SPEC.moe_layers:
        dispatched = torch.zeros(16, 8, dtype=torch.bool).scatter_(1, wrong.routes[layer].long(), True)
        assert dispatched.sum() == 32
        applied = wrong.fed.applied(layer, dispatched)
        assert torch.equal(applied, wrong.checksums[layer])
        assert (applied != table.checksums[layer])[:3].all()


def test_what_is_refused_of_the_trace(tmp_path):
    sequences = []
    with ShardWriter(tmp_path, "honest", SPEC) as writer:
        for i in range(3):
            tokens = (*range(20, 25), 25 + i) if i < 2 else tuple(range(30, 36))
            ref = writer.add(f"s{i}", routes(5, i), tokens[:5], [Span(5, 7, Provenance.DECODE)])
            ref = signed(ref, routes(5, i), SPEC.moe_layers, tokens[:5], versions=7)
            sequences.append(
                Sequence(f"s{i}", tokens[:2], tokens[2:], np.zeros(4, np.float32), 0.0, sampled_by(7, 4), ref)
            )
    found = list(in_the_trace(TraceStore(tmp_path), SPEC, sequences, 7))
    assert [refusal.fault for refusal in found] == [SHIFTED, SHIFTED, PERMUTED, SWAPPED]
    late, alone, permuted, swapped = (refusal.message for refusal in found)
    assert "routes were recorded from other tokens (request s0, token 0" in late
    # The second sequence was fed the same tokens as the first, so its routes would be right; the third is used instead.
    assert "routes were recorded from other tokens (request s0" in swapped
    for message in (alone, permuted):
        assert "the routes as they were read are not those that left the sampler's engine" in message
        assert "other sums for 1 of 1 sequences: s0" in message
    # If all sequences were fed the same tokens, nothing can be swapped.
    assert [one.fault for one in in_the_trace(TraceStore(tmp_path), SPEC, sequences[:2], 7)] == [
        SHIFTED, SHIFTED, PERMUTED
    ]  # fmt: skip
