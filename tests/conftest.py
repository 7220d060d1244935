"""In which order files are tested, and no test by the clock."""

import hypothesis
import pytest

# A time limit for an example tells how busy the machine is, and fails on a slow one.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Folders with whole runs, several ranks, real engines: minutes each, the longest first.
_LONG = ("end_to_end", "distributed", "rollout")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: begun last, one of them would keep a single worker busy when the others are done."""
    order = {name: at for at, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
