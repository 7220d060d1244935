"""Settings that are passed on to Megatron: each does what its name says. Runs on one rank."""

import os
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from moe_rl.config.passed_on import ATTENTION, MEGATRON, OPTIMIZER, fields
from moe_rl.config.training import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.errors import ConfigError
from tests.megatron.models import TRAIN, facts
from tests.megatron.test_schedule import Run
from tests.support.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
DECAYING = OptimizerConfig(lr=1e-2, weight_decay=0.5)


def calls_in_an_update(run, modules):
    """Return how often the first of these modules runs in an update of 3 microbatches."""
    calls = []
    modules[0].register_forward_pre_hook(lambda *_: calls.append(None))
    result, tally = run.update()
    assert result.applied and tally["applied_mismatch"] == 0 and tally["consumed"] == tally["expected"]
    return len(calls)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("core_attn", "core_attention"),
        pytest.param("moe", "mlp.experts", marks=pytest.mark.long),
    ],
)
def test_selective_recomputation_runs_a_module_again_and_changes_no_bit(one_rank, module, name):
    passed = {"recompute_granularity": "selective", "recompute_modules": [module]}
    plain, again = Run(), Run(megatron=passed)
    found = [[one for key, one in run.layers()[0].named_modules() if key.endswith(name)] for run in (plain, again)]
    assert [calls_in_an_update(run, one) for run, one in zip((plain, again), found, strict=True)] == [3, 6]
    theirs = again.weights()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in plain.weights().items())


def test_gradients_are_summed_in_bfloat16_where_that_is_said(one_rank):
    plain, small = (Run(dtype="bfloat16", megatron_optimizer=one) for one in ({}, {"grad_reduce_in_fp32": False}))
    buffers = [run.policy.chunks[0].buffers[0] for run in (plain, small)]
    assert [buffer.grad_data.dtype for buffer in buffers] == [torch.float32, torch.bfloat16]
    assert small.update()[0].grad_norm == pytest.approx(plain.update()[0].grad_norm, rel=0.02)


@pytest.mark.parametrize(
    ("passed", "moved", "kept"),
    [
        ({"apply_wd_to_qk_layernorm": True}, "model.layers.0.self_attn.q_norm.weight", "model.norm.weight"),
        pytest.param({"decoupled_weight_decay": False}, "lm_head.weight", "model.norm.weight", marks=pytest.mark.long),
        pytest.param({"decoupled_lr": 1e-3}, "lm_head.weight", "model.norm.weight", marks=pytest.mark.long),
    ],
)
def test_the_optimizer_obeys(one_rank, passed, moved, kept):
    plain, other = Run(optimizer=DECAYING), Run(optimizer=DECAYING, megatron_optimizer=passed)
    for run in (plain, other):
        run.update()
    ours, theirs = plain.weights(), other.weights()
    moved = moved if moved in ours else "model.embed_tokens.weight"
    assert not torch.equal(ours[moved], theirs[moved])
    assert torch.equal(ours[kept], theirs[kept])


def test_matrix_products_in_bfloat16_may_be_summed_in_float32(one_rank):
    flag = torch.backends.cuda.matmul
    before = flag.allow_bf16_reduced_precision_reduction
    try:
        Run(dtype="bfloat16", megatron={"disable_bf16_reduced_precision_matmul": True})
        assert flag.allow_bf16_reduced_precision_reduction is False
    finally:
        flag.allow_bf16_reduced_precision_reduction = before


def test_attention_takes_the_backend_of_that_name():
    """TransformerEngine reads these variables."""
    from moe_rl.megatron import model

    variables, allowed = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"), {}
    for backend in ATTENTION:
        train = TRAIN.model_copy(update={"megatron": {"attention_backend": backend}})
        config = model.transformer_config(facts(), train, ParallelConfig())
        with mock.patch.dict(os.environ):
            for name in variables:
                os.environ.pop(name, None)
            model.GPTModel._set_attention_backend(SimpleNamespace(config=config))
            allowed[backend] = "".join(os.environ[name] for name in variables)
    assert allowed == {"flash": "100", "fused": "010", "unfused": "001", "auto": "111"}


@pytest.mark.parametrize(
    ("passed", "key"),
    [
        ({"megatron": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}}, "train.megatron"),
        ({"megatron": {"mla_down_proj_fusion": True}}, "train.megatron"),
        ({"megatron_optimizer": {"exp_avg_dtype": "bfloat16"}}, "train.megatron_optimizer"),
        (
            {"megatron_optimizer": {"param_name_patterns_for_fp32_local_accumulation": ["all"]}},
            "train.megatron_optimizer",
        ),
    ],
)
def test_what_megatron_refuses_names_the_mapping(one_rank, passed, key):
    with refused(ConfigError, key=key):
        Run(**passed)


def test_the_lists_hold_what_is_set_here():
    """A setting that model.py gives to Megatron and that no list names could be replaced by a config."""
    from moe_rl.megatron import model

    given = {}

    def record(name):
        def build(**settings):
            given[name] = settings
            raise ZeroDivisionError

        return build

    with mock.patch.object(model, "TransformerConfig", record("model")), suppress(ZeroDivisionError):
        model.transformer_config(facts(), TRAIN, ParallelConfig())
    everything = mock.patch.multiple(
        model, OptimizerConfig=record("optimizer"), DistributedDataParallel=mock.DEFAULT, _of=lambda *_: {}
    )
    with everything, suppress(ZeroDivisionError):
        model.wrap_for_training([], mock.Mock(), TrainConfig(microbatch_tokens=8, optimizer=DECAYING))
    # These have values here that a config may replace, with checks of their own.
    replaced = {"bias_activation_fusion", "gradient_accumulation_fusion", "moe_token_dispatcher_type"}
    assert set(given["model"]) - MEGATRON.ours == replaced
    assert set(given["optimizer"]) <= OPTIMIZER.ours <= fields(OPTIMIZER.classes).keys()


ALL, ACTIVATIONS, NONE = (True, True), (True, False), (False, False)


@pytest.mark.parametrize(
    ("cuda", "engine", "apex", "passed", "fused"),
    [
        (True, True, True, {}, ALL),
        (True, True, False, {}, ACTIVATIONS),  # the output layer could not be built
        (True, False, True, {}, NONE),
        (False, True, True, {}, NONE),
        (True, True, True, {"bias_activation_fusion": False, "gradient_accumulation_fusion": False}, NONE),
    ],
)
@pytest.mark.parametrize("family", [{}, {"glu_clamp": 7.0, "linear_bias": True}], ids=["swiglu", "gpt-oss"])
def test_kernels_are_fused_where_the_device_has_them(monkeypatch, family, cuda, engine, apex, passed, fused):
    from moe_rl.megatron import model

    monkeypatch.setattr(model, "HAVE_TE", engine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: apex or None)
    train = TRAIN.model_copy(update={"megatron": passed})
    config = model.transformer_config(facts(**family), train, ParallelConfig())
    assert (config.bias_activation_fusion, config.gradient_accumulation_fusion) == fused
