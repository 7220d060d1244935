"""What does not fit: every reason why the planned bytes have no room, and what to change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from moe_rl.config.check_files import existing_folder
from moe_rl.config.schema import Config
from moe_rl.errors import describe
from moe_rl.planning.plan import Plan


def fit_problems(config: Config, plan: Plan) -> list[str]:
    """One message each, empty when everything fits."""
    return [*_disk_problems(config, plan)]


def _disk_problems(config: Config, plan: Plan) -> Iterator[str]:
    free = shutil.disk_usage(existing_folder(config.run.runs_dir)).free
    if free < plan.storage.checkpoint_bytes:
        yield describe(
            "run.runs_dir: not enough free disk for one checkpoint",
            where=str(config.run.runs_dir),
            got=f"{free:,} bytes",
            expected=f"at least {plan.storage.checkpoint_bytes:,}",
            do="free some space or set run.runs_dir",
        )
