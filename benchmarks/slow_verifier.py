"""Rewards a completion like the demo's `exact_match`, after a long-tailed time in which it only waits.

It stands for tests in a sandbox, or for a judge on another machine. The time is log-normal: half of the verifications
take less than MEDIAN_SECONDS, 1 in 100 would take longer than LONGEST_SECONDS and is cut there. It depends on the
prompt and the completion alone, so it is the same in every mode.
"""

from __future__ import annotations

import hashlib
import math
import time
from statistics import NormalDist

from moe_rl.tasks import rewards

MEDIAN_SECONDS, LONGEST_SECONDS = 0.3, 5.0
_SPREAD = math.log(LONGEST_SECONDS / MEDIAN_SECONDS) / NormalDist().inv_cdf(0.99)


def exact_match(prompt: str, completion: str, answer: str) -> float:
    """Wait, then return the reward."""
    time.sleep(seconds(prompt, completion))
    return rewards.exact_match(completion, answer)


def seconds(prompt: str, completion: str) -> float:
    """Return how long the verification of this completion takes."""
    digest = hashlib.sha256(f"{prompt}\0{completion}".encode()).digest()
    uniform = (int.from_bytes(digest[:6]) + 0.5) / 2**48
    return min(LONGEST_SECONDS, MEDIAN_SECONDS * math.exp(_SPREAD * NormalDist().inv_cdf(uniform)))
