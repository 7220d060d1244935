import dataclasses
import re

import pytest

from moe_rl.config.hf import expected_tensors, parameter_count, read_model
from moe_rl.config.load import load_config
from moe_rl.config.plan import least_ranks, make_plan, render, stage_layers
from moe_rl.config.schema import ParallelConfig


@pytest.fixture
def plan_of(config_file):
    def plan(*overrides, world_size=2):
        config = load_config(config_file, overrides)
        return make_plan(config, read_model(config.model.path), world_size)

    return plan


def test_a_step_by_hand(plan_of):
    """4 prompts x 2 completions of at most 10 + 6 tokens; 2 updates; 40 tokens, hence 2 sequences, a microbatch."""
    plan = plan_of()
    assert (plan.data_parallel, plan.expert_data_parallel, plan.experts_per_rank) == (2, 1, 2)
    assert (plan.sequences_per_step, plan.groups_per_update, plan.sequences_per_update) == (8, 2, 4)
    assert (plan.max_sequence_tokens, plan.max_tokens_per_step, plan.updates) == (16, 128, 12)
    assert plan.max_microbatches_per_update == 1
    assert plan_of("train.microbatch_tokens=31").max_microbatches_per_update == 2
    assert plan_of("train.updates_per_step=1", "parallel.expert=1", world_size=1).max_microbatches_per_update == 4
    assert (plan.prompts_per_epoch, plan.epochs) == (8, 3.0)


def test_model_and_storage_by_hand(plan_of):
    """Experts: 2 layers x 4 x 3 matrices of 8 x 6. Routes: 2 layers x top 2, one byte. KV: K and V, 3 x 2 x 4, bf16."""
    plan = plan_of()
    assert plan.expert_parameters == 2 * 4 * 3 * 8 * 6
    assert plan.routes_bytes_per_token == 4
    assert plan.max_routes_bytes_per_step == 8 * 15 * 4 and plan.sampling_rounds == 1
    assert plan.kv_bytes_per_token == 2 * 3 * 2 * 4 * 2
    assert plan.kv_tokens == (1 << 20) // 96
    assert plan.weight_sync_bytes == 2 * plan.parameters
    assert plan_of("rollout.dtype=float32").kv_bytes_per_token == 192


def test_dynamic_sampling_may_take_more_prompts_and_disk(plan_of):
    once, thrice = plan_of(), plan_of("rollout.dynamic_sampling_rounds=3")
    assert thrice.max_routes_bytes_per_step == 3 * once.max_routes_bytes_per_step
    assert thrice.sequences_per_step == once.sequences_per_step and thrice.epochs == once.epochs
    assert "3.00  to 3 times that" in render(thrice) and "times that" not in render(once)


def test_route_ids_take_two_bytes_above_256_experts(plan_of, config_file):
    config = load_config(config_file)
    facts = read_model(config.model.path)
    assert make_plan(config, dataclasses.replace(facts, num_experts=256), 2).routes_bytes_per_token == 4
    assert make_plan(config, dataclasses.replace(facts, num_experts=257), 2).routes_bytes_per_token == 8


