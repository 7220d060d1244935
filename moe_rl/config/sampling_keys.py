"""The sections `rollout` and `replay`: how sequences are sampled, and what the trainer takes of their routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from moe_rl.config.section import BelowOne, Count, Few, Fraction, Location, Number, Seconds, Section, Share, Whole
from moe_rl.errors import describe


class RolloutConfig(Section):
    """How completions are sampled, and by what."""

    prompts_per_step: Few
    """Prompts sampled from in one step."""
    group_size: Annotated[int, Field(ge=2, le=2**16)]
    """Completions sampled from each prompt."""
    dynamic_sampling_rounds: Few = 1
    """DAPO's dynamic sampling: as long as fewer than prompts_per_step groups have rewards that differ, as many further
    prompts are sampled from, in so many rounds at most. Trained on are the first prompts_per_step such groups. 1: off,
    all groups are trained on."""
    max_prompt_tokens: Count
    """Longer prompts are refused when the prompts are read."""
    max_completion_tokens: Count
    """Completions are truncated here."""
    temperature: Annotated[float, Field(ge=0.01, le=2.0)] = 1.0
    """Sampling temperature; the trainer's logits are divided by it too. vLLM takes 0.01 for a lower one, and refuses
    one above 2."""
    top_k: Whole = 0
    """Tokens are drawn from the `top_k` most likely ones. 0: from all. This and the next two need
    keep_sampling_mask. Evaluation samples with them too, but for its greedy half."""
    top_p: Share = 1.0
    """Tokens are drawn from the fewest that together have this probability. 1: from all."""
    min_p: BelowOne = 0.0
    """Tokens are drawn from those at least this many times as likely as the likeliest. 0: from all."""
    keep_sampling_mask: bool = False
    """Record which tokens top_k, top_p and min_p left each sampled one to be drawn from, and have the trainer
    renormalise its distributions over the same ones in every pass (DeepSeek-V3.2, arXiv 2512.02556)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision that the sampler computes in."""
    weights: Literal["exact", "fp8_e4m3"] = "exact"
    """exact: the trainer's, in `dtype`. fp8_e4m3: of attention, experts and dense layers the matrices are rounded to
    what block-scaled float8 holds before the sampler gets them, also the first time; it still computes in `dtype`."""
    weight_transfer: Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "disk"] = "auto"
    """How new weights reach the sampler. shared_memory: of one host. cuda_ipc: of GPUs that trainer and sampler share.
    broadcast: over NCCL, or gloo without GPUs, as vLLM does it. disk: a folder that both see, the run's. auto: the one
    that --plan shows."""
    weight_bucket_mib: Annotated[float, Field(gt=0.0, le=2**20)] = 256.0
    """Weights that a rank holds on their way to the sampler at a time, or one tensor that is larger."""
    sleep_level: Annotated[Literal[0, 1, 2], Number] = 0
    """What a sampler on the trainer's GPUs gives back while the trainer works. 0: nothing. 1: the KV cache; weights go
    to the host. 2: both; the weights come back with the next update. Does nothing on a CPU."""
    max_concurrent: Few = 256
    """Sequences the engine decodes at once."""
    kv_cache_mib: Count = 512
    """Memory for the engine's KV cache, on each of its GPUs."""
    capture: Literal["patch", "worker", "native"] = "patch"
    """What records routes. patch: the patched vLLM. worker: the same recorder through vLLM's worker class, in a vLLM
    that may not be patched. native: vLLM's own capture (Model Runner V2, which needs a GPU)."""
    router_logits_fraction: Fraction = 0.0
    """Share of the tokens whose router logits the sampler stores with their routes. Not with native capture."""
    startup_timeout_seconds: Seconds = 300.0
    """An engine that is not ready by then is given up, a server that has not loaded new weights by then too."""
    servers: tuple[str, ...] = ()
    """URLs, http://host:port, of the vLLM servers (moe-rl serve --config) that sample in place of an engine that
    rank 0 starts; each a replica of the weights, of this run alone. They write below run.runs_dir, which they and all
    ranks see. Each decodes max_concurrent sequences at once."""
    token_file: Location | None = None
    """File of mode 600 with the secret that the servers want of everyone; serve_vllm.py makes it."""
    max_lost_servers: Whole = 0
    """Servers that may die, hang or lose their weights before the run ends; the others sample what these had not given
    back, and a resumed run wants all of them again."""

    def problems(self) -> Iterator[str]:
        yield from self._mask_problems()
        yield from self.server_problems()

    def _mask_problems(self) -> Iterator[str]:
        removing = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        asked = ", ".join(f"rollout.{name} {getattr(self, name)}" for name, removes in removing.items() if removes)
        if asked and not self.keep_sampling_mask:
            yield describe(
                "rollout.keep_sampling_mask: the sampler's log-probabilities would be of the tokens that were left to "
                "draw from, the trainer's of all, and every ratio of the two wrong",
                where=asked,
                got="false",
                expected="true",
                do="set it, or draw from all tokens",
            )
        if self.keep_sampling_mask and not asked:
            yield describe(
                "rollout.keep_sampling_mask: nothing is removed, so there is no mask to keep",
                got="true",
                expected="rollout.top_k above 0, rollout.top_p below 1 or rollout.min_p above 0 with it",
                do="set one of them, or turn it off",
            )
        if self.keep_sampling_mask and self.capture == "native":
            yield describe(
                "rollout.keep_sampling_mask: vLLM's own capture records routes only",
                where="rollout.capture is native",
                got="true",
                expected="rollout.capture patch or worker",
            )
        if self.top_k == 1:
            yield describe(
                "rollout.top_k: leaves one token, whose log-probability is 0 whatever the policy: nothing can be "
                "learned",
                got=1,
                expected="at least 2, or 0 for all",
            )

    def server_problems(self) -> Iterator[str]:
        """Say what is wrong with `servers` as they are written; whether they answer is asked in rollout/attach.py."""
        count = len(self.servers)
        for key, value in (("token_file", self.token_file), ("max_lost_servers", self.max_lost_servers)):
            if value and not count:
                yield describe(
                    f"rollout.{key}: is of rollout.servers, and there are none", got=value, do="name them, or remove it"
                )
        if not count:
            return
        for url in self.servers:
            if reason := _no_address(url):
                yield describe(f"rollout.servers: {reason}", got=repr(url), expected="http://host:port")
        for url, times in Counter(url.rstrip("/").lower() for url in self.servers).items():
            if times > 1:
                yield describe("rollout.servers: named more than once", got=url, expected="every server once")
        if self.token_file is None:
            yield describe(
                "rollout.token_file: the servers let nobody in without their token",
                got="null",
                expected="the file that serve_vllm.py --token-file made",
            )
        if self.max_lost_servers >= count:
            yield describe(
                "rollout.max_lost_servers: none would be left",
                got=self.max_lost_servers,
                expected=f"less than {count}, the servers there are",
            )
        if self.capture == "native":
            yield describe(
                "rollout.capture: a server cannot record by vLLM's own capture",
                got="native",
                expected="rollout.capture patch or worker",
            )
        if self.sleep_level:
            yield describe(
                "rollout.sleep_level: servers have GPUs of their own and do not sleep", got=self.sleep_level, expected=0
            )
        if self.prompts_per_step < count:
            yield describe(
                "rollout.servers: more than the prompts of a step, whose completions stay on one server",
                got=count,
                expected=f"at most rollout.prompts_per_step = {self.prompts_per_step}",
            )


