"""The digest that trainer and sampler take of a tensor, each over its own memory.

On the host it is the xxh3-128 of name, dtype, shape and bytes. On a device, where bytes are too many to be copied to
the host, it is the xxh3-128 of name, dtype, shape and one sum of all 32-bit words,

    sum over words i of  word(i) * salt(i mod W) * salt'(i div W)   modulo 2**64

with fixed odd salts: any change of one word changes it, any other one but for one in about 2**32 (multilinear hashing,
Carter & Wegman 1979). Both sides of a way hold a tensor on the same kind of device, so that they take the same one.
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

from moe_rl.errors import WeightSyncError, describe
from moe_rl.weights.update import DTypeName, TensorInfo

_WORDS = 1 << 20
"""Words that share a salt of the second kind: 8 MiB as int64, in which they are summed."""


def tensor_digest(name: str, tensor: Tensor) -> str:
    """32 hexadecimal digits, of the tensor's name, dtype, shape and values wherever it lies."""
    state = xxhash.xxh3_128(f"{name}\0{dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}\0".encode())
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if octets.device.type == "cpu":
        state.update(octets.numpy())
    else:
        state.update(word_sum(octets).to_bytes(8, "little"))
    return state.hexdigest()


def info_of(name: str, tensor: Tensor) -> TensorInfo:
    """A tensor as it is announced, with the digest of what lies in this process's memory."""
    return TensorInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor_digest(name, tensor))


def as_announced(infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, for a reader that cuts a run of bytes by their announcement alone. Raises WeightSyncError at the
    first that is another than was announced, or lacks, or is one too many."""
    nothing = ("nothing", torch.empty(0))
    for info, (name, tensor) in zip_longest(infos, tensors, fillvalue=nothing):
        got = (name, dtype_name(tensor.dtype), tuple(tensor.shape))
        expected = (info.name, info.dtype, info.shape) if isinstance(info, TensorInfo) else "nothing"
        if got != expected:
            message = "Another tensor would be sent than was announced"
            raise WeightSyncError(describe(message, got=got, expected=expected))
        yield name, tensor


def dtype_name(dtype: torch.dtype) -> DTypeName:
    """The name of a dtype in `TensorInfo`; of one that cannot be sent, a name that no reader takes."""
    return cast(DTypeName, str(dtype).removeprefix("torch."))


def tensor_digests(
    tensors: Iterable[tuple[str, Tensor]], on_tensor: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """{name: digest}. `on_tensor` is called after each."""
    digests: dict[str, str] = {}
    for name, tensor in tensors:
        digests[name] = tensor_digest(name, tensor)
        on_tensor()
    return digests


def total_digest(digests: Mapping[str, str]) -> str:
    """The digest of a set of tensors, from those of the tensors."""
    state = xxhash.xxh3_128()
    for name in sorted(digests):
        state.update(f"{name}\0{digests[name]}\0".encode())
    return state.hexdigest()


def word_sum(octets: Tensor) -> int:
    """The sum above, of bytes [N] on any device; they are padded with zeros to whole words."""
    of_words, of_runs = _salts(octets.device)
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    if len(octets) % 4 or octets.storage_offset() % 4:  # else the copy would be as large as the tensor
        octets = torch.nn.functional.pad(octets, (0, -len(octets) % 4))
    for number, words in enumerate(octets.view(torch.int32).split(_WORDS)):
        total += (words.long() * of_words[: len(words)]).sum() * of_runs[number]
    return int(total) & 0xFFFFFFFFFFFFFFFF


@lru_cache(maxsize=8)
def _salts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd int64 for the words of a run, and for the runs of a tensor of at most 256 GiB."""
    made = (np.random.PCG64(seed).random_raw(count) | np.uint64(1) for seed, count in ((1, _WORDS), (2, 1 << 16)))
    of_words, of_runs = (torch.from_numpy(salts.view(np.int64)).to(device) for salts in made)
    return of_words, of_runs
