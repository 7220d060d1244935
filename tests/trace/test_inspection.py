"""Tests facts of a store against counts by hand, faults that show only in the whole store, and comparisons."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from moe_rl.errors import TraceError
from moe_rl.report.trace_page import write_plots
from moe_rl.trace import ShardWriter, TraceSpec
from moe_rl.trace.audit import faults
from moe_rl.trace.bounds import order0_bits, set_bits
from moe_rl.trace.difference import compare
from moe_rl.trace.inspection import coactivation, expert_counts, inspect, measure, references, select
from moe_rl.types import Provenance, Span
from tests.support.refusals import refused


@pytest.fixture
def store(tmp_path, spec, write_shard):
    """Two shards; the last record of each continues its first."""
    return [write_shard(tmp_path, f"s{n}", spec, seed=10 * n, prefix=f"step{n}/p") for n in range(2)]


def pairs_by_hand(routes, num_experts):
    pairs = Counter()
    for one in routes.tolist():
        pairs.update(itertools.product(one, one))
    return np.array([[pairs[i, j] for j in range(num_experts)] for i in range(num_experts)])


def own_rows(store):
    """Return the own rows of every record: a record that continues another lacks its first two."""
    return np.concatenate([routes[2 if at == 3 else 0 :] for shard in store for at, routes in enumerate(shard.routes)])


def test_facts_are_those_of_the_records(tmp_path, spec, store):
    facts = inspect(select(tmp_path))
    (model,) = facts["models"]
    own = own_rows(store)
    assert facts["shards"] == 2 and facts["bytes"] == sum(shard.path.stat().st_size for shard in store)
    assert (model["sequences"], model["records"], model["continued_records"], model["aborted_records"]) == (8, 8, 2, 2)
    assert model["stored_tokens"] == len(own) and model["provenance"] == {"decode": len(own)}
    assert model["tokens"] == sum(len(routes) for shard in store for routes in shard.routes) == len(own) + 4
    assert model["bytes_per_token"] * model["tokens"] == pytest.approx(facts["bytes"])
    assert model["bytes_per_stored_token"] * len(own) == pytest.approx(facts["bytes"])
    assert model["weight_versions"] == [7, 7] and model["aux"] == ["logprobs"]
    assert model["incomplete_sequences"] == 0
    _, counts = expert_counts(select(tmp_path))
    by_hand = np.array([np.bincount(own[:, layer].ravel(), minlength=32) for layer in range(3)])
    np.testing.assert_array_equal(counts, by_hand)
    for row, layer in zip(model["popularity"], range(3), strict=True):
        assert by_hand[layer, row["busiest_expert"]] == by_hand[layer].max()
        assert row["busiest_load"] == pytest.approx(by_hand[layer].max() / by_hand[layer].mean())
        assert row["idle_experts"] == (by_hand[layer] == 0).sum() and 0 < row["evenness"] < 1
    assert model["bits_per_set_bound"] == pytest.approx(math.log2(math.comb(32, 4)))
    assert model["bits_per_set"] < model["bits_per_set_with_all"]


def test_stored_counts_and_decoded_ones_are_added_alike(tmp_path, spec, random_routes, decoded):
    """Long records store their counts; short ones do not."""
    lengths = (400, 3)
    routes = [random_routes(spec, rows, seed=rows) for rows in lengths]
    with ShardWriter(tmp_path, "s", spec) as writer:
        for rows, one in zip(lengths, routes, strict=True):
            writer.add(f"r{rows}", one, np.arange(rows), decoded(rows))
    _, counts = expert_counts(select(tmp_path))
    own = np.concatenate(routes)
    np.testing.assert_array_equal(counts, [np.bincount(own[:, layer].ravel(), minlength=32) for layer in range(3)])


def test_stages_of_a_pipeline_are_one_sequence(tmp_path, spec, random_routes, decoded):
    routes = random_routes(spec, 6)
    for name, layers in (("stage0", [0, 1]), ("stage1", [3])):
        with ShardWriter(tmp_path, name, spec, layers=layers) as writer:
            picked = routes[:, [spec.moe_layers.index(layer) for layer in layers]]
            writer.add("a", picked, np.arange(6), decoded(6))
            if name == "stage0":
                writer.add("b", picked, np.arange(6), decoded(6))
    (model,) = inspect(select(tmp_path))["models"]
    assert (model["sequences"], model["records"], model["tokens"], model["incomplete_sequences"]) == (2, 3, 12, 1)
    (model,) = inspect(select(tmp_path / "stage1.safetensors"))["models"]
    assert [row["layer"] for row in model["popularity"]] == [3]


def test_a_request_that_was_sampled_again_is_another_sequence(tmp_path, spec, random_routes, decoded):
    """The last attempt by publication that was not aborted, s10, is compared; each has two pipeline stages."""
    attempts = {"s2": (5, True), "s9": (20, False), "s10": (30, False), "s11": (7, True)}
    for version, (shard, (rows, aborted)) in enumerate(attempts.items()):
        routes = random_routes(spec, rows, seed=version)
        for stage, columns, layers in ((0, [0, 1], [0, 1]), (1, [2], [3])):
            with ShardWriter(tmp_path / "here", f"{shard}.pp{stage}of2", spec, layers=layers) as writer:
                writer.add("a", routes[:, columns], np.arange(rows), decoded(rows, version))
                if aborted:
                    writer.mark_aborted("a")
    with ShardWriter(tmp_path / "there", "s", spec) as writer:
        writer.add("a", random_routes(spec, 30, seed=2), np.arange(30), decoded(30))
    here, there = select(tmp_path / "here"), select(tmp_path / "there")
    (model,) = inspect(here)["models"]
    assert (model["sequences"], model["incomplete_sequences"], model["records"]) == (4, 0, 8)
    assert model["tokens"] == model["stored_tokens"] == 62 and model["weight_versions"] == [0, 3]
    for sums in (compare(here, there), compare(there, here)):
        assert (sums.sequences, sums.rows, sums.layers, sums.sets_L.sum()) == (1, 30, (0, 1, 3), 0)


def test_coactivation_counts_pairs(tmp_path, spec, store):
    layers, pairs = coactivation(select(tmp_path), (0, 3))
    own = own_rows(store)
    assert layers == (0, 3)
    for at, column in enumerate((0, 2)):
        np.testing.assert_array_equal(pairs[at], pairs_by_hand(own[:, column], 32))


def test_order0_entropy_is_that_of_the_fitted_distribution():
    """All sets are listed: the maximum-entropy distribution with these marginals has P ~ product of weights."""
    weights = np.array([5.0, 3.0, 1.0, 0.5, 0.2, 0.0])
    sets = list(itertools.combinations(range(6), 3))
    chance = np.array([weights[list(s)].prod() for s in sets])
    chance /= chance.sum()
    entropy = -(chance[chance > 0] * np.log2(chance[chance > 0])).sum()
    marginals = np.array([sum(p for s, p in zip(sets, chance, strict=True) if e in s) for e in range(6)])
    counts = np.stack([np.round(marginals * 1e7), np.full(6, 1e6), np.zeros(6)])
    got = order0_bits(counts, 3)
    assert got == pytest.approx([entropy, set_bits(6, 3), 0], abs=1e-3)


def test_order0_entropy_of_experts_that_are_always_chosen():
    assert order0_bits(np.array([[100, 100, 0, 0], [100, 50, 50, 0]]), 2) == pytest.approx([0, 1], abs=0.2)


def test_a_sound_store_has_no_faults(tmp_path, store):
    assert faults(select(tmp_path)) == []
    assert faults(select(store[0].path)) == []


def test_each_fault_of_a_store_is_named(tmp_path, store, decoded):
    constant = np.tile(np.array([1, 2, 3, 4], np.uint16), (9, 4, 1))
    with ShardWriter(tmp_path, "constant", TraceSpec("four-layers", 32, 4, "mmdmm")) as writer:
        writer.add("filled", constant, np.arange(9), decoded(9))
    with open(tmp_path / "manifest.jsonl", "ab") as manifest:
        manifest.write(b"{}\n")
    store[0].path.unlink()
    damaged = bytearray(store[1].path.read_bytes())
    damaged[-200] ^= 1
    store[1].path.write_bytes(damaged)
    found = faults(select(tmp_path))
    for text in ("line 4: damaged", "shard s0 was published and is not there", "filled", "s1"):
        assert any(text in fault for fault in found), (text, found)
    assert any("same for every token" in fault for fault in found)
    # A single shard is judged without the rest of the store.
    assert len(faults(select(tmp_path / "constant.safetensors"))) == 1


def test_records_are_selected_by_pattern(tmp_path, store):
    assert [ref.key for ref in references(select(tmp_path), "step1/*0:0")] == ["step1/p0:0"]
    for target in (tmp_path / "missing", tmp_path / "missing.safetensors", tmp_path / ".x.safetensors"):
        with pytest.raises(TraceError):
            select(target)


def changed(routes, places, num_experts=32):
    """Replace the last expert of each set (token, layer)."""
    routes = routes.copy()
    for token, layer in places:
        routes[token, layer, -1] = next(e for e in reversed(range(num_experts)) if e not in routes[token, layer])
    return routes


def test_comparison_counts_sets_experts_and_tokens(tmp_path, spec, random_routes, decoded):
    routes, tokens = random_routes(spec, 20), np.arange(20)
    other = changed(routes, [(2, 0), (2, 1), (11, 1)])
    pairs = {
        "here": [("a", routes, tokens), ("b", routes, tokens), ("only", routes, tokens)],
        "there": [
            ("a", other[:, :, ::-1], tokens),
            ("b", other, np.where(tokens == 5, 99, tokens)),
            ("c", routes, tokens),
            ("d", routes, tokens),
        ],
    }
    for name, records in pairs.items():
        with ShardWriter(tmp_path / name, "s", spec) as writer:
            for key, one, ids in records:
                writer.add(key, one, ids, decoded(20))
    found = compare(select(tmp_path / "here"), select(tmp_path / "there"))
    assert (found.sequences, found.only_here, found.only_there, found.shorter) == (2, 1, 2, 1)
    # b is compared up to token 5 only.
    assert found.rows == 25 and found.tokens == 3 and found.layers == (0, 1, 3)
    assert found.sets_L.tolist() == [2, 3, 0] and found.experts_L.tolist() == [2, 3, 0]
    assert found.bin_sets.sum() == 75 and found.bin_differ[[2, 11]].tolist() == [4, 1]


def test_stores_without_common_sequences_are_not_compared(tmp_path, spec, random_routes, decoded):
    for name in "xy":
        with ShardWriter(tmp_path / name, "s", spec) as writer:
            writer.add(name, random_routes(spec, 4), np.arange(4), decoded(4))
    with refused(TraceError, folder=tmp_path / "x", other=tmp_path / "y"):
        compare(select(tmp_path / "x"), select(tmp_path / "y"))


def test_plots_say_what_was_planted(tmp_path, random_routes):
    """Expert 5 of layer 1 is always chosen, with expert 6; the second store differs in every set of the last layer."""
    spec = TraceSpec("tiny", 16, 3, "mmm")
    routes = random_routes(spec, 300)
    rest = np.argsort(np.random.default_rng(1).random((300, 14)))[:, :1]
    routes[:, 1] = np.concatenate([np.full((300, 1), 5), np.full((300, 1), 6), rest + 2 * (rest >= 5)], axis=1)
    tokens = np.random.default_rng(2).integers(0, 50, 300)
    other = changed(routes, [(token, 2) for token in range(300)], 16)
    for name, one in (("here", routes), ("there", other)):
        with ShardWriter(tmp_path / name, "s", spec) as writer:
            writer.add("a", np.sort(one), tokens, [Span(300, 0, Provenance.PREFILL)])
    paths = write_plots(select(tmp_path / "here"), tmp_path / "plots", select(tmp_path / "there"))
    page = paths[-1].read_text()
    assert "Busiest: expert 5 of layer 1, 5.3 times the mean" in page
    assert "experts 5 and 6 of layer 1" in page
    assert "33.33% of sets differ over 300 tokens of 1 sequences, 100.00% in layer 2" in page
    assert page.count("<svg") == 5 and "<script" not in page and "http" not in page
    names = {path.name for path in paths}
    assert {"popularity.png", "coactivation.png", "disagreement.png"} < names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[:-1])


def test_a_stage_of_a_pipeline_is_plotted_with_its_layers_alone(tmp_path, random_routes, decoded):
    spec = TraceSpec("tiny", 16, 3, "mmmmm")
    with ShardWriter(tmp_path, "s", spec, layers=[1, 3]) as writer:
        writer.add("a", random_routes(spec, 300, layers=2), np.arange(300), decoded(300))
    page = write_plots(select(tmp_path), tmp_path / "plots")[-1].read_text()
    assert "in 2 layers" in page and "Every expert was chosen." in page and "layer 4" not in page
    with ShardWriter(tmp_path / "empty", "s", spec) as writer:
        writer.add("a", random_routes(spec, 0), [], [])
    with refused(TraceError, folder=tmp_path / "empty"):
        write_plots(select(tmp_path / "empty"), tmp_path / "plots")


def test_measure_covers_the_records_it_says(tmp_path, store):
    found = measure(select(tmp_path))
    assert found["records"] == 8 and found["raw_bytes"] == sum(r.size for shard in store for r in shard.routes)
    assert all(value > 0 for value in found.values())
    (tmp_path / "none").mkdir()
    with refused(TraceError, folder=tmp_path / "none"):
        measure(select(tmp_path / "none"))
