"""What megatron builds on ranks of groups that do not exist, on a device that holds nothing: sizes of buffers, and of
what the optimizer keeps. Writes one JSON list to standard output, of the cases whose names are its arguments.

Writes the sizes as one JSON list to standard output. Only torch.distributed (its own fake backend) and the device are
replaced; all of megatron's code runs unchanged.
"""

from __future__ import annotations

import functools
import gc
import json
import sys

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import moe_rl.megatron  # noqa: F401  the CPU backend
from moe_rl.config.training import ParallelConfig, TrainConfig
from moe_rl.megatron import cpu, model, world
from tests.planning.meta_cases import cases

NAMES = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}


class Meta(TorchFunctionMode):
    """Give meta tensors the type name that the optimizer looks for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return NAMES[args[0].dtype]
        return func(*args, **(kwargs or {}))


def built(facts, parallel: ParallelConfig, train: TrainConfig, world_size: int, rank: int) -> dict:
    """Return the elements of each buffer of the rank (with padding), of its parameters, and of what the optimizer
    updates; and the sizes of its groups under the names of `Layout`.
    """
    from megatron.core import parallel_state

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(**world.group_sizes(parallel), create_gloo_process_groups=False)
    with torch.device("meta"), Meta():
        config = model.transformer_config(facts, train, parallel)
        chunks, optimizer = model.wrap_for_training(model.build_model(facts, config, None), config, train)
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    result = {
        "groups": {
            "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
            "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            "tensor": parallel_state.get_tensor_model_parallel_world_size(),
            "context": parallel_state.get_context_parallel_world_size(),
            "data": parallel_state.get_data_parallel_world_size(),
            "expert": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
            "expert_data": parallel_state.get_expert_data_parallel_world_size(),
        },
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "parameters": sum(
            buffer.param_data.nbytes if buffer.param_data is not None else sum(p.nbytes for p in buffer.params)
            for buffer in buffers
        ),
        "elements": sum(p.numel() for chunk in chunks for p in chunk.parameters()),
        "stepped_on": sum(
            p.numel() for part in parts for group in part.optimizer.param_groups for p in group["params"]
        ),
        "masters": sum(
            p.nbytes
            for part in parts
            for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
            for group in getattr(part, name, [])
            for p in group
        ),
    }
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    gc.collect()
    return result


def main() -> None:
    cpu.HOST = torch.device("meta")
    model.CheckpointReader = model.hf_map.load = lambda *args: None
    model.get_megatron_optimizer = functools.partial(model.get_megatron_optimizer, use_gloo_process_groups=False)
    chosen = {case.name: case for case in cases()}
    found = [
        built(case.facts, case.parallel, case.train, case.world_size, rank)
        for case in map(chosen.__getitem__, sys.argv[1:])
        for rank in case.ranks
    ]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
