"""Plays a CUDA device on a machine without one, so that the code for GPUs runs in every test.

    with pretend_cuda.installed() as device:
        ...  # torch.cuda.is_available() is True; "cuda" is host memory
    device.syncs, device.faults

Devices are checked as on a GPU: tensors of the host and of the device do not mix. Streams, events, pinned copies and
the allocator keep their order (order.py): a wait that is missing is an error, or leaves poison in a host buffer. Gloo
plays NCCL. Every wait of the host is counted by its place (places.py). docs/measurements/gpu.md lists what a GPU does
otherwise.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.pretend_cuda import order
from tests.support.pretend_cuda.order import Device, Event, PretendFault, Stream
from tests.support.pretend_cuda.tensor import CUDA, Pretend, PretendTensor, poison

__all__ = ["CUDA", "Device", "Event", "Graph", "PretendFault", "PretendTensor", "Stream", "fit_megatron", "installed",
           "mapped", "pool", "unmap"]  # fmt: skip

MEMORY = 80 << 30


@contextmanager
def installed() -> Iterator[Device]:
    """Play the device in this process. Modules that look for CUDA when they are imported must be imported inside."""
    device = Device.__new__(Device)
    order.install(device)
    device.__init__()  # its streams look for it
    with ExitStack() as stack:
        stack.callback(order.install, None)
        if "moe_rl.megatron.cpu" in sys.modules:  # it plays a device too: it sends "cuda" to the host
            stack.enter_context(sys.modules["moe_rl.megatron.cpu"].without_mode())
        for target, names in _stand_ins(device).items():
            stack.enter_context(patch.multiple(target, **names))
        stack.enter_context(Pretend())
        yield device


def fit_megatron() -> None:
    """Change what Megatron and torch's modules do to tensors that these tensors cannot do. Call it inside
    `installed`."""
    import megatron.core.utils

    # A module that moves gets new parameters, with what Megatron has noted on the old ones: which are experts.
    torch.__future__.set_swap_module_params_on_conversion(True)
    swap = torch.utils.swap_tensors

    def swap_but_notes(old: torch.Tensor, new: torch.Tensor) -> None:
        notes = {name: value for name, value in vars(old).items() if name not in ("host", "block")}
        swap(old, new)
        vars(old).update(notes)

    torch.utils.swap_tensors = swap_but_notes
    # Megatron gives an empty tensor other data, of another shape, to cut it off from the tensor that it is a view of.
    megatron.core.utils._kernel_make_viewless_tensor = lambda tensor, grad: tensor.detach().requires_grad_(grad)


@contextmanager
def pool(name: str) -> Iterator[None]:
    """Take new memory of the device from a pool, as vLLM's allocator does between `use_memory_pool` and its end."""
    before, order.current().pool = order.current().pool, name
    try:
        yield
    finally:
        order.current().pool = before


def unmap(name: str) -> None:
    """Unmap a pool, as a sleep at level 2 does: its values are gone, and it cannot be used until it is mapped."""
    for block in (blocks := order.current().blocks.get(name, [])):
        block.mapped = False
    poison(blocks)


def mapped(name: str) -> None:
    """Map fresh memory to the pool."""
    for block in order.current().blocks.get(name, []):
        block.mapped = True


class Graph:
    """Stands for torch.cuda.CUDAGraph: `with graph: ...` notes the work, and `replay` does it again on its memory."""

    def __init__(self) -> None:
        self._work: list = []

    def __enter__(self) -> Graph:
        order.current().graph = self._work
        return self

    def __exit__(self, *_: object) -> None:
        order.current().graph = None

    def replay(self) -> None:
        for func, args, kwargs, made in self._work:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(made), _tensors(again), strict=True):
                if old is not new:
                    old.copy_(new)


def _tensors(made: object) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(made) if isinstance(one, torch.Tensor)]


def _read(value: Any) -> Any:
    return value.item() if isinstance(value, PretendTensor) else value


