import dataclasses
import re

import pytest

from moe_rl.config.layout import least_ranks, stage_layers
from moe_rl.config.load import load_config
from moe_rl.config.training import ParallelConfig, TrainConfig
from moe_rl.models.hf import expected_tensors, parameter_count, read_model
from moe_rl.planning.cluster_plan import make_plan
from moe_rl.planning.memory import host_bytes
from moe_rl.planning.parameters import Buffer
from moe_rl.planning.plan_table import bytes_text, render


def test_a_step_by_hand(plan_of):
    """4 prompts x 2 completions of at most 10 + 6 tokens; 2 updates; microbatches of 40 tokens, hence of 2
    sequences.
    """
    plan = plan_of()
    assert (plan.layout.data, plan.layout.expert_data, plan.layout.experts_per_rank) == (2, 1, 2)
    assert (plan.batch.sequences_per_step, plan.batch.groups_per_update, plan.batch.sequences_per_update) == (8, 2, 4)
    assert (plan.batch.max_sequence_tokens, plan.batch.max_tokens_per_step, plan.batch.updates) == (16, 128, 12)
    assert plan.batch.max_microbatches == 1
    assert plan_of("train.microbatch_tokens=31").batch.max_microbatches == 2
    assert plan_of("train.updates_per_step=1", "parallel.expert=1", world_size=1).batch.max_microbatches == 4
    assert (plan.batch.prompts_per_epoch, plan.batch.epochs) == (8, 3.0)


def test_model_and_storage_by_hand(plan_of):
    """Experts: 2 layers x 4 x 3 matrices of 8 x 6. Routes: 2 layers x top 2, one byte. KV: K and V, 3 x 2 x 4, bf16."""
    plan = plan_of()
    assert plan.model.expert_parameters == 2 * 4 * 3 * 8 * 6
    assert plan.storage.routes_bytes_per_token == 4
    assert plan.storage.max_routes_bytes_per_step == 8 * 15 * 4 and plan.batch.sampling_rounds == 1
    assert plan.sampler.kv_bytes_per_token == 2 * 3 * 2 * 4 * 2
    assert plan.sampler.kv_tokens == (1 << 20) // 96
    assert plan.storage.weight_sync_bytes == 2 * plan.model.parameters
    assert plan_of("rollout.dtype=float32").sampler.kv_bytes_per_token == 192


def test_dynamic_sampling_may_take_more_prompts_and_disk(plan_of):
    once, thrice = plan_of(), plan_of("rollout.dynamic_sampling_rounds=3")
    assert thrice.storage.max_routes_bytes_per_step == 3 * once.storage.max_routes_bytes_per_step
    assert thrice.batch.sequences_per_step == once.batch.sequences_per_step and thrice.batch.epochs == once.batch.epochs
    assert "3.00  up to 3 times that" in render(thrice) and "times that" not in render(once)


def test_the_disk_takes_as_long_to_write_a_checkpoint_as_to_resume_and_less_for_weights_alone(plan_of):
    """float32 Adam keeps 12 bytes of a parameter besides its 2 in bfloat16."""
    storage = plan_of("train.dtype=bfloat16").storage
    assert storage.checkpoint_bytes == 7 * storage.export_bytes
    disk = f"cluster={{gpus: 2, gpu_memory_gib: 79, links_gb_per_second: {{disk: {storage.export_bytes / 3 / 1e9}}}}}"
    text = render(plan_of("train.dtype=bfloat16", disk))
    assert "21 s to write, and to resume, at " in text and "weights alone, 3 s to write (export.every_steps)" in text
    assert "weights alone (export.every_steps)" in render(plan_of())


def test_a_checkpoint_that_a_stop_cannot_write_is_said(plan_of):
    size = plan_of().storage.checkpoint_bytes
    for seconds, late in ((24, False), (26, True)):
        disk = f"cluster={{gpus: 2, gpu_memory_gib: 79, links_gb_per_second: {{disk: {size / seconds / 1e9}}}}}"
        assert ("a stop leaves 25 s (checkpoint.grace_seconds)" in render(plan_of(disk))) == late


def test_route_ids_take_two_bytes_above_256_experts(plan_of, config_file):
    config = load_config(config_file)
    facts = read_model(config.model.path)
    assert make_plan(config, dataclasses.replace(facts, num_experts=256), 2).storage.routes_bytes_per_token == 4
    assert make_plan(config, dataclasses.replace(facts, num_experts=257), 2).storage.routes_bytes_per_token == 8


