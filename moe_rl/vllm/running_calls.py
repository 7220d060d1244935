"""Holds the calls that an engine works on: their outputs, published shards and replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from moe_rl.types import GenerateRequest, RouteRef
from moe_rl.vllm import sampling, wire
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.route_source import NativeSource, WorkerSource
from moe_rl.vllm.sampling import Growing, ReportedSpan


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
        publishes: whether the shard is being published.
    """

    number: int
    source: WorkerSource | NativeSource | None
    shard: str
    requests: list[GenerateRequest]
    asks: list[RecordingRequest | None]
    keep_open: bool = False
    outputs: list[RequestOutput] = field(init=False)
    unfinished: int = field(init=False)
    publishes: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.outputs, self.unfinished = [RequestOutput() for _ in self.requests], len(self.requests)

    @abstractmethod
    def publish(self, source: WorkerSource | NativeSource) -> None:
        """Begin publishing the shard, or its records of this call. All requests must have ended."""

    @abstractmethod
    def reply(self, refs: dict[str, RouteRef]) -> wire.Reply:
        """Return the reply. refs: references to the records by the keys of the requests."""


class SampledCall(RunningCall):
    """Samples completions."""

    def publish(self, source: WorkerSource | NativeSource) -> None:
        sequences, aborted = sampling.forwarded(self.requests, self.asks, self.outputs)
        for request, ask, output in zip(self.requests, self.asks, self.outputs, strict=True):
            if ask is not None and ask.key in sequences and not output.aborted:
                source.finished(ask, request.prompt_token_ids, output.token_ids, output.result)
        source.publish(str(self.number), self.shard, sequences, aborted, self.keep_open)
        stats = ", ".join(f"{count} {name}" for name, count in sorted(source.stats().items()))
        rows = sum(map(len, sequences.values()))
        print(f"shard {self.shard}: {len(sequences)} sequences, {rows} rows; since the start: {stats}")

    def reply(self, refs: dict[str, RouteRef]) -> wire.Reply:
        pairs = zip(self.requests, self.outputs, strict=True)
        return wire.Generated([output.completion(request, refs) for request, output in pairs])


class ScoredCall(RunningCall):
    """Scores token sequences."""

    def publish(self, source: WorkerSource | NativeSource) -> None:
        sequences = {one.key: list(one.prompt_token_ids[:-1]) for one in self.requests}
        source.publish(str(self.number), self.shard, sequences)

    def reply(self, refs: dict[str, RouteRef]) -> wire.Reply:
        return wire.Scored(
            [
                sampling.prompt_logprobs(output.result, request.prompt_token_ids)
                for output, request in zip(self.outputs, self.requests, strict=True)
            ],
            [refs[request.key] for request in self.requests if request.key in refs],
        )