def _indexed(value: Any) -> Any:
    return (
        CUDA
        if isinstance(value, str) and value == "cuda" or (isinstance(value, torch.device) and value.type == "cuda")
        else value
    )


def _stand_ins(device: Device) -> dict[Any, dict[str, Any]]:
    """Return {module or class: {name: what stands for it}}."""
    run, tensor, as_tensor = threading.Thread.run, torch.tensor, torch.as_tensor
    new_group = dist.new_group
    join, wait, to = dist.init_process_group, dist.Work.wait, torch.Tensor.to

    def run_with_mode(thread: threading.Thread) -> None:
        with Pretend():
            run(thread)

    def made(make):
        def on_device(data, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            if isinstance(data, PretendTensor):
                return data.to(*args, device=device, **kwargs)
            host = make(torch.utils._pytree.tree_map(_read, data), *args, **kwargs)
            return host if device is None else host.to(device)

        return on_device

    def moved(host: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Without an index, C++ asks the driver for one.
        given = {key: _indexed(value) for key, value in kwargs.items()}
        return to(host, *map(_indexed, args), **given)

    def waited(work: dist.Work, *timeout: Any) -> bool:
        device.current.known.learn(device.nccl.known)  # of all NCCL's work, also of what was asked later
        return wait(work, *timeout)

    def by_gloo(backend: str | None = None, *args: Any, device_id: object = None, **kwargs: Any) -> None:
        join("gloo", *args, **kwargs)

    def group_of(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        group = new_group(*args, backend=None if backend == "nccl" else backend, **kwargs)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            device.of_hosts.add(group.group_name)
        return group

    def objects_on(group: dist.ProcessGroup | None = None) -> str:
        group = group or dist.group.WORLD
        return "cpu" if group is not None and group.group_name in device.of_hosts else "cuda"

    def synchronize(*_: object) -> None:
        everything = order.Known()
        for one in (device.default, device.nccl, device.current):
            everything.learn(one.known)
        device.wait("torch.cuda.synchronize", everything)

    def refuse_waits(mode: str) -> None:
        device.refuses_waits = mode == "error"

    name = "Pretend H100"
    facts = types.SimpleNamespace(
        total_memory=MEMORY, multi_processor_count=132, major=9, minor=0, name=name, uuid="pretend"
    )
    state = {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda new, *_, **__: torch.set_rng_state(new),
    }

    def stream_of(*_: object, **__: object) -> Stream:
        return device.current

    return {
        torch.cuda: {
            **state,
            **{name: lambda *_, **__: None for name in ("_lazy_init", "init", "set_device", "empty_cache")},
            **{f"{most}memory_{what}": lambda *_: 0 for most in ("", "max_") for what in ("allocated", "reserved")},
            "is_available": lambda: True, "device_count": lambda: 1, "is_initialized": lambda: True,
            "current_device": lambda: 0, "mem_get_info": lambda *_: (MEMORY, MEMORY),
            "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": lambda one: one, "current_stream": stream_of,
            "default_stream": lambda *_, **__: device.default,
            "stream": lambda one: contextlib.nullcontext() if one is None else one,
            "synchronize": synchronize, "set_sync_debug_mode": refuse_waits,
            "is_current_stream_capturing": lambda: device.graph is not None,
            "get_device_name": lambda *_: name, "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": lambda *_: facts, "manual_seed": torch.manual_seed,
            "default_generators": (torch.default_generator,),
        },
        torch.cuda.random: state,
        torch.accelerator: {"current_stream": stream_of, "is_available": lambda: True},
        torch: {"Stream": Stream, "Event": Event, "tensor": made(tensor), "as_tensor": made(as_tensor)},
        torch.Tensor: {"cuda": lambda host, *_, **__: host.to(CUDA), "to": moved},
        threading.Thread: {"run": run_with_mode},
        dist: {"init_process_group": by_gloo, "new_group": group_of},
        dist.distributed_c10d: {"_get_object_coll_device": objects_on},
        dist.Work: {"wait": waited},
    }  # fmt: skip
