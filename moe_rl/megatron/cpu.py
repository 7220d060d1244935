"""Megatron-core on a machine without CUDA: gloo collectives, torch ops. The package's `__init__` calls `install`.

Megatron-core asks `torch.cuda` four kinds of questions even when every tensor lives in host memory. They are answered:

1. which device, which stream?          torch.cuda.{current_device, current_stream, Stream, Event, synchronize},
                                        Tensor.record_stream
2. the CUDA random generator            is the CPU generator: the only one that draws numbers here
3. make this tensor on "cuda"           `HostDevice`, a TorchFunctionMode, reads that as "cpu"
4. is this a torch.cuda.FloatTensor?    `HostDevice` answers `Tensor.type()` in the words the optimizer looks for

and four module-level names of megatron-core are assigned, each with its reason beside it. Everything else is
megatron-core as released.
"""

from __future__ import annotations

import logging
import os
import warnings

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")


class Stream:
    """The one stream there is: work is done when the call returns."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        pass

    def record_event(self, event=None):
        return event or Event()


class Event:
    """Already happened, always."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait(self, *args):
        pass

    def synchronize(self):
        pass


class HostDevice(TorchFunctionMode):
    """Reads device "cuda" as "cpu", and names host tensors as the optimizer's type checks expect."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs = {**kwargs, "device": HOST}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


_installed = False


def install() -> None:
    """Prepare this process for megatron-core without CUDA. Idempotent; refuses a machine that has CUDA."""
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("the CPU backend was asked for on a machine with CUDA")
    # megatron.core.jit wraps small functions in torch.compile when it is imported: no compiler is needed for them here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

    _hush()
    cuda, only_stream = torch.cuda, Stream()
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = cuda.default_stream = lambda *a, **k: only_stream
    cuda.current_device = lambda: HOST
    cuda.synchronize = lambda *a, **k: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    # Tells the GPU's caching allocator who still reads a tensor, which combined 1F1B does. It rejects our Stream.
    torch.Tensor.record_stream = lambda tensor, stream: None
    HostDevice().__enter__()

    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    # Upstream queues this call until CUDA starts, which is never: the RNG state would silently not be restored.
    mcore_random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    # It warns on every fork that the CPU state changed; here the "CUDA" generator is the CPU generator.
    logging.getLogger(mcore_random.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())
    # Upstream converts split sizes for all_to_all only if the tensor is on a GPU; the collective needs integers.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    # Gloo gathers and scatters equal shares only; the ranks that share an expert's matrices hold unequal ones.
    mappings._gather_along_first_dim = _gather_rows(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_rows(mappings._reduce_scatter_along_first_dim)
    _installed = True


def _hush() -> None:
    """Drop what megatron-core says about GPU packages it does not find, once per rank and module, at every start."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning
    )
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _to_host(tensor, as_numpy: bool = False, record_stream: bool = False):
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather_rows(gather_equal):
    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return gather_equal(input_, group, use_global_buffer=use_global_buffer)
        padded = input_.new_zeros(int(max(output_split_sizes)), *input_.shape[1:])
        padded[: len(input_)] = input_
        shares = gather_equal(padded, group).chunk(group.size())
        return torch.cat([share[: int(rows)] for share, rows in zip(shares, output_split_sizes, strict=True)])

    return gather


def _reduce_scatter_rows(reduce_scatter_equal):
    def reduce_scatter(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter_equal(input_, group, use_global_buffer=use_global_buffer)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split([int(rows) for rows in input_split_sizes])[group.rank()].clone()

    return reduce_scatter
