"""Settings that a config passes on to Megatron and vLLM: which are taken, and why others are refused."""

import importlib.util
import re
from pathlib import Path

import pytest

from moe_rl.config.bypasses import _BYPASSES
from moe_rl.config.check import config_problems
from moe_rl.config.load import dump_config, load_config
from moe_rl.config.passed_on import MEGATRON, OPTIMIZER, VLLM, _reason, fields, needs_engine, not_planned
from moe_rl.config.passed_together import combination_problems
from moe_rl.models.hf import read_model, read_published
from moe_rl.planning.cluster_plan import make_plan
from moe_rl.planning.plan_table import render
from tests.support.refusals import tells

CONFIG = "configs/tiny_moe_cpu.yaml"
TAKEN = [
    "train.megatron={recompute_granularity: selective, recompute_modules: [core_attn], fp8: hybrid}",
    "train.dtype=bfloat16",
    "train.megatron_optimizer={use_precision_aware_optimizer: true, exp_avg_dtype: bfloat16, decoupled_lr: 0.01}",
    "rollout.vllm={speculative_config: {method: ngram}, kv_cache_dtype: fp8, stream_interval: 16}",
    "rollout.servers=[http://10.0.0.5:8000]",
    "rollout.token_file=token",
]


def found(*overrides):
    config = load_config(CONFIG, list(overrides))
    return config_problems(config, read_model(config.model.path), 2)


