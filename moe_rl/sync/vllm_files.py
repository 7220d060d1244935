"""A vLLM weight-transfer backend that takes safetensors parts. Runs inside the engine; importing it registers it.

An update is refused before a single parameter is touched: the digest and the set of tensors are confirmed over the very
memory that is loaded afterwards. A refused engine goes on with the weights it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name

from moe_rl.errors import WeightSyncError, describe
from moe_rl.sync.loaded import not_loaded
from moe_rl.sync.weights import actual_digest, check_complete, checkpoint_shapes, read_parts

BACKEND = "moe_rl_files"


@dataclass
class FilesInit(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class FilesUpdate(WeightTransferUpdateInfo):
    """parts: paths of all parts of one update. digest: what `expected_digest` of the sender gave for them."""

    parts: list[str]
    digest: str


class FilesWeightTransfer(WeightTransferEngine[FilesInit, FilesUpdate]):
    """Loads one complete set of HF-named tensors per update. `on_progress` is called after every tensor."""

    init_info_cls = FilesInit
    update_info_cls = FilesUpdate
    supports_draft_weight_update = False
    on_progress: Callable[[], None] = staticmethod(lambda: None)

    def init_transfer_engine(self, init_info: FilesInit) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """The model is opened for loading only when the update has proved complete: see `receive_weights`."""

    @torch.inference_mode()
    def receive_weights(self, update_info: FilesUpdate) -> None:
        tensors = dict(read_parts([Path(part) for part in update_info.parts]))
        expected = {
            name: shape
            for name, shape in checkpoint_shapes(Path(self.model_config.model)).items()
            # Of multi-token-prediction layers, which the model leaves out, nobody sends anything.
            if get_spec_layer_idx_from_weight_name(self.model_config.hf_config, name) is None
        }
        check_complete({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
        digest = actual_digest(tensors.items(), self.on_progress)
        if digest != update_info.digest:
            raise WeightSyncError(
                describe(
                    "The engine read other weights than were sent",
                    where=", ".join(update_info.parts),
                    got=f"digest {digest}",
                    expected=update_info.digest,
                    do="look for a damaged disk, or for two trainers that write to one folder",
                )
            )
        initialize_layerwise_reload(self.model)
        self.model.load_weights(self._counted(tensors))
        lost = not_loaded(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        if lost:
            # Too late to refuse: the engine holds some of the new weights and must end.
            raise RuntimeError(
                describe(
                    "vLLM lost a part of the new weights",
                    got=f"{len(lost)} parameters that nothing was loaded into: {', '.join(lost[:3])}",
                    do="check the patch series: python tools/apply_patches.py --check",
                )
            )

    def _counted(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for item in tensors.items():
            yield item
            self.on_progress()

    def finish_weight_update(self) -> None:
        """Everything was done when the parts were read."""

    def shutdown(self) -> None:
        """Nothing is held between updates."""


WeightTransferEngineFactory.register_engine(BACKEND, FilesWeightTransfer)
