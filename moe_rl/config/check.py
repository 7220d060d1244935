"""Finds everything that is wrong with a config, its files and the number of ranks, before any work starts.

Rules about one field or one section are part of the section classes. This file has the rules that need two sections or
the model. `layout` has the rules that need the number of ranks, `check_cluster` those for several machines, and
`check_files` those for this machine. Only headers and small files are read, and no user code is imported, so the checks
are quick and have no side effects.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_rl.config.check_cluster import (
    engine_problems,
    has_servers,
    neighbour_problems,
    overlap_problem,
    queue_problems,
)
from moe_rl.config.check_features import environment_problems, lora_problems, stale_problems
from moe_rl.config.check_files import file_problems
from moe_rl.config.environment import GatewayConfig
from moe_rl.config.layout import layout_problems
from moe_rl.config.passed_on import passed_problems
from moe_rl.config.schema import Config
from moe_rl.errors import About, ConfigError, Problem, describe, did_you_mean
from moe_rl.models.hf import ModelFacts, read_model


def problems(config: Config, world_size: int, *, samples: bool = True) -> list[Problem]:
    """Return every reason why `config` cannot run here on `world_size` ranks, one message each; empty when it can.

    This does not examine the installed software, nor the memory that a plan needs (`planning.cluster_plan`). samples:
    whether prompts, rewards and a folder for the run are needed.
    """
    try:
        facts, model_problems = read_model(config.model.path), []
    except ConfigError as error:
        facts, model_problems = None, error.problems
    return model_problems + config_problems(config, facts, world_size) + file_problems(config, facts, samples)


def refuse(problems: list[Problem]) -> None:
    """Raise ConfigError if anything was found."""
    if problems:
        raise ConfigError(
            [*problems, f"{len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was started"]
        )


def config_problems(config: Config, facts: ModelFacts | None, world_size: int) -> list[Problem]:
    """Return the problems that are the same on every machine. facts: the model's, None if they are not known."""
    return [
        *(_model_problems(config, facts) if facts is not None else ()),
        *config.model.problems(),
        *config.task.problems(),
        *config.rollout.problems(),
        *config.pipeline.problems(),
        *config.objective.problems(),
        *stale_problems(config.objective, config.pipeline.lag),
        *config.replay.problems(),
        *config.train.optimizer.problems(),
        *config.eval.problems(),
        *config.export.problems(),
        *config.report.problems(),
        *environment_problems(config),
        *_evaluation_problems(config),
        *_batch_problems(config),
        *_pipeline_problems(config),
        *_segment_problems(config),
        *_replay_problems(config),
        *_capture_problems(config),
        *_mask_problems(config),
        *lora_problems(config, facts),
        *engine_problems(config),
        *queue_problems(config),
        *neighbour_problems(config, world_size),
        *passed_problems(config, facts),
        *layout_problems(config.parallel, config.train, facts, world_size),
        *_share_problems(config, world_size),
        *_profile_problems(config, world_size),
    ]