def test_fields_of_the_installed_versions_are_taken(tmp_path):
    assert found(*TAKEN) == []
    config = load_config(CONFIG, TAKEN)
    assert list(needs_engine(config)) == [
        "train.megatron.fp8",
        "train.megatron_optimizer.use_precision_aware_optimizer",
    ]
    assert [key.rpartition(".")[2] for key in not_planned(config)] == [
        "recompute_granularity", "recompute_modules", "fp8", "decoupled_lr",
        "speculative_config", "kv_cache_dtype", "stream_interval",
    ]  # fmt: skip
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("train.megatron.recompute_module=[moe]", {"do": "did you mean recompute_modules?"}),
        ("train.megatron.num_layers=2", {"got": 2}),
        ("train.megatron.fp8=e5m2", {"expected": ("e4m3", "hybrid")}),
        ("train.megatron.bias_activation_fusion=1", {"expected": "bool"}),
        ("train.megatron.moe_router_fusion=true", {"expected": "off"}),
        ("train.megatron.cuda_graph_impl=local", {"expected": "none"}),
        ("train.megatron.moe_input_jitter_eps=0.1", {"expected": "off"}),
        ("train.megatron.timers=null", {}),
        ("train.megatron.inference_rng_tracker=true", {}),
        ("train.megatron.rotary_interleaved=true", {}),
        ("train.megatron.attention_softmax_in_fp32=true", {"do": "remove it"}),
        ("train.megatron.pipeline_model_parallel_comm_backend=ucc", {"do": "remove it"}),
        ("train.megatron.use_fused_weighted_squared_relu=true", {"do": "remove it"}),
        ("train.megatron.use_te_rng_tracker=true", {"do": "remove it"}),
        ("train.megatron.use_grouped_gemm_for_dense_mlp=true", {"do": "remove it"}),
        ("train.megatron.fp8_interval=2", {"got": 2, "do": "remove it"}),
        ("train.megatron.tp_comm_overlap=true", {"do": "remove it"}),
        ("train.megatron.batch_invariant_mode=true", {"do": "remove it"}),
        ("train.megatron.attention_backend=local", {"expected": ("flash", "auto")}),
        ("train.megatron.attention_backend=flashh", {"expected": ("flash", "auto")}),
        ("train.megatron.high_priority_a2a_comm_stream=true", {"do": "set train.overlap_expert_parallel_comm"}),
        ("train.megatron.batch_p2p_sync=false", {"got": False, "do": "set parallel.pipeline"}),
        ("train.megatron.mla_down_proj_fusion=true", {"got": True, "do": "set a model.path"}),
        ("train.megatron.recompute_modules=[core_attn]", {"do": "set train.megatron.recompute_granularity"}),
        ("train.megatron.recompute_num_layers=1", {"do": "set train.megatron.recompute_granularity"}),
        ("train.megatron.fp8_margin=3", {"got": 3, "do": "set train.megatron.fp8"}),
        ("train.megatron.fp8_recipe=tensorwise", {"do": "set train.megatron.fp8"}),
        ("train.megatron.first_last_layers_bf16=true", {"do": "set train.megatron.fp8"}),
        ("train.megatron.num_layers_at_end_in_bf16=2", {"do": "set train.megatron.first_last_layers_bf16"}),
        ("train.megatron.cpu_offloading_num_layers=1", {"do": "set train.megatron.cpu_offloading"}),
        ("train.megatron.offload_modules=[moe_act]", {"do": "set train.megatron.fine_grained_activation_offloading"}),
        ("train.megatron.fp8_param=true", {"do": "remove it"}),
        ("train.megatron_optimizer.fp8_param_gather=true", {"do": "remove it"}),
        ("train.megatron_optimizer.reuse_grad_buf_for_mxfp8_param_ag=true", {"do": "remove it"}),
        ("train.megatron_optimizer.fp8_recipe=tensorwise", {"do": "remove it"}),
        ("train.megatron.microbatch_group_size_per_vp_stage=4", {"got": 4, "do": "remove it"}),
        ("train.megatron.num_microbatches_with_partial_activation_checkpoints=1", {"got": 1, "do": "remove it"}),
        ("train.megatron_optimizer.exp_avg_dtype=int4", {"expected": ("float32", "bfloat16")}),
        ("train.megatron_optimizer.exp_avg_dtype=float16", {"expected": ("float32", "bfloat16")}),
        ("train.megatron_optimizer.exp_avg_sq_dtype=uint8", {"expected": ("float32", "bfloat16")}),
        ("train.megatron_optimizer.main_grads_dtype=bfloat16", {"do": "remove it"}),
        ("train.megatron_optimizer.main_params_dtype=float16", {"do": "remove it"}),
        ("train.megatron_optimizer.exp_avg_dtype=int16", {"expected": ("float32", "bfloat16")}),
        ("train.megatron_optimizer.overlap_param_gather=true", {}),
        ("train.megatron_optimizer.grad_reduce_in_fp32=false", {"got": False, "do": "set train.dtype bfloat16"}),
        ("train.megatron_optimizer.bucket_size=1000", {"got": 1000, "do": "overlap_grad_reduce to true"}),
        ("train.megatron_optimizer.use_torch_optimizer_for_cpu_offload=true", {"do": "remove it"}),
        ("train.megatron_optimizer.pin_cpu_params=true", {"do": "remove it"}),
        ("train.megatron_optimizer.pin_cpu_grads=true", {"do": "set optimizer_cpu_offload"}),
        ("train.megatron_optimizer.overlap_cpu_optimizer_d2h_h2d=true", {"do": "set optimizer_cpu_offload"}),
        ("train.megatron_optimizer.decoupled_min_lr=0.0", {"got": 0.0, "do": "set decoupled_lr"}),
        ("train.megatron_optimizer.store_param_remainders=true", {"do": "set use_precision_aware_optimizer"}),
        ("train.megatron_optimizer.lr=0.1", {"got": 0.1}),
        ("rollout.vllm.max_num_seqs=3", {"do": "rollout.max_concurrent"}),
        ("rollout.vllm.enforce_eager=false", {"do": "rollout.cuda_graphs"}),
        ("rollout.vllm.tensor_parallel_size=2", {"do": "an engine beside a rank has only its GPU"}),
        ("rollout.vllm.data_parallel_size=2", {}),
        ("rollout.vllm.kv_transfer_config={}", {}),
        ("rollout.vllm.gpu_memory_utilization=0.5", {"got": 0.5, "do": "set rollout.kv_cache_mib"}),
        ("rollout.vllm.max_parallel_loading_workers=2", {"do": "remove it"}),
        ("rollout.vllm.renderer_num_workers=2", {"do": "remove it"}),
        ("rollout.vllm.max_num_queued_reqs=8", {"do": "remove it"}),
        ("rollout.vllm.max_num_queued_tokens=8", {"do": "remove it"}),
        ("rollout.vllm.dp_sync_interval=8", {"do": "remove it"}),
        ("rollout.vllm.all2all_backend=deepep_low_latency", {"do": "remove it"}),
        ("rollout.vllm.stream_interval=16", {"given": "no rollout.servers", "got": 16}),
        ("rollout.vllm.profiler_config={}", {"given": "no rollout.servers", "do": "remove it"}),
        ("rollout.vllm.cudagraph_metrics=true", {"given": "no rollout.servers", "got": True}),
        ("rollout.vllm.stream_intervall=3", {"do": "did you mean stream_interval?"}),
    ],
)
def test_what_is_unknown_or_breaks_a_run_is_refused_by_name(override, facts):
    (problem,) = found(override)
    do = facts.pop("do", "")
    assert do.lower() in problem.lower()
    tells(problem, key=override.partition("=")[0], **facts)


