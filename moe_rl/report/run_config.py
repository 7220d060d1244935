"""Reads `config.yaml`, the resolved config of a run, as plain values, and compares such configs key by key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

FILE = "config.yaml"


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the sections of a run's config. A folder without the file has none."""
    path = run_dir / FILE
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by dotted key. A plain value has the key ""."""
    if not isinstance(values, dict):
        return {prefix.removesuffix("."): values}
    return {name: leaf for key, value in values.items() for name, leaf in flat(value, f"{prefix}{key}.").items()}


def differing(configs: Sequence[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return each flat key whose value is not the same in all configs, with its values. None: the config lacks it."""
    keys = dict.fromkeys(key for config in configs for key in config)
    by_key = [(key, [config.get(key) for config in configs]) for key in keys]
    return [(key, values) for key, values in by_key if any(value != values[0] for value in values[1:])]
