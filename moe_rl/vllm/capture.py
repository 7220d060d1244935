"""Records the routers' choices of a step on the device, and copies them to the host.

The buffer is fixed and every layer writes its own column, so capture also works in CUDA graphs and compiled forward
passes, which replay the same addresses. vLLM's own binding is used: it handles routers, monolithic kernels with their
own sink, and models without a router object, and it gives logical expert ids, before load balancing.
Legend for shapes: T tokens of a step, L MoE layers of this worker, K top-k experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_rl.errors import EngineError
from moe_rl.trace.source_sum import expert_salts

NOT_REPORTED = -1
# Rows summed at once in a long prefill: each id needs 12 bytes that vLLM has not reserved.
_ROWS_AT_ONCE = 1024


class Capture:
    """Owns a fixed buffer [max_tokens, L, K] int32 on the model's device, bound to the model's routers.

    The buffer's columns are `layers`, the global decoder layer numbers of the MoE layers found, ascending. Raises
    EngineError for a model without MoE layers, or whose kernels do not report their routes.
    """

    def __init__(self, model: torch.nn.Module, *, max_tokens: int, top_k: int, device: torch.device):
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self.modules = moe_modules(model)
        self.layers = tuple(self.modules)
        self._column = {layer: column for column, layer in enumerate(self.layers)}
        self.buffer = torch.full((max_tokens, len(self.layers), top_k), NOT_REPORTED, dtype=torch.int32, device=device)
        try:
            bind_routed_experts_capturer(model, self)
        except ValueError as error:
            raise EngineError(
                "Routes cannot be recorded for this model", got=error, do="choose another MoE backend in vLLM"
            ) from error

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Store the choice [T, K] of one layer; called by vLLM. A compiled forward can trace plain indexing."""
        self.buffer[: topk_ids.shape[0], self._column[layer_id]] = topk_ids

    def clear(self, tokens: int) -> None:
        """Erase the previous step, so that a layer that does not report keeps no old experts."""
        self.buffer[:tokens].fill_(NOT_REPORTED)


class RowSums:
    """Sums each row of the buffer before anything else reads the row: see trace.source_sum.

    layers [L] are the global numbers of the buffer's columns; each has `experts` experts.
    """

    def __init__(self, layers: Sequence[int], experts: int, device: torch.device):
        salts = np.concatenate([expert_salts(layer, experts) for layer in layers])
        self._salts = torch.from_numpy(salts.view(np.int64)).to(device)
        self._first = (torch.arange(len(layers), dtype=torch.int32) * experts).to(device)[:, None]
        self._last_expert = experts - 1

    def of(self, routes: Tensor) -> Tensor:
        """Return int64 [T] from routes [T, L, K], on the device and without waiting. Other code rejects ids out of
        range."""
        return torch.cat([self._of(some) for some in routes.split(_ROWS_AT_ONCE)])

    def _of(self, routes: Tensor) -> Tensor:
        ids = routes.clamp(0, self._last_expert).add_(self._first)
        return self._salts.index_select(0, ids.view(-1)).view(len(routes), -1).sum(-1)


def to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.Event | None]:
    """Return copies of the tensors in host memory, and the event after which they may be read (None: now).

    On an accelerator the copies run on a side stream after the work queued on the current stream, without blocking.
    """
    device = tensors[0].device
    if device.type == "cpu":
        return [tensor.clone() for tensor in tensors], None
    # Snapshots are taken on the main stream, before the next step can overwrite the buffers.
    snapshots = [tensor.clone() for tensor in tensors]
    side = _side_stream(device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        copies = []
        for snapshot in snapshots:
            copy = torch.empty(snapshot.shape, dtype=snapshot.dtype, pin_memory=True)
            copies.append(copy.copy_(snapshot, non_blocking=True))
            snapshot.record_stream(side)
        done = torch.Event(device)
        done.record(side)
    return copies, done


_SIDE_STREAMS: dict[torch.device, torch.Stream] = {}


def _side_stream(device: torch.device) -> torch.Stream:
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.Stream(device)
    return _SIDE_STREAMS[device]


def moe_modules(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Return the modules that vLLM binds captures to, by global decoder layer number, ascending."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    pairs = [
        (int(module.layer_id), module)
        for module in model.modules()
        if isinstance(module, (MoERunner, RoutedExpertsCaptureSource))
    ]
    modules = dict(sorted(pairs, key=lambda item: item[0]))
    if not modules or len(modules) != len(pairs):
        raise EngineError(
            "Routes cannot be recorded for this model",
            got="no MoE layer" if not pairs else f"several in one decoder layer: {sorted(n for n, _ in pairs)}",
            do="take a mixture-of-experts model, or turn recording off",
        )
    return modules
