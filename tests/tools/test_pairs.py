"""Tests that the rows of benchmarks/pairs.py have every pair that the checks accept, and runs some of them."""

import itertools
import json
import math

import pytest

from tests.support.one_rank import alone
from tests.train.stand_in_run import OVERRIDES, begin

CONFIG = "configs/tiny_moe_cpu.yaml"
NULLS = ["objective.clip_low=null", "objective.clip_high=null"]


@pytest.fixture(scope="module")
def switches(benchmark):
    return benchmark("pair_parts.switches")


@pytest.fixture(scope="module")
def checks(benchmark, switches, tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    benchmark("pair_parts.models").write_models(models)
    return switches.Checks(models)


@pytest.fixture(scope="module")
def array(benchmark, checks):
    return benchmark("pair_parts.covering").covering(checks, tries=1)


def test_every_pair_of_levels_is_in_a_row_or_refused(benchmark, switches, checks, array):
    rows = list(itertools.chain.from_iterable(array.runs))
    assert all(checks.problems(row) == [] for row in rows)
    every = {
        frozenset(((a, one), (b, other)))
        for a, b in itertools.combinations(switches.SWITCHES, 2)
        for one, other in itertools.product(switches.SWITCHES[a], switches.SWITCHES[b])
    }
    assert array.pairs | set(array.refused) == every
    assert not array.pairs & set(array.refused)
    assert set().union(*map(benchmark("pair_parts.covering").pairs_of, rows)) >= array.pairs
    assert type(array).read(array.text()) == array
    for first, *others in array.runs:  # rows on kept rollouts differ in nothing that decides about these
        assert all(row[s] == first[s] for row in others for s in switches.SWITCHES if s not in switches.ON_KEPT)


def test_a_refusal_names_a_key_of_the_pair(benchmark, switches, array):
    assert array.refused
    for pair, message in benchmark("pairs").refusals(array).items():
        assert any(switch in pair for switch in switches.named(message)), (pair, message)


def test_every_loss_trains_with_other_switches_on_the_rollouts_of_a_run(switches, array, tmp_path):
    process, run = begin(tmp_path, "run.steps=1")
    assert process.returncode == 0, process.stderr
    rows = []
    for loss in switches.LOSSES:
        row = next(row for row in itertools.chain.from_iterable(array.runs) if row["loss"] == loss)
        alone_here = row | {"packing": "length", "overlap": "0"}  # one rank exchanges nothing
        levels = [switches.SWITCHES[switch][alone_here[switch]] for switch in switches.ON_KEPT]
        rows.append((CONFIG, [*OVERRIDES, "run.steps=1", *NULLS, *itertools.chain.from_iterable(levels)]))
    asked, out = tmp_path / "rows.json", tmp_path / "rows.jsonl"
    asked.write_text(json.dumps(rows))
    process = alone("benchmarks/pair_parts/on_kept.py", run, asked, out)
    assert process.returncode == 0, process.stderr
    ended = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(ended) == len(rows)
    assert all(math.isfinite(one["objective/loss"]) and one["optim/skipped"] == 0 for one in ended)


def test_a_row_that_dies_is_reduced_to_the_pair_that_kills_it_and_run_again_later(
    benchmark, switches, checks, tmp_path, monkeypatch
):
    pairs = benchmark("pairs")
    row = switches.DEFAULTS | {"tied": "yes", "transfer": "disk", "export": "steps", "samples": "0", "dynamic": "3"}
    runs = []

    def run_once(row, folder, models):
        runs.append(row)
        if row["export"] == "steps" and row["samples"] == "0":
            raise pairs.Died("planted")

    monkeypatch.setattr(pairs, "run_once", run_once)
    (result,) = pairs.Rows([row], tmp_path, checks, 8).done()
    assert (result["died"], result["cause"]) == ("planted", "export: steps, samples: 0")
    made = len(runs)
    (again,) = pairs.Rows([row], tmp_path, checks, 8).done()
    assert again["cause"] == result["cause"]
    assert len(runs) == 2 * made, "it may have died because the machine was busy"
