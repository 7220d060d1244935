"""From the store to the routers: only the right rows, and padding that does no harm."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from moe_rl.errors import RouteValidationError, TraceError
from moe_rl.replay.routes import microbatch_routes, padding_routes, read_routes
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.types import Provenance, RoutePart, Sequence, Span

SPEC = TraceSpec("model", 16, 4, "mmm")


def routes_of(rng, tokens):
    return np.argsort(rng.random((tokens, 3, 16)), -1)[..., :4].astype(np.uint8)


@pytest.fixture
def stored(tmp_path):
    """Two sequences in a store, as the sampler would leave them, and their routes."""
    rng = np.random.default_rng(0)
    sequences, tables = [], []
    with ShardWriter(tmp_path, "step1", SPEC) as writer:
        for number, (prompt, completion) in enumerate([(5, 4), (5, 4)]):
            tokens = tuple(rng.integers(0, 99, prompt + completion).tolist())
            table = routes_of(rng, prompt + completion - 1)
            spans = [Span(len(tokens) - 1, 3, Provenance.DECODE)]
            ref = writer.add(f"s{number}", table, np.array(tokens[:-1], np.int32), spans)
            sequences.append(
                Sequence(f"s{number}", tokens[:prompt], tokens[prompt:], np.zeros(completion, np.float32), 1.0, 3, ref)
            )
            tables.append(np.sort(table, -1))
    return TraceStore(tmp_path), sequences, tables


def fed(sequence):
    return np.array((sequence.prompt_token_ids + sequence.token_ids)[:-1])


def test_the_right_routes_are_read(stored):
    store, sequences, tables = stored
    for sequence, table in zip(sequences, tables, strict=True):
        read = partial(read_routes, store, sequence, SPEC, fed=fed(sequence), weight_version=3)
        assert np.array_equal(read(layers=SPEC.moe_layers), table)
        # a pipeline stage gets its own layers and pays for no others
        assert np.array_equal(read(layers=(1,)), table[:, 1:2])
        assert np.array_equal(read(layers=(0, 2)), table[:, [0, 2]])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda a, b: {"routes": b.routes}, RouteValidationError),  # another sequence's routes, equal shape
        (lambda a, b: {"prompt_token_ids": a.prompt_token_ids[1:] + (7,)}, RouteValidationError),  # tokens shifted
        (lambda a, b: {"token_ids": a.token_ids + (7,)}, RouteValidationError),  # one token more than was forwarded
        (lambda a, b: {"routes": None}, TraceError),
        (lambda a, b: {"routes": dataclasses.replace(a.routes, key="s1")}, TraceError),
        (lambda a, b: {"routes": dataclasses.replace(a.routes, start=1)}, TraceError),
        (
            lambda a, b: {"routes": dataclasses.replace(a.routes, parts=(RoutePart("x", a.routes.parts[0].digest),))},
            TraceError,
        ),
    ],
)
def test_routes_of_other_tokens_are_refused(stored, change, error):
    store, (first, second), _ = stored
    wrong = dataclasses.replace(first, **change(first, second))
    with pytest.raises(error) as caught:
        read_routes(store, wrong, SPEC, layers=SPEC.moe_layers, fed=fed(wrong), weight_version=3)
    assert "s0" in str(caught.value) or "s1" in str(caught.value)


def test_routes_of_other_weights_or_models_are_refused(stored):
    store, (first, _), _ = stored
    with pytest.raises(RouteValidationError, match="s0"):
        read_routes(store, first, SPEC, layers=SPEC.moe_layers, fed=fed(first), weight_version=4)
    with pytest.raises(RouteValidationError, match="s0"):
        other = dataclasses.replace(SPEC, model_fingerprint="other")
        read_routes(store, first, other, layers=SPEC.moe_layers, fed=fed(first), weight_version=3)
    with pytest.raises(RouteValidationError, match="s0"):
        other = dataclasses.replace(SPEC, layer_map="dmmm")
        read_routes(store, first, other, layers=(1, 2), fed=fed(first), weight_version=3)


def test_layers_are_laid_out_by_their_global_number():
    rng = np.random.default_rng(1)
    spec = TraceSpec.from_layers("model", 16, 4, (1, 4, 7), 8)
    parts = [routes_of(rng, 3), routes_of(rng, 5)]
    laid = microbatch_routes(
        parts,
        spec,
        layers=spec.moe_layers,
        padded_tokens=16,
        rows=slice(0, 16),
        expert_parallel=2,
        device=torch.device("cpu"),
    )
    assert sorted(laid.routes) == [1, 4, 7] and laid.real.tolist() == list(range(8))
    for column, layer in enumerate((1, 4, 7)):
        assert laid.routes[layer].shape == (16, 4) and laid.routes[layer].dtype == torch.int64
        assert np.array_equal(laid.routes[layer][:8], np.concatenate(parts)[:, column])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_ranks_of_a_sequence_parallel_group_cut_the_same_table(ranks):
    rng = np.random.default_rng(2)
    parts = [routes_of(rng, 3), routes_of(rng, 6)]

    def cut(rows):
        return microbatch_routes(
            parts,
            SPEC,
            layers=SPEC.moe_layers,
            padded_tokens=16,
            rows=rows,
            expert_parallel=2,
            device=torch.device("cpu"),
        )

    whole, share = cut(slice(0, 16)), 16 // ranks
    pieces = [cut(slice(rank * share, (rank + 1) * share)) for rank in range(ranks)]
    for layer in SPEC.moe_layers:
        assert torch.equal(torch.cat([piece.routes[layer] for piece in pieces]), whole.routes[layer])
    # real rows come first: 9 of them, then padding, which may take whole ranks
    assert [len(piece.real) for piece in pieces] == [max(0, min(share, 9 - rank * share)) for rank in range(ranks)]


def test_rows_in_any_order_take_their_routes_along():
    rng = np.random.default_rng(3)
    parts = [routes_of(rng, 3), routes_of(rng, 6)]
    rows = np.array([4, 12, 0, 8, 15, 2])  # as a context-parallel rank has them: padding also between tokens
    laid = microbatch_routes(
        parts,
        SPEC,
        layers=SPEC.moe_layers,
        padded_tokens=16,
        rows=rows,
        expert_parallel=2,
        device=torch.device("cpu"),
    )
    assert laid.real.tolist() == [0, 2, 3, 5]
    whole = np.concatenate([*parts, padding_routes(7, 3, SPEC, expert_parallel=2)])
    for layer in SPEC.moe_layers:
        assert np.array_equal(laid.routes[layer], whole[rows, layer])


@pytest.mark.parametrize("expert_parallel", [1, 2, 4])
def test_padding_is_valid_and_spread(expert_parallel):
    rows = padding_routes(8, 3, SPEC, expert_parallel=expert_parallel)
    assert rows.shape == (8, 3, 4)
    assert all(len(set(row)) == 4 for token in rows for row in token)
    experts, counts = np.unique(rows[:, 0], return_counts=True)
    assert len(experts) == 16 and counts.max() - counts.min() <= 1
    # the first row alone already reaches as many ranks as it can
    assert len({e // (16 // expert_parallel) for e in rows[0, 0]}) == min(4, expert_parallel)
