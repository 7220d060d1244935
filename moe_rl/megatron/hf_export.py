"""The trained weights on their way out of the ranks: whole tensors under Hugging Face names, in bounded rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from moe_rl.megatron import hf_map
from moe_rl.megatron.hf_files import stored_dtype
from moe_rl.models.hf import ModelFacts


@dataclass(frozen=True, slots=True)
class Round:
    """A part of what this rank gives. whole: name, dtype and shape of each tensor, known before any is made. tensors:
    (name, tensor), one at a time. Ranks that share tensors make them together: all must exhaust it."""

    whole: list[tuple[str, torch.dtype, tuple[int, ...]]]
    tensors: Iterator[tuple[str, torch.Tensor]]


def export_rounds(
    chunks: Iterable[torch.nn.Module],
    facts: ModelFacts,
    dtype: torch.dtype,
    limit: float,
    *,
    dense: bool,
    experts: bool,
    device: torch.device,
) -> list[Round]:
    """The weights of (unwrapped) GPTModels in `dtype` on `device`, in rounds of at most `limit` bytes, or of one weight
    that is larger. Expert biases are float32 in any precision. dense, experts: as for `hf_map.export`.

    Ranks that share tensors have the same number of rounds, so that all may wait for one another between two.
    """

    def size(name: str, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * stored_dtype(name, dtype).itemsize

    def stored(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.to(device, stored_dtype(name, dtype)).contiguous()

    rounds = []
    for run in hf_map.rounds(chunks, facts, size, limit):
        given = [entry for entry in run if (experts if entry.weight.experts else dense) and entry.group.rank() == 0]
        whole = [(name, stored_dtype(name, dtype), shape) for entry in given for name, shape in entry.whole]
        rounds.append(Round(whole, stored(hf_map.export_entries(run, facts, dense=dense, experts=experts))))
    return rounds
