"""Provides reward functions that a config may name: `task.rewards.NAME.function: moe_rl.tasks.rewards.exact_match`.

Your own reward function is a plain function with any of these parameters, passed by name (see `verifier_worker`):

    prompt, answer      texts of the task's row
    completion          what the policy wrote, without the stop token that ended it
    finish_reason       "stop", or "length" when it was truncated
    stop_token_id       the stop token that ended it; None when none did
"""

from __future__ import annotations

import re

# Only ASCII digits, without plus sign, leading zero or "-0". Each integer then has one spelling, so the policy earns
# no reward for an answer that a plain string comparison would refuse.
_ANSWER = re.compile(r"<answer>(0|-?[1-9][0-9]*)</answer>")
_BOX = re.compile(r"\\boxed\{\s*(-?[0-9][0-9,]*)\s*\}")


def exact_match(completion: str, answer: str) -> float:
    """Return 1.0 if the completion, without outer whitespace, is `<answer>INT</answer>` with the hidden answer; else
    0.0.
    """
    return float(_answer_in(completion) == answer.strip())


def answer_format(completion: str) -> float:
    """Return 1.0 if the completion, without outer whitespace, is `<answer>INT</answer>` with any integer; else 0.0."""
    return float(_answer_in(completion) is not None)


def _answer_in(completion: str) -> str | None:
    match = _ANSWER.fullmatch(completion.strip())
    return match.group(1) if match else None


def boxed_integer(completion: str, answer: str) -> float:
    """Return 1.0 if the last \\boxed{...} holds the hidden integer, as in contests; else 0.0.

    Commas between thousands and leading zeros are ignored. If the last box holds anything but an integer, the answer is
    wrong, even if an earlier box was right.

    Raises:
        ValueError: `answer` is not an integer.
    """
    wanted = int(answer.replace(",", ""))
    start = completion.rfind("\\boxed")
    match = _BOX.match(completion, start) if start >= 0 else None
    return float(match is not None and int(match.group(1).replace(",", "")) == wanted)
