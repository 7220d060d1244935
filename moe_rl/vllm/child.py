"""Runs the engine process, `python -m moe_rl.vllm.child FD PARENT_PID`: answers wire frames with vLLM, one at a
time."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moe_rl.disk import reason
from moe_rl.errors import EngineError, MoeRLError, WeightSyncError, describe
from moe_rl.messages import Channel
from moe_rl.parent import belong_to
from moe_rl.types import Completion, GenerateRequest, RouteRef
from moe_rl.vllm import arguments, sampling, wire
from moe_rl.vllm.process import outlive_a_full_log
from moe_rl.vllm.recording import Recording, RecordingRequest
from moe_rl.vllm.route_source import NativeSource, WorkerSource
from moe_rl.vllm.sampling import Growing
from moe_rl.vllm.wire import SLEEPING_PARTS, EngineSettings
from moe_rl.weights.update import Holding, agreement, encode, refusal

_ALIVE_SECONDS = 0.5
# vLLM's sleep level after which the weights must be sent again.
_DISCARDS_WEIGHTS = 2


def main() -> int:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    belong_to(parent)
    outlive_a_full_log()
    channel = Channel(socket.socket(fileno=descriptor), wire.CALLS)
    try:
        start = channel.receive()
        assert isinstance(start, wire.Start)  # the parent sends it first, and only once
        engine = ChildEngine(start.settings, _Pulse(channel))
    except Exception as error:
        traceback.print_exc()
        channel.send(wire.Failed(_message(error)))
        return 1
    channel.send(wire.Ready(engine.vllm_version))
    while True:
        try:
            call = channel.receive()
        except EOFError:
            call = wire.Close()
        if isinstance(call, wire.Close):
            sys.stdout.flush()
            # vLLM's own shutdown takes seconds and has nothing to save.
            os._exit(0)
        assert not isinstance(call, wire.Start)
        reply: wire.Reply | wire.Failed
        try:
            reply, sound = engine.answer(call), True
        except MoeRLError as error:
            traceback.print_exc()
            reply, sound = wire.Failed(str(error), isinstance(error, WeightSyncError)), engine.is_idle()
        except Exception as error:
            # vLLM itself failed, so the state of its caches and weights is unknown.
            traceback.print_exc()
            reply, sound = wire.Failed(_message(error)), False
        channel.send(reply)
        if not sound:
            return 1


class ChildEngine:
    """Runs vLLM in this process, set up to be deterministic, and reports what it did."""

    def __init__(self, settings: EngineSettings, pulse: Callable[[], None]):
        arguments.refuse_wrong_vllm(settings.capture)
        # Imported late, so that a wrong vLLM is reported before its slow import.
        import vllm
        from vllm.platforms import current_platform

        self.vllm_version: str = vllm.__version__
        self._pulse = pulse
        self._on_cpu: bool = current_platform.is_cpu()
        self._holding = Holding(version=0, digest="", whole=True)
        self._asleep: set[str] = set()
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
            **arguments.fixed(
                settings.model_path,
                capture=settings.capture,
                recording=recording,
                reads_text=settings.reads_text,
            ),
            **arguments.sized(
                dtype=settings.dtype,
                seed=settings.seed,
                max_model_len=settings.max_model_len,
                max_concurrent=settings.max_concurrent,
                kv_cache_mib=settings.kv_cache_mib,
            ),
            # Servers have GPUs of their own, which they never release.
            enable_sleep_mode=settings.sleeps and not self._on_cpu,
        )
        self._source: WorkerSource | NativeSource | None = None
        if recording is not None:
            if settings.capture == "native":
                self._source = NativeSource(self._llm, recording)
            else:
                self._source = WorkerSource(self._llm, settings.capture)
        (transfer,) = self._llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
        transfer.on_progress = pulse
        self._vocabulary: int = self._llm.llm_engine.vllm_config.model_config.get_vocab_size()
        self._max_model_len, self._reads_text = settings.max_model_len, settings.reads_text
        self._llm.update_weight_version("0")

    def is_idle(self) -> bool:
        """Return whether nothing is left of a failed call, so that the next call may start."""
        return not self._llm.llm_engine.has_unfinished_requests()

    def answer(self, call: wire.Call) -> wire.Reply:
        """Process one call. Raises MoeRLError for a refusal; any other exception means that vLLM is broken."""
        match call:
            case wire.Generate():
                return wire.Generated(self._generate(call.requests, call.shard, call.enough))
            case wire.Score(runs, shard):
                return self._score(runs, shard)
            case wire.AskCounts():
                return wire.Counted(dict(self._source.stats()) if self._source is not None else {})
            case wire.Sleep(level):
                return wire.Slept(self._sleep(level))
            case wire.Wake(part):
                self._wake(part)
                return wire.Awake()
            case wire.Update():
                self._update(call)
                return wire.Updated()

    def _generate(self, requests: list[GenerateRequest], shard: str, enough: int | None) -> list[Completion]:
        self._check_ready()
        sampling.check(
            requests,
            max_model_len=self._max_model_len,
            vocabulary=self._vocabulary,
            reads_text=self._reads_text,
        )
        self._forget_prefixes()
        version = int(self._llm.llm_engine.get_weight_version())
        records = self._source is not None and any(request.record for request in requests)
        asks = [RecordingRequest.of(request, shard) if records else None for request in requests]
        with self._recorded(shard if records else None) as source:
            grows = enough is not None
            prompts = [(r.prompt_token_ids, _parameters(r, ask, grows)) for r, ask in zip(requests, asks, strict=True)]
            outputs = self._run(prompts, enough)
            refs = _publish(source, shard, requests, asks, outputs) if source is not None else {}
        return [output.completion(request, version, refs) for request, output in zip(requests, outputs, strict=True)]

    def _score(self, runs: list[list[int]], shard: str | None) -> wire.Scored:
        self._check_ready()
        for run in runs:
            sampling.check_scored(run, max_model_len=self._max_model_len, vocabulary=self._vocabulary)
        # vLLM's own capture does not return the routes of a prompt that is only scored.
        records = shard is not None and isinstance(self._source, WorkerSource)
        requests = sampling.scoring(runs, record=records)
        asks = [RecordingRequest.of(request, shard or "") for request in requests]
        self._forget_prefixes()
        with self._recorded(shard if records else None) as source:
            asked = [_parameters(r, ask, grows=False, scores=True) for r, ask in zip(requests, asks, strict=True)]
            outputs = self._run(list(zip(runs, asked, strict=True)))
            refs: dict[str, RouteRef] = {}
            if source is not None and shard is not None:
                wanted = {request.key: run[:-1] for request, run in zip(requests, runs, strict=True)}
                refs = source.publish(shard, wanted, [])
        return wire.Scored(
            [sampling.prompt_logprobs(output.result, run) for output, run in zip(outputs, runs, strict=True)],
            [refs[request.key] for request in requests if request.key in refs],
        )

    @contextmanager
    def _recorded(self, shard: str | None) -> Iterator[WorkerSource | NativeSource | None]:
        """Open a shard and yield the source of routes; abandon the shard if the block fails. Yields None without a
        shard."""
        source = self._source if shard is not None else None
        if source is None or shard is None:
            yield None
            return
        source.open(shard)
        try:
            yield source
        except BaseException:
            source.abandon(shard)
            raise

    def _update(self, call: wire.Update) -> None:
        self._hear(self._llm.collective_rpc("moe_rl_update_weights", args=(encode(call.update),)))
        if self._holding.refused:
            raise refusal(self._holding)
        if call.update.final:
            self._llm.update_weight_version(str(call.update.version))
            if self._source is not None:
                self._source.set_weight_version(call.update.version)

    def _hear(self, answers: list[dict[str, object]]) -> None:
        """Store what the workers report that they hold."""
        self._holding = agreement([msgspec.convert(answer, Holding) for answer in answers])

    def _check_ready(self) -> None:
        """Refuse to sample from incomplete weights, or while memory is released."""
        if not self._holding.whole:
            raise refusal(self._holding)
        if self._asleep:
            got = " and ".join(sorted(self._asleep))
            raise EngineError(describe("The vLLM engine sleeps", got=f"no {got}", do="wake it first"))

    def _sleep(self, level: int) -> bool:
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

    def _run(self, prompts: list, enough: int | None = None) -> list[_Output]:
        """Return the outputs for (token ids, SamplingParams), in order. After `enough` finished, the rest is
        aborted."""
        engine = self._llm.llm_engine
        for at, (token_ids, params) in enumerate(prompts):
            engine.add_request(str(at), {"prompt_token_ids": list(token_ids)}, params)
        outputs = [_Output() for _ in prompts]
        unfinished = len(prompts)
        while engine.has_unfinished_requests():
            for result in engine.step():
                outputs[int(result.request_id)].take(result)
                unfinished -= result.finished
            if enough is not None and len(prompts) - unfinished >= enough and unfinished:
                engine.abort_request([str(at) for at, output in enumerate(outputs) if not output.finish_reason])
                for output in outputs:
                    output.finish_reason = output.finish_reason or "abort"
            self._pulse()
        # The worker learns of the last finished requests in the next step.
        engine.step()
        return outputs

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache though no request runs")


class _Pulse:
    """Tells the parent that the engine makes progress, at limited frequency."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._sent = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._sent >= _ALIVE_SECONDS:
            self._sent = now
            self._channel.send(wire.Alive())


