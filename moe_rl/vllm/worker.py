"""Adds a recorder to vLLM's workers through vLLM's arguments `worker_extension_cls` and `worker_cls`.

RecorderControl has the methods that the engine calls between steps. RecordingWorker attaches a recorder without a
patch, for installations that must not be changed.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Set
from typing import Any

import msgspec
import torch

from moe_rl.errors import EngineError, MoeRLError, is_refusal
from moe_rl.vllm import loader, patches  # noqa: F401 - the loader registers itself where models are loaded
from moe_rl.vllm.hooks import attach_recorder
from moe_rl.vllm.native import NativeRecorder
from moe_rl.vllm.recorder import Recorder
from moe_rl.vllm.route_source import Claim, claims
from moe_rl.weights import receiver

CONTROL = f"{__name__}.RecorderControl"
WORKER = f"{__name__}.RecordingWorker"


class RecorderControl:
    """Provides methods for collective_rpc. Arguments and results are plain values, so they can cross processes.

    A worker that does not record answers None; of the tensor-parallel workers only the first records.
    """

    moe_rl_recorder: Recorder | NativeRecorder | None = None
    # Attributes of the worker class that this is mixed into.
    model_runner: Any
    weight_transfer_engine: receiver.WeightReceiver

    def moe_rl_records(self) -> bool:
        return self.moe_rl_recorder is not None

    def moe_rl_layers(self) -> list[int]:
        """Return the global numbers of this worker's decoder layers with experts."""
        from moe_rl.vllm.capture import moe_modules

        return list(moe_modules(self.model_runner.get_model()))

    def moe_rl_open(self, sink: str, folder: str = "") -> None:
        """Begin a shard. `folder` is the store's folder below the trace root."""
        if self.moe_rl_recorder is not None:
            self.moe_rl_recorder.open(sink, folder)

    def moe_rl_publish(self, call: str, *given: Any) -> None:
        """Begin publishing a shard. given: as of Recorder.publish. `call` names this for the two methods below."""
        if (recorder := self.moe_rl_recorder) is not None:
            recorder.publications[call] = recorder.publish(*given)

    def moe_rl_published(self, call: str) -> bool:
        """Return whether this worker has done what `moe_rl_publish` began."""
        return self.moe_rl_recorder is None or self.moe_rl_recorder.publications[call].done()

    def moe_rl_claims(self, call: str) -> dict[str, Claim] | None:
        """Wait until it is done, and return this worker's part of each record."""
        if self.moe_rl_recorder is None:
            return None
        return claims(self.moe_rl_recorder.publications.pop(call).result())

    def moe_rl_abandon(self, sink: str) -> None:
        if self.moe_rl_recorder is not None:
            self.moe_rl_recorder.abandon(sink)

    def moe_rl_abandon_all(self) -> None:
        if self.moe_rl_recorder is not None:
            self.moe_rl_recorder.abandon_all()

    def moe_rl_update_weights(self, update: bytes) -> dict[str, object]:
        """Load one part of new weights, see `weights.update.encode`. Returns a `Holding` as plain values."""
        return receiver.take(self, update)

    def moe_rl_discard_weights(self) -> dict[str, object]:
        """Mark the weights as released. Returns as `moe_rl_update_weights` does."""
        self.weight_transfer_engine.intake.touch()
        return msgspec.to_builtins(self.weight_transfer_engine.intake.holding())

    def moe_rl_forget_weights(self) -> dict[str, object]:
        """Reset for another run: version 0, and incomplete weights until the first update."""
        self.weight_transfer_engine.intake.forget()
        return msgspec.to_builtins(self.weight_transfer_engine.intake.holding())

    def moe_rl_stats(self) -> dict[str, int] | None:
        return dict(self.moe_rl_recorder.stats) if self.moe_rl_recorder is not None else None

    def moe_rl_spec(self) -> dict[str, object] | None:
        """Return the fields of the TraceSpec."""
        return dataclasses.asdict(self.moe_rl_recorder.spec) if self.moe_rl_recorder is not None else None

    def moe_rl_unfinished(self, sink: str) -> list[str] | None:
        """Return the keys of requests that may still add to a shard, see Recorder.unfinished."""
        return self.moe_rl_recorder.unfinished(sink) if self.moe_rl_recorder is not None else None

    def moe_rl_answer(self, method: str, *args) -> dict[str, object]:
        """Call `method` and return {"value": result}; {"refused": message} if the call is at fault; {"failed": message}
        if this worker or its disk is.

        For engines in other processes: there an exception arrives as text without its type, and if one of several
        workers raises, vLLM mistakes the other workers' answers for answers to the next call.
        """
        try:
            return {"value": getattr(self, method)(*args)}
        except Exception as error:
            if is_refusal(error):
                return {"refused": str(error)}
            traceback.print_exc()
            return {"failed": str(error) if isinstance(error, MoeRLError) else f"{type(error).__name__}: {error}"}


