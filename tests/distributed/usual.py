"""Which cases of a parametrised test run with further seeds."""

import pytest


def with_seeds(*values, usual: bool):
    """Return a case of a test; a usual one also runs with further random models, see `make test-seeds`."""
    return pytest.param(*values, marks=pytest.mark.seeds if usual else ())