@pytest.mark.parametrize(
    ("override", "with_it"),
    [
        ("train.megatron.high_priority_a2a_comm_stream=true", "train.overlap_expert_parallel_comm=true"),
        ("train.megatron.batch_p2p_sync=false", "parallel.pipeline=2"),
        ("train.megatron.mla_down_proj_fusion=true", None),
        ("train.megatron_optimizer.grad_reduce_in_fp32=false", "train.dtype=bfloat16"),
    ],
)
def test_a_key_is_taken_where_it_has_an_effect(override, with_it):
    """Without its facts, a model may have latent attention."""
    config = load_config(CONFIG, [override, *[with_it] * bool(with_it)])
    told = config_problems(config, read_model(config.model.path) if with_it else None, 2)
    assert override.partition("=")[0] not in [problem.about.get("key") for problem in told]


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("train.megatron.fp8_recipe=mxfp8", "fp8_recipe"),
        ("train.megatron.fp8_recipe=custom", "fp8_recipe"),
        ("train.recompute=moe", "train.recompute"),
        ("train.megatron.fp4=e2m1", "fp4"),
        ("train.megatron.recompute_modules=[core_attn, moe]", "recompute_modules"),
        ("train.megatron.apply_rope_fusion=true", "apply_rope_fusion"),
    ],
)
def test_what_float8_and_latent_attention_do_not_go_with(setting, key):
    def keys(*more):
        config = load_config(CONFIG, ["train.megatron.fp8=hybrid", *more])
        problems = combination_problems(config.train, config.parallel, facts)
        return [problem.about["key"].removeprefix("train.megatron.") for problem in problems]

    facts = read_published("configs/models/deepseek_v3.json")
    kept = ["train.megatron.recompute_granularity=selective", "train.megatron.recompute_modules=[core_attn]"]
    assert keys("train.megatron.fp8_recipe=tensorwise", *kept) == []
    assert keys("train.megatron.recompute_granularity=selective", setting) == [key]


def test_a_key_that_is_taken_has_a_reader():
    """Outside the config classes and the parts of Megatron that no run uses. One class reads a field itself: it sets a
    flag of torch, see tests/megatron/test_passed_on.py."""
    places = map(Path, importlib.util.find_spec("megatron").submodule_search_locations)
    skipped = {Path(file).name for file, _ in (*MEGATRON.classes, *OPTIMIZER.classes)}
    skipped |= {"fsdp", "inference", "mimo", "bert", "T5", "hybrid", "ssm", "vision", "multimodal", "huggingface"}
    read = set()
    for place in places:
        for path in (place / "core").rglob("*.py"):
            if not skipped & {*path.relative_to(place).parts}:
                text = path.read_text(encoding="utf-8")
                read.update(*re.findall(r"\.(\w+)|getattr\(\s*[\w.]+,\s*['\"](\w+)", text))
    for passed in (MEGATRON, OPTIMIZER):
        taken = {name for name in fields(passed.classes).keys() - passed.ours if not _reason(passed, name)}
        assert len(taken) >= 20
        assert taken - read - {*_BYPASSES, "disable_bf16_reduced_precision_matmul"} == set()


