"""Every test of this folder needs a CUDA device: `pytest -m gpu`."""

from pathlib import Path

import pytest

from tests.distributed.conftest import checkpoint, on_ranks, proven, pytest_runtest_teardown, reference

__all__ = ["checkpoint", "on_ranks", "proven", "pytest_runtest_teardown", "reference"]


@pytest.hookimpl(tryfirst=True)  # before pytest reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
