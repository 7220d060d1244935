"""In which order files are tested."""

import pytest

# Of whole runs, of several ranks, of real engines: minutes each, the longest first.
_LONG = ("end_to_end", "distributed", "rollout")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: begun last, one of them would keep a single worker busy when the others are done."""
    order = {name: at for at, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
