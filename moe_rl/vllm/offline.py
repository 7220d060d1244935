"""Returns the routes of an offline `vllm.LLM` as numpy arrays, for programs with their own loop and trainer.

    with record("path/to/checkpoint", max_model_len=2048) as llm:
        for one in llm.generate(["What is 2 + 3?"], SamplingParams(max_tokens=32)):
            one.output.text, one.routes  # experts [prompt + sampled - 1 tokens, MoE layers, top_k]

vLLM runs in this process, so a plain script or a notebook needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from moe_rl.errors import EngineError
from moe_rl.trace import TraceSpec, TraceStore, validate
from moe_rl.trace.model_spec import checkpoint_spec
from moe_rl.types import RouteRef, Sequence, sampled_by
from moe_rl.vllm import arguments
from moe_rl.vllm.process import model_runner
from moe_rl.vllm.recording import Recording, RecordingRequest
from moe_rl.vllm.route_source import WorkerSource
from moe_rl.vllm.sampling import sampled_logprobs


@dataclass(frozen=True, slots=True)
class RecordedCompletion:
    """Holds vLLM's output for one prompt, and the experts of every forwarded token.

    Attributes:
        prompt_token_ids: P tokens.
        output: vLLM's CompletionOutput with S sampled tokens (token_ids, text, logprobs, ...).
        logprobs: float32 [S], natural log-probabilities of the sampled tokens under the distribution they were drawn
            from.
        routes: [P + S - 1, L, K] uint8 or uint16, ids of the K experts, ascending. The last sampled token is not
            forwarded.
        layers: the global numbers of the L decoder layers.
        ref: reference to the record in the trace store.
        weight_version: version of the weights that sampled the completion.
    """

    prompt_token_ids: tuple[int, ...]
    output: Any
    logprobs: np.ndarray
    routes: np.ndarray
    layers: tuple[int, ...]
    ref: RouteRef
    weight_version: int

    def sequence(self, reward: float) -> Sequence:
        """Return the completion with its reward, ready for `moe_rl.pack`."""
        tokens = tuple(self.output.token_ids)
        versions = sampled_by(self.weight_version, len(tokens))
        return Sequence(self.ref.key, self.prompt_token_ids, tokens, self.logprobs, reward, versions, self.ref)


class RecordingLLM:
    """Holds the result of `record`: `llm` is the vllm.LLM, `store` keeps the routes, `spec` describes the model."""

    def __init__(
        self,
        llm: Any,
        source: WorkerSource,
        store: TraceStore,
        spec: TraceSpec,
        folder: tempfile.TemporaryDirectory[str],
    ) -> None:
        self.llm, self.store, self.spec = llm, store, spec
        self._source, self._folder = source, folder
        llm.update_weight_version("0")

    def generate(
        self, prompts: Seq[str | Seq[int]], sampling_params: Any, *, shard: str | None = None
    ) -> list[RecordedCompletion]:
        """Sample completions, in prompt order; with n > 1 the samples of a prompt follow each other.

        Args:
            prompts: texts, or lists of token ids.
            sampling_params: vLLM's, one for all prompts or one each.
            shard: name of the shard for the routes.

        Raises:
            EngineError: `prompts` is a single prompt.
            EngineError, RouteValidationError: the recorded routes are not those of the tokens.
            TraceError: the shard exists.
        """
        if isinstance(prompts, str) or any(isinstance(p, Mapping) or not hasattr(p, "__len__") for p in prompts):
            raise EngineError(
                "Prompts are a list of texts, or of lists of token ids",
                where={"argument": "prompts"},
                got=repr(prompts)[:80],
                do="put a single prompt into a list",
            )
        shard = shard or f"offline-{secrets.token_hex(8)}"
        settings = sampling_params if isinstance(sampling_params, Seq) else [sampling_params] * len(prompts)
        inputs = [prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)} for prompt in prompts]
        # Sequences of several calls may be packed together, so that each needs a key of its own.
        names = [f"{shard}/{index}" for index in range(len(settings))]
        asked = [
            _with_recording(params, RecordingRequest(name, shard)) for name, params in zip(names, settings, strict=True)
        ]
        self._source.open(shard)
        try:
            results = self.llm.generate(inputs, asked, use_tqdm=False)
            # The recorder learns of the last finished requests in the next step.
            self.llm.llm_engine.step()
            made = {}
            for name, result, params in zip(names, results, asked, strict=True):
                for output in result.outputs:
                    key = name if params.n == 1 else f"{name}/{output.index}"
                    made[key] = tuple(result.prompt_token_ids), output
            sequences = {key: [*prompt, *output.token_ids[:-1]] for key, (prompt, output) in made.items()}
            self._source.publish(shard, shard, sequences)
            refs = self._source.references(shard)
        except BaseException:
            self._source.abandon(shard)
            raise
        return [self._completion(*made[key], refs[key], sequences[key]) for key in made]

    def close(self) -> None:
        """End vLLM. Removes the routes if `record` was given no folder for them."""
        self.llm.llm_engine.engine_core.shutdown()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _completion(
        self, prompt: tuple[int, ...], output: Any, ref: RouteRef, token_ids: list[int]
    ) -> RecordedCompletion:
        record = self.store.read(ref)
        version = int(self.llm.llm_engine.get_weight_version())
        validate(record, token_ids=token_ids, spec=self.spec, weight_version=version, ref=ref)
        logprobs = [by_token[token].logprob for by_token, token in zip(output.logprobs, output.token_ids, strict=True)]
        return RecordedCompletion(
            prompt, output, sampled_logprobs(logprobs, ref.key), record.routes, record.layers, ref, version
        )


def record(
    model: Path | str,
    *,
    trace_root: Path | str | None = None,
    layer_map: str | None = None,
    fingerprint: str | None = None,
    capture: str = "worker",
    support: bool = False,
    log_normalizer: bool = False,
    router_logits_fraction: float = 0.0,
    **of_vllm: Any,
) -> RecordingLLM:
    """Start a `vllm.LLM` that records routes.

    model: checkpoint folder. trace_root: folder of the trace store; None: a temporary one. layer_map: a letter for each
        decoder layer, d for dense and m for experts, as in "d*3,m*58"; needed for a family that is not in
        `moe_rl.models`. fingerprint: a name of the model in the trace, in place of a digest of its config.json.
        capture: "worker" needs no patch, "patch" needs a vLLM with this package's patches. support to
        router_logits_fraction: what else is kept, as in `recording.Recording`. of_vllm: arguments for vllm.LLM.
    Raises ConfigError for a model, and EngineError for a vLLM or arguments, with which routes cannot be recorded.
    """
    if capture not in ("worker", "patch"):
        message = "An offline LLM cannot record with this capture"
        raise EngineError(message, where={"argument": "capture"}, got=capture, expected="worker or patch")
    if taken := of_vllm.keys() & {"model", "worker_cls", "worker_extension_cls", "additional_config"}:
        raise EngineError("An argument of vLLM is reserved", where={"argument": min(taken)}, do="leave it out")
    arguments.refuse_wrong_vllm(capture)
    spec = checkpoint_spec(model, layer_map=layer_map, fingerprint=fingerprint)
    # vLLM runs in this process: a script needs no guard, and `generate` can make an extra step.
    os.environ |= model_runner(capture) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import vllm

    folder = tempfile.TemporaryDirectory(prefix="moe_rl-routes-")
    root = Path(trace_root or folder.name).absolute()
    recording = Recording(str(root), spec.model_fingerprint, support, log_normalizer, router_logits_fraction)
    # Prompts may be texts here, and the caller's arguments override all that recording does not need.
    defaults = arguments.fixed(Path(model), capture=capture, recording=recording, reads_text=True)
    defaults |= arguments.unsized(share_given="gpu_memory_utilization" in of_vllm)
    defaults |= arguments.synchronous(of_vllm)
    llm = vllm.LLM(**defaults | of_vllm)
    return RecordingLLM(llm, WorkerSource(llm, capture), TraceStore(root), spec, folder)


def _with_recording(params: Any, ask: RecordingRequest) -> Any:
    """Return a copy of vLLM's SamplingParams that requests routes and the log-probabilities of sampled tokens."""
    params = params.clone()
    if params.logprobs is None:
        params.logprobs = 0
    params.extra_args = (params.extra_args or {}) | ask.extra_args(params.n)
    return params
