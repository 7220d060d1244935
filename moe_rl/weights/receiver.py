"""Receives updates in the sampler's workers, as a vLLM weight-transfer backend. Importing this module registers it.

Sampler.update_weights --> take() in each worker: vLLM's start_weight_update, update_weights, finish_weight_update
                            --> WeightReceiver: admit, read, confirm, load --> Holding; all workers must agree on it

Also collects the tensors of a layer's experts while new weights come to vLLM.

vLLM reloads a layer when its last tensor has come. To know which is the last, it passes each tensor through its loader
once more, on the meta device, in a mode that counts copied elements. A layer has hundreds of experts' tensors, and the
model says which. So they are kept here until all have come, without counting elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name

from moe_rl.errors import MoeRLError, WeightSyncError, first_of
from moe_rl.models.weight_files import is_derived
from moe_rl.models.weight_table import EMBEDDING, HEAD
from moe_rl.weights.digest import dtype_name
from moe_rl.weights.intake import Intake
from moe_rl.weights.read_back import ReadBack
from moe_rl.weights.reader import Reader
from moe_rl.weights.shared_disk import checkpoint_shapes
from moe_rl.weights.update import WeightUpdate, decode

_WEIGHTS = {"w13_weight", "w2_weight"}


def collect_experts(model: torch.nn.Module) -> None:
    """Let the layers of experts of a model that is open for loading collect their tensors.

    vLLM still counts elements in layers that also have biases or scales, and in those that hold experts twice.
    """
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            names = {name for name, _ in layer.named_parameters(recurse=False)} - SKIP_LOAD_TENSORS
            if names == _WEIGHTS and layer.moe_config.num_experts == layer.moe_config.num_logical_experts:
                _collect(layer)


def experts_of(layer: RoutedExperts, parameter: str) -> set[tuple[str, int]]:
    """Return each (part, expert) that comes for a parameter. The parts of "w13_..." are w1 and, where there is a gate,
    w3."""
    gated = layer.moe_config.is_act_and_mul
    parts = ("w2",) if not parameter.startswith("w13") else ("w1", "w3") if gated else ("w1",)
    return {(part, expert) for part in parts for expert in range(layer.moe_config.num_logical_experts)}


def _collect(layer: RoutedExperts) -> None:
    """Wrap the loaders of a layer's weights, to keep the tensors until all have come."""
    info = get_layerwise_info(layer)
    missing = {(name, *pair) for name in _WEIGHTS for pair in experts_of(layer, name)}
    # Asked once for each expert, and not for each of its tensors: on a GPU the host waits for the answer.
    experts = range(layer.moe_config.num_logical_experts)
    here = {expert for expert in experts if layer._map_global_expert_id_to_local_expert_id(expert) != -1}

    def wrapper(name: str) -> Callable[..., bool]:
        loader = _get_original_loader(getattr(layer, name))
        signature = inspect.signature(loader)

        @wraps(loader, assigned=())
        def online_process_loader(*args: object, **kwargs: object) -> bool:  # vLLM unwraps this name
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            part, expert = bound.arguments["shard_id"], bound.arguments["expert_id"]
            if expert not in here:
                bound.arguments["loaded_weight"] = None  # another rank's: only noted, and its memory is not held
            info.loaded_weights.append((name, bound))
            missing.discard((name, part, expert))
            if not missing:
                _layerwise_process(layer, info)
            return expert in here

        return online_process_loader

    for name in _WEIGHTS:
        getattr(layer, name).weight_loader = wrapper(name)


BACKEND = "moe_rl"


@dataclass
class NoInit(WeightTransferInitInfo):
    """Has no fields: the backend needs no setup."""


@dataclass
class UpdatePart(WeightTransferUpdateInfo):
    """Wraps one part of an update for vLLM."""

    update: WeightUpdate


