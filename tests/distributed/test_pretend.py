"""The code for GPUs on a pretend CUDA device: benchmarks/pretend.py, and the same step on the host."""

import importlib
from pathlib import Path

import pytest

from tests.distributed.jobs.step import one

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("pretend")


@pytest.fixture(scope="module")
def pretended(benchmark, checkpoint, tmp_path_factory):
    return benchmark.measure(checkpoint, tmp_path_factory.mktemp("pretend"))


def test_no_layer_waits_for_the_device_and_other_code_as_often_as_stated(pretended, benchmark):
    assert pretended["host_syncs_in_layers"] == 0 and pretended["faults"] == []
    assert all(pretended["waits"][level] <= most for level, (_, most) in benchmark.BUDGET.items()), pretended["places"]
    page = (BENCHMARKS.parent / "docs/measurements/gpu.md").read_text()
    assert "\n".join(benchmark.table()) in page


def test_every_planted_fault_is_noticed(pretended):
    assert pretended["plants"] == pretended["plants_caught"] == 11, pretended["not_noticed"]


def test_a_step_computes_what_it_computes_on_the_host(pretended, benchmark, on_ranks, checkpoint, tmp_path):
    ((metrics, _), _) = on_ranks(2, one, "pretend", {"overrides": list(benchmark.SETTINGS)}, checkpoint, tmp_path)
    assert pretended["metrics"]["routing/consumed"] == pretended["metrics"]["routing/expected"] > 0
    for name in ("optim/grad_norm", "policy_kl/k3", "policy/entropy", "routing/shadow_mismatch"):
        assert pretended["metrics"][name] == pytest.approx(metrics[name], rel=2**-7), name  # an ulp of bfloat16


def test_weights_are_handed_over_and_digested_on_the_device(pretended):
    weights = pretended["weights"]
    assert weights["on_device"] and weights["tensors"] == 231 and weights["wrong_digests"] == 0
    assert weights["syncs"] < weights["buckets"], "one wait for a round of another rank, and a few for all"


def test_the_proof_runs_on_the_device(pretended):
    proof = pretended["proof"]
    assert proof["maps"] > 0 and proof["wrong_maps"] == proof["wrong_received"] == 0