@pytest.mark.parametrize(
    "override",
    ["rollout.keep_sampling_mask=true", "objective.score_centering=4", "rollout.router_logits_fraction=0.5"],
)
def test_of_drafts_only_routes_are_recorded(override):
    given, told = "rollout.vllm.speculative_config is set", []
    for drafts in ([], ["rollout.vllm.speculative_config={method: ngram}"]):
        told.append([problem for problem in found(override, *drafts) if problem.about.get("given") == given])
    without, (problem,) = told
    assert without == []
    tells(problem, key=override.partition("=")[0])


@pytest.mark.parametrize("moves", ["", ", optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0"])
def test_an_optimizer_that_holds_its_state_itself_moves_no_experts_and_is_distributed(moves):
    own = "train.dtype=bfloat16", f"train.megatron_optimizer={{use_precision_aware_optimizer: true{moves}}}"
    given = "train.megatron_optimizer.use_precision_aware_optimizer is true"
    (problem,) = found(*own, "placement.experts=traced")
    tells(problem, key="placement.experts", given=given, got="traced", expected="natural")
    (problem,) = found(*own, "train.distributed_optimizer=false")
    tells(problem, key="train.distributed_optimizer", given=given, got=False, expected=True)


@pytest.mark.parametrize("drafts", ["speculative_config: {method: mtp}", "spec_method: mtp"])
def test_drafts_are_not_scheduled_before_it_is_known_which_are_accepted(drafts):
    given = f"rollout.vllm={{{drafts}, async_scheduling: true}}"
    (problem,) = found(given)
    tells(problem, key="rollout.vllm.async_scheduling", given=f"rollout.vllm.{drafts.partition(':')[0]} is set")
    assert found(given.replace("true", "false")) == found("rollout.vllm={async_scheduling: true}") == []
    assert found(given, "rollout.capture=native") == []


@pytest.mark.parametrize(
    ("dtype", "passed", "key", "facts"),
    [
        ("bfloat16", "optimizer_cpu_offload: true", "optimizer_offload_fraction", {"got": 0.0}),
        ("bfloat16", "optimizer_cpu_offload: true, optimizer_offload_fraction: 0", "optimizer_offload_fraction",
         {"got": 0, "expected": "above 0, at most 1"}),
        ("bfloat16", "optimizer_offload_fraction: 0.5", "optimizer_offload_fraction", {"got": 0.5, "expected": 0}),
        ("bfloat16", "optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0, exp_avg_dtype: bfloat16",
         "exp_avg_dtype", {"expected": "float32"}),
        ("bfloat16", "use_precision_aware_optimizer: false, exp_avg_sq_dtype: bfloat16",
         "exp_avg_sq_dtype", {"do": "use_precision_aware_optimizer to true"}),
        ("bfloat16", "exp_avg_dtype: float16", "exp_avg_dtype", {"expected": ("float32", "bfloat16")}),
        ("bfloat16", "exp_avg_sq_dtype: uint8", "exp_avg_sq_dtype", {"expected": ("float32", "bfloat16")}),
        ("bfloat16", "optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0, store_param_remainders: true",
         "store_param_remainders", {"got": True, "do": "without optimizer_cpu_offload"}),
        ("bfloat16", "optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0, decoupled_weight_decay: false",
         "decoupled_weight_decay", {"got": False, "expected": True}),
        ("float32", "use_precision_aware_optimizer: true", "use_precision_aware_optimizer",
         {"got": True, "given": "train.dtype is float32", "do": "train.dtype to bfloat16"}),
    ],
)  # fmt: skip
def test_settings_of_the_optimizer_that_do_nothing_together_are_told(dtype, passed, key, facts):
    aware = "" if "use_precision" in passed else "use_precision_aware_optimizer: true, "
    (problem,) = found(f"train.dtype={dtype}", f"train.megatron_optimizer={{{aware}{passed}}}")
    assert facts.pop("do", "") in problem
    tells(problem, key=f"train.megatron_optimizer.{key}", **facts)


def test_settings_of_the_optimizer_that_go_together_are_taken():
    moved = "use_precision_aware_optimizer: true, optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5"
    assert found("train.dtype=bfloat16", f"train.megatron_optimizer={{{moved}, exp_avg_dtype: float32}}") == []
    assert found("train.megatron_optimizer={optimizer_cpu_offload: false, optimizer_offload_fraction: 0.0}") == []
    off = "overlap_cpu_optimizer_d2h_h2d: false, pin_cpu_grads: false, store_param_remainders: false"
    assert found(f"train.megatron_optimizer={{{off}, decoupled_lr: 0.01, decoupled_min_lr: 0.0}}") == []


