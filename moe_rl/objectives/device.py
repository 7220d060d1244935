"""Copies what the host has made to the device of a pass."""

from __future__ import annotations

import numpy as np
import torch


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the values on the device, without waiting for it.

    An accelerator copies them from pinned memory after the work that is already queued. torch keeps the pinned memory
    until then. On a CPU nothing is copied if `values` are contiguous.
    """
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
