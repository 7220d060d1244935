"""Provides the routes of an engine to the process that drives it: one interface, two implementations.

WorkerSource uses a recorder in the workers, attached by the patch or by the worker class. NativeSource uses vLLM's own
capture, whose arrays come with every output. Both use the same sinks, the same validator and the same store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.errors import EngineError, MoeRLError
from moe_rl.trace.source_sum import added, rows_of
from moe_rl.types import RoutePart, RouteRef
from moe_rl.vllm.recording import Recording, RecordingRequest
from moe_rl.vllm.sinks import Sinks
from moe_rl.vllm.slots import Recorded, Rows

# A worker's report of its part of a record: shard, digest, first row, rows, source sum. Plain values for transfer.
Claim = tuple[str, str, int, int, str]


class WorkerSource:
    """Uses recorders in the workers of an engine started with `worker_extension_cls=worker.CONTROL`."""

    def __init__(self, llm, capture: str):
        self._llm = llm
        if not any(llm.collective_rpc("moe_rl_records")):
            do = {
                "patch": "run moe-rl patch --apply, or set rollout.capture: worker",
                "worker": "pass the worker class to vLLM",
            }
            raise EngineError("vLLM did not attach the recorder", got=f"capture {capture}", do=do[capture])

    def open(self, sink: str) -> None:
        self._llm.collective_rpc("moe_rl_open", args=(sink,))

    def finished(self, ask: RecordingRequest, prompt: Sequence[int], token_ids: Sequence[int], result) -> None:
        """Do nothing: the workers see finished requests themselves."""

    def publish(self, call: str, *given: Any) -> None:
        """Begin publishing a shard. given: as of Recorder.publish. `call` names this for the two methods below."""
        self._llm.collective_rpc("moe_rl_publish", args=(call, *given))

    def published(self, call: str) -> bool:
        """Return whether `references` would not wait."""
        return all(self._llm.collective_rpc("moe_rl_published", args=(call,)))

    def references(self, call: str) -> dict[str, RouteRef]:
        """Wait until `publish` is done, and return references to the records by their keys."""
        return join_parts(self._llm.collective_rpc("moe_rl_claims", args=(call,)))

    def abandon(self, sink: str) -> None:
        self._llm.collective_rpc("moe_rl_abandon", args=(sink,))

    def set_weight_version(self, version: int) -> None:
        """Do nothing: the workers see updates themselves."""

    def stats(self) -> dict[str, int]:
        return next(stats for stats in self._llm.collective_rpc("moe_rl_stats") if stats is not None)


class NativeSource:
    """Uses vLLM's `enable_return_routed_experts`."""

    def __init__(self, llm, recording: Recording):
        self._llm = llm
        (layers,) = llm.collective_rpc("moe_rl_layers")
        self._layers = np.asarray(layers)
        spec = recording.spec(llm.llm_engine.vllm_config.model_config, layers)
        self._sinks = Sinks(Path(recording.trace_root), spec, layers=tuple(layers), suffix="")
        self._dtype = spec.dtype
        self._version = 0
        self._publications: dict[str, Future[dict[str, RouteRef]]] = {}
        self._stats = dict.fromkeys(("requests", "recorded", "forwarded", "refused"), 0)

    def open(self, sink: str) -> None:
        self._sinks.open(sink)

    def finished(self, ask: RecordingRequest, prompt: Sequence[int], token_ids: Sequence[int], result) -> None:
        """Take the array [tokens - 1, decoder layers, K] from vLLM's last output of a request."""
        self._stats["requests"] += 1
        try:
            rows = self._rows(ask, np.asarray([*prompt, *token_ids][:-1], np.int32), result.outputs[0].routed_experts)
            cached = result.num_cached_tokens
            recorded = Recorded(
                self._stats["requests"],
                ask,
                np.asarray(prompt, np.int32),
                cached=cached,
                greedy=False,
                forwarded=len(rows),
            )
            self._sinks.add(recorded, ask, rows, {})
        except MoeRLError:
            self._stats["refused"] += 1
            raise
        self._stats["recorded"] += 1
        self._stats["forwarded"] += len(rows) - cached

    def _rows(self, ask: RecordingRequest, token_ids: np.ndarray, routes: np.ndarray | None) -> Rows:
        if routes is None or len(routes) != len(token_ids):
            raise EngineError(
                "vLLM's capture did not return every forwarded token",
                where={"request": ask.key},
                got="nothing" if routes is None else f"{len(routes)} rows",
                expected=len(token_ids),
            )
        if routes.dtype.kind != "u":
            raise EngineError(
                "vLLM's capture returned ids of another type",
                where={"request": ask.key},
                got=routes.dtype,
                expected="uint8 or uint16, whose ids cannot be negative",
            )
        chosen = routes[:, self._layers].astype(self._dtype, casting="safe")
        sums = rows_of(chosen, self._layers.tolist(), token_ids, versions=self._version)
        return Rows(chosen, token_ids, np.full(len(token_ids), self._version, np.int64), sums)

    def publish(self, call: str, *given: Any) -> None:
        self._publications[call] = self._sinks.publish(*given)

    def published(self, call: str) -> bool:
        return self._publications[call].done()

    def references(self, call: str) -> dict[str, RouteRef]:
        return self._publications.pop(call).result()

    def abandon(self, sink: str) -> None:
        self._sinks.abandon(sink)

    def set_weight_version(self, version: int) -> None:
        self._version = version

    def stats(self) -> dict[str, int]:
        """Return the Recorder counts that vLLM's outputs show, over the requests to be recorded."""
        return dict(self._stats)


def claims(refs: Mapping[str, RouteRef]) -> dict[str, Claim]:
    """Convert one worker's published references into its answer to `moe_rl_claims`."""
    return {
        key: (part.shard, part.digest, ref.start, ref.rows, ref.source_sum)
        for key, ref in refs.items()
        for part in ref.parts
    }


def join_parts(answers: Sequence[Mapping[str, Claim] | None]) -> dict[str, RouteRef]:
    """Make references from the workers' answers to `moe_rl_claims`: one part per recording worker."""
    recorded = [answer for answer in answers if answer is not None]
    refs = {}
    for key in recorded[0]:
        shards, digests, (start, *_), (rows, *_), sums = zip(*(answer[key] for answer in recorded), strict=True)
        refs[key] = RouteRef(key, rows, tuple(map(RoutePart, shards, digests)), start, added(sums))
    return refs
