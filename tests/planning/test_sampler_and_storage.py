"""Tests by hand samplers on several GPUs, links, and what the nodes of a cluster read."""

import pytest

from moe_rl.config.layout import make_layout
from moe_rl.config.training import ParallelConfig
from moe_rl.models.hf import read_published
from moe_rl.planning.plan_table import render
from moe_rl.planning.sampler_memory import kv_bytes_per_token, node_share, weight_bytes
from tests.planning.meta_cases import ROOT


@pytest.fixture(scope="module")
def published():
    return lambda name: read_published(ROOT / f"configs/models/{name}.json")


def test_the_kv_cache_of_an_engines_gpu(published):
    """With 4 key-value heads of 128, each GPU has at least one. A latent of 512 + 64 is whole on each."""
    qwen, deepseek = published("qwen3_30b_a3b"), published("deepseek_v3")
    per_head = 48 * 2 * 128 * 2
    assert [kv_bytes_per_token(qwen, "bfloat16", gpus) for gpus in (1, 2, 4, 8)] == [
        4 * per_head, 2 * per_head, per_head, per_head,
    ]  # fmt: skip
    assert kv_bytes_per_token(deepseek, "bfloat16", 1) == kv_bytes_per_token(deepseek, "bfloat16", 16) == 61 * 576 * 2


def test_the_weights_of_an_engines_gpu(published):
    """Norms and routers are whole on each GPU."""
    qwen = published("qwen3_30b_a3b")
    whole = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    one, two = (weight_bytes(qwen, "bfloat16", gpus) for gpus in (1, 2))
    assert one == 2 * 30_532_122_624  # the published number of parameters
    assert two == one // 2 + whole


def test_engines_and_links(plan_of):
    cluster = ("gpus=2", "gpu_memory_gib=1", "engines=2", "links_gb_per_second={a: 2}")
    plan = plan_of(*(f"cluster.{key}" for key in cluster))
    assert (plan.sampler.engines, plan.sampler.max_concurrent) == (2, 4)
    assert plan.storage.sync_seconds == {"a": plan.storage.weight_sync_bytes / 2e9}
    assert plan.sampler.fitting == plan.sampler.kv_tokens // 16
    urls = "rollout.servers=[http://a:1,http://b:1]"
    assert plan_of(urls, "rollout.token_file=t").sampler.engines == 2
    assert plan_of().storage.sync_seconds == {} and plan_of().sampler.max_concurrent == 8


def test_an_engine_of_several_nodes(plan_of):
    plans = [plan_of(f"cluster={{gpus: 2, gpus_per_node: 2, gpu_memory_gib: 1, gpus_per_engine: {n}}}") for n in (2, 4)]
    assert [plan.sampler.nodes_per_engine for plan in plans] == [1, 2]
    assert ["moe-rl serve --nnodes 2" in render(plan) for plan in plans] == [False, True]


def test_an_epoch(plan_of):
    """8 prompts, 4 a step, 2 completions each of at most 16 tokens with the prompt."""
    batch = plan_of().batch
    assert (batch.steps_per_epoch, batch.max_tokens_per_epoch) == (2.0, 8 * 2 * 16)
    absent = plan_of("task.train.0.data=/nowhere", "task.train_prompts=100").batch
    assert (absent.prompts_per_epoch, absent.steps_per_epoch) == (100, 25.0)


@pytest.mark.parametrize(
    ("sizes", "ranks", "share"),
    [
        ({"tensor": 4}, 32, 2 / 8),  # 2 of 8 shares, all layers
        ({"tensor": 4, "pipeline": 2}, 32, 2 / 4 / 2),  # a node is in one stage, of 4 shares
        ({"pipeline": 4}, 8, 1.0),  # one node has everything
        ({"pipeline": 4}, 16, 2 / 4),  # two whole stages, which have all shares
        ({"tensor": 8, "context": 2}, 64, 1 / 4),  # half the ranks of a share read all of it
    ],
)
def test_what_a_node_reads(published, sizes, ranks, share):
    layout = make_layout(ParallelConfig(**sizes), published("qwen3_30b_a3b"), ranks)
    assert node_share(layout, 8) == pytest.approx(share)
    assert node_share(layout, ranks) == 1.0


def test_routes_of_a_node_are_of_one_sampling_round(plan_of):
    plan = plan_of("rollout.dynamic_sampling_rounds=3")
    assert plan.storage.max_routes_bytes_per_step == 3 * plan.storage.max_routes_bytes_per_node
