"""Puts a NativeRecorder where control calls and vLLM's outputs come: into an engine of this process, or a server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from moe_rl.vllm.native import NativeRecorder
from moe_rl.vllm.recording import Recording, RecordingRequest
from moe_rl.vllm.route_source import WorkerSource
from moe_rl.vllm.worker import RecorderControl


class Here(RecorderControl):
    """Answers control calls in this process, as the workers do where they record."""

    def __init__(self, recorder: NativeRecorder):
        self.moe_rl_recorder = recorder

    def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        return [getattr(self, method)(*args)]


class NativeSource(WorkerSource):
    """Uses vLLM's `enable_return_routed_experts` in an engine of this process."""

    def __init__(self, llm: Any, recording: Recording):
        layers = llm.collective_rpc("moe_rl_layers")[0]
        self._recorder = NativeRecorder(llm.llm_engine.vllm_config.model_config, layers, recording)
        self._llm = Here(self._recorder)

    def finished(self, ask: RecordingRequest, token_ids: Sequence[int], result: Any) -> None:
        self._recorder.add(ask, result, partial(self._recorder.rows, ask, token_ids, result))


async def attach(engine: Any, recording: Recording) -> None:
    """Record what this AsyncLLM samples. `engine.moe_rl_native` then answers control calls about records."""

    def sampling() -> int:
        running = engine.output_processor.request_states.values()
        return sum(state.detokenizer.num_output_tokens() for state in running)

    layers = (await engine.collective_rpc("moe_rl_layers"))[0]
    recorder = NativeRecorder(engine.vllm_config.model_config, layers, recording, sampling)
    engine.moe_rl_native = Here(recorder)
    engine.generate = recorder.wrap(engine.generate)