def test_a_buffer_by_hand():
    """Two parameters. The second starts at 128, a multiple of 64; both copies have half of 256, a multiple of 128."""
    buffer = Buffer(sizes=(70, 30), copies=2, ranks_between=1)
    assert (buffer.elements, buffer.padded_elements, buffer.owned()) == (100, 256, [70, 30])
    assert Buffer((64, 200), 1, 1).owned() == [264] and Buffer((64, 200), 1, 1).padded_elements == 384
    assert Buffer((300,), 3, 1).owned() == [128, 128, 44]
    assert Buffer((), 4, 1).owned() == [0] * 4


def test_pinned_copies_of_gradients_are_rounded_up_to_powers_of_two():
    """Copies of 3 and 5 gradients take 16 and 32 bytes, those of 128 and 2 no more than they need."""
    buffers = [Buffer((3, 5), 1, 1), Buffer((128, 130), 3, 1)]
    assert buffers[1].pieces() == [[128], [128], [2]]
    passed = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    plain, pinned = (
        host_bytes(buffers, TrainConfig.model_construct(megatron_optimizer=passed | {"pin_cpu_grads": pin}), 3)
        for pin in (False, True)
    )
    assert plain == [16 * 136, 16 * 136, 16 * 10]
    assert [more - less for more, less in zip(pinned, plain, strict=True)] == [16, 16, 16]


