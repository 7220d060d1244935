"""The engine process: `python -m moe_rl.rollout.child FD PARENT_PID`. Answers wire frames with vLLM, one at a time."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

import numpy as np

from moe_rl.errors import EngineError, MoeRLError, WeightSyncError, describe
from moe_rl.rollout import patches, wire
from moe_rl.types import GenerateRequest

_PR_SET_PDEATHSIG = 1
_ALIVE_SECONDS = 0.5
# The CPU backend takes multiples of 32 only.
_BLOCK_SIZE = 32
_STEP_TOKENS = 4096


def main() -> int:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    channel = wire.Channel(socket.socket(fileno=descriptor), wire.Call)
    try:
        sampler = Sampler(channel.receive(), _Pulse(channel))
    except Exception as error:
        traceback.print_exc()
        channel.send(wire.Failed(_message(error)))
        return 1
    channel.send(wire.Ready(sampler.vllm_version))
    while True:
        try:
            call = channel.receive()
        except EOFError:
            call = wire.Close()
        if isinstance(call, wire.Close):
            sys.stdout.flush()
            # vLLM's own shutdown takes seconds and has nothing to save.
            os._exit(0)
        try:
            reply, sound = sampler.answer(call), True
        except MoeRLError as error:
            traceback.print_exc()
            reply, sound = wire.Failed(str(error), isinstance(error, WeightSyncError)), sampler.is_idle()
        except Exception as error:
            # vLLM itself failed: what its caches and weights hold now is anybody's guess.
            traceback.print_exc()
            reply, sound = wire.Failed(_message(error)), False
        channel.send(reply)
        if not sound:
            return 1


class Sampler:
    """vLLM in this process, told to be deterministic and to say what it did."""

    def __init__(self, start: wire.Start, pulse: Callable[[], None]):
        faults = patches.problems()
        if faults:
            raise EngineError("\n".join(faults))
        # Imported here: a parent that is told of a wrong vLLM should not wait for its import.
        import vllm

        from moe_rl.sync.vllm_files import BACKEND

        self.vllm_version: str = vllm.__version__
        self._pulse = pulse
        additional = {}
        if start.trace_root is not None:
            additional["moe_rl"] = {"trace_root": start.trace_root, "model_fingerprint": start.model_fingerprint}
        self._llm = vllm.LLM(
            model=start.model_path,
            skip_tokenizer_init=True,
            # Else vLLM would take stop tokens and sampling parameters from the checkpoint.
            generation_config="vllm",
            dtype=start.dtype,
            seed=start.seed,
            max_model_len=start.max_model_len,
            max_num_seqs=start.max_concurrent,
            # A partial prefill draws a token, throws it away and winds the request's generator back, which a CPU
            # generator cannot do: vLLM dies. Whole prompts draw nothing in vain.
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(_STEP_TOKENS, start.max_model_len, start.max_concurrent),
            block_size=_BLOCK_SIZE,
            kv_cache_memory_bytes=start.kv_cache_bytes,
            enable_prefix_caching=True,
            enforce_eager=True,
            # Of the distribution the token was drawn from: after the temperature, not before.
            logprobs_mode="processed_logprobs",
            weight_transfer_config={"backend": BACKEND},
            additional_config=additional,
        )
        (self._recorder,) = self._llm.collective_rpc(lambda worker: getattr(worker, "moe_rl_recorder", None))
        if self._recorder is None and start.trace_root is not None:
            raise EngineError(
                describe("vLLM did not call the recorder", do="run python tools/apply_patches.py --check")
            )
        (transfer,) = self._llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
        transfer.on_progress = pulse
        self._llm.update_weight_version("0")

    def is_idle(self) -> bool:
        """Whether nothing is left of a failed call, so that the next one may be taken."""
        return not self._llm.llm_engine.has_unfinished_requests()

    def answer(self, call: wire.Generate | wire.Score | wire.Update) -> wire.Message:
        """Work on one call. Raises MoeRLError for what can be refused; anything else means that vLLM is broken."""
        if isinstance(call, wire.Generate):
            return wire.Generated(self._generate(call.requests, call.shard))
        if isinstance(call, wire.Score):
            return wire.Scored(self._score(call.token_ids))
        self._update(call)
        return wire.Updated()

    def _generate(self, requests: list[GenerateRequest], shard: str) -> list[wire.Sampled]:
        self._forget_prefixes()
        version = int(self._llm.llm_engine.get_weight_version())
        if self._recorder is not None:
            self._recorder.begin(shard, version)
        outputs = self._run([(request.prompt_token_ids, _sampling(request)) for request in requests])
        refs = {}
        if self._recorder is not None:
            rows = {
                request.key: len(request.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
                for request, output in zip(requests, outputs, strict=True)
            }
            refs = self._recorder.finish(rows)
            print(
                f"shard {shard}: {len(rows)} completions, {sum(rows.values())} rows, "
                f"{self._recorder.forwarded} tokens forwarded, {self._recorder.preemptions} preemptions"
            )
        sampled = []
        for request, output in zip(requests, outputs, strict=True):
            completion = output.outputs[0]
            logprobs = [at[token].logprob for at, token in zip(completion.logprobs, completion.token_ids, strict=True)]
            sampled.append(
                wire.Sampled(
                    token_ids=list(completion.token_ids),
                    logprobs=np.asarray(logprobs, "<f4").tobytes(),
                    finish_reason=completion.finish_reason,
                    weight_version=_one_version(completion, request.key),
                    routes=refs.get(request.key),
                )
            )
        return sampled

    def _score(self, token_ids: list[int]) -> bytes:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        self._forget_prefixes()
        (output,) = self._run([(token_ids, params)])
        scored = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
        return np.asarray([at[token].logprob for at, token in scored], "<f4").tobytes()

    def _update(self, call: wire.Update) -> None:
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"parts": call.parts, "digest": call.digest}})
        self._llm.finish_weight_update(str(call.version))
        self._forget_prefixes()

    def _run(self, prompts: list) -> list:
        """Finished outputs of (token ids, SamplingParams), in order."""
        engine = self._llm.llm_engine
        for at, (token_ids, params) in enumerate(prompts):
            engine.add_request(str(at), {"prompt_token_ids": list(token_ids)}, params)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs.update((int(output.request_id), output) for output in engine.step() if output.finished)
            self._pulse()
        # The worker is told of the last finished requests in the step after.
        engine.step()
        return [outputs[at] for at in range(len(prompts))]

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache though no request runs")


class _Pulse:
    """Tells the parent, not more often than needed, that the engine gets ahead."""

    def __init__(self, channel: wire.Channel):
        self._channel = channel
        self._sent = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._sent >= _ALIVE_SECONDS:
            self._sent = now
            self._channel.send(wire.Alive())


def _sampling(request: GenerateRequest):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        # The stop tokens of the request are all there are.
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"moe_rl_key": request.key},
    )


def _one_version(completion, key: str) -> int:
    """The version of the weights that sampled every token, from the spans that vLLM reports."""
    spans = [(span.version, span.start, span.end) for span in completion.weight_versions or ()]
    if len(spans) != 1 or spans[0][1:] != (0, len(completion.token_ids)):
        raise EngineError(
            describe("A completion was not sampled by one version", where=f"request {key}", got=spans or "no version")
        )
    return int(spans[0][0])


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, MoeRLError) else f"{type(error).__name__}: {error}"


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent's main thread ends, by whatever cause."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the trainer was gone before the engine began")


if __name__ == "__main__":
    sys.exit(main())
