"""Makes tensors that lie in host memory and say that they are on "cuda:0", and runs operations on them.

What differs from a GPU is listed in docs/measurements/gpu.md. C++ code takes these tensors for host tensors, so the
methods that C++ answers by itself (`to`, `cpu`, `tolist`, `numpy`, `data`) are answered here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.pretend_cuda.order import POISON, Block, PretendFault, current
from tests.support.pretend_cuda.places import formula_of_autograd, place

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
_to = torch.Tensor.to

_pinned: dict[int, torch.UntypedStorage] = {}  # kept, so that no other storage gets the address

# The host waits inside these, for the number of values that they return.
_WAITS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten.bincount,
    aten._unique2, aten.unique_dim, aten.unique_consecutive,
}  # fmt: skip
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_READ_ONLY = {"send"}  # collectives that write nothing on this rank


class PretendTensor(torch.Tensor):
    """A tensor on the pretend device; `host` has its values, `block` is the memory."""

    host: torch.Tensor
    block: Block

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, block: Block | None = None) -> PretendTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            layout=host.layout, device=HOST,
        )  # fmt: skip
        made.host, made.block = host, block or Block(host.untyped_storage())
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        same = self if dtype in (None, self.dtype) else _to(self, dtype)
        if device is not None and device.type == "cpu":
            return _ToHost.apply(same, non_blocking)
        return same.clone() if copy and same is self else same

    def cpu(self, *_: object) -> torch.Tensor:
        return self.to(HOST)

    def cuda(self, *_: object, **__: object) -> torch.Tensor:
        return self

    def tolist(self) -> Any:
        current().wait("tolist", current().current.known)
        return self.detach().host.tolist()

    def numpy(self, *_: object, **__: object):
        raise TypeError("can't convert cuda:0 device type tensor to numpy: copy it to the host first")

    __array__ = numpy

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA, **kwargs})

    def type(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return super().type(*args, **kwargs)
        return super().type().replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, other: PretendTensor) -> None:
        if (other.shape, other.stride(), other.dtype) != (self.shape, self.stride(), self.dtype):
            raise PretendFault(f"the pretend device cannot give a tensor other data of another shape, at {place()}")
        self.host, self.block = other.host, other.block

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def record_stream(self, stream) -> None:
        self.block.record_stream(stream)

    def __repr__(self, **_: object) -> str:
        return f"PretendTensor({tuple(self.shape)}, {self.dtype})"


class Pretend(TorchDispatchMode):
    """Sees the operations that no argument is on the pretend device for: tensors that are made there or copied."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source: PretendTensor, non_blocking: bool) -> torch.Tensor:
        target = torch.empty_like(source.host)
        if non_blocking:  # torch makes the memory pinned
            _pin(target)
        _to_host(target, source, non_blocking=non_blocking)
        return target

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient.to(CUDA), None


def run(func, args: tuple, kwargs: dict[str, Any]):
    """Run one operation of torch, as its kernel for CUDA would run it."""
    packet = func.overloadpacket
    if "device" in kwargs and (
        (packet is aten._to_copy and isinstance(args[0], PretendTensor)) or formula_of_autograd()
    ):
        kwargs = {**kwargs, "device": CUDA}  # C++ names the device where it takes our tensors to be
    if packet is aten.is_pinned:
        return _is_pinned(args[0])
    if packet is aten._pin_memory:
        return _pin(args[0].clone())
    if packet in (aten.copy_, aten._to_copy) and (moved := _moved(packet, args, kwargs)) is not None:
        return moved
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    ours = [one for one in tensors if isinstance(one, PretendTensor)]
    asked = kwargs.get("device")
    here = bool(ours) if asked is None else torch.device(asked).type == "cuda"
    plain = dict(kwargs)
    pinned = plain.pop("pin_memory", None)
    if asked is not None:
        plain["device"] = HOST
    if func.namespace == "c10d":
        return _collective(func, args, kwargs)
    if not ours and not here:
        made = func(*args, **plain)
        return _pin(made) if pinned else made
    if len(ours) < len(tensors) and packet not in _SHAPES_ONLY:
        _check_hosts(func, args, [one for one in tensors if one.ndim and not isinstance(one, PretendTensor)])
    device = current()
    if packet in _WAITS or _masks(packet, args) or (packet is aten.repeat_interleave and _lengths(args, kwargs)):
        device.wait(str(packet).removeprefix("aten."), device.current.known)
    time = device.current.work()
    if not func.is_view:
        for tensor, writes in _uses(func, args, kwargs):
            tensor.block.use(device.current, time, writes=writes, what=str(func))
    host_args, host_kwargs = tree_map(_host_of, args), tree_map(_host_of, plain)
    try:
        out = func(*host_args, **host_kwargs)
    except IndexError as error:
        raise PretendFault(f"device-side assert: {error} ({func}), at {place()}") from error
    if device.graph is not None and not func.is_view:
        device.graph.append((func, host_args, host_kwargs, out))
    if not here:
        return out
    known = {id(one.host): one for one in ours}

    def wrap(one):
        if not isinstance(one, torch.Tensor):
            return one
        if id(one) in known:
            if one.shape != known[id(one)].shape:
                raise PretendFault(f"the pretend device cannot change a shape in place: {func} at {place()}")
            return known[id(one)]
        base = next((mine for mine in ours if _address(mine) == _address(one)), None) if func.is_view or ours else None
        made = PretendTensor(one, None if base is None else base.block)
        if base is None:
            made.block.use(device.current, time, writes=True, what=str(func))
        return made

    return tree_map(wrap, out)


# They take a shape from a tensor of any device, and no values.
_SHAPES_ONLY = {aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like}


