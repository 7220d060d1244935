"""Tests the arithmetic of the cluster model by hand, and that every number of its cost file names its source."""

from dataclasses import fields, replace

import numpy as np
import pytest
import yaml

from tests.tools.conftest import BENCHMARKS


@pytest.fixture(scope="module")
def model(benchmark):
    return benchmark("simulate_cluster")


@pytest.fixture
def costs(model):
    return model.read_costs(BENCHMARKS / "costs/h800.yaml", model.Costs)[1]


@pytest.mark.parametrize(("name", "file"), [("simulate_cluster", "h800"), ("simulate_pipeline", "h100_pipeline")])
def test_every_cost_has_a_unit_and_a_source(benchmark, name, file):
    given = yaml.safe_load((BENCHMARKS / f"costs/{file}.yaml").read_text())
    assert given.keys() - {"name"} == {field.name for field in fields(benchmark(name).Costs)}
    for key, (value, unit, source) in ((key, one) for key, one in given.items() if key != "name"):
        assert value > 0 and unit and any(word in source for word in ("assumed", "measured", "NVIDIA")), key


def test_an_exchange_waits_for_the_fullest_link(model, costs):
    """Two nodes of two ranks. Rank 0 sends 3 bytes to its neighbour and 5 + 7 to the other node; what stays is free."""
    sent = np.zeros((4, 1, 4))
    sent[0, 0] = 100, 3, 5, 7
    sent[1, 0, 3] = 8  # rank 3 gets 7 + 8 from the other node
    two = replace(costs, ranks_of_a_node=2, intra_bandwidth=1.0, inter_bandwidth=10.0)
    assert model._exchange(two, sent).tolist() == [3.0]
    assert model._exchange(replace(two, intra_bandwidth=100.0), sent).tolist() == [1.5]


def test_chunks_hide_the_shorter_of_exchange_and_experts(model):
    experts, exchange = np.array([8.0, 1.0]), np.array([2.0, 4.0])
    assert model._inner(experts, exchange, 0.5, 1).tolist() == [2 + 8 + 2 + 1, 4 + 1 + 4 + 1]
    assert model._inner(experts, exchange, 0.5, 2).tolist() == [1 + 8 + 1 + 2, 2 * 4 + 0.5 + 2]


def test_a_layer_waits_for_the_fullest_rank(model, costs):
    """Ten more layers add the modelled cost of attention, experts and the exchange of counts, and nothing else."""
    tokens, sent = np.array([100.0, 300.0]), np.zeros((2, 1, 2))
    sent[0, 0, 0], sent[1, 0, 1] = 40, 160  # rows stay where they are: there is no exchange
    free = replace(costs, intra_latency=0.0, layer_overhead=0.0, attention_rate=1e30)
    one, eleven = (
        model._microbatch(free, tokens, 0 * tokens, np.repeat(sent, layers, 1), np.zeros((2, layers, 2)), 7.0, False)
        for layers in (1, 11)
    )
    dense = 2 * (2048 * 128 * (2 * 32 + 2 * 4)) * 300 / costs.gemm_rate
    experts = 6 * 2048 * 768 * 160 / costs.gemm_rate
    assert eleven - one == pytest.approx(10 * (3 * dense + 3 * experts + 7))


def test_what_must_not_cost_more_does_not(model, costs):
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 400, 64).tolist()
    counts = rng.integers(0, 40, (64, 3, 16)) * np.arange(1, 17)
    seconds = model.variants(costs, counts.sum(axis=0)[None], lengths, counts, 4, 4, 2_000)
    assert seconds["plan"] < seconds["native"] < seconds["replay"]
    assert seconds["placement"] < seconds["load"] and seconds["ideal"] < seconds["overlap"] < seconds["placement"]


def test_copies_of_a_popular_expert_shorten_a_step_by_more_than_their_weights_cost(model, costs):
    lengths, counts = [4_000] * 16, np.full((16, 2, 16), 1_000)
    counts[:, :, 3] = 17_000
    seconds = model.variants(costs, counts.sum(axis=0)[None], lengths, counts, 4, 4, 16_000)
    assert seconds["ideal"] < seconds["copies"] < 0.9 * seconds["placement"]
    assert seconds["nodes"] == seconds["copies"]  # there is one


def test_copies_that_keep_rows_within_a_node_shorten_a_step(model, costs):
    """Experts are even, but half of all rows go to the other node. The parts add up to what is above `ideal`."""
    lengths, counts = [4_000] * 16, np.full((16, 2, 8), 4_000)
    seconds = model.variants(replace(costs, ranks_of_a_node=2), counts.sum(0)[None], lengths, counts, 4, 4, 16_000)
    assert seconds["copies"] == seconds["placement"] and seconds["nodes"] < 0.9 * seconds["copies"]
    assert seconds["overlap"] < seconds["ideal"]
    assert seconds["overlap"] - seconds["no check"] == pytest.approx(2 * costs.check)  # in two layers
    assert seconds["no copies"] < seconds["no check"] and seconds["no copies"] < seconds["no rows"]
    assert seconds["no rows"] == pytest.approx(seconds["no tokens"]) and seconds["no tokens"] == seconds["ideal"]