def __getattr__(name: str):
    """Create RecordingWorker on first use: its base class depends on the platform and takes long to import."""
    if name != "RecordingWorker":
        raise AttributeError(name)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Base
    else:
        from vllm.v1.worker.gpu_worker import Worker as Base

    from vllm.v1.worker import gpu_worker

    # A patched vLLM does this itself; it must not be done twice.
    has_hooks = hasattr(gpu_worker, "attach_recorder")
    applied = {name[:4] for name, state in patches.inspect().patches.items() if state == "applied"}
    prepacks = "0002" in applied

    class RecordingWorker(RecorderControl, Base):
        """Extends vLLM's worker of this platform with the changes of patches 0001 and 0002."""

        def load_model(self, *args, **kwargs) -> None:
            refuse_unpatched(self.vllm_config, applied, on_cpu=current_platform.is_cpu())
            super().load_model(*args, **kwargs)
            if not has_hooks:
                attach_recorder(self)

        def execute_model(self, scheduler_output):
            recorder = None if has_hooks else self.moe_rl_recorder
            if recorder is not None:
                recorder.before_step(scheduler_output)
            output = super().execute_model(scheduler_output)
            if recorder is not None:
                recorder.after_forward(scheduler_output)
            return output

        def finish_weight_update(self) -> None:
            super().finish_weight_update()
            if not prepacks and current_platform.is_cpu():
                _prepack(self.model_runner.get_model())

    globals()[name] = RecordingWorker
    return RecordingWorker


def refuse_unpatched(config, applied: Set[str], *, on_cpu: bool) -> None:
    """Raise EngineError if vLLM without some patches would crash or compute wrong numbers with this VllmConfig.

    `applied` holds the four digits of the applied patches. On a CPU with AMX this also requests the AMX tiles from the
    kernel.
    """
    model = config.model_config
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    plain_latent = model.use_mla and rope.get("rope_type", "default") == "default"
    updated_oss = "GptOssForCausalLM" in model.architectures and config.weight_transfer_config is not None
    tiles = on_cpu and torch.cpu._is_amx_tile_supported()
    refused = tiles and not torch.cpu._init_amx()
    for wrong, patch, why in (
        (plain_latent and on_cpu, "0006", "plain rotary angles of latent attention on a CPU"),
        (updated_oss, "0007", "weight updates, which lose the experts and sinks of gpt-oss"),
        (
            tiles and model.use_mla and model.dtype != torch.bfloat16,
            "0008",
            f"latent attention in {model.dtype} by AMX",
        ),
        (
            on_cpu and config.speculative_config is not None,
            "0011",
            "the temperatures of drafted tokens on a CPU",
        ),
        (refused and model.dtype != torch.float32, "0009", "AMX, which this CPU has but its Linux does not grant"),
    ):
        if wrong and patch not in applied:
            raise EngineError(
                f"This vLLM handles {why} wrongly",
                got=f"a vLLM without patch {patch}",
                do="moe-rl patch --apply, and set rollout.capture to patch",
            )


def _prepack(model) -> None:
    """Repack the experts into the CPU kernel's layout after an update overwrote it, as patch 0002 does."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            module._quant_method.moe_kernel.fused_experts.process_weights_after_loading(module.routed_experts)