def _address(tensor: torch.Tensor) -> int:
    return (tensor.host if isinstance(tensor, PretendTensor) else tensor).untyped_storage().data_ptr()


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    _pinned[storage.data_ptr()] = storage
    return tensor


def _is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in pinned memory, which may be a part of a larger piece."""
    place = _address(tensor)
    return any(start <= place < start + storage.nbytes() for start, storage in _pinned.items())


def _moved(packet, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Run a copy between the host and the device; None if it is not one."""
    if packet is aten.copy_:
        target, source = args[:2]
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        to_device, from_device = isinstance(target, PretendTensor), isinstance(source, PretendTensor)
        if to_device == from_device:
            return None
        if from_device:
            _to_host(target, source, non_blocking=non_blocking)
        elif source.ndim or source.numel() > 1:
            _to_device(target, source, non_blocking=non_blocking)
        else:
            return None
        return target
    asked, (source, *_) = kwargs.get("device"), args
    if isinstance(source, PretendTensor) or asked is None or torch.device(asked).type != "cuda":
        return None
    target = PretendTensor(torch.empty_like(source, dtype=kwargs.get("dtype") or source.dtype))
    _to_device(target, source, non_blocking=bool(kwargs.get("non_blocking")))
    return target


def _to_host(target: torch.Tensor, source: PretendTensor, *, non_blocking: bool) -> None:
    device = current()
    time = device.current.work()
    source.block.use(device.current, time, writes=False, what="a copy to the host")
    if non_blocking and _is_pinned(target):
        values = source.host.detach().clone()
        _octets(target).fill_(POISON)

        def arrive() -> None:
            target.detach().copy_(values)

        device.copy_later(arrive)
        return
    device.wait("copy to the host", device.current.known)
    target.detach().copy_(source.host)


def _to_device(target: PretendTensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    device = current()
    time = device.current.work()
    target.block.use(device.current, time, writes=True, what="a copy to the device")
    target.host.detach().copy_(source.detach())
    if not non_blocking:
        device.wait("copy to the device", device.current.known)
    elif _is_pinned(source):
        before, where = source.detach().clone(), place()

        def compare() -> None:
            if not torch.equal(_octets(before), _octets(source)):
                device.faults.append(f"a pinned buffer is changed before its copy to the device has ended, at {where}")

        device.copy_later(compare)


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes; they share its memory if it is contiguous."""
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a view would keep the stride 0 of one element


def _collective(func, args: tuple, kwargs: dict[str, Any]):
    """Let gloo do what NCCL would do on a stream of its own, behind the work of the current stream."""
    device, groups = current(), [one for one in args if isinstance(one, torch.ScriptObject)]
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    if any(dist.ProcessGroup.unbox(one).group_name in device.of_hosts for one in groups[:1]):
        return func(*args, **kwargs)
    if func.overloadpacket is torch.ops.c10d.barrier:
        device.wait("barrier", device.current.known)
        return func(*args, **kwargs)
    if any(not isinstance(one, PretendTensor) for one in tensors if one.numel()):
        raise PretendFault(f"NCCL gets a tensor in host memory: {func} at {place()}")
    device.nccl.wait_stream(device.current)
    time, name = device.nccl.work(), func.overloadpacket.__name__
    for at, argument in enumerate(args):
        for tensor in tree_leaves(argument):
            if isinstance(tensor, PretendTensor):
                tensor.block.use(device.nccl, time, writes=at == 0 and name not in _READ_ONLY, what=f"c10d.{name}")
                tensor.record_stream(device.nccl)
    out = func(*tree_map(_host_of, args), **tree_map(_host_of, kwargs))
    known = {id(_host_of(one)): one for one in tensors}
    return tree_map(lambda one: known.get(id(one), one), out)


def _host_of(value: Any) -> Any:
    return value.host if isinstance(value, PretendTensor) else value


def _check_hosts(func, args: tuple, strangers: list[torch.Tensor]) -> None:
    """Refuse host tensors beside tensors of the device, except single numbers, and indices, which are copied first."""
    if not strangers:
        return
    indexed = func.overloadpacket in _INDEXED and isinstance(args[0], PretendTensor)
    if indexed and not any(one is value for one in strangers for value in args[2:]):
        current().wait("an index in host memory", current().current.known)
        return
    raise PretendFault(
        f"Expected all tensors to be on the same device: {func} gets {[tuple(one.shape) for one in strangers]} in host "
        f"memory, at {place()}"
    )


def _masks(packet, args: tuple) -> bool:
    """Return whether an index has a mask, whose true values are counted first."""
    if packet not in _INDEXED:
        return False
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _lengths(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether the sum of repeats must be read, because the call does not give it."""
    return kwargs.get("output_size") is None and isinstance(args[-1], PretendTensor)


def _uses(func, args: tuple, kwargs: dict[str, Any]) -> Iterable[tuple[PretendTensor, bool]]:
    """Yield the tensors that an operation uses, and whether it writes them."""
    positional, by_name = _writes(func)
    for value, writes in zip(args, positional, strict=False):
        yield from ((one, writes) for one in tree_leaves(value) if isinstance(one, PretendTensor))
    for name, value in kwargs.items():
        yield from ((one, by_name.get(name, False)) for one in tree_leaves(value) if isinstance(one, PretendTensor))


@cache
def _writes(func) -> tuple[tuple[bool, ...], dict[str, bool]]:
    writes = [one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments]
    return tuple(writes), {one.name: write for one, write in zip(func._schema.arguments, writes, strict=True)}


def poison(blocks: Iterable[Block]) -> None:
    """Fill memory with what nobody wrote."""
    for block in blocks:
        torch.empty(0, dtype=torch.uint8).set_(block.storage).fill_(POISON)
