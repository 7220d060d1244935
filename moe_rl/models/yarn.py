"""What config.json says of rotary angles that are stretched for longer contexts."""

from __future__ import annotations

from typing import Any

from moe_rl.models.facts import Fields, Yarn


def yarn(read: Fields, rope: dict[str, Any]) -> Yarn | None:
    """The numbers of YaRN; None where angles are plain. Problems are left in `read`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        read.wrong("rope_parameters", rope, "rope_type 'default' or 'yarn', nothing else is built")
        return None
    if rope.get("attention_factor") is not None:
        read.wrong("rope_parameters.attention_factor", rope["attention_factor"], "none: it follows from the others")

    def number(key: str, default: float | None = None) -> float:
        return read.number(f"rope_parameters.{key}", rope.get(key, default))

    positions = rope.get("original_max_position_embeddings")
    if type(positions) is not int or positions < 1:
        read.wrong("rope_parameters.original_max_position_embeddings", positions, "a whole number from 1")
        positions = 1
    scales = [rope.get(key) or None for key in ("mscale", "mscale_all_dim")]
    if scales.count(None) == 1:
        read.wrong("rope_parameters.mscale and .mscale_all_dim", scales, "both or none: one is read in different ways")
    return Yarn(
        factor=number("factor"),
        positions=positions,
        fast=number("beta_fast", 32.0),
        slow=number("beta_slow", 1.0),
        truncate=rope.get("truncate", True) is not False,
        mscale=number("mscale") if scales[0] else None,
        mscale_all_dim=number("mscale_all_dim") if scales[1] else None,
    )
