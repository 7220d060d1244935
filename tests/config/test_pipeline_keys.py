"""Which keys of the pipeline go together."""

from pathlib import Path

import pytest

from moe_rl.config.check import config_problems
from moe_rl.config.load import load_config
from tests.support.refusals import tells

CONFIG = Path(__file__).parents[2] / "configs/tiny_moe_cpu.yaml"
ASYNC = "pipeline.mode=async"
PLAYS = (
    "task.environment={run: moe_rl.tasks.environments.examples.calculator.run, concurrent: 4}",
    "task.rewards={}",
    "task.pass_reward=null",
)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["pipeline.max_staleness=1"], "pipeline.max_staleness"),
        (["pipeline.mode=one_step_off", "pipeline.kv=recompute"], "pipeline.kv"),
        ([ASYNC, "pipeline.max_staleness=0", "pipeline.segments=first"], "pipeline.segments"),
        ([ASYNC, "pipeline.max_staleness=0", "pipeline.late=drop"], "pipeline.late"),
        ([ASYNC, "pipeline.max_staleness=0", "pipeline.oversample=0.5"], "pipeline.oversample"),
        ([ASYNC, "pipeline.kv=recompute", "rollout.stop=[END]"], "pipeline.kv"),
        ([ASYNC, "pipeline.kv=recompute", "pipeline.oversample=0.5", "pipeline.late=drop"], None),
        ([ASYNC, "pipeline.segments=first", "rollout.stop=[END]"], "pipeline.segments"),
        ([ASYNC, "pipeline.segments=first", *PLAYS], "pipeline.segments"),
        ([ASYNC, "pipeline.segments=first"], None),
        ([ASYNC, *PLAYS], None),
        ([ASYNC, "pipeline.max_staleness=0"], None),
        ([ASYNC, "rollout.stop=[END]"], None),
    ],
)
def test_what_goes_together(overrides, key):
    found = config_problems(load_config(CONFIG, ["rollout.sleep_level=0", *overrides]), None, 2)
    assert len(found) == (key is not None), found
    for problem in found:
        tells(problem, key=key)