@pytest.mark.parametrize(("dtype", "parameter", "state"), [("bfloat16", 2, 12), ("float32", 4, 8)])
def test_memory_of_a_rank(plan_of, dtype, parameter, state):
    """Main gradients 4 B. State, sharded: a bf16 parameter has a master and two moments, a fp32 one two moments."""
    plan = plan_of(f"train.dtype={dtype}", "objective.kl_coef=0.1", world_size=4)
    dense, expert = plan.dense_parameters, plan.expert_parameters // 2
    assert plan.parameters_per_rank == dense + expert
    assert plan.parameter_bytes_per_rank == plan.reference_bytes_per_rank == parameter * (dense + expert)
    assert plan.main_grad_bytes_per_rank == 4 * (dense + expert)
    assert plan.optimizer_bytes_per_rank == state * (-(-dense // 4) + expert // 2)
    assert plan.checkpoint_bytes == (parameter + state) * plan.parameters
    assert plan_of(f"train.dtype={dtype}").reference_bytes_per_rank == 0


def test_memory_of_a_rank_without_the_distributed_optimizer(plan_of):
    """All of the state: two moments of each float32 parameter that the rank holds."""
    shared, whole = (
        plan_of("train.dtype=float32", f"train.distributed_optimizer={on}", world_size=4) for on in ("true", "false")
    )
    assert whole.optimizer_bytes_per_rank == 8 * whole.parameters_per_rank > 2 * shared.optimizer_bytes_per_rank
    assert "not sharded" in render(whole) and "not sharded" not in render(shared)


def test_memory_of_a_rank_that_shares_its_matrices(plan_of):
    """8 ranks: 4 data-parallel pairs; an expert is cut in two, and there are two of it. Norms and routers are whole."""
    shared = ("parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2", "train.dtype=float32")
    plan = plan_of(*shared, world_size=8)
    assert (plan.data_parallel, plan.expert_data_parallel, plan.experts_per_rank) == (4, 2, 2)
    # of 3 layers two norms of 8 and two of 4 each, two routers of 4 x 8, the last norm
    whole = 3 * (2 * 8 + 2 * 4) + 2 * 4 * 8 + 8
    dense = whole + (plan.dense_parameters - whole) // 2
    assert plan.parameters_per_rank == dense + plan.expert_parameters // 4
    assert plan.optimizer_bytes_per_rank == 8 * (-(-dense // 4) + plan.expert_parameters // 4 // 2)
    assert plan.checkpoint_bytes == plan_of("train.dtype=float32").checkpoint_bytes
    rows = render(plan)
    assert "tensor parallel" in rows and "expert tensor parallel" in rows


def test_memory_of_a_rank_that_shares_its_sequences(plan_of):
    """8 ranks: 4 data-parallel pairs. Both of a pair hold all dense parameters, and share the optimizer's state."""
    plan = plan_of("parallel.context=2", "parallel.expert=2", "train.dtype=float32", world_size=8)
    assert (plan.context_parallel, plan.data_parallel, plan.expert_data_parallel) == (2, 4, 4)
    assert plan.parameters_per_rank == plan.dense_parameters + plan.expert_parameters // 2
    assert plan.optimizer_bytes_per_rank == 8 * (-(-plan.dense_parameters // 8) + plan.expert_parameters // 2 // 4)
    assert plan.max_microbatches_per_update == plan_of(world_size=4).max_microbatches_per_update
    assert "context parallel" in render(plan)


def test_memory_of_a_stage(plan_of):
    """3 stages of a layer each. The fullest is the last: a layer with experts, the output matrix and the last norm."""
    plan = plan_of("parallel.pipeline=3", "parallel.expert=1", "train.dtype=float32", world_size=6)
    assert (plan.data_parallel, plan.expert_data_parallel) == (2, 2)
    attention, norms, router, experts = (16 + 8 + 8) * 8 + 8 * 16, 2 * 8 + 2 * 4, 4 * 8, 4 * 3 * 8 * 6
    assert plan.parameters_per_rank == attention + norms + router + experts + 24 * 8 + 8
    assert "pipeline stages" in render(plan)


@pytest.mark.parametrize(
    ("sizes", "stages"),
    [
        ({"pipeline": 1}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"pipeline": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"pipeline": 2, "virtual_pipeline": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"pipeline": 4, "virtual_pipeline": 2}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_layers_of_the_stages(model, sizes, stages):
    facts = dataclasses.replace(read_model(model), layers=8)
    assert stage_layers(facts, ParallelConfig(**sizes)) == stages


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({}, 1),
        ({"tensor": 2}, 2),
        ({"expert": 2, "expert_tensor": 2}, 4),
        ({"tensor": 4, "expert": 2}, 4),
        ({"tensor": 2, "context": 2, "expert": 4}, 4),
        ({"context": 3, "expert": 2, "pipeline": 2}, 12),
    ],
)
def test_the_fewest_ranks_of_a_layout(sizes, ranks):
    assert least_ranks(ParallelConfig(**sizes)) == ranks


def test_kv_cache_that_is_too_small_is_said(plan_of):
    assert plan_of().kv_fits_max_concurrent
    assert "preempt" not in render(plan_of())
    small = plan_of("rollout.group_size=200")
    assert small.max_concurrent_sequences == 256 and small.kv_fits_max_concurrent
    tight = plan_of("rollout.group_size=200", "rollout.max_concurrent=800")
    assert tight.kv_tokens < 800 * 16 and not tight.kv_fits_max_concurrent
    assert "preempt" in render(tight)


def test_what_does_not_divide_still_gives_a_plan(plan_of):
    plan = plan_of("parallel.expert=3", "train.updates_per_step=9", "task.train=/nowhere", "train.microbatch_tokens=1")
    assert (plan.expert_data_parallel, plan.experts_per_rank, plan.groups_per_update) == (1, 2, 1)
    assert plan.epochs is None and "cannot be read" in render(plan)


def test_parameter_count_adds_up(plan_of, model):
    facts = read_model(model)
    total = sum(a * b for a, b in ((*shape, 1)[:2] for shape in expected_tensors(facts).values()))
    assert parameter_count(facts).total == plan_of().parameters == total


def test_render_is_aligned_and_complete(plan_of):
    rows = [line for line in render(plan_of()).split("\n") if line.startswith("  ")]
    columns = [re.fullmatch(r"  (\S.*?)  +(\S+(?: [A-Za-z]+)?)(?:  (\S.*))?", row) for row in rows]
    assert all(columns) and len({match.end(2) for match in columns}) == 1
    values = {match[1]: match[2] for match in columns}
    assert (values["sequences"], values["optimizer updates"], values["routes per token"]) == ("8", "12", "4 B")
