"""`with_replay`: block specs that another program made get replay, or are refused before a model is built."""

import dataclasses
import functools

import pytest

from moe_rl.config.training import ParallelConfig
from moe_rl.errors import ConfigError
from tests.megatron.models import TRAIN, facts


@pytest.fixture
def made(one_rank):
    """A config with a dense first layer, and Megatron's own spec for it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from moe_rl.megatron.model import transformer_config

    config = transformer_config(facts(layers=3, moe_layers=(1, 2)), TRAIN, ParallelConfig())
    return config, get_gpt_decoder_block_spec(config, use_transformer_engine=False)


def test_layers_with_experts_get_a_replayed_router_and_the_given_spec_stays(made):
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from moe_rl import with_replay
    from moe_rl.megatron.router import ReplayLayer, ReplayMoELayer, ReplayRouter

    config, spec = made
    replayed = with_replay(spec, config)
    assert [one.module for one in replayed.layer_specs] == [ReplayLayer] * 3
    builders = [one.submodules.mlp for one in replayed.layer_specs]
    assert [one.func is ReplayMoELayer for one in builders] == [False, True, True]
    assert all(one.keywords["submodules"].router is ReplayRouter for one in builders[1:])
    assert spec.layer_specs[1].submodules.mlp.func is MoELayer
    assert isinstance(builders[1], functools.partial)


def test_a_config_that_bypasses_replay_and_a_layer_without_a_builder_are_refused(made):
    from moe_rl import with_replay

    config, spec = made
    with pytest.raises(ConfigError) as error:
        with_replay(spec, dataclasses.replace(config, moe_enable_routing_replay=True))
    assert error.value.about["setting"] == "moe_enable_routing_replay"
    layer = spec.layer_specs[1]
    submodules = dataclasses.replace(layer.submodules, mlp=object())
    broken = dataclasses.replace(spec, layer_specs=[dataclasses.replace(layer, submodules=submodules)])
    with pytest.raises(ConfigError) as error:
        with_replay(broken, config)
    assert error.value.about["argument"] == "spec"
