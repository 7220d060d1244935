"""Defines the sections `rollout`, `replay` and `pipeline`: how sequences are sampled, how the trainer uses their
routes, and how both overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from moe_rl.config.section import (
    BelowOne,
    Count,
    Few,
    Fraction,
    Location,
    NotNegative,
    Number,
    Seconds,
    Section,
    Share,
    Whole,
)
from moe_rl.errors import About, Problem, describe
from moe_rl.types import LONGEST_STOP_STRING, MOST_STOP_STRINGS


class PipelineConfig(Section):
    """Says how sampling and training overlap."""

    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: a step samples its completions with the newest weights, then trains on them. one_step_off: the next step is
    sampled while a step trains, with the weights from before that step. async: groups of completions are sampled
    without a break, new weights go in while requests are in flight, and a step trains on the groups that are ready.
    one_step_off and async need a sampler that shares no GPU with the trainer."""
    max_staleness: Whole | None = None
    """Largest number of versions that the weights that began a group may lag those that train on it, in mode async. The
    limit applies when a step takes the group, after its time in the queue. 0: as sync, bit for bit. null: 1 in mode
    async."""
    kv: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of requests that are in flight when new weights arrive, in mode async. keep: they
    continue with it. recompute: they are aborted, and continued with a new prefill under the new weights."""
    segments: Literal["exact", "first"] = "exact"
    """How an aborted and continued completion is trained on, in mode async: aborted at an update with kv recompute, or
    with either kv when the run ended in the middle of it and was resumed. exact: each part is its own segment after the
    earlier parts, with routes for all its tokens from the weights that sampled it. All segments of a completion are in
    one microbatch and one term of the loss; a part that leaves no room for another in train.microbatch_tokens is
    sampled again. first: one sequence, in which every token keeps the first routes that were recorded for it."""
    late: Literal["wait", "drop"] = "wait"
    """What a step does, in mode async, about groups that are not ready and would be too old for the next step. wait: it
    waits for them. drop: they are dropped and their prompts count as used."""
    oversample: NotNegative = 0.0
    """Groups that may be sampled beyond those that steps need, as a fraction of rollout.prompts_per_step (mode async).
    Steps do not wait for this many of the slowest groups, which are then dropped."""

    @property
    def lag(self) -> int:
        """Return how many versions the weights that sampled a completion may lag the trainer's."""
        if self.mode == "async":
            return 1 if self.max_staleness is None else self.max_staleness
        return int(self.mode == "one_step_off")

    @property
    def by_group(self) -> bool:
        """Return whether groups are sampled one by one, and not the batch of a step at once."""
        return self.mode == "async" and self.lag > 0

    @property
    def ahead(self) -> int:
        """Return how many batches are sampled before the step that trains on them begins."""
        return int(self.mode == "one_step_off")

    def problems(self) -> Iterator[Problem]:
        keys: tuple[str, ...] = "kv", "segments", "late", "oversample"
        given, do = "pipeline.max_staleness is 0", "raise it"
        if self.mode != "async":
            keys, given, do = ("max_staleness", *keys), f"pipeline.mode is {self.mode}", "set it to async"
        for key in keys if not self.by_group else ():
            if (value := getattr(self, key)) != type(self).model_fields[key].default:
                yield describe(
                    "only used when groups are sampled without a break",
                    where={"key": f"pipeline.{key}", "given": given},
                    got=value,
                    do=f"{do}, or remove pipeline.{key}",
                )


StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP_STRING)]


