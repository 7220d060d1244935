"""Computes the digest that trainer and sampler each take of a tensor in their own memory.

On the CPU the digest is the xxh3-128 of name, dtype, shape and bytes. On a GPU, where copying all bytes to the host
would cost too much, it is the xxh3-128 of name, dtype, shape and one sum over all 32-bit words,

    sum over words i of  word(i) * salt(i mod W) * salt'(i div W)   modulo 2**64

with fixed odd salts. A change of one word always changes the sum; any other change is missed with probability about
2**-32 (multilinear hashing, Carter & Wegman 1979). Trainer and sampler hold a tensor on the same kind of device, so
both use the same formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import cast

import numpy as np
import torch
import xxhash
from torch import Tensor

from moe_rl.errors import WeightSyncError
from moe_rl.weights.update import DTypeName, TensorInfo

_WORDS = 1 << 20
"""Words in one block of the sum; as int64 a block takes 8 MiB."""


class TensorDigests:
    """Takes digests of tensors. The host waits for a device only once, when they are read."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._summed: dict[str, tuple[xxhash.xxh3_128, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the digest of a tensor, which may change or be freed afterwards."""
        state = xxhash.xxh3_128(f"{name}\0{dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}\0".encode())
        octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if octets.device.type == "cpu":
            state.update(octets.numpy())
            self._known[name] = state.hexdigest()
        else:
            self._summed[name] = state, word_sum(octets)

    def read(self) -> dict[str, str]:
        """Return {name: 32 hexadecimal digits} of all tensors so far. They depend on name, dtype, shape and values."""
        if self._summed:
            sums = torch.stack([total for _, total in self._summed.values()]).tolist()
            for (name, (state, _)), total in zip(self._summed.items(), sums, strict=True):
                state.update((total % 2**64).to_bytes(8, "little"))
                self._known[name] = state.hexdigest()
            self._summed.clear()
        return self._known


def tensor_digest(name: str, tensor: Tensor) -> str:
    """Return the digest of one tensor, see `TensorDigests.read`."""
    return tensor_digests([(name, tensor)])[name]


def info_of(name: str, tensor: Tensor) -> TensorInfo:
    """Describe a tensor for the announcement, with the digest of its bytes in this process."""
    return TensorInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_digest(name, tensor))


def as_announced(infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors after comparing each with its announcement; the sampler cuts the byte stream only by it.

    Raises:
        WeightSyncError: a tensor differs from its announcement, is missing, or was not announced.
    """
    nothing = ("nothing", torch.empty(0))
    for info, (name, tensor) in zip_longest(infos, tensors, fillvalue=nothing):
        got = (name, dtype_name(tensor.dtype), tuple(tensor.shape))
        expected = (info.name, info.dtype, info.shape) if isinstance(info, TensorInfo) else "nothing"
        if got != expected:
            message = "A tensor to be sent differs from its announcement"
            raise WeightSyncError(message, got=got, expected=expected)
        yield name, tensor


def dtype_name(dtype: torch.dtype) -> DTypeName:
    """Return a dtype's name in `TensorInfo`. Every reader refuses the name of a dtype that cannot be sent."""
    return cast(DTypeName, str(dtype).removeprefix("torch."))


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is stored: `dtype`, but always float32 for expert biases."""
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def tensor_digests(
    tensors: Iterable[tuple[str, Tensor]], on_tensor: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Return {name: digest}, and call `on_tensor` after each tensor."""
    digests = TensorDigests()
    for name, tensor in tensors:
        digests.add(name, tensor)
        on_tensor()
    return digests.read()


def total_digest(digests: Mapping[str, str]) -> str:
    """Return the digest of a set of tensors, computed from their digests."""
    state = xxhash.xxh3_128()
    for name in sorted(digests):
        state.update(f"{name}\0{digests[name]}\0".encode())
    return state.hexdigest()


def word_sum(octets: Tensor) -> Tensor:
    """Return the sum defined above for bytes [N], padded with zeros to whole words: an int64 scalar on their device."""
    of_words, of_runs = _salts(octets.device)
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    if len(octets) % 4 or octets.storage_offset() % 4:  # only if needed: padding copies the whole tensor
        octets = torch.nn.functional.pad(octets, (0, -len(octets) % 4))
    for number, words in enumerate(octets.view(torch.int32).split(_WORDS)):
        total += (words.long() * of_words[: len(words)]).sum() * of_runs[number]
    return total


@lru_cache(maxsize=8)
def _salts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return odd int64 salts: one for each word of a block, and one for each block of a tensor of at most 256 GiB."""
    made = (np.random.PCG64(seed).random_raw(count) | np.uint64(1) for seed, count in ((1, _WORDS), (2, 1 << 16)))
    of_words, of_runs = (torch.from_numpy(salts.view(np.int64)).to(device) for salts in made)
    return of_words, of_runs
