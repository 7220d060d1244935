"""Attaches the adapters of LoRA to a model, names them as `peft` does, and describes them for checkpoints.

Nothing but adapters is trained: all weights of the model are frozen, routers included. `adapters.py` has the adapters.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.extensions.transformer_engine import HAVE_TE
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_rl.config.training import LoraConfig
from moe_rl.disk import sync, write_json
from moe_rl.errors import ConfigError, ReplayError, first_of
from moe_rl.megatron import hf_map, world
from moe_rl.megatron.adapters import Adapter, add_to_output, is_replicated
from moe_rl.models.facts import ModelFacts
from moe_rl.models.peft import CONFIG, PREFIX, WEIGHTS, of_first_expert, target_of
from moe_rl.weights.stream import Round


@dataclass(frozen=True, slots=True)
class Adapted:
    """Holds an adapter of this rank, and the Hugging Face tensors that it changes."""

    entry: hf_map.Entry
    adapter: Adapter

    @property
    def names(self) -> list[str]:
        """Return the modules that `peft` would adapt, one for each A."""
        return [PREFIX + name.removesuffix(".weight") for name in self.entry.names]

    def whole(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Yield name, dtype and shape of the adapter's whole tensors."""
        rank, dtype = self.adapter.a.shape[1], self.adapter.a.dtype
        for name, (_, (outputs, inputs)) in zip(self.names, self.entry.whole, strict=True):
            yield f"{name}.lora_A.weight", dtype, (rank, inputs)
            yield f"{name}.lora_B.weight", dtype, (outputs, rank)


def attach(models: Iterable[torch.nn.Module], facts: ModelFacts, lora: LoraConfig) -> None:
    """Freeze (unwrapped) GPTModels, and attach adapters to their linear layers.

    Every A begins with the values that its name gives, uniform in +-1 / sqrt(inputs) as in `peft`, and every B with 0;
    or both as in the folder `lora.start`.

    Raises:
        ConfigError: The layers are TransformerEngine's.
    """
    if HAVE_TE:
        raise ConfigError(
            "adapters are not supported on TransformerEngine's layers",
            where={"key": "train.lora"},
            got="transformer-engine is installed",
            expected="an environment without it",
            do="uninstall transformer-engine, or set train.lora to null",
        )
    models = list(models)
    for model in models:
        model.requires_grad_(False)
        layers = {id(layer.weight): layer for layer in model.modules() if hasattr(layer, "weight")}
        first: dict[str, Adapter] = {}
        for entry in list(hf_map.entries(model, facts)):
            if target_of(entry.weight) not in lora.targets:
                continue
            adapter = _attach(layers[id(entry.parameters[0])], entry, facts, lora, model.config.sequence_parallel)
            if entry.weight.experts and lora.shared_outer:
                common = first.setdefault(of_first_expert(entry.names[0]), adapter)
                adapter.share(common, model.config.sequence_parallel)
        if model.pre_process:
            model.embedding.register_forward_hook(_begin_gradients)
    with ExitStack() as stack:
        whole: Callable[[str, tuple[int, ...], bool], Tensor] = _initial
        if lora.start is not None:
            file = lora.start / WEIGHTS
            # Opened once: opening it reads the names of all tensors.
            whole = partial(_stored, file, stack.enter_context(safe_open(file, framework="pt")))
        for target in (target for model in models for target in adapted(model, facts)):
            _fill(target, facts, whole)


def _attach(
    layer: torch.nn.Module, entry: hf_map.Entry, facts: ModelFacts, lora: LoraConfig, sequence_parallel: bool
) -> Adapter:
    (matrix,), weight = entry.parameters, entry.weight
    shares, groups = _shares(entry), _kv_groups(entry, facts)
    rows = torch.arange(len(matrix), device=matrix.device)[:, None]
    which = torch.zeros(len(matrix), dtype=torch.int64, device=matrix.device)
    for number, piece in enumerate(hf_map.split(rows, weight.layout, groups, shares)):
        which[piece.flatten()] = number
    halves = weight.layout == "gate_up"
    adapter = Adapter(matrix, which, lora.rank, lora.alpha / lora.rank, entry.axis, entry.group, halves=halves)
    layer.lora = adapter
    if not weight.experts:
        adapter.of_tokens(sequence_parallel)
        layer.register_forward_hook(add_to_output)
    return adapter