class ReplayConfig(Section):
    """Which routes the trainer takes, and what becomes of those that are missing."""

    mode: Literal["r3", "r2", "off"] = "r3"
    """r3: the trainer takes the sampler's routes in every forward pass of the policy. r2: it routes natively where it
    computes the old log-probabilities, and takes these routes in the updates. off: it routes natively."""
    native_every: Whole = 5
    """Every so many steps the disagreement of the routers is logged for each layer, and under r3 one extra pass routes
    natively, to measure what replay removes. 0: never."""
    keep_shards: Count = 4
    """Last steps whose rollouts, trace shards included, stay on disk. So do those sampled from the checkpoints that are
    kept (checkpoint.keep) and from the initial model; others are removed."""
    missing: Literal["refuse", "drop", "native"] = "refuse"
    """What becomes of a sequence with forwarded tokens that have no recorded route. refuse: the run ends. drop: it is
    not trained on. native: the router chooses for these tokens. Damaged or wrong routes always end the run."""
    stale: Literal["refuse", "replay", "native"] = "refuse"
    """What becomes of routes recorded under older weights than those the trainer has."""
    max_staleness: Whole = 0
    """Updates that routes may be older; with stale replay or native only. Older ones end the run."""
    plan: bool | None = None
    """Whether what each rank sends to which expert is computed from the routes once a step, so that no MoE layer asks
    the other ranks for counts or waits for them. The results are the same bit for bit. null: yes where routes are
    replayed (mode r3 and r2)."""
    overlap_chunks: Annotated[int, Field(ge=0, le=2**10)] = 0
    """With plans, the rows of an MoE layer leave for the ranks of `parallel.expert` before its router has run, and the
    layer computes while they travel, forward and backward. 1: all at once, the router and shared experts under way; the
    results are the same bit for bit. More: in so many chunks, one in the experts while another travels; the gradients
    of the experts are then sums over chunks. 0: off, Megatron's order."""
    max_rows: Count | None = None
    """Rows, (token, expert) pairs with padding among them, that the experts of a rank may get in a layer of a
    microbatch. A step whose routes would bring more ends the run before the first pass under them. null: any number."""
    max_fallback_fraction: Fraction = 0.0
    """The run ends when more of a step's (token, layer) positions are routed natively, or more of its sequences are
    dropped, than this."""

    def problems(self) -> Iterator[str]:
        if self.mode == "off" and self.plan:
            yield describe(
                "replay.plan: without replay no route is known before its layer runs",
                where="replay.mode is off",
                got=True,
                expected="false or null",
            )
        if self.overlap_chunks and (self.mode == "off" or self.plan is False):
            key, value = ("replay.mode", "off") if self.mode == "off" else ("replay.plan", False)
            yield describe(
                f"{key}: rows are sent before the router has run by dispatch plans only, which replayed routes have",
                where=f"replay.overlap_chunks is {self.overlap_chunks}",
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
                "replay.max_rows: not all rows are counted before the step",
                where=", ".join(why for why, holds in unknown.items() if holds),
                got=self.max_rows,
                expected="null, or every row replayed by a plan",
            )
        falls_back = self.missing != "refuse" or self.stale == "native"
        if falls_back != (self.max_fallback_fraction > 0):
            yield describe(
                "replay.max_fallback_fraction: bounds what replay.missing and replay.stale let pass, and only that",
                where=f"replay.missing is {self.missing}, replay.stale is {self.stale}",
                got=self.max_fallback_fraction,
                expected="above 0" if falls_back else 0,
            )
        if (self.stale != "refuse") != (self.max_staleness > 0):
            yield describe(
                "replay.max_staleness: says how old the routes may be that replay.stale lets pass",
                where=f"replay.stale is {self.stale}",
                got=self.max_staleness,
                expected="at least 1" if self.stale != "refuse" else 0,
            )


def _no_address(url: str) -> str:
    """Why it is no address of a server; "" when it is one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"no URL ({error})"
    if parts.scheme != "http":
        return "they speak http"
    if not host or not port:
        return "host and port are both needed"
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        return "nothing but host and port belongs into it"
    return ""
