"""Collects vLLM's arguments in one place, for the engine in a child process, for servers, and for an offline LLM.

`fixed` holds the arguments that recording and weight updates rely on; callers may not override them. `sized` holds
those that a run's config decides. An argument that only one of the three callers needs is set in that caller. vLLM is
imported late, so that errors in the arguments are reported quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from moe_rl.errors import EngineError
from moe_rl.models.hf import FAMILIES, read_config
from moe_rl.models.weight_files import checkpoint_tensors, is_derived
from moe_rl.vllm import patches
from moe_rl.vllm.recording import Recording

# The CPU backend requires multiples of 32.
BLOCK_SIZE = 32
_STEP_TOKENS = 4096
# The share of a GPU that vLLM requires to be free at its start. Since the KV cache's size is given, vLLM uses this
# share for nothing else; a trainer may already occupy the GPU.
_FREE_AT_START = 0.01
# KV cache of a vLLM on a CPU if no config sets its size. By default vLLM takes 0.92 of the machine's memory, and
# crashes if other processes use it.
_CPU_KV_CACHE_BYTES = 1 << 30


def refuse_wrong_vllm(capture: str) -> None:
    """Raise EngineError if the installed vLLM cannot record with `capture` (of the config's rollout)."""
    if faults := patches.problems(capture=capture):
        raise EngineError(faults)


def fixed(model: Path, *, capture: str, recording: Recording | None, reads_text: bool) -> dict[str, object]:
    """Return the arguments of every vLLM.

    Args:
        model: the checkpoint folder.
        recording: None turns recording off.
        reads_text: load the tokenizer, for stop strings or prompts of text.

    Raises EngineError if vLLM's own capture (native) cannot run, before a model is loaded.
    """
    from vllm.config import StructuredOutputsConfig
    from vllm.platforms import current_platform

    from moe_rl.vllm.loader import FORMAT
    from moe_rl.vllm.scheduler import SCHEDULER
    from moe_rl.vllm.worker import CONTROL, WORKER
    from moe_rl.weights.receiver import BACKEND

    arguments: dict[str, object] = {
        "model": str(model.absolute()),
        "skip_tokenizer_init": not reads_text,
        # Otherwise vLLM takes stop tokens and sampling parameters from the checkpoint.
        "generation_config": "vllm",
        # Log-probabilities of the distribution that the token was drawn from, that is after the temperature.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": CONTROL,
        "scheduler_cls": SCHEDULER,
        # auto would follow some JSON schemas with another backend, which an engine cannot load beside the first.
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
        "weight_transfer_config": {"backend": BACKEND},
    }
    if needs_loader(model):
        arguments["load_format"] = FORMAT
    if current_platform.is_cpu() and patches.inspect().summary != "patched":
        # Without patch 0003 vLLM crashes on a CPU when a seeded request is prefilled in chunks.
        arguments["enable_chunked_prefill"] = False
    if recording is None:
        return arguments
    if capture == "native":
        _refuse_native(recording)
        arguments["enable_return_routed_experts"] = True
    if capture == "worker":
        arguments["worker_cls"] = WORKER
    recording = msgspec.structs.replace(recording, native=capture == "native")
    return arguments | {"additional_config": {"moe_rl": msgspec.to_builtins(recording)}}


def needs_loader(model: Path) -> bool:
    """Return whether only `loader` can load this checkpoint: it has a tied embedding or derived buffers."""
    raw = read_config(model)
    if not FAMILIES.keys() & set(raw.get("architectures") or ()):
        return False
    return raw.get("tie_word_embeddings") is True or any(map(is_derived, checkpoint_tensors(model)))


def sized(
    *,
    dtype: str,
    seed: int,
    max_model_len: int,
    max_concurrent: int,
    kv_cache_mib: int,
    gpus: int = 1,
    cuda_graphs: bool | None,
    passed: Mapping[str, object],
) -> dict[str, object]:
    """Return the arguments that a run's config decides.

    Args:
        dtype: "bfloat16" or "float32".
        seed: vLLM's seed.
        max_model_len: prompt plus completion, in tokens.
        max_concurrent: sequences decoded at once.
        kv_cache_mib: size of the KV cache.
        gpus: number of GPUs that share one replica of the weights.
        cuda_graphs: whether the forward pass is compiled and replayed as graphs. None: where `completed` finds a GPU.
        passed: further arguments, `rollout.vllm`.
    """
    return {
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "max_num_seqs": max_concurrent,
        "max_num_batched_tokens": max(_STEP_TOKENS, max_model_len, max_concurrent),
        "kv_cache_memory_bytes": kv_cache_mib << 20,
        "gpu_memory_utilization": _FREE_AT_START,
        "block_size": BLOCK_SIZE,
        "tensor_parallel_size": gpus,
        "enforce_eager": None if cuda_graphs is None else not cuda_graphs,
        **passed,
    }


def completed(sizes: Mapping[str, object]) -> dict[str, object]:
    """Return `sized` arguments of a server with what depends on its device: with a GPU, it uses CUDA graphs."""
    from vllm.platforms import current_platform

    eager = sizes["enforce_eager"]
    return {**sizes, "enforce_eager": current_platform.is_cpu() if eager is None else eager}


def synchronous(given: Mapping[str, object], *, native: bool = False) -> dict[str, object]:
    """Return the argument that turns asynchronous scheduling off if `given` turns speculative decoding on.

    An asynchronous scheduler counts all drafts of a step as computed until it learns which were accepted. The recorder
    would read rows that were never written. vLLM's own capture (native) waits for what was accepted.
    """
    names = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    speculates = any(given.get(name) is not None for name in names)
    return {"async_scheduling": False} if speculates and not native else {}


def unsized(*, share_given: bool) -> dict[str, object]:
    """Return the size of the KV cache if no run's config sets it: 1 GiB on a CPU, vLLM's own choice on a GPU.

    share_given: the caller sets gpu_memory_utilization, the share of memory that vLLM takes, which then decides.
    """
    from vllm.platforms import current_platform

    return {"kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES} if current_platform.is_cpu() and not share_given else {}


def _refuse_native(recording: Recording) -> None:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise EngineError(
            "vLLM's own capture cannot run here",
            got=f"platform {current_platform.device_type}, no Triton for it",
            expected="Triton, which Model Runner V2 needs",
            do="set rollout.capture to patch or worker",
        )
    if recording.more_than_routes:
        raise EngineError(
            "vLLM's own capture records routes only",
            got="support, log_normalizer, router_logits_fraction or head",
            do="set rollout.capture to patch or worker",
        )
