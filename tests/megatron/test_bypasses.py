"""Settings of megatron-core that break replay: each is refused before a model is built, and for a reason."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from moe_rl.config.bypasses import bypasses
from moe_rl.config.training import OptimizerConfig, ParallelConfig, TrainConfig
from moe_rl.errors import ConfigError
from moe_rl.models.hf import read_model
from moe_rl.replay.replay_pass import MicrobatchHandle, Watch
from tests.support.refusals import tells

POLICY = Path(__file__).parents[2] / "assets/tiny_moe/policy"
TRAIN = TrainConfig(microbatch_tokens=8, dtype="float32", optimizer=OptimizerConfig(lr=1e-3))


def config_with(parallel, **settings):
    """Return the trainer's config with settings that the trainer never uses."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_rl.megatron import model

    def build(**ours):
        return TransformerConfig(**{**ours, **settings})

    with mock.patch.object(model, "TransformerConfig", build):
        return model.transformer_config(read_model(POLICY), TRAIN, ParallelConfig(**parallel))


@pytest.mark.parametrize(
    ("settings", "parallel", "named"),
    [
        ({"moe_router_fusion": True}, {}, "moe_router_fusion"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, {}, "moe_router_load_balancing_type"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, {}, "moe_router_load_balancing_type"),
        ({"moe_expert_capacity_factor": 1.0}, {}, "moe_expert_capacity_factor"),
        (
            {
                "moe_expert_rank_capacity_factor": 1.0,
                "moe_token_dispatcher_type": "flex",
                "moe_flex_dispatcher_backend": "ncclep",
            },
            {"expert": 2},
            "moe_expert_rank_capacity_factor",
        ),
        ({"moe_router_force_load_balancing": True}, {}, "moe_router_force_load_balancing"),
        ({"moe_router_force_biased": 1.0}, {}, "moe_router_force_biased"),
        ({"moe_enable_routing_replay": True}, {}, "moe_enable_routing_replay"),
        (
            {"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False},
            {},
            "moe_token_dispatcher_type",
        ),
        ({"cuda_graph_impl": "local"}, {}, "cuda_graph_impl"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe_router"]},
            {},
            "cuda_graph_impl",
        ),
        ({"batch_p2p_comm": True, "overlap_p2p_comm": False}, {"pipeline": 2, "virtual_pipeline": 2}, "batch_p2p_comm"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_setting_that_bypasses_replay_is_named_before_anything_is_built(settings, parallel, named):
    from moe_rl.megatron.model import build_model

    with pytest.raises(ConfigError, match=f"^{named}: ") as refused:
        build_model(read_model(POLICY), config_with(parallel, **settings), POLICY)
    assert len(refused.value.problems) == 1


def test_a_setting_that_only_gpus_have_is_named():
    """Without TransformerEngine, Megatron makes no config with this setting."""
    config = config_with({})
    config.moe_router_padding_for_quantization = True
    (problem,) = bypasses(vars(config))
    tells(problem, setting="moe_router_padding_for_quantization", got=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"),
        ("layernorm_zero_centered_gamma", True),
        ("qk_l2_norm", True),
        ("softmax_type", "off-by-one"),
        ("experimental_attention_variant", "gated_delta_net"),
        ("moe_apply_probs_on_input", True),
        ("mrope_section", [4, 2, 2]),
    ],
)
def test_a_setting_that_our_layers_would_ignore_is_refused(name, value):
    from moe_rl.megatron.specs import replay_spec

    config = config_with({})
    setattr(config, name, value)
    with pytest.raises(ConfigError) as refused:
        replay_spec(config)
    tells(refused.value.problems[0], setting=name, got=value)


def test_several_are_told_at_once():
    config = config_with({}, moe_router_fusion=True, moe_router_force_load_balancing=True)
    assert len(list(bypasses(vars(config)))) == 2


@pytest.mark.parametrize(
    ("parallel", "settings"),
    [
        ({}, {}),
        # Older releases failed for experts that tensor-parallel ranks hold whole; 0.19.2 does not.
        ({"tensor": 2}, {}),
        # The same holds for multi-token-prediction layers that are recomputed over packed sequences.
        (
            {},
            {
                "mtp_num_layers": 1,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
        ),
        # With more than two stages, the neighbours are two ranks.
        ({"pipeline": 4, "virtual_pipeline": 2}, {"batch_p2p_comm": True, "overlap_p2p_comm": False}),
        # These are computed beside the routed experts, behind the same hooks.
        ({}, {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": True}),
        ({}, {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.1]}),
    ],
)
def test_what_replays_exactly_is_not_refused(parallel, settings):
    assert list(bypasses(vars(config_with(parallel, **settings)))) == []


@pytest.mark.parametrize(
    "recomputation",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
)
def test_megatron_itself_refuses_to_recompute_what_it_overlaps(recomputation):
    """If Megatron stops refusing this, `bypasses` must."""
    with pytest.raises(AssertionError, match="recompu"):
        config_with({"expert": 2}, bf16=True, overlap_moe_expert_parallel_comm=True, **recomputation)


@pytest.mark.parametrize(
    ("settings", "experts_kept", "weights_kept"),
    [
        ({}, True, True),
        ({"moe_router_load_balancing_type": "sinkhorn"}, False, False),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, False, False),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_expert_capacity_factor": 0.5}, False, False),
        ({"moe_router_force_load_balancing": True}, True, False),
        ({"moe_router_force_biased": 1.0}, True, False),
    ],
)
def test_the_reason_for_refusing_it(one_rank, settings, experts_kept, weights_kept):
    """Does the replaying router, with this setting, still return the recorded experts with weights from its own
    logits?"""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from moe_rl.megatron.router import ReplayRouter

    config = config_with({}, **settings)
    router = ReplayRouter(config, get_default_pg_collection())
    router.set_layer_number(1)
    generator = torch.Generator().manual_seed(3)
    router.weight.data = 0.05 * torch.randn(router.weight.shape, generator=generator)
    hidden = torch.randn(16, 1, config.hidden_size, generator=generator)
    recorded = torch.rand(16, config.num_moe_experts, generator=generator).topk(config.moe_router_topk)[1]
    logits = F.linear(hidden[:, 0], router.weight)
    weights = torch.zeros_like(logits).scatter(1, recorded, torch.softmax(logits.gather(1, recorded), -1))

    replay = SimpleNamespace(
        mode="replay",
        watch=Watch(),
        take=lambda *key: recorded,
        native_rows=lambda microbatch: None,
        observe_logits=lambda *key: None,
    )
    router.handle = MicrobatchHandle(replay, 0)
    probs, routing_map = router(hidden)
    expected = torch.zeros_like(routing_map).scatter(1, recorded, True)
    assert torch.equal(routing_map, expected) == experts_kept
    assert torch.allclose(probs, weights, atol=1e-6) == weights_kept
