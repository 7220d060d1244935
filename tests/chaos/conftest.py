"""The run that nobody touches."""

import pytest

from tests.chaos.chain import run_untouched


@pytest.fixture(scope="session")
def untouched(tmp_path_factory):
    """Its folder."""
    return run_untouched(tmp_path_factory.mktemp("untouched"))
