"""Groups tokens by lag: by how many weight versions the sampler was behind the trainer.

Drift and faults look alike in a mean over all tokens. By lag they do not: drift grows with the lag, and tokens of lag 0
look like those of a synchronous run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LAGS = ("0", "1", "2-3", "4-7", "8+")
"""Names of the groups, in versions."""
_STARTS = (1, 2, 4, 8)


def sums_by_lag(values: Tensor, lags: Tensor) -> Tensor:
    """Return float64 [len(LAGS)]: the sum of the values [N] in each group. Needs no host sync.

    lags: int64 [N], the trainer's version minus that of the weights that the value comes from.
    """
    group = torch.stack([lags >= start for start in _STARTS]).sum(0)
    return torch.zeros(len(LAGS), dtype=torch.float64, device=values.device).index_add(0, group, values.double())


def with_keys(lags: Tensor, counts: Sequence[int]) -> Tensor:
    """Return for each token the largest lag of itself and of the tokens before it in its packed sequence, int64 [N].

    A sampler that keeps keys and values over an update lets new weights attend to keys that older ones made, so such a
    token is not sampled from the new weights alone. A later segment of a completion is another packed sequence: its
    weights made the keys of its whole prompt.

    Args:
        lags: int64 [N], one packed sequence after the other.
        counts: Tokens of each packed sequence, N in all, turns with their own rewards included.
    """
    return torch.cat([lags[:0], *(of_sequence.cummax(0)[0] for of_sequence in lags.split(list(counts)))])


def interpolated(logprobs: Tensor, rollout_logprobs: Tensor, lags: Tensor) -> Tensor:
    """Return A-3PO's old logprobs (arXiv 2512.06547), which need no pass of their own.

    (1 - a_t) l_t + a_t l_rollout_t,   a_t = 1 / lag of token t, and 0 at lag 0

    The older the sampler's weights are, the nearer this is to the current policy.

    Args:
        logprobs: [N] float32 or float64, of the current policy, without gradient. rollout_logprobs has the same shape
            and dtype.
        lags: int64 [N].
    """
    share = torch.where(lags > 0, 1 / lags.clamp(min=1).double(), 0.0)
    return torch.lerp(logprobs.double(), rollout_logprobs.double(), share).to(logprobs.dtype)
