"""vLLM's own arguments, put together once: for the engine in a child process, for servers, for an offline LLM.

`fixed` is what recording and the updates of weights stand on, and may not be contradicted. `sized` is what a run's
config decides. What only one of the three gives stands where that one starts vLLM, with its reason. Imports vLLM late:
who mistyped should not wait for it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from moe_rl.errors import EngineError, describe
from moe_rl.vllm import patches
from moe_rl.vllm.recording import Recording

# The CPU backend takes multiples of 32 only.
_BLOCK_SIZE = 32
_STEP_TOKENS = 4096
# The share of a GPU that vLLM wants free at its start. It has no other use where the KV cache's size is given, and a
# trainer may be there first.
_FREE_AT_START = 0.01
# KV cache of a vLLM on a CPU where no config gives its size. vLLM itself would take 0.92 of the memory of the machine,
# and die where other processes use it.
_CPU_KV_CACHE_BYTES = 1 << 30


def refuse_wrong_vllm(capture: str) -> None:
    """Raises EngineError when the installed vLLM is none that `capture` (of the config's rollout) can record with."""
    if faults := patches.problems(capture=capture):
        raise EngineError("\n".join(faults))


def fixed(model: Path, *, capture: str, recording: Recording | None) -> dict[str, object]:
    """What every vLLM is started with. model: checkpoint folder. recording: None turns recording off.

    Raises EngineError where vLLM's own capture (native) cannot run, before a model is loaded in vain.
    """
    from vllm.platforms import current_platform

    from moe_rl.vllm.worker import CONTROL, WORKER
    from moe_rl.weights.receiver import BACKEND

    arguments: dict[str, object] = {
        "model": str(model.absolute()),
        "skip_tokenizer_init": True,
        # Else vLLM would take stop tokens and sampling parameters from the checkpoint.
        "generation_config": "vllm",
        # Logprobs are of the distribution the token was drawn from: after the temperature, not before.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": CONTROL,
        "weight_transfer_config": {"backend": BACKEND},
    }
    if current_platform.is_cpu() and patches.inspect().summary != "patched":
        # Without patch 0003 a request with a seed that is prefilled in parts kills vLLM on a CPU.
        arguments["enable_chunked_prefill"] = False
    if recording is None:
        return arguments
    if capture == "native":
        _refuse_native(recording)
        return arguments | {"enable_return_routed_experts": True}
    if capture == "worker":
        arguments["worker_cls"] = WORKER
    return arguments | {"additional_config": {"moe_rl": msgspec.to_builtins(recording)}}


def sized(
    *, dtype: str, seed: int, max_model_len: int, max_concurrent: int, kv_cache_mib: int, gpus: int = 1
) -> dict[str, object]:
    """What a run's config decides. max_model_len: prompt and completion, in tokens. max_concurrent: sequences decoded
    at once. gpus: that share one replica of the weights."""
    return {
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "max_num_seqs": max_concurrent,
        "max_num_batched_tokens": max(_STEP_TOKENS, max_model_len, max_concurrent),
        "kv_cache_memory_bytes": kv_cache_mib << 20,
        "gpu_memory_utilization": _FREE_AT_START,
        "block_size": _BLOCK_SIZE,
        "tensor_parallel_size": gpus,
        "enforce_eager": True,
    }


def unsized(*, share_given: bool) -> dict[str, object]:
    """The size of the KV cache of a vLLM that no run's config sizes: 1 GiB on a CPU, vLLM's own choice on a GPU.

    share_given: the caller tells vLLM which share of the memory to take (gpu_memory_utilization), which then decides.
    """
    from vllm.platforms import current_platform

    return {"kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES} if current_platform.is_cpu() and not share_given else {}


def _refuse_native(recording: Recording) -> None:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON or current_platform.is_cpu():
        raise EngineError(
            describe(
                "vLLM's own capture cannot run here",
                got=f"platform {current_platform.device_type}, Triton {'found' if HAS_TRITON else 'missing'}",
                expected="a GPU and Triton, which Model Runner V2 needs",
                do="set rollout.capture to patch or worker",
            )
        )
    if recording.support or recording.log_normalizer or recording.router_logits_fraction:
        raise EngineError(
            describe(
                "vLLM's own capture records routes only",
                got="support, log_normalizer or router_logits_fraction",
                do="set rollout.capture to patch or worker",
            )
        )
