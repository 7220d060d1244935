"""Records the routes that vLLM itself returns (`rollout.capture: native`), where its outputs arrive.

    vLLM's worker --- routes of a request's rows ---> engine process ---> this process ---> sinks.py, the same shards

vLLM cuts the rows of a data-parallel rank out of the batch of all ranks, and keeps the rows of cached prefixes. It says
nothing about the token that a row belongs to. So rows are bound to the tokens that vLLM returned, and the sums of
trace/source_sum.py begin here, not in the worker: what went wrong on the way to this process stays unseen.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.errors import EngineError, MoeRLError
from moe_rl.trace.source_sum import rows_of
from moe_rl.types import RouteRef
from moe_rl.vllm.recording import Recording, RecordingRequest, parse
from moe_rl.vllm.sinks import Sinks
from moe_rl.vllm.slots import Recorded, Rows


class NativeRecorder:
    """Stands in for the workers' `recorder.Recorder`, with the same control methods.

    Args:
        model_config: vLLM's ModelConfig.
        layers: global numbers of the decoder layers with experts.
        recording: the store.
        sampling: returns how many tokens running requests have; `stats` then shows that the engine works.
    """

    def __init__(
        self, model_config: Any, layers: Sequence[int], recording: Recording, sampling: Callable[[], int] = lambda: 0
    ):
        self.spec = recording.spec(model_config, layers)
        self.sinks = Sinks(Path(recording.trace_root), self.spec, layers=tuple(layers), suffix="")
        self.open, self.publish = self.sinks.open, self.sinks.publish
        self.abandon, self.abandon_all = self.sinks.abandon, self.sinks.abandon_all
        self.publications: dict[str, Future[dict[str, RouteRef]]] = {}
        self._layers, self._sampling = np.asarray(layers), sampling
        self._counts: Counter[str] = Counter(requests=0, recorded=0, forwarded=0, refused=0)
        self._running: dict[object, RecordingRequest] = {}

    @property
    def stats(self) -> dict[str, int]:
        """Return the Recorder counts that vLLM's outputs show, over the requests to be recorded."""
        return {**self._counts, "forwarded": self._counts["forwarded"] + self._sampling()}

    def unfinished(self, sink: str) -> list[str]:
        """Return the keys of requests that may still add to a shard."""
        return [ask.key for ask in self._running.values() if ask.sink == sink]

    def wrap(self, generate: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        """Return AsyncLLM.generate, which then records each request before it gives the last output, without routes."""

        async def recording(prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
            token_ids, loop, number = list[int](), asyncio.get_running_loop(), object()
            if (ask := parse(params.extra_args, request_id)) is not None:
                self._running[number] = ask
            try:
                async with aclosing(generate(prompt, params, request_id, **options)) as results:
                    async for result in results:
                        (last,) = result.outputs
                        token_ids += last.token_ids
                        if ask is not None and result.finished and token_ids:
                            # The sums of a long sequence take a tenth of a second.
                            made = loop.run_in_executor(None, self.rows, ask, token_ids, result)
                            await asyncio.wait([made])
                            self.add(ask, result, made.result)
                        last.routed_experts = None  # HTTP would carry them too
                        yield result
            finally:
                self._running.pop(number, None)

        return recording

    def rows(self, ask: RecordingRequest, token_ids: Sequence[int], result: Any) -> Rows:
        """Return the rows of a request from vLLM's last output, whose array is [tokens - 1, decoder layers, K].

        token_ids: all that were sampled. Raises EngineError if the array does not fit them.
        """
        (last,) = result.outputs
        routes, versions = last.routed_experts, [int(span.version) for span in last.weight_versions or ()]
        tokens = np.asarray([*result.prompt_token_ids, *token_ids][:-1], np.int32)
        fault: tuple[str, object, object] | None = None
        if routes is None or len(routes) != len(tokens):
            rows = "nothing" if routes is None else f"{len(routes)} rows"
            fault = "did not return every forwarded token", rows, len(tokens)
        elif routes.dtype.kind != "u":
            fault = "returned ids of another type", routes.dtype, "uint8 or uint16, whose ids cannot be negative"
        elif len(versions) != 1:
            fault = "does not say which weights made which row", f"tokens of weight versions {versions}", "one version"
        if fault is not None:
            what, got, expected = fault
            raise EngineError(f"vLLM's capture {what}", where={"request": ask.key}, got=got, expected=expected)
        chosen = routes[:, self._layers].astype(self.spec.dtype, casting="safe")
        sums = rows_of(chosen, self._layers.tolist(), tokens, versions=versions[0])
        return Rows(chosen, tokens, np.full(len(tokens), versions[0], np.int64), sums)

    def add(self, ask: RecordingRequest, result: Any, rows: Callable[[], Rows]) -> None:
        """Give the rows of a finished request to its shard. `publish` reports why a request has none."""
        number, cached = self._counts["requests"], result.num_cached_tokens
        self._counts["requests"] += 1
        try:
            taken, prompt = rows(), np.asarray(result.prompt_token_ids, np.int32)
            self.sinks.add(Recorded(number, ask, prompt, cached, greedy=False, forwarded=len(taken)), ask, taken, {})
        except MoeRLError as error:
            self._counts["refused"] += 1
            self.sinks.refuse(ask.sink, ask.key, error)
        else:
            self._counts["recorded"] += 1
            self._counts["forwarded"] += len(taken) - cached
