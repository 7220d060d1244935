"""Runs vLLM in the engine process: several calls at a time, pauses, and weight updates while requests are running.

begin         a call's requests join those that vLLM already has
step          one step of vLLM; a call whose requests have all ended begins publishing its shard during later steps,
              and is answered once that is done
leave         the unfinished requests of a call are aborted; they end with the tokens so far
pause         vLLM makes no forward pass; requests keep their KV cache; weights may be updated
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moe_rl.disk import PUBLISH_SECONDS
from moe_rl.errors import EngineError
from moe_rl.types import Completion, GenerateRequest, RouteRef
from moe_rl.vllm import arguments, sampling, wire
from moe_rl.vllm.recording import Recording, RecordingRequest
from moe_rl.vllm.route_source import WorkerSource
from moe_rl.vllm.sampling import Growing, ReportedSpan
from moe_rl.vllm.wire import SLEEPING_PARTS, EngineSettings
from moe_rl.weights.update import Holding, agreement, encode, refusal


@dataclass(slots=True)
class RequestOutput(Growing):
    """Collects the output of one request. `result` is vLLM's latest output; `came` lists which weights sampled the
    tokens of each piece."""

    result: Any = None
    came: list[ReportedSpan] = field(default_factory=list)

    def take(self, result, version: int) -> None:
        """Add the tokens since the previous output."""
        self.result = result
        last = result.outputs[0]
        of, logprobs = ([], []) if last.logprobs is None else (last.logprobs.token_ids, last.logprobs.logprobs)
        if last.logprobs is not None and of != list(last.token_ids):
            raise RuntimeError(f"vLLM returned log-probabilities of other tokens: {result.request_id}")
        self.add(last.token_ids, logprobs, last.finish_reason, last.weight_versions, last.stop_reason)
        if last.token_ids:
            begun = self.came.pop() if self.came and self.came[-1].version == str(version) else None
            start = begun.start if begun is not None else len(self.token_ids) - len(last.token_ids)
            self.came.append(ReportedSpan(str(version), start, len(self.token_ids)))

    def abort(self) -> None:
        """End with the tokens so far. vLLM sends no more output for an aborted request."""
        self.finish_reason, self.versions = "abort", self.came


@dataclass(slots=True)
class RunningCall(ABC):
    """Holds one call while vLLM works on it.

    Attributes:
        source: records the requests; None records nothing.
        shard: the shard open there.
        keep_open: whether it stays open for further calls.
        asks: what each request records.
        outputs: the output of each request.
        unfinished: number of unfinished requests.
        published_by: when the shard must be published; None: that has not begun.
    """

    number: int
    source: WorkerSource | None
    shard: str
    requests: list[GenerateRequest]
    asks: list[RecordingRequest | None]
    keep_open: bool = False
    outputs: list[RequestOutput] = field(init=False)
    unfinished: int = field(init=False)
    published_by: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.outputs, self.unfinished = [RequestOutput() for _ in self.requests], len(self.requests)

    @abstractmethod
    def publish(self, source: WorkerSource) -> None:
        """Begin publishing the shard, or its records of this call. All requests must have ended."""

    @abstractmethod
    def reply(self, refs: dict[str, RouteRef]) -> wire.Reply:
        """Return the reply. refs: references to the records by the keys of the requests."""


class SampledCall(RunningCall):
    """Samples completions."""

    def publish(self, source: WorkerSource) -> None:
        sequences, aborted = sampling.forwarded(self.requests, self.asks, self.outputs)
        for ask, output in zip(self.asks, self.outputs, strict=True):
            if ask is not None and output.token_ids and not output.aborted:
                source.finished(ask, output.token_ids, output.result)
        cut = self.keep_open and not self.requests
        source.publish(str(self.number), self.shard, sequences, aborted, self.keep_open, cut)
        stats = ", ".join(f"{count} {name}" for name, count in sorted(source.stats().items()))
        rows = [len(ids) for ids in sequences.values() if ids]
        print(f"shard {self.shard}: {len(rows)} sequences, {sum(rows)} rows; since the start: {stats}")

    def reply(self, refs: dict[str, RouteRef]) -> wire.Reply:
        pairs = zip(self.requests, self.outputs, strict=True)
        return wire.Generated([output.completion(request, refs) for request, output in pairs])


class ScoredCall(RunningCall):
    """Scores token sequences."""

    def publish(self, source: WorkerSource) -> None:
        for ask, output in zip(self.asks, self.outputs, strict=True):
            if ask is not None:
                source.finished(ask, output.token_ids, output.result)
        sequences = {request.key: list(request.prompt_token_ids[:-1]) for request in self.requests}
        source.publish(str(self.number), self.shard, sequences)

    def reply(self, refs: dict[str, RouteRef]) -> wire.Reply:
        return wire.Scored(
            [
                sampling.prompt_logprobs(output.result, request.prompt_token_ids)
                for output, request in zip(self.outputs, self.requests, strict=True)
            ],
            [refs[request.key] for request in self.requests if request.key in refs],
        )


# vLLM's sleep level after which the weights must be sent again.
_DISCARDS_WEIGHTS = 2
# How many tokens of ended completions are reported per step: 16,384 take 0.1 ms.
_TOLD_TOKENS = 1 << 14
_YIELDING = 10
_PUBLISHED_POLL_SECONDS = 0.01


class ChildEngine:
    """Runs vLLM in this process, set up to be deterministic, and reports its results."""

    def __init__(self, settings: EngineSettings, pulse: Callable[[], None]):
        arguments.refuse_wrong_vllm(settings.capture)
        # Imported late: importing vLLM is slow, and a wrong vLLM is reported before.
        import vllm
        from vllm.platforms import current_platform

        self.vllm_version: str = vllm.__version__
        self._on_cpu: bool = current_platform.is_cpu()
        if self._on_cpu and settings.yields:
            os.nice(_YIELDING)
        self._holding = Holding(version=0, digest="", whole=True)
        self._asleep: set[str] = set()
        self._paused = False
        # Calls by number.
        self.running: dict[int, RunningCall] = {}
        self._left_open: set[str] = set()  # shards that calls left open
        # Ended requests that `news` has not reported yet, with their indices in their calls.
        self._ended: list[tuple[RunningCall, int]] = []
        recording = None
        if settings.trace_root is not None:
            recording = Recording(
                trace_root=str(settings.trace_root.absolute()),
                model_fingerprint=settings.model_fingerprint,
                support=settings.support,
                log_normalizer=settings.log_normalizer,
                router_logits_fraction=settings.router_logits_fraction,
                head=settings.head,
            )
        self._llm = vllm.LLM(
            **arguments.sized(
                dtype=settings.dtype,
                seed=settings.seed,
                max_model_len=settings.max_model_len,
                max_concurrent=settings.max_concurrent,
                kv_cache_mib=settings.kv_cache_mib,
                cuda_graphs=settings.cuda_graphs,
                passed=settings.passed,
            )
            | arguments.synchronous(settings.passed, native=settings.capture == "native")
            | arguments.fixed(
                settings.model_path, capture=settings.capture, recording=recording, reads_text=settings.reads_text
            ),
            # Servers have their own GPUs, which they never release.
            enable_sleep_mode=settings.sleeps and not self._on_cpu,
            # Level 2 drops all weights, and updates bring a draft none.
            sleep_preserve_parameter_names=["draft.*"],
        )
        self._source: WorkerSource | None = None
        if recording is not None:
            if settings.capture == "native":
                from moe_rl.vllm.native_source import NativeSource

                self._source = NativeSource(self._llm, recording)
            else:
                self._source = WorkerSource(self._llm, settings.capture)
        (transfer,) = self._llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
        transfer.on_progress = pulse
        self._vocabulary: int = self._llm.llm_engine.vllm_config.model_config.get_vocab_size()
        self._max_model_len = settings.max_model_len
        self._keeps = {"reads_text": settings.reads_text, "keeps_support": settings.support}
        # vLLM's engine core of this process.
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._llm.update_weight_version("0")
        self._version = 0

    def answer(self, number: int, call: wire.Call) -> wire.Reply | None:
        """Process one call. Returns None for a call that `step` answers.

        Raises MoeRLError for a refusal; any other exception means that vLLM is broken.
        """
        match call:
            case wire.Generate():
                self._generate(number, call)
                return None
            case wire.Score(runs, shard):
                self._score(number, runs, shard)
                return None
            case wire.AskCounts():
                return wire.Counted(dict(self._source.stats()) if self._source is not None else {})
            case wire.Pause():
                self._pause()
                return wire.Done()
            case wire.Resume():
                self._refuse_torn_weights()
                self._core.resume_scheduler()
                self._paused = False
                return wire.Done()
            case wire.Sleep(level):
                return wire.Slept(self._sleep(level))
            case wire.Wake(part):
                self._wake(part)
                return wire.Done()
            case wire.Update():
                self._update(call)
                return wire.Updated(self._holding)

    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        return any(call.unfinished == 0 or not self._paused for call in self.running.values())

    def step(self) -> list[tuple[int, wire.Reply | Exception]]:
        """Make one step of vLLM. Returns the reply or error of each call whose requests ended before it and whose shard
        is published.

        The workers learn in this step which requests ended before it; a shard can be published only after that.
        """
        ended = [call for call in self.running.values() if not call.unfinished]
        idle = self._paused or len(ended) == len(self.running)
        self._advance()
        attempts = [(call.number, self._end(call)) for call in ended]
        replies = [(number, reply) for number, reply in attempts if reply is not None]
        if idle and not replies:
            time.sleep(_PUBLISHED_POLL_SECONDS)
        return replies

    def news(self) -> list[wire.RequestsEnded]:
        """Return ended completions: all those of ended calls, and of others as many as delay a step by less than a
        millisecond."""
        ended: dict[int, list[tuple[int, Completion]]] = {}
        later: list[tuple[RunningCall, int]] = []
        tokens = 0
        for call, index in self._ended:
            if call.number in self.running and tokens >= _TOLD_TOKENS:
                later.append((call, index))
                continue
            tokens += len(call.outputs[index].token_ids)
            with suppress(EngineError):  # the reply to the call reports the fault
                completion = call.outputs[index].completion(call.requests[index], {})
                ended.setdefault(call.number, []).append((index, completion))
        self._ended = later
        return [wire.RequestsEnded(number, completions) for number, completions in ended.items()]

    def leave(self, number: int) -> None:
        """Abort the unfinished requests of a call, if it is still running."""
        if (call := self.running.get(number)) is None:
            return
        left = [index for index, output in enumerate(call.outputs) if not output.finish_reason]
        self._llm.llm_engine.abort_request([f"{number}-{index}" for index in left])
        for index in left:
            call.outputs[index].abort()
        call.unfinished = 0

    def _generate(self, number: int, call: wire.Generate) -> None:
        if call.requests:  # an open shard is published even while weights go in
            self._check_ready()
        sampling.check(call.requests, max_model_len=self._max_model_len, vocabulary=self._vocabulary, **self._keeps)
        sampling.check_grammars(call.requests)
        if call.alone:
            self._refuse_pause()
            self._refuse_company("A call that samples alone")
            self._forget_prefixes()
        records = not call.requests or any(request.record for request in call.requests)
        source = self._source if records else None
        asks = [RecordingRequest.of(request, call.shard) if source is not None else None for request in call.requests]
        prompts = [
            (request.prompt_token_ids, _parameters(request, ask, grows=not call.alone))
            for request, ask in zip(call.requests, asks, strict=True)
        ]
        self._begin(SampledCall(number, source, call.shard, call.requests, asks, call.keep_open), prompts)

    def _score(self, number: int, runs: list[list[int]], shard: str | None) -> None:
        self._check_ready()
        self._refuse_pause()
        for run in runs:
            sampling.check_scored(run, max_model_len=self._max_model_len, vocabulary=self._vocabulary)
        source = self._source if shard is not None else None
        requests = sampling.scoring(runs, record=source is not None)
        asks = [RecordingRequest.of(request, shard or "") for request in requests]
        asked = [_parameters(r, ask, grows=False, scores=True) for r, ask in zip(requests, asks, strict=True)]
        self._begin(ScoredCall(number, source, shard or "", requests, asks), list(zip(runs, asked, strict=True)))

    def _begin(self, call: RunningCall, prompts: list) -> None:
        """Open the call's shard, if it records and no earlier call left it open, and give its requests to vLLM."""
        if call.source is not None:
            if call.shard not in self._left_open:
                call.source.open(call.shard)
            (self._left_open.add if call.keep_open else self._left_open.discard)(call.shard)
        self.running[call.number] = call
        for index, (token_ids, params) in enumerate(prompts):
            # Cached prefixes are shared within one version of the weights.
            prompt = {"prompt_token_ids": list(token_ids), "cache_salt": str(self._version)}
            self._llm.llm_engine.add_request(f"{call.number}-{index}", prompt, params)

    def _advance(self) -> None:
        for result in self._llm.llm_engine.step():
            number, _, index = result.request_id.partition("-")
            call = self.running[int(number)]
            call.outputs[int(index)].take(result, self._version)
            if result.finished:
                call.unfinished -= 1
                if isinstance(call, SampledCall):
                    self._ended.append((call, int(index)))

    def _end(self, call: RunningCall) -> wire.Reply | Exception | None:
        """Return the reply of a call, or the error, after which its shard is abandoned; None until it is published."""
        refs: dict[str, RouteRef] = {}
        try:
            if (source := call.source) is not None:
                if call.published_by is None:
                    call.publish(source)
                    call.published_by = time.monotonic() + PUBLISH_SECONDS
                if not source.published(str(call.number)) and time.monotonic() < call.published_by:
                    return None
                # Past the limit this waits, and without signs of life the parent ends this process.
                refs = source.references(str(call.number))
            reply: wire.Reply | Exception = call.reply(refs)
        except Exception as error:
            reply = error
            if call.source is not None and not call.keep_open:
                call.source.abandon(call.shard)
        del self.running[call.number]
        return reply

    def _pause(self) -> None:
        """Stop scheduling, and take the outputs of batches in flight on the device."""
        self._core.pause_scheduler("keep", clear_cache=False)
        for _ in range(self._core.batch_queue_size):
            self._advance()
        self._paused = True

    def _update(self, call: wire.Update) -> None:
        if not self._paused:
            self._refuse_company("An update without a pause")
        self._hear(self._llm.collective_rpc("moe_rl_update_weights", args=(encode(call.update),)))
        if self._holding.refused:
            raise refusal(self._holding)
        if call.update.final:
            self._llm.update_weight_version(str(call.update.version))
            self._version = call.update.version

    def _hear(self, answers: list[dict[str, object]]) -> None:
        """Store the workers' report of their weights."""
        self._holding = agreement([msgspec.convert(answer, Holding) for answer in answers])

    def _refuse_torn_weights(self) -> None:
        if not self._holding.whole:
            raise refusal(self._holding)

    def _refuse_company(self, what: str) -> None:
        """Refuse a call that needs an engine without requests."""
        if self.running:
            got = f"{len(self.running)} calls running"
            raise EngineError(f"{what} needs an engine without requests", got=got, do="wait for them")

    def _refuse_pause(self) -> None:
        """Refuse a call that blocks until its result, because then no call could end the pause."""
        if self._paused:
            raise EngineError("The vLLM engine is paused", do="resume it first")

    def _check_ready(self) -> None:
        """Refuse to sample from incomplete weights, or while memory is released."""
        self._refuse_torn_weights()
        if self._asleep:
            got = " and ".join(sorted(self._asleep))
            raise EngineError("The vLLM engine sleeps", got=f"no {got}", do="wake it first")

    def _sleep(self, level: int) -> bool:
        self._refuse_company("Sleep")
        self._forget_prefixes()
        self._llm.sleep(level)
        self._asleep = set(SLEEPING_PARTS)
        if level == _DISCARDS_WEIGHTS:
            self._hear(self._llm.collective_rpc("moe_rl_discard_weights"))
        # vLLM's CPU worker only logs that it cannot sleep, and keeps its memory.
        return not self._on_cpu

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._llm.wake_up([part])
            self._asleep.discard(part)

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache though no request runs")


def _parameters(request: GenerateRequest, ask: RecordingRequest | None, grows: bool, *, scores: bool = False):
    """Return vLLM's parameters of a request.

    Args:
        request: what to sample.
        ask: what to record; None records nothing.
        grows: stream tokens as they are sampled, because an aborted request has no final output.
        scores: return log-probabilities of the prompt; vLLM then computes the whole prompt again.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if grows else RequestOutputKind.FINAL_ONLY
    prompt_logprobs = 0 if scores else None
    return SamplingParams(
        **sampling.parameters(request, ask),
        structured_outputs=sampling.structured_outputs(request.grammar),
        output_kind=kind,
        prompt_logprobs=prompt_logprobs,
        skip_clone=True,  # they are not shared, and vLLM would deep-copy each
        flat_logprobs=True,  # lists of numbers instead of an object per token
    )
