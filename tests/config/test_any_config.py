"""Tests random configs: each is refused with the wrong key in the message, or the run can be planned and started."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_rl.config.check import problems
from moe_rl.config.load import _all_keys, anchored, load_config
from moe_rl.errors import ConfigError
from moe_rl.models.hf import read_model
from moe_rl.planning.cluster_plan import disk_problems, make_plan, memory_problems, transfer_problems
from moe_rl.planning.plan_table import render
from moe_rl.train.run_folder import create, start_problems

KEYS = sorted(set(_all_keys()))
VALUES = (
    *("0", "1", "2", "3", "-1", "-5", "1.5", "0.5", "1e308", "-1e308", "1e-308", "1e-46", "4294967296", "2147483647"),
    *("18446744073709551616", "1000000", "NaN", ".inf", "-.inf", "null", "true", "false", "[]", "{}", "[1,2]", "''"),
    *("x", "' '", '"\\0"', '"a\\nb"', "/", "/dev/null", "..", "~", f"'{'a' * 300}'", "'http://[::1'", "['http://a:1']"),
    *("native", "off", "r2", "fp8_e4m3", "worker", "gspo", "grpo", "moe_rl.errors.describe", "moe_rl..x", "0x10", "@"),
)
OVERRIDES = st.lists(
    st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES) | st.floats().map(repr) | st.integers().map(str)),
    min_size=1,
    max_size=3,
)


@pytest.fixture
def model(tmp_path, write_model):
    return write_model(tmp_path / "model", mlp_only_layers=[])


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(OVERRIDES, st.sampled_from([1, 2, 2, 4]))
def test_it_is_refused_by_name_or_can_be_begun(config_file, tmp_path, overrides, ranks):
    inside = f"run.runs_dir={tmp_path / 'runs'}"
    try:
        config = load_config(config_file, [inside, *(f"{key}={value}" for key, value in overrides)])
        found = problems(config, ranks)
        if not found:
            facts = read_model(config.model.path)
            plan = make_plan(config, facts, ranks)
            assert render(plan)
            found = [*memory_problems(plan), *transfer_problems(plan), *disk_problems(config, plan)]
            found += start_problems(config)
        if found:
            raise ConfigError(found)
    except ConfigError as error:
        assert all(len(problem) > 20 for problem in error.problems)
        return
    if config.run.runs_dir.is_relative_to(tmp_path):
        assert load_config(create(config).config) == anchored(config)