@pytest.mark.parametrize(("dtype", "parameter", "state"), [("bfloat16", 2, 12), ("float32", 4, 8)])
def test_memory_of_a_rank(plan_of, dtype, parameter, state):
    """Main gradients 4 B. State, shared: a bf16 parameter has a master and two moments, a fp32 one two moments."""
    plan = plan_of(f"train.dtype={dtype}", "objective.kl_coef=0.1", world_size=4)
    memory, dense, expert = plan.fullest.memory, plan.model.dense_parameters, plan.model.expert_parameters // 2
    assert memory.parameters == dense + expert and memory.reference_bytes == parameter * (dense + expert)
    padded = memory.main_grad_bytes // 4
    assert dense + expert <= padded < 2 * (dense + expert) and memory.parameter_bytes == parameter * padded
    assert state * (-(-dense // 4) + expert // 2) <= memory.optimizer_bytes < state * (dense + expert)
    assert plan.storage.checkpoint_bytes == (parameter + state) * plan.model.parameters
    # four copies of the dense parameters and two of an expert share the weights
    shares, copy = -(-dense // 4) + -(-expert // 2), memory.checkpoint_copy_bytes
    assert copy == memory.optimizer_bytes + parameter * shares
    assert bytes_text(copy) in re.search("a rank's copy of it .*", render(plan))[0]
    assert plan_of(f"train.dtype={dtype}").fullest.memory.reference_bytes == 0


@pytest.mark.parametrize(
    ("passed", "gradient", "state", "host", "stored"),
    [
        ("{}", 4, 12, 0, 12),
        ("{grad_reduce_in_fp32: false}", 2, 16, 0, 12),  # Adam gets a float32 copy of the gradient
        ("{use_precision_aware_optimizer: true}", 4, 10, 0, 10),
        ("{use_precision_aware_optimizer: true, exp_avg_dtype: bfloat16, exp_avg_sq_dtype: bfloat16}", 4, 6, 0, 10),
        ("{use_precision_aware_optimizer: true, store_param_remainders: false}", 4, 12, 0, 12),
        ("{optimizer_cpu_offload: true, optimizer_offload_fraction: 0.75, pin_cpu_grads: false}", 4, 4, 12, 12),
    ],
)
def test_memory_of_a_rank_whose_optimizer_is_smaller(plan_of, passed, gradient, state, host, stored):
    plain, plan = plan_of(), plan_of(f"train.megatron_optimizer={passed}")
    ours, theirs = plain.fullest.memory, plan.fullest.memory
    assert theirs.main_grad_bytes * 4 == ours.main_grad_bytes * gradient
    assert theirs.optimizer_bytes * 12 == ours.optimizer_bytes * state
    assert theirs.host_bytes * 12 == ours.optimizer_bytes * host and ours.host_bytes == 0
    assert plan.storage.checkpoint_bytes == (2 + stored) * plan.model.parameters
    assert plan.not_planned == ()


@pytest.mark.parametrize("sleep", [0, 2])
def test_both_sides_of_a_shared_gpu_by_hand(plan_of, sleep):
    """Parameters, gradients, state, activations and routes of the trainer; weights, KV and an update of the engine."""
    plan = plan_of("cluster={gpus: 2, gpu_memory_gib: 1, reserved_gib: 0}", f"rollout.sleep_level={sleep}")
    memory, stage = plan.fullest.memory, plan.fullest
    resident = 2 * memory.main_grad_bytes // 4 + memory.main_grad_bytes + memory.optimizer_bytes
    engine = 2 * plan.model.parameters + (1 << 20) + plan.sampler.sync_bytes
    # 8 sequences of 16 tokens on 2 ranks; 2 MoE layers, top 2; the number, the place and the router's own choice
    routes = 8 * 16 // 2 * 2 * 2 * (1 + 4 + 1)
    assert stage.route_bytes == routes
    assert plan.shared_bytes == resident + engine + (0 if sleep else stage.activations.peak_bytes + routes)


def test_attention_without_transformer_engine_pads_to_twice_the_rows(plan_of):
    """40 rows, 3 layers. A padded row has 16 numbers of queries and output, 8 of keys and values, a float per head."""
    ours, theirs = (plan_of(*more).fullest.activations for more in ((), ("train.megatron={apply_rope_fusion: true}",)))
    assert ours.kept_bytes - theirs.kept_bytes == 3 * 40 * (2 * (2 * 16 + 2 * 8) + 4 * 4)


def test_no_packing_exceeds_the_tokens_of_a_microbatch(plan_of):
    assert plan_of("train.packing=load").batch.microbatch_rows == plan_of().batch.microbatch_rows == 40
    assert plan_of("train.microbatch_tokens=41").batch.microbatch_rows == 48


def test_what_is_cut_into_several_sequences_is_said_not_to_be_counted(plan_of):
    queue, uncounted = "pipeline.mode=async", "not counting branches and segments"
    episodes = "task.environment={run: moe_rl.tasks.environments.examples.calculator.run}"
    for overrides in ((queue,), (episodes,)):
        assert render(plan_of(*overrides)).count(uncounted) == 4
    for overrides in ((), (queue, "pipeline.segments=first"), (queue, "rollout.stop=[x]")):
        assert uncounted not in render(plan_of(*overrides))


def test_memory_of_a_rank_without_the_distributed_optimizer(plan_of):
    """A rank has all of the state: two moments of each float32 parameter that it holds, without padding."""
    shared, whole = (
        plan_of("train.dtype=float32", f"train.distributed_optimizer={on}", world_size=4) for on in ("true", "false")
    )
    memory = whole.fullest.memory
    assert memory.optimizer_bytes == 8 * memory.parameters > 2 * shared.fullest.memory.optimizer_bytes
    assert memory.main_grad_bytes == memory.parameter_bytes == 4 * memory.parameters
    # copies share the writing of all: weights and two moments
    assert whole.storage.checkpoint_bytes == shared.storage.checkpoint_bytes == 12 * whole.model.parameters
    assert memory.checkpoint_copy_bytes < memory.optimizer_bytes
    assert "not sharded" in render(whole) and "not sharded" not in render(shared)


def test_a_checkpoint_has_once_what_experts_share(plan_of):
    """In 2 layers 4 experts have one A of gate and one of up, 2 x 8, and one B of down, 8 x 2: 14 bytes per element."""
    lora = ("train.lora={rank: 2, alpha: 4, sync: adapter}", "train.dtype=bfloat16")
    own, shared = (
        plan_of(*lora, f"train.lora.shared_outer={on}", "parallel.expert=1", world_size=1) for on in ("false", "true")
    )
    for plan in (own, shared):
        assert plan.storage.checkpoint_bytes == plan.fullest.memory.checkpoint_copy_bytes
    assert own.storage.checkpoint_bytes - shared.storage.checkpoint_bytes == 14 * 2 * (4 - 1) * 3 * (2 * 8)
    assert plan_of(*lora, "train.lora.shared_outer=true").storage.checkpoint_bytes == shared.storage.checkpoint_bytes
    # A sampler gets a copy for each expert.
    assert own.storage.weight_sync_bytes == shared.storage.weight_sync_bytes


def test_parameters_of_a_rank_that_shares_its_matrices(plan_of):
    """8 ranks form 4 data-parallel pairs. Each expert is cut in two and has two copies. Norms and routers are whole."""
    shared = ("parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2", "train.dtype=float32")
    plan = plan_of(*shared, world_size=8)
    assert (plan.layout.data, plan.layout.expert_data, plan.layout.experts_per_rank) == (4, 2, 2)
    # of 3 layers two norms of 8 and two of 4 each, two routers of 4 x 8, the last norm
    whole = 3 * (2 * 8 + 2 * 4) + 2 * 4 * 8 + 8
    dense = whole + (plan.model.dense_parameters - whole) // 2
    assert plan.fullest.memory.parameters == dense + plan.model.expert_parameters // 4
    assert plan.storage.checkpoint_bytes == plan_of("train.dtype=float32").storage.checkpoint_bytes
    rows = render(plan)
    assert "tensor parallel" in rows and "expert tensor parallel" in rows


def test_parameters_of_a_rank_that_shares_its_sequences(plan_of):
    """8 ranks form 4 data-parallel pairs. Both ranks of a pair hold all dense parameters."""
    plan = plan_of("parallel.context=2", "parallel.expert=2", "train.dtype=float32", world_size=8)
    assert (plan.layout.context, plan.layout.data, plan.layout.expert_data) == (2, 4, 4)
    assert plan.fullest.memory.parameters == plan.model.dense_parameters + plan.model.expert_parameters // 2
    assert plan.batch.max_microbatches == plan_of(world_size=4).batch.max_microbatches
    assert "context parallel" in render(plan)


def test_memory_of_a_stage(plan_of):
    """3 stages of a layer each. The fullest is the last: a layer with experts, the output matrix and the last norm."""
    plan = plan_of("parallel.pipeline=3", "parallel.expert=1", "train.dtype=float32", world_size=6)
    assert (plan.layout.data, plan.layout.expert_data) == (2, 2)
    attention, norms, router, experts = (16 + 8 + 8) * 8 + 8 * 16, 2 * 8 + 2 * 4, 4 * 8, 4 * 3 * 8 * 6
    assert plan.fullest.memory.parameters == attention + norms + router + experts + 24 * 8 + 8
    assert "pipeline stages" in render(plan)


@pytest.mark.parametrize(
    ("sizes", "stages"),
    [
        ({"pipeline": 1}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"pipeline": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"pipeline": 2, "virtual_pipeline": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"pipeline": 4, "virtual_pipeline": 2}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ({"pipeline": 2, "layers_per_run": (5, 3)}, [[0, 1, 2, 3, 4], [5, 6, 7]]),
        ({"pipeline": 2, "virtual_pipeline": 2, "layers_per_run": (3, 2, 2, 1)}, [[0, 1, 2, 5, 6], [3, 4, 7]]),
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
    assert plan_of().sampler.fits_max_concurrent
    assert "preempt" not in render(plan_of())
    small = plan_of("rollout.group_size=200")
    assert small.sampler.max_concurrent == 256 and small.sampler.fits_max_concurrent
    tight = plan_of("rollout.group_size=200", "rollout.max_concurrent=800")
    assert tight.sampler.kv_tokens < 800 * 16 and not tight.sampler.fits_max_concurrent
    assert "preempt" in render(tight)


def test_what_does_not_divide_still_gives_a_plan(plan_of):
    plan = plan_of(
        "parallel.expert=3", "train.updates_per_step=9", "task.train.0.data=/nowhere", "train.microbatch_tokens=1"
    )
    assert (plan.layout.expert_data, plan.layout.experts_per_rank, plan.batch.groups_per_update) == (1, 2, 1)
    assert plan.batch.epochs is None and "cannot be read" in render(plan)
    uneven = plan_of("parallel.pipeline=4", "parallel.expert=1", world_size=4)
    assert [len(stage.memory.layers) for stage in uneven.stages] == [1, 1, 1, 0] and "no layers;" in render(uneven)
    endless = plan_of("task.train=[{name: sums, data: 'reasoning_gym:chain_sum', seed: 1}]")
    assert endless.batch.endless and "endless" in render(endless) and "cannot be read" not in render(endless)


def test_parameter_count_adds_up(plan_of, model):
    facts = read_model(model)
    total = sum(a * b for a, b in ((*shape, 1)[:2] for shape in expected_tensors(facts).values()))
    assert parameter_count(facts).total == plan_of().model.parameters == total


def test_render_is_aligned_and_complete(plan_of):
    rows = [line for line in render(plan_of()).split("\n") if line.startswith("  ")]
    columns = [re.fullmatch(r"  (\S.*?)  +(\S+(?: [A-Za-z]+)?)(?:  (\S.*))?", row) for row in rows]
    assert all(columns) and len({match.end(2) for match in columns}) == 1
    values = {match[1]: match[2] for match in columns}
    assert (values["sequences"], values["optimizer updates"], values["routes per token"]) == ("8", "12", "4 B")