def _model_problems(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    where: About = {"folder": config.model.path}
    beyond = [token for token in facts.eos_token_ids if not 0 <= token < facts.vocab]
    if beyond or not facts.eos_token_ids:
        yield describe(
            "eos_token_id must name the tokens that end a completion",
            where={"key": "model.path", **where},
            got=list(facts.eos_token_ids),
            expected=f"at least one id below vocab_size = {facts.vocab}",
        )
    if config.rollout.weights != "exact" and facts.linear_bias:
        yield describe(
            "fp8_e4m3 does not support this model, whose experts are stacked in shared tensors",
            where={"key": "rollout.weights", **where},
            got=config.rollout.weights,
            expected="exact",
        )
    if config.placement.copies and facts.linear_bias:
        yield describe(
            "experts with biases cannot be copied",
            where={"key": "placement.copies", **where},
            got=config.placement.copies,
            expected=0,
        )
    gpus = 1 if config.cluster is None or config.run.replays is not None else config.cluster.gpus_per_engine
    keys = facts.kv_heads if facts.latent is None else facts.heads
    if facts.heads % gpus or max(keys, gpus) % min(keys, gpus):
        yield describe(
            "vLLM cannot divide the attention heads among the GPUs of an engine",
            where={"key": "cluster.gpus_per_engine", **where},
            got=gpus,
            expected=f"a divisor of {facts.heads} heads that divides {keys} key-value heads or is a multiple of them",
        )
    if config.train.expert_bias_rate and not facts.expert_bias:
        yield describe(
            "the model's routers have no expert bias",
            where={"key": "train.expert_bias_rate", **where},
            got=config.train.expert_bias_rate,
            expected=0,
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
    if longest > facts.longest:
        yield describe(
            "longer than the model's positions",
            where={"key": "rollout.max_prompt_tokens + rollout.max_completion_tokens"},
            got=longest,
            expected=f"at most {facts.longest}, by max_position_embeddings and YaRN",
            do="shorten one of them, or scale the model's angles: in its config.json, add rope_scaling with YaRN and "
            "set max_position_embeddings to factor x original_max_position_embeddings",
        )
    if config.rollout.top_k >= facts.vocab:
        yield describe(
            "removes no token",
            where={"key": "rollout.top_k"},
            got=config.rollout.top_k,
            expected=f"below vocab_size = {facts.vocab}, or 0 for all",
        )


def _mask_problems(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    removes = rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0
    serves = config.task.environment is not None or config.gateway != GatewayConfig()
    if rollout.keep_sampling_mask and not (removes or serves):
        yield describe(
            "no token is removed, so there is no mask to keep",
            where={"key": "rollout.keep_sampling_mask"},
            got="true",
            expected="rollout.top_k above 0, rollout.top_p below 1, rollout.min_p above 0, or a gateway",
            do="set one of them, or turn it off",
        )


def _capture_problems(config: Config) -> Iterator[Problem]:
    """Yield the settings that vLLM's own capture does not go with."""
    centering, fraction = config.objective.score_centering, config.rollout.router_logits_fraction
    cache, only = config.rollout.vllm.get("enable_prefix_caching"), "vLLM's own capture records only routes"
    refused = (
        ("objective.score_centering", centering is not None, centering, only),
        ("rollout.router_logits_fraction", fraction > 0, fraction, only),
        ("rollout.vllm.enable_prefix_caching", cache is False, cache, "vLLM's own capture needs the prefix cache"),
    )
    for key, wrong, got, what in refused:
        if wrong and config.rollout.capture == "native":
            yield describe(
                what,
                where={"key": key, "given": "rollout.capture is native"},
                got=got,
                expected="rollout.capture patch or worker",
            )


def _pipeline_problems(config: Config) -> Iterator[Problem]:
    mode, level = config.pipeline.mode, config.rollout.sleep_level
    beside = config.cluster is not None and not has_servers(config) and config.run.replays is None
    if mode != "sync" and beside:
        yield overlap_problem(mode)
    if mode != "sync" and level:
        yield describe(
            "a sampler that works at the same time as the trainer cannot give its memory back",
            where={"key": "rollout.sleep_level", "given": f"pipeline.mode is {mode}"},
            got=level,
            expected=0,
        )
    if config.pipeline.by_group and config.rollout.capture == "native":
        yield describe(
            "vLLM's own capture does not say which weights made which row",
            where={"key": "rollout.capture", "given": f"pipeline.max_staleness is {config.pipeline.lag}"},
            got="native",
            expected="patch or worker",
        )
    if mode != "sync" and config.rollout.weight_transfer == "cuda_ipc":
        yield describe(
            "goes through a GPU that trainer and sampler share, and they work at the same time",
            where={"key": "rollout.weight_transfer", "given": f"pipeline.mode is {mode}"},
            got="cuda_ipc",
            expected="another way, and a sampler on its own GPUs",
        )
    if config.pipeline.kv == "recompute" and config.rollout.stop:
        yield describe(
            "every update would restart unfinished completions, because a stop string may lie across the cut",
            where={"key": "pipeline.kv", "given": f"rollout.stop is {list(config.rollout.stop)}"},
            got="recompute",
            expected="keep",
        )


def _segment_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of completions that are aborted at each update and continued as segments."""
    pipeline, rollout = config.pipeline, config.rollout
    continued = pipeline.by_group and pipeline.kv == "recompute" and not rollout.stop
    anew = {"rollout.stop": bool(rollout.stop), "task.environment": config.task.environment is not None}
    for key, is_set in anew.items() if pipeline.by_group and pipeline.segments == "first" else ():
        if is_set:
            yield describe(
                "aborted completions are never continued, but restarted",
                where={"key": "pipeline.segments", "given": f"{key} is set"},
                got="first",
                do=f"remove pipeline.segments, or {key}",
            )
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    if continued and pipeline.segments == "exact" and config.train.microbatch_tokens < 2 * longest:
        yield describe(
            "two segments of one completion may not fit into a microbatch, and one loss needs both",
            where={"key": "train.microbatch_tokens", "given": "pipeline.kv is recompute, pipeline.segments is exact"},
            got=config.train.microbatch_tokens,
            expected=f"at least twice rollout.max_prompt_tokens + rollout.max_completion_tokens = {2 * longest}",
            do="raise it, or set pipeline.segments to first or pipeline.kv to keep",
        )


def _batch_problems(config: Config) -> Iterator[Problem]:
    rollout, train = config.rollout, config.train
    if rollout.prompts_per_step % train.updates_per_step:
        yield describe(
            "does not divide the groups of a step",
            where={"key": "train.updates_per_step"},
            got=train.updates_per_step,
            expected=f"a divisor of rollout.prompts_per_step = {rollout.prompts_per_step}",
        )
    overlong = config.task.overlong
    if overlong is not None and overlong.cache_tokens >= rollout.max_completion_tokens:
        yield describe(
            "even a completion without a token would be overlong",
            where={"key": "task.overlong.cache_tokens"},
            got=overlong.cache_tokens,
            expected=f"below rollout.max_completion_tokens = {rollout.max_completion_tokens}",
        )
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    if train.microbatch_tokens < longest:
        yield describe(
            "the longest possible sequence does not fit",
            where={"key": "train.microbatch_tokens"},
            got=train.microbatch_tokens,
            expected=f"at least rollout.max_prompt_tokens + rollout.max_completion_tokens = {longest}",
        )
    optimizer, updates = train.optimizer, config.run.steps * train.updates_per_step
    if optimizer.warmup_steps > updates:
        yield describe(
            "the run ends before the warm-up does",
            where={"key": "train.optimizer.warmup_steps"},
            got=optimizer.warmup_steps,
            expected=f"at most run.steps * train.updates_per_step = {updates}",
        )
    falls = optimizer.schedule != "constant" and optimizer.min_lr == 0
    if falls and optimizer.decay_steps is not None and optimizer.decay_steps < updates:
        yield describe(
            "the run continues with a learning rate of 0",
            where={"key": "train.optimizer.min_lr"},
            got=optimizer.min_lr,
            expected=f"above 0: the run makes {updates} updates, and train.optimizer.decay_steps is "
            f"{optimizer.decay_steps}",
            do="set train.optimizer.min_lr, or raise train.optimizer.decay_steps",
        )


def _evaluation_problems(config: Config) -> Iterator[Problem]:
    evaluation = config.eval
    if evaluation.best is not None and evaluation.best not in (known := config.task.pass_rates):
        yield describe(
            "no evaluation has this metric",
            where={"key": "eval.best"},
            got=evaluation.best,
            expected=f"one of {', '.join(known)}",
            do=did_you_mean(evaluation.best, known),
        )


def _replay_problems(config: Config) -> Iterator[Problem]:
    replay = config.replay
    given: About = {"given": f"replay.overlap_chunks is {config.replay.overlap_chunks}"}
    if replay.mode == "r2" and config.objective.old_logprobs != "trainer":
        yield describe(
            "replay.mode r2 takes its routes from the trainer's old-logprob pass",
            where={"key": "objective.old_logprobs"},
            got=config.objective.old_logprobs,
            expected="trainer",
        )
    if replay.overlap_chunks and config.parallel.expert == 1:
        yield describe(
            "no rows travel, so there is nothing to overlap with computation",
            where={"key": "parallel.expert", **given},
            got=1,
            expected="at least 2",
            do="set replay.overlap_chunks to 0",
        )
    for name in ("moe_shared_expert_overlap", "overlap_dispatch_backward_with_experts_wgrad"):
        if replay.overlap_chunks and config.train.megatron.get(name):
            yield describe(
                "Megatron would overlap the same exchange with other work",
                where={"key": f"train.megatron.{name}", **given},
                got=True,
                expected="false",
                do="remove it, or set replay.overlap_chunks to 0",
            )
    if replay.overlap_chunks and config.train.overlap_expert_parallel_comm:
        yield describe(
            "combined 1F1B runs layers in its own parts while rows travel",
            where={"key": "train.overlap_expert_parallel_comm", **given},
            got=True,
            expected="false",
            do="turn one of the two off",
        )


def _share_problems(config: Config, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    per_update = config.rollout.prompts_per_step // config.train.updates_per_step * config.rollout.group_size
    shares = world_size // (parallel.tensor * parallel.context * parallel.pipeline)
    if 0 < per_update < shares:
        yield describe(
            "fewer sequences in an update than data-parallel ranks to train on them",
            where={"key": "rollout"},
            got=f"{per_update} sequences and {shares} ranks",
            do="raise rollout.prompts_per_step or rollout.group_size, or lower train.updates_per_step",
        )
    if config.placement.experts == "traced" and config.parallel.expert == 1:
        yield describe(
            "there are no other ranks to place experts on",
            where={"key": "placement.experts", "given": "parallel.expert is 1"},
            got="traced",
            expected="natural",
        )
    if config.placement.copies:
        yield from _copies_problems(config)
    else:
        for key in ("least_copied_rows", "node_ranks"):
            if (got := getattr(config.placement, key)) is not None:
                yield describe(
                    "it has no effect if no expert is copied",
                    where={"key": f"placement.{key}", "given": "placement.copies is 0"},
                    got=got,
                    expected="null",
                )


def _copies_problems(config: Config) -> Iterator[Problem]:
    given: About = {"given": f"placement.copies is {config.placement.copies}"}
    reasons = (
        ("parallel.expert", config.parallel.expert == 1, 1, "at least 2", "no other rank can take a copy"),
        (
            "placement.node_ranks",
            (config.placement.node_ranks or 0) % config.parallel.expert_tensor != 0,
            config.placement.node_ranks,
            f"a multiple of parallel.expert_tensor, {config.parallel.expert_tensor}",
            "ranks that share an expert's matrices would be on several nodes",
        ),
        ("replay.mode", config.replay.mode == "off", "off", "r3 or r2", "only known routes say which experts to copy"),
        ("replay.plan", config.replay.plan is False, False, "true or null", "copies are part of dispatch plans"),
        (
            "train.overlap_expert_parallel_comm",
            config.train.overlap_expert_parallel_comm,
            True,
            "false",
            "Megatron's overlap of microbatches does not exchange copies",
        ),
    )
    for key, wrong, got, expected, what in reasons:
        if wrong:
            do = "change it, or set placement.copies to 0"
            yield describe(what, where={"key": key, **given}, got=got, expected=expected, do=do)


def _profile_problems(config: Config, world_size: int) -> Iterator[Problem]:
    profile = config.report.profile
    if profile is None:
        return
    for key, last, most in (
        ("steps", max(profile.steps), config.run.steps),
        ("ranks", max(profile.ranks), world_size - 1),
    ):
        if last > most:
            yield describe(
                "the run has no such step or rank to record",
                where={"key": f"report.profile.{key}"},
                got=last,
                expected=f"at most {most}",
            )
