import json
from decimal import Decimal

import pytest

from moe_rl.config.reward_kinds import ReasoningGymReward
from moe_rl.tasks.verifiers import RewardItem

reasoning_gym = pytest.importorskip("reasoning_gym")

SCORES = {"gym": ReasoningGymReward(kind="reasoning_gym", answer_in="tags")}


def row(task: str, **options) -> dict:
    """Return the columns of one item, as JSON has them."""
    return json.loads(json.dumps(dict(reasoning_gym.create_dataset(task, seed=3, size=1, **options)[0])))


def said(answer: str | None, columns: dict) -> RewardItem:
    return RewardItem("", f"so <answer>{answer}</answer>" if answer is not None else "so", columns)


def test_each_task_has_its_own_scorer(make_pool):
    tasks = [row("chain_sum"), row("word_sorting"), row("countdown")]
    items = [item for columns in tasks for item in (said(columns["answer"], columns), said("zzz", columns))]
    unlike = row("chain_sum") | {"metadata": {"source_dataset": "no_such_task"}}
    # Its scorer compares tuples, so in JSON its own answer is wrong.
    tuples = row("arc_agi")
    with make_pool(kinds=SCORES, timeout=60.0) as pool:
        *scored, unknown, unfit, none = pool.score(
            [*items, said("1", unlike), said(tuples["answer"], tuples), said(None, tasks[0])]
        )
    assert [verdict.reward for verdict in scored[::2]] == [1.0] * 3
    assert all(verdict.reward < 0.1 for verdict in scored[1::2])
    assert none.reward < 0.1
    assert (unknown.status, unfit.status) == ("failed", "failed")
    assert "no_such_task" in unknown.detail and "arc_agi" in unfit.detail


def test_a_scorer_works_with_the_options_of_the_generator(make_pool):
    options = {"min_num_decimal_places": 1, "max_num_decimal_places": 1}
    columns = row("decimal_arithmetic", **options)
    near = said(str(Decimal(columns["answer"]) + Decimal("0.05")), columns)
    rewards = []
    for generators in ({"decimal_arithmetic": options}, {}):
        with make_pool(kinds=SCORES, timeout=60.0, generators=generators) as pool:
            rewards += [verdict.reward for verdict in pool.score([near])]
    assert rewards == [1.0, 0.0]