def _begin_gradients(layer: torch.nn.Module, inputs: object, output: Tensor) -> None:
    """Let gradients begin at the frozen embedding's output. Recomputed layers need an input with a gradient."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _shares(entry: hf_map.Entry) -> list[int]:
    return [shape[0] for shape in entry.weight.tensors.values()]


def _kv_groups(entry: hf_map.Entry, facts: ModelFacts) -> int:
    return facts.kv_heads // (entry.group.size() if entry.axis == 0 else 1)


def adapted(model: torch.nn.Module, facts: ModelFacts) -> Iterator[Adapted]:
    """Yield the adapters of an (unwrapped) GPTModel."""
    for entry in hf_map.entries(model, facts):
        adapter = getattr(entry.parameters[0], "adapter", None)
        if adapter is not None:
            yield Adapted(entry, adapter)


def _initial(name: str, shape: tuple[int, ...], shared: bool) -> Tensor:
    """Return the first values of a whole tensor, `shared` by the layer's experts or not. They do not depend on the
    layout."""
    if name.endswith(".lora_B.weight"):
        return torch.zeros(shape)
    name = of_first_expert(name) if shared else name
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
    return torch.rand(shape, generator=generator).mul_(2).sub_(1).div_(math.sqrt(shape[1]))


def _stored(file: Path, tensors: safe_open, name: str, shape: tuple[int, ...], shared: bool) -> Tensor:
    """Return a whole tensor of a folder that `peft.folder_problems` has found to be right.

    Args:
        tensors: The folder's `file`, opened.

    Raises:
        ConfigError: The layer's experts are to share the tensor, and have different ones.
    """
    tensor = tensors.get_tensor(name)
    if shared and not torch.equal(tensor, tensors.get_tensor(of_first_expert(name))):
        raise ConfigError(
            "the experts of a layer have different outer matrices",
            where={
                "key": "train.lora.start",
                "given": "train.lora.shared_outer is on",
                "file": file,
                "tensor": name,
            },
            expected="the same matrix in all experts",
            do="set train.lora.shared_outer to false",
        )
    return tensor


@torch.no_grad()
def _fill(target: Adapted, facts: ModelFacts, whole: Callable[[str, tuple[int, ...], bool], Tensor]) -> None:
    """Set an adapter from whole tensors: A [rank, inputs] and B [outputs, rank] of each Hugging Face tensor.

    Args:
        whole: Returns the tensor of a name and a shape, which the layer's experts share or not.
    """
    entry, adapter = target.entry, target.adapter
    tensors, rank, inputs = adapter.a.shape
    part, parts = (0, 1) if entry.axis is None else (entry.group.rank(), entry.group.size())
    rows = []
    for number, (name, outputs) in enumerate(zip(target.names, _shares(entry), strict=True)):
        a_shape = rank, inputs * (parts if entry.axis == 1 else 1)
        a = whole(f"{name}.lora_A.weight", a_shape, adapter.outer is adapter.a)
        adapter.a[number].copy_(a.chunk(parts, 1)[part] if entry.axis == 1 else a)
        b = whole(f"{name}.lora_B.weight", (outputs, rank), adapter.outer is adapter.b)
        rows.append(b.chunk(parts)[part] if entry.axis == 0 else b)
    adapter.rows.copy_(hf_map.join(rows, entry.weight.layout, _kv_groups(entry, facts)))


def exported(models: Iterable[torch.nn.Module], facts: ModelFacts, *, dense: bool, experts: bool) -> Iterator[Adapted]:
    """Yield the adapters that this rank exports, alone or with the ranks that share them. See `hf_map.export`."""
    for target in (target for model in models for target in adapted(model, facts)):
        if experts if target.entry.weight.experts else dense:
            yield target


def whole_tensors(
    run: Iterable[Adapted], facts: ModelFacts, get: Callable[[Tensor], Tensor] = Tensor.detach
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole adapter tensors under the names of `peft`, each on the first of the ranks that share it.

    All ranks that share tensors must exhaust the iterator, as that of `hf_map.export`.

    Args:
        get: Returns what to export of a parameter of an adapter.
    """
    for target in run:
        entry, adapter = target.entry, target.adapter
        pieces = get(adapter.b).flatten(0, -2)
        rows = hf_map.split(pieces, entry.weight.layout, _kv_groups(entry, facts), _shares(entry))
        for name, a, b in zip(target.names, get(adapter.a), rows, strict=True):
            a = torch.cat(hf_map.gather(a, entry.group), 1) if entry.axis == 1 else a
            b = torch.cat(hf_map.gather(b, entry.group)) if entry.axis == 0 else b
            if entry.group.rank() == 0:
                # Each expert's own: safetensors refuses tensors that share memory.
                yield f"{name}.lora_A.weight", a.clone() if adapter.outer is adapter.a else a
                yield f"{name}.lora_B.weight", b.clone() if adapter.outer is adapter.b else b


def export_rounds(
    models: Iterable[torch.nn.Module],
    facts: ModelFacts,
    limit: float,
    device: torch.device,
    *,
    dense: bool,
    experts: bool,
) -> list[Round]:
    """Export adapters in rounds of at most `limit` bytes, or of one adapter that is larger, as `hf_map.export_rounds`
    does weights. They keep the precision of the training.

    dense, experts: See `hf_map.export`.
    """

    def size(target: Adapted) -> int:
        return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in target.whole())

    rounds = []
    # All adapters are cut, not only those that this rank exports: ranks that share some may not share others.
    for run in hf_map.in_runs(exported(models, facts, dense=True, experts=True), size, limit):
        mine = [target for target in run if (experts if target.entry.weight.experts else dense)]
        whole = [info for target in mine for info in target.whole() if target.entry.group.rank() == 0]
        rounds.append(Round(whole, _on(device, whole_tensors(mine, facts))))
    return rounds


