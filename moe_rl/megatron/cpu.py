"""Runs megatron-core on a machine without CUDA, with gloo collectives and torch ops. The package calls `install`.

Megatron-core makes four kinds of calls to `torch.cuda` even when every tensor is in host memory. `install` replaces
them:

1. which device, which stream?          torch.cuda.{current_device, current_stream, Stream, Event, synchronize},
                                        Tensor.record_stream
2. the CUDA random generator            becomes the CPU generator, the only one that is used here
3. create this tensor on "cuda"         `HostDevice`, a TorchFunctionMode, changes "cuda" to "cpu"
4. is this a torch.cuda.FloatTensor?    `HostDevice` makes `Tensor.type()` return the names that the optimizer expects

It also replaces four module-level functions of megatron-core; a comment beside each gives the reason. Everything else
is megatron-core as released.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")


class Stream:
    """Stands for the only stream. Work is finished when a call returns."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        pass

    def record_event(self, event=None):
        return event or Event()


class Event:
    """Stands for an event that has always happened already."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait(self, *args):
        pass

    def synchronize(self):
        pass


class HostDevice(TorchFunctionMode):
    """Changes device "cuda" to "cpu", and gives host tensors the type names that the optimizer checks for."""

    here = False

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

    def see(self, here: bool) -> bool:
        """Start or stop intercepting the torch calls of this thread. Return whether it intercepted them before.

        Modes entered later must have ended.
        """
        before, self.here = self.here, here
        if here and not before:
            self.__enter__()
        elif before and not here:
            self.__exit__(None, None, None)
        return before


_mode: HostDevice | None = None  # once it is installed


@contextmanager
def mode_left_behind() -> Iterator[Callable[[], object]]:
    """Yield a function that removes `HostDevice` until the context ends; without the mode it does nothing.

    Python runs the mode in every torch call. Megatron's schedules need it only before their first microbatch: no pass
    through the model names a device.
    """
    if _mode is None:
        yield lambda: None
        return
    before = _mode.see(True)
    try:
        yield partial(_mode.see, False)
    finally:
        _mode.see(before)


@contextmanager
def without_mode() -> Iterator[None]:
    """Remove `HostDevice` until the context ends, except at the beginning of a pass through the model."""
    with mode_left_behind() as leave:
        leave()
        yield


def install() -> None:
    """Prepare this process for megatron-core without CUDA. Repeated calls have no effect. Raises RuntimeError on a
    machine with CUDA."""
    global _mode
    if _mode is not None:
        return
    if torch.cuda.is_available():
        raise RuntimeError("the CPU backend cannot be installed on a machine with CUDA")
    # megatron.core.jit wraps small functions in torch.compile at import. Disable that, so that no compiler is needed.
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
    # record_stream tells the GPU's caching allocator who still reads a tensor. Combined 1F1B calls it, and torch
    # rejects our Stream.
    torch.Tensor.record_stream = lambda tensor, stream: None
    _mode = HostDevice()
    _mode.see(True)

    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    # The original queues this call until CUDA starts, which never happens: the RNG state would silently not be
    # restored.
    mcore_random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    # It warns on every fork that the CPU state changed, because here the "CUDA" generator is the CPU generator.
    logging.getLogger(mcore_random.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())
    # The original converts split sizes for all_to_all only if the tensor is on a GPU; the collective needs integers.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    # Gloo gathers and scatters equal parts only, but the ranks that share an expert's matrices have unequal numbers of
    # rows.
    mappings._gather_along_first_dim = _gather_rows(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_rows(mappings._reduce_scatter_along_first_dim)


def _hush() -> None:
    """Silence megatron-core's warnings about missing GPU packages, which every rank and module repeats at every
    start."""
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
