"""Everything that is wrong with a config, the files it names and the number of ranks: all of it, before any work.

The schema holds what one field can say; here stands what needs two fields or the model, in `check_files` what needs the
machine. Headers and small files only are read and nobody's code is imported: quick, and without side effects.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator

from moe_rl.config.check_files import file_problems
from moe_rl.config.check_stages import stage_problems
from moe_rl.config.layout import chunk_layers, least_ranks
from moe_rl.config.objective import correction_problems, kl_problems
from moe_rl.config.schema import LOSS_PARAMETERS, Config, ParallelConfig, TrainConfig
from moe_rl.config.servers import server_problems
from moe_rl.errors import ConfigError, describe
from moe_rl.models.hf import ModelFacts, read_model


def problems(config: Config, world_size: int) -> list[str]:
    """Every reason why `config` cannot run here on `world_size` ranks, one message each; empty when it can.

    Not looked at here: the state of what is installed, and what needs the plan's arithmetic (`planning.fit`).
    """
    try:
        facts, found = read_model(config.model.path), []
    except ConfigError as error:
        facts, found = None, error.problems
    return found + config_problems(config, facts, world_size) + file_problems(config, facts)


def config_problems(config: Config, facts: ModelFacts | None, world_size: int) -> list[str]:
    """Those that are the same on every machine. facts: of the model, None when they are not known."""
    return [
        *(_model_problems(config, facts) if facts is not None else ()),
        *_task_problems(config),
        *_batch_problems(config),
        *_sampling_problems(config, facts),
        *server_problems(config),
        *_objective_problems(config),
        *correction_problems(config.objective),
        *kl_problems(config.objective),
        *_replay_problems(config),
        *layout_problems(config.parallel, config.train, facts, world_size),
        *_share_problems(config, world_size),
    ]


def _model_problems(config: Config, facts: ModelFacts) -> Iterator[str]:
    where = str(config.model.path)
    beyond = [token for token in facts.eos_token_ids if not 0 <= token < facts.vocab]
    if beyond or not facts.eos_token_ids:
        yield describe(
            "model.path: eos_token_id must name the tokens that end a completion",
            where=where,
            got=list(facts.eos_token_ids),
            expected=f"at least one id below vocab_size = {facts.vocab}",
        )
    if config.rollout.weights != "exact" and facts.linear_bias:
        yield describe(
            "rollout.weights: this model's experts share tensors that are not matrices, which are not rounded",
            where=where,
            got=config.rollout.weights,
            expected="exact",
        )
    if config.train.expert_bias_rate and not facts.expert_bias:
        yield describe(
            "train.expert_bias_rate: the model's routers have no expert bias",
            where=where,
            got=config.train.expert_bias_rate,
            expected=0,
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens
    if longest > facts.max_position_embeddings:
        yield describe(
            "rollout.max_prompt_tokens + rollout.max_completion_tokens: longer than the model's positions",
            got=longest,
            expected=f"at most max_position_embeddings = {facts.max_position_embeddings}",
            do="shorten one of them",
        )


def _task_problems(config: Config) -> Iterator[str]:
    task = config.task
    if task.pass_reward not in task.rewards:
        close = difflib.get_close_matches(task.pass_reward, task.rewards, n=1)
        yield describe(
            "task.pass_reward: no such reward",
            got=task.pass_reward,
            expected=f"one of {', '.join(task.rewards)}",
            do=f"did you mean {close[0]}?" if close else "",
        )
    if all(reward.weight == 0 for reward in task.rewards.values()):
        yield describe("task.rewards: every weight is 0, so there is nothing to learn", do="give one a weight")


def _batch_problems(config: Config) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    if rollout.prompts_per_step % train.updates_per_step:
        yield describe(
            "train.updates_per_step: does not divide the groups of a step",
            got=train.updates_per_step,
            expected=f"a divisor of rollout.prompts_per_step = {rollout.prompts_per_step}",
        )
    overlong = config.task.overlong
    if overlong is not None and overlong.cache_tokens >= rollout.max_completion_tokens:
        yield describe(
            "task.overlong.cache_tokens: even a completion without a token would be overlong",
            got=overlong.cache_tokens,
            expected=f"below rollout.max_completion_tokens = {rollout.max_completion_tokens}",
        )
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    if train.microbatch_tokens < longest:
        yield describe(
            "train.microbatch_tokens: the longest possible sequence does not fit",
            got=train.microbatch_tokens,
            expected=f"at least rollout.max_prompt_tokens + rollout.max_completion_tokens = {longest}",
        )


def _sampling_problems(config: Config, facts: ModelFacts | None) -> Iterator[str]:
    rollout = config.rollout
    removing = {"top_k": rollout.top_k > 0, "top_p": rollout.top_p < 1, "min_p": rollout.min_p > 0}
    asked = ", ".join(f"rollout.{name} {getattr(rollout, name)}" for name, removes in removing.items() if removes)
    if asked and not rollout.keep_sampling_mask:
        yield describe(
            "rollout.keep_sampling_mask: the sampler's log-probabilities would be of the tokens that were left to draw "
            "from, the trainer's of all, and every ratio of the two wrong",
            where=asked,
            got="false",
            expected="true",
            do="set it, or draw from all tokens",
        )
    if rollout.keep_sampling_mask and not asked:
        yield describe(
            "rollout.keep_sampling_mask: nothing is removed, so there is no mask to keep",
            got="true",
            expected="rollout.top_k above 0, rollout.top_p below 1 or rollout.min_p above 0 with it",
            do="set one of them, or turn it off",
        )
    if rollout.keep_sampling_mask and rollout.capture == "native":
        yield describe(
            "rollout.keep_sampling_mask: vLLM's own capture records routes only",
            where="rollout.capture is native",
            got="true",
            expected="rollout.capture patch or worker",
        )
    if rollout.top_k == 1:
        yield describe(
            "rollout.top_k: leaves one token, whose log-probability is 0 whatever the policy: nothing can be learned",
            got=1,
            expected="at least 2, or 0 for all",
        )
    if facts is not None and rollout.top_k >= facts.vocab:
        yield describe(
            "rollout.top_k: removes no token",
            got=rollout.top_k,
            expected=f"below vocab_size = {facts.vocab}, or 0 for all",
        )


def _objective_problems(config: Config) -> Iterator[str]:
    objective, updates = config.objective, config.train.updates_per_step
    if objective.clip_low is not None and objective.clip_low >= 1:
        yield describe(
            "objective.clip_low: the lower clip bound 1 - clip_low is not above 0",
            got=objective.clip_low,
            expected="below 1",
        )
    taken = LOSS_PARAMETERS[objective.name]
    unset = [key for key in taken if getattr(objective, key) is None]
    if unset:
        yield describe(
            f"{' and '.join(f'objective.{key}' for key in unset)}: no value fits every loss",
            where=f"objective.name is {objective.name}",
            got="no value",
            do=f"set it; published or usual: {', '.join(f'{key} {taken[key]}' for key in unset)}",
        )
    parameters = {key for of_loss in LOSS_PARAMETERS.values() for key in of_loss}
    for key in sorted(parameters - set(taken)):
        if getattr(objective, key) is not None:
            yield describe(
                f"objective.{key}: the loss does not take it",
                where=f"objective.name is {objective.name}",
                got=getattr(objective, key),
                expected=f"only {', '.join(f'objective.{key}' for key in taken)}",
                do="remove it, or set it to null",
            )
    if objective.name in ("dr_grpo", "minirl") and objective.advantage != "group_mean":
        yield describe(
            "objective.advantage: the method's advantages are rewards minus their group's mean, undivided",
            where=f"objective.name is {objective.name}",
            got=objective.advantage,
            expected="group_mean",
        )
    old_logprobs = {"dppo_tv": "sampler", "minirl": "trainer", "decoupled": "trainer"}.get(objective.name)
    if old_logprobs not in (None, objective.old_logprobs):
        yield describe(
            "objective.old_logprobs: not the policy that the method's ratio is taken to",
            where=f"objective.name is {objective.name}",
            got=objective.old_logprobs,
            expected=old_logprobs,
        )
    betas = config.train.optimizer.betas
    if max(betas) >= 1:
        yield describe("train.optimizer.betas: Adam's averages never move at 1", got=list(betas), expected="below 1")
    if config.train.optimizer.warmup_steps > config.run.steps * updates:
        yield describe(
            "train.optimizer.warmup_steps: the run ends before the warm-up does",
            got=config.train.optimizer.warmup_steps,
            expected=f"at most run.steps * train.updates_per_step = {config.run.steps * updates}",
        )


def _replay_problems(config: Config) -> Iterator[str]:
    replay = config.replay
    if replay.mode == "r2" and config.objective.old_logprobs != "trainer":
        yield describe(
            "objective.old_logprobs: replay.mode r2 takes its routes from the trainer's old-logprob pass",
            got=config.objective.old_logprobs,
            expected="trainer",
        )
    if replay.mode == "off" and replay.plan:
        yield describe(
            "replay.plan: without replay no route is known before its layer runs",
            where="replay.mode is off",
            got=True,
            expected="false or null",
        )
    if replay.overlap_chunks:
        yield from _overlap_problems(config)
    unknown = {
        "replay.mode is off": replay.mode == "off",
        "replay.plan is false": replay.plan is False,
        "replay.missing is native": replay.missing == "native",
        "replay.stale is native": replay.stale == "native",
    }
    if replay.max_rows is not None and any(unknown.values()):
        yield describe(
            "replay.max_rows: not all rows are counted before the step",
            where=", ".join(why for why, holds in unknown.items() if holds),
            got=replay.max_rows,
            expected="null, or every row replayed by a plan",
        )
    falls_back = replay.missing != "refuse" or replay.stale == "native"
    if falls_back != (replay.max_fallback_fraction > 0):
        yield describe(
            "replay.max_fallback_fraction: bounds what replay.missing and replay.stale let pass, and only that",
            where=f"replay.missing is {replay.missing}, replay.stale is {replay.stale}",
            got=replay.max_fallback_fraction,
            expected="above 0" if falls_back else 0,
        )
    if (replay.stale != "refuse") != (replay.max_staleness > 0):
        yield describe(
            "replay.max_staleness: says how old the routes may be that replay.stale lets pass",
            where=f"replay.stale is {replay.stale}",
            got=replay.max_staleness,
            expected="at least 1" if replay.stale != "refuse" else 0,
        )


def _overlap_problems(config: Config) -> Iterator[str]:
    replay, where = config.replay, f"replay.overlap_chunks is {config.replay.overlap_chunks}"
    if replay.mode == "off" or replay.plan is False:
        key, value = ("replay.mode", "off") if replay.mode == "off" else ("replay.plan", False)
        yield describe(
            f"{key}: rows are sent before the router has run by dispatch plans only, which replayed routes have",
            where=where,
            got=value,
            expected="r3 or r2" if value == "off" else "true or null",
            do="change it, or set replay.overlap_chunks to 0",
        )
    if config.parallel.expert == 1:
        yield describe(
            "parallel.expert: no rows travel that anything could be computed under",
            where=where,
            got=1,
            expected="at least 2",
            do="set replay.overlap_chunks to 0",
        )
    if config.train.overlap_expert_parallel_comm:
        yield describe(
            "train.overlap_expert_parallel_comm: combined 1F1B runs layers in parts of its own, while rows travel",
            where=where,
            got=True,
            expected="false",
            do="turn one of the two off",
        )


def layout_problems(
    parallel: ParallelConfig, train: TrainConfig, facts: ModelFacts | None, world_size: int
) -> Iterator[str]:
    """Every reason why the model cannot be laid out and scheduled so on `world_size` ranks. facts None: not known."""
    yield from _rank_problems(parallel, facts, world_size)
    yield from _schedule_problems(parallel, train, facts)


def _rank_problems(parallel: ParallelConfig, facts: ModelFacts | None, world_size: int) -> Iterator[str]:
    least = least_ranks(parallel)
    if world_size % least:
        sizes = ", ".join(f"parallel.{dimension} = {size}" for dimension, size in parallel if size not in (1, ()))
        yield describe(
            "parallel: the number of ranks does not fit it",
            got=f"{world_size} ranks and {sizes}",
            expected=f"a multiple of {least} ranks",
            do=f"start as many with torchrun --nproc-per-node {least}, or change parallel",
        )
    for dimension, name, size in _divided_sizes(facts) if facts is not None else ():
        ranks = getattr(parallel, dimension)
        if size % ranks:
            yield describe(
                f"parallel.{dimension}: does not divide the model's {name}",
                got=ranks,
                expected=f"a divisor of {size}",
            )
    yield from stage_problems(parallel, facts)
    if facts is not None and facts.linear_bias and parallel.expert_tensor > 1:
        yield describe(
            "parallel.expert_tensor: megatron cannot share an expert that has biases",
            got=parallel.expert_tensor,
            expected=1,
            do="raise parallel.expert instead",
        )
    if facts is not None and facts.tie_word_embeddings and parallel.pipeline > 1:
        yield describe(
            "parallel.pipeline: the first and the last stage would share the tied embedding, which is not supported",
            got=parallel.pipeline,
            expected="1 for a model with tie_word_embeddings",
        )


def _share_problems(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    per_update = config.rollout.prompts_per_step // config.train.updates_per_step * config.rollout.group_size
    shares = world_size // (parallel.tensor * parallel.context * parallel.pipeline)
    if 0 < per_update < shares:
        yield describe(
            "rollout: fewer sequences in an update than data-parallel ranks to train on them",
            got=f"{per_update} sequences and {shares} ranks",
            do="raise rollout.prompts_per_step or rollout.group_size, or lower train.updates_per_step",
        )
    if config.placement.experts == "traced" and config.parallel.expert == 1:
        yield describe(
            "placement.experts: there are no other ranks to place experts on",
            where="parallel.expert is 1",
            got="traced",
            expected="natural",
        )


def _schedule_problems(parallel: ParallelConfig, train: TrainConfig, facts: ModelFacts | None) -> Iterator[str]:
    if train.recompute in ("uniform", "block"):
        held = min(map(len, itertools.chain(*chunk_layers(facts, parallel)))) if facts is not None else None
        if held and train.recompute_layers > held:
            yield describe(
                "train.recompute_layers: more than the layers of the shortest run of adjacent ones",
                got=train.recompute_layers,
                expected=f"at most {held}",
            )
    elif train.recompute_layers > 1:
        yield describe(
            f"train.recompute_layers: without effect where train.recompute is {train.recompute}",
            got=train.recompute_layers,
            expected="train.recompute uniform or block",
            do="remove it, or set train.recompute",
        )
    if train.packing == "load" and parallel.expert == 1:
        yield describe(
            "train.packing: there are no experts on other ranks to load evenly",
            where="parallel.expert is 1",
            got="load",
            expected="length",
        )
    if not train.overlap_expert_parallel_comm:
        if train.delay_wgrad_compute:
            yield describe(
                "train.delay_wgrad_compute: there is no communication that delayed work would go under",
                where="train.overlap_expert_parallel_comm is off",
                got=True,
                expected="false",
                do="turn the overlap on, or this off",
            )
        return
    where = "train.overlap_expert_parallel_comm is on"
    if parallel.expert == 1:
        yield describe("parallel.expert: there is nothing to overlap", where=where, got=1, expected="at least 2")
    if train.dtype != "bfloat16":
        yield describe(
            "train.dtype: megatron overlaps in bfloat16 only", where=where, got=train.dtype, expected="bfloat16"
        )
    if train.recompute != "none":
        yield describe(
            "train.recompute: megatron cannot recompute layers that it runs in parts",
            where=where,
            got=train.recompute,
            expected="none",
        )
    if parallel.pipeline > 1 and parallel.virtual_pipeline == 1:
        yield describe(
            "parallel.virtual_pipeline: in a pipeline megatron overlaps interleaved stages only",
            where=where,
            got=1,
            expected="at least 2",
            do="set it to 2, or turn one of parallel.pipeline and the overlap off",
        )


def _divided_sizes(facts: ModelFacts) -> Iterator[tuple[str, str, int]]:
    """(a dimension of `parallel`, what it must divide, how many of it the model has)."""
    yield "expert", "experts (num_experts)", facts.num_experts
    yield "expert_tensor", "experts' width (moe_intermediate_size)", facts.moe_intermediate_size
    yield "tensor", "key-value heads (num_key_value_heads)", facts.kv_heads
    yield "tensor", "vocabulary (vocab_size)", facts.vocab
    if len(facts.moe_layers) < facts.layers:
        yield "tensor", "dense layers' width (intermediate_size)", facts.intermediate_size
    if facts.shared_intermediate_size:
        yield "tensor", "shared experts' width together", facts.shared_intermediate_size