def _on(device: torch.device, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.to(device).contiguous()) for name, tensor in tensors)


def sharded(model: torch.nn.Module, facts: ModelFacts) -> dict[str, ShardedTensor]:
    """Describe this rank's adapters for Megatron's checkpoints: {name of the parameter: what it is of a whole
    tensor}."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shards = {}
    for target in adapted(model, facts):
        for kind, parameter in (("a", target.adapter.a), ("b", target.adapter.b)):
            name, group, of_expert = target.names[0], target.entry.group, bool(target.entry.weight.experts)
            if parameter is target.adapter.outer:
                name, group, of_expert = of_first_expert(name), parallel_state.get_tensor_model_parallel_group(), False
            data_parallel = (
                parallel_state.get_expert_data_parallel_group()
                if of_expert
                else parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
            cut = getattr(parameter, "tensor_model_parallel", False)
            copy = group.rank() if is_replicated(parameter, group) else 0
            shards[names[id(parameter)]] = ShardedTensor.from_rank_offsets(
                f"lora.{name}.{kind}",
                parameter,
                *([(parameter.partition_dim, group.rank(), group.size())] if cut else ()),
                replica_id=(0, copy, data_parallel.rank()),
            )
    return shards


@torch.no_grad()
def check_counts(models: Iterable[torch.nn.Module], facts: ModelFacts) -> None:
    """Check for each dense layer that it adds its adapter's product once. All ranks call this together.

    A layer that sums over tensor-parallel ranks could add the product once for each of them. The layer runs on random
    inputs, once with its adapter alone, and once with B A as its matrix. While B is 0 this shows nothing.

    Raises:
        ReplayError: Another product is added. The message names the layer. Raised on all ranks.
    """
    wrong = []
    for model in models:
        layers = {id(layer.weight): layer for layer in model.modules() if hasattr(layer, "weight")}
        for target in adapted(model, facts):
            if not target.entry.weight.experts and (
                times := _wrong_count(layers[id(target.entry.parameters[0])], target)
            ):
                wrong.append(f"{target.names[0].removeprefix(PREFIX)}: {times}")
    everyone = [text for rank in world.gather(wrong, list[str]) for text in rank]
    if everyone:
        raise ReplayError(
            "layers do not add their adapters' products once",
            got=first_of(everyone),
            expected="1 times B A x",
            do="look at how the layer sums over tensor-parallel ranks; the weights that were sampled with are right",
            fault="adapter count",
        )


def _wrong_count(layer: torch.nn.Module, target: Adapted) -> str:
    """Return how often a layer adds B A x, if not once."""
    adapter, matrix = target.adapter, target.entry.parameters[0]
    kept, delta = matrix.data, adapter.delta().to(matrix.dtype)
    generator = torch.Generator(matrix.device).manual_seed(1)
    shape = (8 * adapter.group.size(), 1, matrix.shape[1])
    rows = torch.randn(shape, generator=generator, device=matrix.device).to(matrix.dtype)

    def output(values: Tensor, on: bool) -> Tensor:
        matrix.data, adapter.on = values, on
        return layer(rows)[0].double()

    try:
        nothing = output(torch.zeros_like(kept), False)
        due, added = output(delta, False) - nothing, output(torch.zeros_like(kept), True) - nothing
    finally:
        matrix.data, adapter.on = kept, True
    if (added - due).norm() <= 0.1 * due.norm():
        return ""
    return f"{float((added * due).sum() / due.square().sum()):.2f} times"


def write_peft(
    folder: Path, models: Iterable[torch.nn.Module], facts: ModelFacts, lora: LoraConfig, base: Path
) -> None:
    """Write the adapters as a folder that `peft` loads. It appears when it is complete. All ranks call this together.

    Args:
        base: The checkpoint that the adapters belong to.

    Raises:
        ConfigError: The folder exists, or its parent does not. Raised on all ranks, before any work.
    """
    hidden, rank = folder.with_name(f".{folder.name}.tmp"), dist.get_rank()
    if folder.exists() or not folder.absolute().parent.is_dir():
        raise ConfigError(
            "adapters must be written into a new folder", got=folder, do="name a new folder inside an existing one"
        )
    dist.barrier()
    if rank == 0:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
    dist.barrier()
    dense, experts = world.holds_first_replica()
    targets = exported(models, facts, dense=dense, experts=experts)
    mine = dict(_on(torch.device("cpu"), whole_tensors(targets, facts)))
    save_file(mine, hidden / f"{rank}.part")
    dist.barrier()
    if rank:
        return
    parts = sorted(hidden.glob("*.part"))
    tensors = {name: tensor for part in parts for name, tensor in load_file(part).items()}
    save_file(tensors, hidden / WEIGHTS, metadata={"format": "pt"})
    sync(hidden / WEIGHTS)
    for part in parts:
        part.unlink()
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(modules),
    }
    write_json(hidden / CONFIG, config)
    hidden.rename(folder)
