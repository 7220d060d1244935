"""What is added to a reward before completions are compared."""

from __future__ import annotations


def overlong_penalty(tokens: int, *, limit: int, cache: int, penalty: float) -> float:
    """DAPO's soft punishment of overlong answers (arXiv 2503.14476, equation 13), to be added to the reward; <= 0.

        0                                            where tokens <= limit - cache
        (limit - cache - tokens) / cache * penalty   up to limit, where it is -penalty
        -penalty                                     beyond

    tokens: of the completion, its stop token included. limit: longest completion allowed, at which one is truncated;
    0 < cache < limit: tokens before it over which the punishment grows. The paper has penalty 1, limit 20480 and cache
    4096. verl and AReaL let it grow on beyond -penalty; TRL does not.
    """
    over = min(max(tokens - (limit - cache), 0), cache)
    return -over / cache * penalty if over else 0.0
