"""Runs environments of other packages. Each adapter is an environment, and needs the extra of its package."""

from __future__ import annotations

from moe_rl.errors import describe, with_extra


def missing(extra: str, error: ImportError) -> ImportError:
    """Return the error for an adapter whose package cannot be imported."""
    return ImportError(
        describe(
            "a package of this adapter cannot be imported",
            where={"part": f"extra {extra}"},
            got=error,
            do=f"{with_extra(extra)}, with the Python that runs the environment (see --python)",
        )
    )
