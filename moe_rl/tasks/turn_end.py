"""Finds the text that ends the assistant's turn in a model's chats, and reports if that would not end a completion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.errors import Problem, describe
from moe_rl.tasks.tokenizer import TextCodec

_ASKS, _ANSWERS, _AGAIN = "Ready, question.", "Certainly, answer.", "Another, question."
_CHAT = ({"role": "user", "content": _ASKS}, {"role": "assistant", "content": _ANSWERS})
_CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "find", "arguments": {"text": _ANSWERS}}}
_CALLS = (
    {"role": "user", "content": _ASKS},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "find", "tool_call_id": "abcdefgh1", "content": _AGAIN},
)


def turn_ends(write: Callable[[Sequence[Mapping[str, Any]]], str]) -> tuple[str, str] | None:
    """Return the chat template's text after an answer: before the next message, and at the end of a chat.

    Args:
        write: returns the text of messages, without the beginning of an answer. It may raise.

    Returns:
        None if that cannot be determined: the template refuses such chats, or does not show the answer.
    """
    try:
        asked_again, last = (write(chat) for chat in ((*_CHAT, {"role": "user", "content": _AGAIN}), _CHAT))
    except Exception:  # a template may raise anything
        return None
    _, shown, after = asked_again.rpartition(_ANSWERS)
    between, again, _ = after.partition(_AGAIN)
    _, shown_last, end = last.rpartition(_ANSWERS)
    return (between, end) if shown and again and shown_last else None


def call_end(write: Callable[[Sequence[Mapping[str, Any]]], str]) -> str | None:
    """Return the chat template's text between the arguments of a tool call and the tool's result; None as in
    `turn_ends`."""
    try:
        _, shown, after = write(_CALLS).rpartition(_ANSWERS)
    except Exception:  # a template may raise anything
        return None
    between, result, _ = after.partition(_AGAIN)
    return between if shown and result else None


def endless_problem(
    write: Callable[[Sequence[Mapping[str, Any]]], str],
    codec: TextCodec,
    model_stops: Collection[int],
    rollout: RolloutConfig,
) -> Problem | None:
    """Return a problem if a model that follows its chat template would never end its turn, or never one that calls a
    tool.

    There is none if the config sets its own stop.

    Args:
        write: see `turn_ends`.
        model_stops: tokens that end a completion without the config.
    """
    ends = turn_ends(write)
    if ends is None or rollout.stop or set(rollout.stop_token_ids) - set(model_stops):
        return None
    between, end = ends
    after, which = codec.encode(between), "a turn of the assistant"
    if set(model_stops) & {*after, *codec.encode(end)}:
        # An answer ends; a tool call may end with another token.
        after, which = codec.encode(call_end(write) or ""), "a turn that calls a tool"
        if set(model_stops) & {*after} or not codec.control_tokens & {*after}:
            return None
    stops = ", ".join(f"{codec.decode((token,))!r} ({token})" for token in model_stops)
    token = next((candidate for candidate in after if candidate in codec.control_tokens), None)
    if token is not None:
        return describe(
            f"no completion would end: the chat template ends {which} with another token",
            where={"key": "rollout.stop_token_ids"},
            got=f"{codec.decode((token,))!r} ({token})",
            expected=f"one of the model's end-of-sequence tokens: {stops}",
            do=f"set rollout.stop_token_ids=[{token}], or correct eos_token_id in generation_config.json",
            fault="endless",
        )
    if not between.strip():
        return None
    return describe(
        "no completion would end: the chat template ends a turn of the assistant with text, not with a token",
        where={"key": "rollout.stop"},
        got=repr(between),
        expected=f"one of the model's end-of-sequence tokens: {stops}",
        do=f"give rollout.stop a text that ends a turn, such as {between.strip().splitlines()[0]!r}, or let the "
        "template write an end-of-sequence token after an answer",
        fault="endless",
    )
