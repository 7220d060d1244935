"""Defines the section `gateway`: how agents reach the model through `moe-rl serve --gateway`."""

from __future__ import annotations

from typing import Any, Literal

from moe_rl.config.section import Count, Few, Seconds, Section

DialogueKind = Literal["first_turns", "later_turns", "tools", "tool_calls", "reasoning"]


class GatewayConfig(Section):
    """Says how messages become tokens, and what a session of an agent may use."""

    renderer: dict[str, Any] = {"name": "default"}
    """Turns messages into tokens and completions into messages: a renderer of the package `renderers` by its name, such
    as qwen3, and its settings, such as enable_thinking. default: the model's own chat template, with the settings
    tool_parser and reasoning_parser. It renders a whole dialogue anew for each turn, so a turn continues the turn
    before only if the template writes the model's earlier output with the same tokens."""
    differs_in: tuple[DialogueKind, ...] = ()
    """Kinds of dialogue in which the renderer may write other tokens than the model's chat template. A difference in
    any other kind is refused. The history of a session of such a kind is not compared with the template."""
    max_sessions: Few = 1024
    """Largest number of sessions that are open at once."""
    session_tokens: Count = 131072
    """Largest number of tokens of a session: the tokens of its prompts that are new to it, and of its completions."""
    session_turns: Count = 256
    """Largest number of turns of a session. Each completion is a turn."""
    session_seconds: Seconds = 3600.0
    """Age in seconds from which a session takes no more turns."""
    max_body_mib: Few = 16
    """Largest body of a request in MiB."""
