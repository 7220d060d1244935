"""Reward functions that a config may name: `task.rewards.NAME.function: moe_rl.tasks.rewards.exact_match`.

One of your own is a plain function of any of these, which it is given by name (see `verifier_worker`):

    prompt, answer      texts of the task's row
    completion          what the policy wrote, without the stop token that ended it
    finish_reason       "stop", or "length" when it was truncated
    stop_token_id       the stop token that ended it; None when none did
"""

from __future__ import annotations

import re

# ASCII digits only, no plus sign, no leading zero, no "-0": one spelling per integer, so that the policy cannot be paid
# for an answer that a plain string comparison with the hidden one would refuse.
_ANSWER = re.compile(r"<answer>(0|-?[1-9][0-9]*)</answer>")
_BOX = re.compile(r"\\boxed\{\s*(-?[0-9][0-9,]*)\s*\}")


def exact_match(completion: str, answer: str) -> float:
    """1.0 iff the completion, stripped of whitespace, is `<answer>INT</answer>` with the hidden answer; else 0.0."""
    return float(_answer_in(completion) == answer.strip())


def answer_format(completion: str) -> float:
    """1.0 iff the completion, stripped of whitespace, is `<answer>INT</answer>`, whatever the integer; else 0.0."""
    return float(_answer_in(completion) is not None)


def _answer_in(completion: str) -> str | None:
    match = _ANSWER.fullmatch(completion.strip())
    return match.group(1) if match else None


def boxed_integer(completion: str, answer: str) -> float:
    """1.0 iff the last \\boxed{...} with an integer, as in contests, holds the hidden one; else 0.0.

    Thousands' commas and leading zeros do not count. A later box with anything else in it is an answer too, and a wrong
    one. Raises ValueError when `answer` is no integer.
    """
    wanted = int(answer.replace(",", ""))
    start = completion.rfind("\\boxed")
    match = _BOX.match(completion, start) if start >= 0 else None
    return float(match is not None and int(match.group(1).replace(",", "")) == wanted)
