"""`with_replay`: block specs that another program made get replay, or are refused before a model is built."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from moe_rl.config.training import ParallelConfig
from moe_rl.errors import ConfigError
from moe_rl.types import Sequence, sampled_by
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


def test_a_layer_of_another_class_is_refused(made):
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    from moe_rl import with_replay

    config, spec = made
    layers = [*spec.layer_specs[:2], dataclasses.replace(spec.layer_specs[2], module=MoETransformerLayer)]
    with pytest.raises(ConfigError) as error:
        with_replay(dataclasses.replace(spec, layer_specs=layers), config)
    assert error.value.about["argument"] == "spec" and "MoETransformerLayer" in str(error.value)


def logits(one_rank, embedding, **settings):
    """Return the logits of a model with a program's own settings, for one packed sequence."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from moe_rl import pack, replay_spec
    from moe_rl.megatron.model import transformer_config

    config = transformer_config(facts(), TRAIN, ParallelConfig())
    for name, value in settings.items():
        setattr(config, name, value)
    model = GPTModel(
        config, replay_spec(config), vocab_size=96, max_sequence_length=64, position_embedding_type=embedding
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    tokens = tuple(range(1, 14))
    batch = pack([Sequence("a", tokens[:3], tokens[3:], np.zeros(10, np.float32), 0.0, sampled_by(0, 10), None)])
    with torch.no_grad():
        return model(batch.tokens, batch.positions, None, packed_seq_params=batch.begin_forward(None, 0))


def test_layers_without_rotation_rotate_nothing(one_rank):
    plain, rotated = logits(one_rank, "none"), logits(one_rank, "rope")
    assert not torch.allclose(plain, rotated, atol=1e-2)
    assert torch.equal(logits(one_rank, "rope", no_rope_freq=[1, 1]), plain)
    mixed = logits(one_rank, "rope", no_rope_freq=[0, 1])
    assert not torch.allclose(mixed, plain, atol=1e-2) and not torch.allclose(mixed, rotated, atol=1e-2)


def test_an_infinite_window_is_none(one_rank):
    whole = logits(one_rank, "rope")
    torch.testing.assert_close(logits(one_rank, "rope", window_size=(-1, 0), window_attn_skip_freq=None), whole)
    assert not torch.allclose(logits(one_rank, "rope", window_size=(1, 0), window_attn_skip_freq=None), whole)
