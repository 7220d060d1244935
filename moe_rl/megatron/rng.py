"""The random generators of a rank: the host's, the device's, and the streams that megatron forks from the latter."""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel

# Megatron adds rank numbers and small constants to a seed: the seeds of two steps must lie further apart than those.
_STRIDE = 1_000_003


def seed(run_seed: int, step: int) -> None:
    """Begin every stream anew, as the run's seed and the steps done say; each rank its own where megatron tells apart.

    For a run that goes on with other ranks than before, whose streams nobody has.
    """
    tensor_parallel.model_parallel_cuda_manual_seed(run_seed + step * _STRIDE)
    torch.manual_seed(run_seed + step * _STRIDE)


def state() -> dict[str, torch.Tensor]:
    """The state of every generator, uint8 on the host. `set_state` goes on from there."""
    streams = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state().cpu(),
        **{f"tracker.{name}": stream.cpu().clone() for name, stream in streams.items()},
    }


def set_state(saved: dict[str, torch.Tensor]) -> None:
    """Put every generator back to what `state` returned, on a rank of the same layout."""
    torch.cuda.set_rng_state(saved["device"])
    torch.set_rng_state(saved["host"])
    streams = {name.removeprefix("tracker."): s for name, s in saved.items() if name.startswith("tracker.")}
    tensor_parallel.get_cuda_rng_tracker().set_states(streams)