@pytest.mark.parametrize(
    ("fraction", "overlap", "in_fp32", "waits"),
    [(0.5, True, False, False), (1.0, True, False, True), (0.5, False, False, True), (0.5, True, True, True)],
)
def test_an_adam_that_would_not_wait_for_gradients_is_refused(fraction, overlap, in_fp32, waits):
    moved = f"use_precision_aware_optimizer: true, optimizer_cpu_offload: true, optimizer_offload_fraction: {fraction}"
    others = f"overlap_cpu_optimizer_d2h_h2d: {overlap}, grad_reduce_in_fp32: {in_fp32}".lower()
    problems = found("train.dtype=bfloat16", f"train.megatron_optimizer={{{moved}, {others}}}")
    assert len(problems) == (not waits)
    for problem in problems:
        key = "train.megatron_optimizer.overlap_cpu_optimizer_d2h_h2d"
        tells(problem, key=key, given="optimizer_offload_fraction is 0.5", got=True, expected=False)


@pytest.mark.parametrize("value", ["null", "true", "bf16", "[float32]", "[[a]]", "{a: 1}", "-1", "1.0e+308", "1.5"])
def test_a_wrong_value_is_told_and_does_not_end_the_plan(value):
    for others, key in (
        ("{use_precision_aware_optimizer: true}", "train.megatron_optimizer.exp_avg_dtype"),
        ("{use_precision_aware_optimizer: true, optimizer_cpu_offload: true}",
         "train.megatron_optimizer.optimizer_offload_fraction"),
        ("{grad_reduce_in_fp32: false}", "train.megatron.recompute_modules"),
    ):  # fmt: skip
        settings = ["train.dtype=bfloat16", f"train.megatron_optimizer={others}", f"{key}={value}"]
        if key.endswith("recompute_modules"):
            settings.append("train.megatron.recompute_granularity=selective")
        config = load_config(CONFIG, settings)
        facts = read_model(config.model.path)
        assert list(needs_engine(config)) in ([], ["train.megatron_optimizer.use_precision_aware_optimizer"],
                                              ["train.megatron.recompute_modules"])  # fmt: skip
        assert render(make_plan(config, facts, 2))
        told = [problem.about["key"] for problem in config_problems(config, facts, 2)]
        allowed = key.endswith("recompute_modules") and value in ("null", "[float32]")
        assert told == [key] * (not allowed)


FLEX = "train.megatron={moe_token_dispatcher_type: flex, moe_flex_dispatcher_backend: hybridep}"


def test_dispatchers_that_follow_no_plan_are_taken_without_plans():
    assert found("replay.plan=false", FLEX) == found("replay.mode=off", FLEX) == []
    assert found("replay.plan=false", "train.megatron.moe_permute_fusion=true") == []
    for plan in (None, "replay.plan=true"):
        (problem,) = found(FLEX, *[plan] * bool(plan))
        tells(problem, key="train.megatron.moe_token_dispatcher_type", got="flex")
        (problem,) = found("train.megatron.moe_permute_fusion=true", *[plan] * bool(plan))
        tells(problem, key="train.megatron.moe_permute_fusion")
    (problem,) = found("replay.plan=false", FLEX, "placement.experts=traced")
    tells(problem, key="placement.experts", got="traced")
    (problem,) = found("train.megatron.moe_hybridep_num_blocks_permute=16")
    tells(problem, key="train.megatron.moe_hybridep_num_blocks_permute")


def test_recomputation_is_set_in_one_place():
    (problem,) = found("train.recompute=moe", "train.megatron.recompute_modules=[core_attn]")
    tells(problem, key="train.megatron.recompute_modules", given="train.recompute is moe")


@pytest.mark.parametrize("passed", [MEGATRON, OPTIMIZER, VLLM], ids=["megatron", "optimizer", "vllm"])
def test_every_name_of_a_list_is_a_field_of_the_installed_version(passed):
    assert passed.ours - fields(passed.classes).keys() == set()
