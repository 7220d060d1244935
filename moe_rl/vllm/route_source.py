"""Provides the routes of an engine to the process that drives it.

They come from a recorder in the workers, attached by the patch or by the worker class. native_source.py takes them from
vLLM's own capture instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_rl.errors import EngineError
from moe_rl.trace.source_sum import added
from moe_rl.types import RoutePart, RouteRef
from moe_rl.vllm.recording import RecordingRequest

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

    def finished(self, ask: RecordingRequest, token_ids: Sequence[int], result: Any) -> None:
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

    def stats(self) -> dict[str, int]:
        return next(stats for stats in self._llm.collective_rpc("moe_rl_stats") if stats is not None)


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