def take(worker, data: bytes) -> dict[str, object]:
    """Process one part of an update in a vLLM worker.

    Returns:
        A `Holding` as plain values, including the refusal if there was one. Errors of vLLM itself are raised.
    """
    receiver: WeightReceiver = worker.weight_transfer_engine
    try:
        update = decode(data)
        if update.number == 0:
            if worker.moe_rl_recorder is not None:
                worker.moe_rl_recorder.settle()
            if receiver.under_way:  # the trainer starts a new update
                worker.finish_weight_update()
            worker.start_weight_update()
        if receiver.under_way:
            worker.update_weights({"update": update})
        else:
            receiver.intake.admit(update)  # raises: there is no update to continue
        if update.final:
            worker.finish_weight_update()
            receiver.check_reached()
    except Exception as error:
        receiver.break_off()
        if not isinstance(error, MoeRLError | msgspec.MsgspecError):
            raise
        return msgspec.to_builtins(receiver.intake.holding(str(error)))
    if update.final and worker.moe_rl_recorder is not None:
        worker.moe_rl_recorder.weight_version = update.version
    return msgspec.to_builtins(receiver.intake.holding())


class WeightReceiver(WeightTransferEngine[NoInit, UpdatePart]):
    """Loads one complete set of HF-named tensors per update. `on_progress` is called after every tensor.

    A part is checked before its bytes are loaded. An update with one part is therefore refused before any parameter
    changes. vLLM loads a layer when its last tensor has come, and keeps the layer's tensors until then.
    """

    init_info_cls = NoInit
    update_info_cls = UpdatePart
    supports_draft_weight_update = False
    on_progress: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *args):
        super().__init__(*args)
        folder = Path(self.model_config.model)
        shapes = checkpoint_shapes(folder)
        config = self.model_config.hf_config
        # vLLM marks a model as untied while its checkpoint has a copy of the tied embedding.
        untied = self.model_config.word_embeddings_untied_by_checkpoint
        self._tied = untied or getattr(config, "tie_word_embeddings", False)
        # The trainer sends no multi-token-prediction layers, which the model leaves out, no buffers that are computed,
        # and a tied embedding once.
        sent = (
            name
            for name in shapes
            if get_spec_layer_idx_from_weight_name(config, name) is None
            and not is_derived(name)
            and not (self._tied and name == HEAD)
        )
        self._shapes = {name: shapes[name] for name in sent}
        self.intake = Intake(self._shapes, dtype_name(self.model_config.dtype))
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        progress = lambda: self.on_progress()  # noqa: E731 - late binding: on_progress is set afterwards
        self._read_back: ReadBack | None = None
        self._reader = Reader(
            self.intake, folder, self._load, self.device, rank=rank, on_tensor=progress, before_load=self._confirmed
        )
        self.under_way = False
        self._open = False
        self._lost: list[str] = []

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: there is no connection to set up."""

    def start_weight_update(self) -> None:
        """Mark an update as started. The model is opened for loading after the first part is confirmed:
        `Reader.take`."""
        self.under_way = True
        if self._read_back is None:  # by now vLLM has made the layers' kernels
            self._read_back = ReadBack(
                self.model, self._shapes, self.model_config.dtype, self.device, self._reader.on_tensor
            )
        self._read_back.begin()

    @torch.inference_mode()
    def receive_weights(self, update_info: UpdatePart) -> None:
        self._reader.take(update_info.update)

    def finish_weight_update(self) -> None:
        """End the update: after the final part, or earlier when the trainer starts a new update."""
        self.break_off(complete=self.intake.complete)

    def break_off(self, *, complete: bool = False) -> None:
        """Close the model for loading, whatever was loaded. No later part can continue this update."""
        self.under_way = False
        self._reader.release()
        if complete:
            self._lost = not_loaded(self.model)
        if self._open:
            self._open = False
            with torch.inference_mode():
                finalize_layerwise_reload(self.model, self.model_config)
        if complete and not self._lost:
            self.intake.finish()
        else:
            self.intake.abandon()

    def check_reached(self) -> None:
        """Raise WeightSyncError if a parameter did not receive all its tensors, or if the model computes with other
        weights than were confirmed. The weights are then incomplete."""
        if self._lost:
            raise WeightSyncError(
                "vLLM did not load all new weights",
                got=f"{len(self._lost)} incomplete parameters: {', '.join(self._lost[:3])}",
                do="check the patch series: moe-rl patch --check",
            )
        assert self._read_back is not None  # since the update's start
        version = self.intake.holding().version
        with torch.inference_mode():
            wrong = self._read_back.wrong(version)
        if wrong:
            self.intake.touch()
            raise WeightSyncError(
                "vLLM computes with other weights than the confirmed ones",
                where={"version": version},
                got=f"{len(wrong)} parts of the model wrong: {first_of(wrong)}",
                expected="in each layer what was confirmed, by digest, for this version",
                do="look at what happens between the digests and the layers: vLLM's loaders, its merging of matrices, "
                "and its packing of weights for a kernel. moe-rl patch --check says whether the series is whole",
                fault="read back",
            )

    def shutdown(self) -> None:
        self._reader.close()

    def _confirmed(self, tensors: dict[str, Tensor]) -> None:
        assert self._read_back is not None  # since the update's start
        self._read_back.confirmed(tensors)

    def _load(self, tensors: dict[str, Tensor]) -> None:
        if not self._open:
            self._open = True
            initialize_layerwise_reload(self.model)
            collect_experts(self.model)
        if self._tied and EMBEDDING in tensors:
            # During loading the output matrix is a separate parameter: vLLM waits for it and packs it again.
            tensors = tensors | {HEAD: tensors[EMBEDDING]}
        with disable_mtp_completeness_check():
            self.model.load_weights(self._counted(tensors))

    def _counted(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for item in tensors.items():
            yield item
            self.on_progress()


def not_loaded(model: torch.nn.Module) -> list[str]:
    """Return the names of parameters that were not, or not fully, loaded into a model that is open for loading.

    Call this after the last `load_weights` and before `finalize_layerwise_reload`. That function would restore the old
    values, or keep memory that was never written, and report success. vLLM counts only what passes through a
    parameter's loader, so anything a model's `load_weights` copies directly is lost. Fully loaded layers are already
    closed. Buffers and an attention layer's scales are computed, not loaded, so they are not checked.
    """
    lost = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue
        parameters = layer.named_parameters(recurse=False)
        keys = [key for key, parameter in parameters if parameter.numel() and key not in SKIP_LOAD_TENSORS]
        lost += [f"{name}.{key}" if name else key for key in _lacking(layer, info, keys)]
    return lost


def _lacking(layer: torch.nn.Module, info: LayerReloadingInfo, keys: list[str]) -> list[str]:
    """Return the parameters that a layer still waits for, except those that wait only for padding.

    Nobody sends padding: extra rows of a vocabulary, or of experts for some kernels.
    """
    came = {parameter for parameter, _ in info.loaded_weights}
    lacking = [key for key in keys if key not in came]
    if lacking:
        return lacking
    if isinstance(layer, LinearBase):
        return keys  # no padding here: a shard is missing (query, key, value, gate or up)
    if isinstance(layer, RoutedExperts):
        return [key for key in keys if _lacks_experts(layer, info, key)]
    return []


def _lacks_experts(layer: RoutedExperts, info: LayerReloadingInfo, key: str) -> bool:
    """Return whether a parameter loaded expert by expert lacks an expert, or the gate or up half of one.

    The calls include the experts of other ranks.
    """
    calls = [bound.arguments for parameter, bound in info.loaded_weights if parameter == key]
    if not all("expert_id" in call for call in calls):
        return False  # loaded as one stacked tensor, hence complete
    return not experts_of(layer, key) <= {(call["shard_id"], call["expert_id"]) for call in calls}


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
