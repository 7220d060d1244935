"""The tokens that could have been sampled under top-k, top-p and min-p, as the trainer's distributions are cut to them.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """What each of T tokens was drawn from, in a flat form.

    counts [T] int64 and ids [sum of counts] int32 on the device: the ids of each token one after the other. A count of
    0: the whole vocabulary. starts [T + 1] int64 on the host: where the ids of each token begin, and the last ones end.
    """

    counts: Tensor
    ids: Tensor
    starts: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray, ids: np.ndarray, device: torch.device) -> Self:
        """counts [T], ids [sum of counts]: any integers."""
        counts = np.asarray(counts, np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return cls(
            torch.from_numpy(counts).to(device), torch.from_numpy(np.asarray(ids).astype(np.int32)).to(device), starts
        )

    def __len__(self) -> int:
        return len(self.counts)

    def removed(self, rows: slice, first: int, size: int) -> Tensor:
        """bool [rows, size]: which of the ids first .. first + size - 1 those tokens could not be. No host sync."""
        counts, begin = self.counts[rows], self.starts[rows.start]
        ids = self.ids[begin : self.starts[min(rows.stop, len(self))]].long() - first
        row = torch.repeat_interleave(counts, output_size=len(ids))
        # One more column takes the ids of other parts of the vocabulary: to sort them out would be a host sync.
        column = torch.where((ids >= 0) & (ids < size), ids, size)
        removed = (counts > 0)[:, None].repeat(1, size + 1)
        removed.view(-1).index_fill_(0, row * (size + 1) + column, False)
        return removed[:, :size]
