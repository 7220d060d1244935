"""The command line of the proof: what cannot be proven is told before anything runs; the docs list what is proven."""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from moe_rl.commands import prove
from moe_rl.commands.prove import BEGIN, END
from moe_rl.errors import ConfigError, ReplayError
from moe_rl.models.hf import read_model
from moe_rl.proof import matrix, precision
from moe_rl.proof.batch import batch, make_checkpoint
from moe_rl.proof.cases import LAYOUTS, RECORDED, Case, parse
from moe_rl.proof.matrix import Proof, Proved, _torchrun, largest, merged
from moe_rl.proof.reference import reference
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]


def run(*arguments):
    """The status of the command."""
    parser = argparse.ArgumentParser()
    prove.add_arguments(parser)
    return prove.run(parser.parse_args(arguments))


def test_a_layout_of_ones_own():
    case = parse(["parallel.tensor=2", "parallel.expert=4", "train.recompute=uniform", "train.recompute_layers=2"], 4)
    assert case == Case(4, {"tensor": 2, "expert": 4}, {"recompute": "uniform", "recompute_layers": 2})
    assert case.layout_name == "TP2 EP4 DP2 recompute=uniform recompute_layers=2"


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["parallel.tensr=2"], {"key": "tensr", "got": 2}),
        (["train.recompute=full"], {"key": "recompute", "got": "full", "expected": ("'uniform'",)}),
        (["tensor=2"], {"override": "'tensor=2'"}),
        (["parallel.tensor"], {"override": "'parallel.tensor'"}),
        (["train.microbatch_tokens=80"], {"override": "'train.microbatch_tokens=80'"}),
        (["train.router_aux_loss=0.1"], {"override": "'train.router_aux_loss=0.1'"}),
        (["train.lora={rank: 4, alpha: 8}"], {"override": "'train.lora={rank: 4, alpha: 8}'"}),
    ],
)
def test_overrides_that_say_nothing_are_named(overrides, facts):
    with refused(ConfigError, **facts):
        parse(overrides, 2)


def test_a_layout_that_cannot_be_is_refused_before_it_runs(capsys):
    given = ("--ranks", "2", "parallel.tensor=4", "parallel.expert=2", "train.overlap_expert_parallel_comm=true")
    assert run(*given) == 2
    said = capsys.readouterr()
    assert said.out == "" and "a multiple of 4 ranks" in said.err and "key-value heads" in said.err


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("grad_reduce_in_fp32:false", "Did you mean grad_reduce_in_fp32?"),  # without a space it is another key
        ("grad_reduce_in_fp32: false", "train.dtype bfloat16"),
        ("pin_cpu_grads: true", "optimizer_cpu_offload"),
    ],
)
def test_a_setting_that_megatron_lacks_or_does_not_read_is_refused_before_it_runs(capsys, setting, told):
    assert run("--ranks", "2", "parallel.expert=2", f"train.megatron_optimizer={{{setting}}}") == 2
    said = capsys.readouterr()
    assert said.out == "" and told in said.err


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_a_layout_of_ones_own_is_proven(tmp_path, capsys, dtype, within):
    """By ranks that the command starts. What a proof is worth: tests/distributed/test_proof.py."""
    own = ("parallel.expert=2", f"train.dtype={dtype}")
    assert run("--ranks", "2", *own, "--json", str(tmp_path / "proof.json")) == 0
    assert "exact in 1 of 1 cases" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "proof.json").read_text())
    assert row["exact"] and row["gradients"] < row["tolerance"] <= within < row["control"]["gradients"]


def test_ranks_that_do_not_end_are_told_and_leave_no_process(tmp_path, monkeypatch):
    """Tests that ran before may have put other ranks in place of `matrix._torchrun`, which this module got first."""
    started = tmp_path / "started"
    rank = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(600)"
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:3]])"
    monkeypatch.setattr(matrix, "torchrun", lambda ranks: [sys.executable, "-c", parent, rank, str(started)])
    with pytest.raises(ReplayError, match=r"2 ranks after 15 s"):
        _torchrun(2, timeout=15)  # a busy machine takes seconds to start two processes
    pid = int(started.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_gpu_may_differ_by_its_rounding_and_no_more(tmp_path, monkeypatch):
    """As a GPU's, products drop the bits that TF32 has not, which is twice as far off as the nearest TF32 is."""
    proof = Proof(make_checkpoint(tmp_path / "model"), tmp_path)
    _, routes = batch(read_model(proof.checkpoint))
    with monkeypatch.context() as patched, precision.Tf32():
        patched.setattr(precision, "to_tf32", truncated)
        gpu = reference(proof.checkpoint, routes)
    free = proof.reference(forced=False)

    def exact(gradients, rounds="tf32", wrong=0):
        counts = {"maps": 12, "with_grad": 12, "wrong_received": 0}
        seen = {"precision": rounds, "logprobs": gpu.logprobs, "tallies": [{}, {"consumed": 12, "expected": 12}]}
        taken = [{**seen, "grads": gradients, "dispatch": {**counts, "wrong_maps": wrong}}]
        off = [{**seen, "grads": free.gradients, "dispatch": {**counts, "wrong_maps": 12}}]
        case = Case(1)
        return Proved(proof.judge(case, taken), proof.judge(replace(case, mode="observe"), off)).exact

    assert exact(gpu.gradients)
    assert not exact(gpu.gradients, "float32") and not exact(gpu.gradients, wrong=1)
    for part in ("mlp.experts.3.down_proj", "mlp.gate", "self_attn.q_proj"):
        name = f"model.layers.0.{part}.weight"
        assert not exact({**gpu.gradients, name: gpu.gradients[name] * 0.9}), name


def truncated(values):
    return (values.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "no case has this many ranks: got [3], expected of [1, 2, 4]"),
        (["parallel.tensor=2"], "your own layout has one world size: got []. Add --ranks N"),
    ],
)
def test_a_world_size_that_says_nothing_is_named(arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_the_docs_have_a_row_for_every_case():
    page = (ROOT / "docs/generated/layouts.md").read_text()
    rows = [line.split(" | ") for line in page.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]]
    shown = [(int(row[0].strip("| ")), row[1], row[2]) for row in rows]
    assert shown == [(case.ranks, case.layout_name, case.mode.upper()) for case in LAYOUTS + RECORDED]
    assert all("not exact" not in row[3] and float(row[3]) < 1e-6 < 1e-2 < float(row[4]) for row in rows)


@pytest.mark.parametrize("at", [0, 1])
def test_a_tensor_that_is_not_a_number_proves_nothing(at):
    """Wherever it comes among the others: Python's max keeps the first of two when one is NaN."""
    expected = {"a": torch.zeros(2), "b": torch.zeros(2)}
    assert largest({"a": torch.ones(2), "b": torch.tensor([0.0, -3.0])}, expected) == 3
    got = {name: torch.full((2,), torch.nan if number == at else 0.0) for number, name in enumerate("ab")}
    assert math.isnan(largest(got, expected))


def test_ranks_that_computed_different_numbers_for_one_thing_prove_nothing():
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])
    together = merged([{"grads": {"a": one}}, {"grads": {"a": one.clone(), "b": other}}], "grads")
    assert together == {"a": one, "b": other}
    with pytest.raises(ReplayError):
        merged([{"grads": {"a": one}}, {"grads": {"a": other}}], "grads")
