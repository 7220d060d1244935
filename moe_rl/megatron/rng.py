"""Saves and restores a rank's random generators: the host's, the device's, and the streams that Megatron derives from
the latter."""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel

# Megatron adds rank numbers and small constants to a seed, so the seeds of two steps must be further apart than these.
_STRIDE = 1_000_003


def seed(run_seed: int, step: int) -> None:
    """Seed every stream again, from the run's seed and the number of finished steps. Ranks get different seeds where
    Megatron needs them.

    Used when a run continues with another layout, or on another kind of device, for which no saved streams exist.
    """
    tensor_parallel.model_parallel_cuda_manual_seed(run_seed + step * _STRIDE)
    torch.manual_seed(run_seed + step * _STRIDE)


def state() -> dict[str, torch.Tensor]:
    """Return the state of every generator, uint8 on the host, for `set_state`."""
    streams = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state().cpu(),
        **{f"tracker.{name}": stream.cpu().clone() for name, stream in streams.items()},
    }


def fits(saved: dict[str, torch.Tensor]) -> bool:
    """Return whether a rank on this kind of device wrote the state: the generators of CPUs and GPUs differ."""
    return len(saved["device"]) == len(torch.cuda.get_rng_state())


def set_state(saved: dict[str, torch.Tensor]) -> None:
    """Restore every generator to what `state` returned on a rank of the same layout and kind of device."""
    torch.cuda.set_rng_state(saved["device"])
    torch.set_rng_state(saved["host"])
    # Copies: the tracker keeps them, and tensors of a file keep it open, so that NFS could not remove its folder.
    streams = {name.removeprefix("tracker."): s.clone() for name, s in saved.items() if name.startswith("tracker.")}
    tensor_parallel.get_cuda_rng_tracker().set_states(streams)
