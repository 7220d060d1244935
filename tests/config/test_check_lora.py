"""What cannot run with adapters is refused by name, before any work."""

import json

import pytest
import torch
from safetensors.torch import save_file

from moe_rl.config.check import problems
from moe_rl.config.load import load_config
from moe_rl.errors import ConfigError
from moe_rl.models.hf import read_model
from moe_rl.models.peft import adapter_tensors
from tests.config.conftest import DEEPSEEK_CONFIG, _write_model
from tests.support.refusals import tells

LORA = ["train.lora.rank=4", "train.lora.alpha=8"]


@pytest.fixture
def write_model(write_model):
    return lambda path, **changes: write_model(path, **{"mlp_only_layers": [], **changes})


@pytest.fixture
def model(tmp_path, write_model):
    return write_model(tmp_path / "model")


@pytest.fixture
def found(config_file):
    def check(*overrides):
        try:
            return problems(load_config(config_file, [*LORA, *overrides]), 2)
        except ConfigError as error:
            return error.problems

    return check


def test_adapters_alone_are_fine(found):
    assert found() == []
    assert found("train.recompute=uniform", "train.distributed_optimizer=false") == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.router_aux_loss=0.1", "train.router_aux_loss"),
        ("train.megatron.recompute_granularity=selective", "train.megatron"),
        ("train.megatron_optimizer.grad_reduce_in_fp32=false", "train.megatron_optimizer"),
        ("placement.experts=traced", "placement.experts"),
        ("placement.copies=1", "placement.copies"),
        ("train.lora.targets=[mlp]", "train.lora.targets"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(found, override, key):
    (message,) = found(override)
    tells(message, key=key)
    assert found() == []


def test_a_sampler_that_merges_does_not_round(found):
    (message,) = found("train.lora.sync=adapter", "rollout.weights=fp8_e4m3")
    tells(message, "train.lora.sync", key="rollout.weights", got="fp8_e4m3", expected="exact")
    assert found("train.lora.sync=adapter") == found("rollout.weights=fp8_e4m3") == []


def test_sharing_between_experts_needs_adapters_of_experts(found):
    (message,) = found("train.lora.shared_outer=true", "train.lora.targets=[attention]")
    tells(message, "experts", key="train.lora.shared_outer")
    assert found("train.lora.shared_outer=true") == []


@pytest.mark.parametrize("override", ["rank=0", "targets=[]", "targets=[experts, experts]"])
def test_a_wrong_value_is_refused(found, override):
    (message,) = found(f"train.lora.{override}")
    tells(message, key=f"train.lora.{override.partition('=')[0]}")


def test_shared_experts_are_a_target(tmp_path, config_file):
    model = _write_model(tmp_path / "latent", DEEPSEEK_CONFIG)
    config = load_config(config_file, [*LORA, "train.lora.targets=[mlp]", f"model.path={model}"])
    assert not [one for one in problems(config, 2) if one.about.get("key") == "train.lora.targets"]


@pytest.fixture
def start(tmp_path, model):
    """start(settings, {name: shape or None}) -> a folder of adapters with these changes."""

    def made(settings=(), changes=()):
        shapes = adapter_tensors(read_model(model), 4, ("attention", "experts")) | dict(changes)
        folder = tmp_path / "adapters"
        folder.mkdir()
        tensors = {name: torch.zeros(shape) for name, shape in shapes.items() if shape is not None}
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"r": 4, "lora_alpha": 8, "use_dora": False} | dict(settings)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    return made


A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
OTHER = "base_model.model.lm_head.lora_A.weight"


@pytest.mark.parametrize(
    ("settings", "changes", "told"),
    [
        ({"r": 8}, {}, "'r': 8"),
        ({"lora_alpha": 16}, {}, "'lora_alpha': 16"),
        ({"use_rslora": True}, {}, "use_rslora"),
        ({}, {A: None}, A),
        ({}, {A: (4, 9)}, "(4, 9)"),
        ({}, {OTHER: (4, 8)}, OTHER),
    ],
)
def test_adapters_that_do_not_fit_are_refused(found, start, settings, changes, told):
    (message,) = found(f"train.lora.start={start(settings, changes)}")
    assert tells(message, key="train.lora.start").got.count(told)


def test_adapters_to_start_from(found, start, tmp_path):
    folder = start()
    assert found(f"train.lora.start={folder}") == []
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    (message,) = found(f"train.lora.start={folder}")
    tells(message, key="train.lora.start")
    (message,) = found(f"train.lora.start={tmp_path / 'nothing'}")
    tells(message, key="train.lora.start")