@dataclass(slots=True)
class _Output(Growing):
    """Collects the output of one request. `result` is vLLM's latest output."""

    result: Any = None

    def take(self, result) -> None:
        """Add what is new since the previous output."""
        self.result = result
        last = result.outputs[0]
        pairs = zip(last.logprobs, last.token_ids, strict=True) if last.logprobs is not None else ()
        logprobs = [at[token].logprob for at, token in pairs]
        self.add(last.token_ids, logprobs, last.finish_reason, last.weight_versions, last.stop_reason)


def _publish(
    source: WorkerSource | NativeSource,
    shard: str,
    requests: list[GenerateRequest],
    asks: list[RecordingRequest | None],
    outputs: list[_Output],
) -> dict[str, RouteRef]:
    """Publish the routes of what was sampled."""
    sequences, aborted = sampling.forwarded(requests, asks, outputs)
    for request, ask, output in zip(requests, asks, outputs, strict=True):
        if ask is not None and ask.key in sequences and not output.aborted:
            source.finished(ask, request.prompt_token_ids, output.token_ids, output.result)
    refs = source.publish(shard, sequences, aborted)
    stats = ", ".join(f"{count} {name}" for name, count in sorted(source.stats().items()))
    rows = sum(map(len, sequences.values()))
    print(f"shard {shard}: {len(sequences)} sequences, {rows} rows; since the start: {stats}")
    return refs


def _parameters(request: GenerateRequest, ask: RecordingRequest | None, grows: bool, *, scores: bool = False):
    """Return vLLM's parameters of a request.

    Args:
        request: what to sample.
        ask: what to record; None records nothing.
        grows: stream tokens as they come, because an aborted request has no final output.
        scores: return log-probabilities of the prompt; vLLM then computes the whole prompt anew.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if grows else RequestOutputKind.FINAL_ONLY
    prompt_logprobs = 0 if scores else None
    return SamplingParams(**sampling.parameters(request, ask), output_kind=kind, prompt_logprobs=prompt_logprobs)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, MoeRLError) else reason(error, Path(tempfile.gettempdir()))


if __name__ == "__main__":
    sys.exit(main())