class RolloutConfig(Section):
    """Sets how completions are sampled, and by which engine or servers."""

    prompts_per_step: Few
    """Number of prompts in one step."""
    group_size: Annotated[int, Field(ge=2, le=2**16)]
    """Number of completions sampled for each prompt."""
    dynamic_sampling_rounds: Few = 1
    """Largest number of sampling rounds in a step (DAPO's dynamic sampling). Each round samples prompts_per_step
    further prompts, until prompts_per_step groups have rewards that differ. The step trains on the first
    prompts_per_step of these groups. 1: one round, and the step trains on all groups."""
    max_prompt_tokens: Count
    """Longest prompt. Reading the prompts refuses longer ones."""
    max_completion_tokens: Count
    """Longest completion. Longer ones are truncated."""
    stop_token_ids: tuple[Whole, ...] = ()
    """Tokens that end a completion, besides the model's end-of-sequence tokens. Such a token is sampled and trained on
    like any other; the text that rewards see ends before it."""
    stop: Annotated[tuple[StopString, ...], Field(max_length=MOST_STOP_STRINGS)] = ()
    """Texts that end a completion as soon as the sampled text contains one, also across tokens. Its tokens are trained
    on like any others; the text that rewards see ends before it. The sampler then loads the tokenizer."""
    temperature: Annotated[float, Field(ge=0.01, le=2.0)] = 1.0
    """Sampling temperature. The trainer divides its logits by it too. vLLM would use 0.01 for a lower temperature, and
    refuses one above 2."""
    top_k: Whole = 0
    """Sample from the `top_k` most likely tokens. 0: from all. top_k, top_p and min_p need keep_sampling_mask. The
    sampled half of the evaluation uses them too."""
    top_p: Share = 1.0
    """Sample from the smallest set of tokens that together have this probability. 1: from all."""
    min_p: BelowOne = 0.0
    """Sample from the tokens whose probability is at least this times that of the most likely token. 0: from all."""
    keep_sampling_mask: bool = False
    """Whether the sampler records, for every sampled token, which tokens top_k, top_p, min_p and a grammar left. The
    trainer then renormalises its distributions over the same tokens in every pass (DeepSeek-V3.2, arXiv 2512.02556).
    Agents may ask for JSON schemas and forced tool calls only with it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision in which the sampler computes."""
    weights: Literal["exact", "fp8_e4m3"] = "exact"
    """exact: the sampler gets the trainer's weights in `dtype`. fp8_e4m3: the matrices of attention, experts and dense
    layers are rounded to block-scaled float8 before every transfer, the first included; the sampler still computes in
    `dtype`."""
    weight_transfer: Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "disk"] = "auto"
    """How new weights reach the sampler. shared_memory: through the memory of one host. cuda_ipc: through GPUs that
    trainer and sampler share. broadcast: from several trainer ranks, over NCCL, or over gloo without GPUs. disk:
    through the run folder, which both see. auto: the way that --plan shows."""
    weight_bucket_mib: Annotated[float, Field(gt=0.0, le=2**20)] = 256.0
    """Largest amount of weights that a rank holds at a time on their way to the sampler. A larger tensor is sent
    alone."""
    weight_senders: Count = 4
    """Largest number of trainer ranks that broadcast weights. Further ranks pass theirs to one of these. Every sender
    has its own connection to all workers of the samplers, which takes memory of their GPUs. Only used with
    broadcast."""
    sleep_level: Annotated[Literal[0, 1, 2], Number] = 0
    """GPU memory that a sampler on the trainer's GPUs gives back while the trainer works. 0: none. 1: it drops the KV
    cache and moves its weights to the host. 2: it drops both, and gets weights with the next update. No effect on a
    CPU."""
    request_seeds: bool = True
    """Whether every request has random numbers of its own, so that a run can be repeated and resumed bit for bit. vLLM
    then draws for one request after the other: an estimated 1 to 2 ms of a step at 256 requests on a GPU. false: all
    requests of an engine share one generator, and the same run samples other tokens whenever its steps differ."""
    max_concurrent: Few = 256
    """Largest number of sequences that an engine decodes at once."""
    kv_cache_mib: Count = 512
    """Size of the engine's KV cache on each of its GPUs."""
    capture: Literal["patch", "worker", "native"] = "patch"
    """What records routes. patch: hooks in the patched vLLM. worker: the same recorder, attached by vLLM's worker
    class, for a vLLM that may not be patched. native: vLLM's own capture (Model Runner V2, which needs a GPU)."""
    router_logits_fraction: Fraction = 0.0
    """Fraction of the tokens whose router logits are stored with their routes. Native capture cannot store any."""
    cuda_graphs: bool | None = None
    """Whether vLLM compiles its forward pass and replays it as CUDA graphs, which decodes faster. Routes are recorded,
    but the recorder cannot compare them with the routers' logits (rollout/witnessed_rows stays 0). null: yes for
    servers with GPUs, unless router_logits_fraction is set; no for the engines that rank 0 starts."""
    vllm: dict[str, Any] = {}
    """Further fields of vLLM's EngineArgs that moe_rl does not set, for the engine or servers of the run, such as
    kv_cache_dtype, quantization, speculative_config, enable_prefix_caching or max_num_batched_tokens.
    docs/howto/one_node.md says which are refused, and why."""
    startup_timeout_seconds: Seconds = 300.0
    """Time limit for an engine to start, and for a server to load new weights."""
    engines: Few = 1
    """Number of engines that rank 0 starts beside the ranks of its node, where no server is named. Engine n has all
    weights and one worker, on the GPU of local rank n. The engines share a step's requests, and sleep together."""
    in_flight: Count | None = None
    """Number of requests that a server or engine may have before it gets no further group from the queue of a step or
    an evaluation (modes sync and one_step_off). Slow ones then sample fewer groups, but which one samples a group
    depends on their speed, so a run no longer repeats bit for bit. Fewer in flight even out more, and decode slower.
    null: no queue; each gets a fixed share of the groups before they begin."""
    servers: tuple[str, ...] = ()
    """URLs (http://host:port) of vLLM servers that sample instead of engines started by rank 0. `moe-rl serve
    --config` starts one. Each server holds all weights, serves this run alone, and decodes max_concurrent sequences at
    once. The servers write below run.runs_dir, which they and all ranks must see."""
    token_file: Location | None = None
    """File of mode 600 with the secret that every request to the servers must carry. `moe-rl serve --token-file` makes
    it."""
    max_lost_servers: Whole = 0
    """Number of servers that may be lost at a time (die, hang or lose their weights) before the run ends. The other
    servers sample what the lost ones had not returned. A lost one that was started again is used from the next weight
    sync on. A resume needs all servers that it names; it may name fewer than before."""

    def problems(self) -> Iterator[Problem]:
        yield from self._mask_problems()
        yield from self._stop_problems()
        yield from self.server_problems()
        if self.cuda_graphs and self.router_logits_fraction:
            yield describe(
                "a graph does not call the routers, whose logits are asked for",
                where={"key": "rollout.cuda_graphs", "given": "rollout.router_logits_fraction is above 0"},
                got="true",
                expected="null or false",
            )

    def _stop_problems(self) -> Iterator[Problem]:
        for index, text in enumerate(self.stop):
            # if two end at the same character, the first in the list counts
            sooner = [other for n, other in enumerate(self.stop) if other in text[:-1] or (n < index and other in text)]
            if sooner:
                yield describe(
                    "can never end a completion, because another stop string ends it earlier",
                    where={"key": f"rollout.stop.{index}"},
                    got=repr(text),
                    expected=f"no text that contains {sooner[0]!r}",
                    do="remove one of them",
                )

    def _mask_problems(self) -> Iterator[Problem]:
        removing = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        asked = ", ".join(f"rollout.{name} {getattr(self, name)}" for name, removes in removing.items() if removes)
        if asked and not self.keep_sampling_mask:
            yield describe(
                "the sampler would normalize over the tokens that remain, and the trainer over all tokens, so every "
                "ratio between them would be wrong",
                where={"key": "rollout.keep_sampling_mask", "given": asked},
                got="false",
                expected="true",
                do="set it, or sample from all tokens",
            )
        if self.keep_sampling_mask and self.capture == "native":
            yield describe(
                "vLLM's own capture records only routes",
                where={"key": "rollout.keep_sampling_mask", "given": "rollout.capture is native"},
                got="true",
                expected="rollout.capture patch or worker",
            )
        if self.top_k == 1:
            yield describe(
                "leaves one token, whose log-probability is 0 whatever the policy: nothing can be learned",
                where={"key": "rollout.top_k"},
                got=1,
                expected="at least 2, or 0 for all",
            )

    def server_problems(self) -> Iterator[Problem]:
        """Yield the problems of `servers` and `engines` that the config alone shows; rollout/attach.py checks whether
        servers answer."""
        count = len(self.servers)
        for key, value in (("token_file", self.token_file), ("max_lost_servers", self.max_lost_servers)):
            if value and not count:
                yield describe(
                    "is only for rollout.servers, which is empty",
                    where={"key": f"rollout.{key}"},
                    got=value,
                    do="name them, or remove it",
                )
        if self.prompts_per_step < max(count, self.engines):
            yield describe(
                "more than the prompts of a step, whose completions stay on one of them",
                where={"key": "rollout.servers" if count else "rollout.engines"},
                got=max(count, self.engines),
                expected=f"at most rollout.prompts_per_step = {self.prompts_per_step}",
            )
        if not count:
            return
        for url in self.servers:
            if reason := _no_address(url):
                yield describe(reason, where={"key": "rollout.servers"}, got=repr(url), expected="http://host:port")
        for url, times in Counter(url.rstrip("/").lower() for url in self.servers).items():
            if times > 1:
                yield describe(
                    "named more than once", where={"key": "rollout.servers"}, got=url, expected="every server once"
                )
        if self.token_file is None:
            yield describe(
                "the servers refuse requests without their token",
                where={"key": "rollout.token_file"},
                got="null",
                expected="the file that moe-rl serve --token-file made",
            )
        if self.max_lost_servers >= count:
            yield describe(
                "must be less than the number of servers",
                where={"key": "rollout.max_lost_servers"},
                got=self.max_lost_servers,
                expected=f"less than {count}, the number of servers",
            )
        for key, wrong, why, expected in (
            ("sleep_level", self.sleep_level, "servers have their own GPUs and do not sleep", 0),
            ("engines", self.engines > 1, "a run samples from servers or from engines beside its ranks", 1),
        ):
            if wrong:
                where: About = {"key": f"rollout.{key}", "given": "rollout.servers is set"}
                yield describe(why, where=where, got=getattr(self, key), expected=expected)


