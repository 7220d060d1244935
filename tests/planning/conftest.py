"""Provides plans of the valid run on disk that the config tests use."""

import pytest

from moe_rl.config.load import load_config
from moe_rl.models.hf import read_model
from moe_rl.planning.cluster_plan import make_plan
from tests.config.conftest import config_file, model  # noqa: F401  fixtures


@pytest.fixture
def plan_of(config_file):  # noqa: F811
    def plan(*overrides, world_size=2):
        config = load_config(config_file, overrides)
        return make_plan(config, read_model(config.model.path), world_size)

    return plan
