"""Lets vLLM's Model Runner V2 run on a CPU, in every Python whose PYTHONPATH names this folder.

Triton's own interpreter runs the kernels, about a thousand times slower than a GPU. vLLM for CPUs accepts Triton only
with a backend named cpu; the interpreter uses none. Gloo does what vLLM's communicator for CPUs lacks: to gather and to
reduce rows of data-parallel ranks, which have different numbers of tokens.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType, SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"


def name_backend(backends: ModuleType) -> None:
    driver = SimpleNamespace(is_active=lambda: False)
    backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def gather_rows(module: ModuleType) -> None:
    import torch
    import torch.distributed as dist

    def all_gatherv(self, rows, dim=0, sizes=None):
        if isinstance(rows, list):
            return [all_gatherv(self, each, dim, sizes) for each in rows]
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        everyones = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(everyones, padded, group=self.cpu_group)
        return torch.cat([each[:size] for each, size in zip(everyones, sizes, strict=True)])

    def reduce_scatterv(self, rows, dim=-1, sizes=None):
        total = rows.clone()
        dist.all_reduce(total, group=self.cpu_group)
        return total.split(sizes)[self.rank_in_group].clone()

    module.CpuCommunicator.all_gatherv, module.CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


CHANGES = {
    "triton.backends": name_backend,
    "vllm.distributed.device_communicators.cpu_communicator": gather_rows,
}


class Changes(MetaPathFinder):
    """Changes each of these modules when it is imported."""

    def find_spec(self, name, path, target=None):
        if name not in CHANGES:
            return None
        change = CHANGES.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Changes())