class ReplayConfig(Section):
    """Says which routes the trainer takes, and what happens where routes are missing."""

    mode: Literal["r3", "r2", "off"] = "r3"
    """r3: every forward pass of the policy takes the sampler's routes. r2: the pass that computes the old
    log-probabilities routes natively, and the updates take its routes. off: every pass routes natively."""
    native_every: Whole = 5
    """Number of steps between measurements of how far the routers disagree in each layer. Under r3 such a step has one
    extra pass that routes natively, to measure what replay removes. 0: never."""
    keep_shards: Count = 4
    """Number of most recent steps whose rollouts and trace shards stay on disk. Those that follow a kept checkpoint
    (checkpoint.keep) or the initial model stay too. All others are removed."""
    missing: Literal["refuse", "drop", "native"] = "refuse"
    """What happens when tokens of a sequence have no recorded route. refuse: the run ends. drop: the sequence is not
    trained on. native: the router chooses for these tokens. Damaged or wrong routes always end the run."""
    stale: Literal["replay", "native"] = "replay"
    """What happens to routes chosen by weights older than the trainer's, as far as `pipeline` allows them. replay: they
    are taken. native: the router chooses for these tokens. Routes of still older weights always end the run."""
    plan: bool | None = None
    """Whether dispatch plans are computed from the routes once a step. With a plan no MoE layer exchanges counts with
    other ranks or waits for them. The results are the same bit for bit. null: yes where routes are replayed (mode r3
    and r2)."""
    overlap_chunks: Annotated[int, Field(ge=0, le=2**10)] = 0
    """Overlap of computation and the expert all-to-all, which needs plans. The rows of an MoE layer are sent before its
    router has run, and the layer computes while they travel. 0: off, Megatron's order. 1: all rows travel at once while
    the router and shared experts compute; the results are the same bit for bit. More: rows travel in that many chunks,
    and experts compute one chunk while another travels; the experts' gradients are then sums over chunks."""
    max_rows: Count | None = None
    """Largest number of rows that the experts of a rank may get in one layer of a microbatch. A row is a (token,
    expert) pair; padding counts. A step whose routes would exceed it ends the run before the step's first pass. null:
    any number."""
    max_fallback_fraction: Fraction = 0.0
    """Largest fraction of a step's (token, layer) positions that may be routed natively, and of its sequences that may
    be dropped. Above it the run ends."""

    def problems(self) -> Iterator[Problem]:
        if self.mode == "off" and self.plan:
            yield describe(
                "without replay the routes are not known in advance",
                where={"key": "replay.plan", "given": "replay.mode is off"},
                got=True,
                expected="false or null",
            )
        if self.overlap_chunks and (self.mode == "off" or self.plan is False):
            key, value = ("replay.mode", "off") if self.mode == "off" else ("replay.plan", False)
            yield describe(
                "only dispatch plans can send rows before the router has run",
                where={"key": key, "given": f"replay.overlap_chunks is {self.overlap_chunks}"},
                got=value,
                expected="r3 or r2" if value == "off" else "true or null",
                do="change it, or set replay.overlap_chunks to 0",
            )
        unknown = {
            "replay.mode is off": self.mode == "off",
            "replay.plan is false": self.plan is False,
            "replay.missing is native": self.missing == "native",
            "replay.stale is native": self.stale == "native",
        }
        if self.max_rows is not None and any(unknown.values()):
            yield describe(
                "some rows cannot be counted before the step",
                where={"key": "replay.max_rows", "given": ", ".join(why for why, holds in unknown.items() if holds)},
                got=self.max_rows,
                expected="null, or a plan that covers every row",
            )
        falls_back = self.missing != "refuse" or self.stale == "native"
        if falls_back != (self.max_fallback_fraction > 0):
            yield describe(
                "limits only what replay.missing and replay.stale allow",
                where={
                    "key": "replay.max_fallback_fraction",
                    "given": f"replay.missing is {self.missing}, replay.stale is {self.stale}",
                },
                got=self.max_fallback_fraction,
                expected="above 0" if falls_back else 0,
            )


def _no_address(url: str) -> str:
    """Return why this is not the address of a server; "" if it is."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"no URL ({error})"
    if parts.scheme != "http":
        return "not an http:// URL"
    if not host or not port:
        return "host or port is missing"
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        return "only http://host:port is allowed"
    return ""
