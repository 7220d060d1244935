"""The feed of groups on a real engine: what a step gets is what `transformers` computes under the versions it names."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.config.load import load_config
from moe_rl.rollout.group_feed import GroupFeed
from moe_rl.rollout.group_files import GroupFiles
from moe_rl.rollout.rollouts import Rollouts
from tests.rollout.in_flight import check_kept, forwarded, trainer_reads, versions_of
from tests.rollout.test_group_feed import TASK, Verifiers, with_keys
from tests.rollout.test_in_flight import flight  # noqa: F401

OVERRIDES = {
    "run.steps": 1000,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_concurrent": 8,
    "rollout.max_completion_tokens": 600,
    "eval.prompts": 1,
    "pipeline.mode": "async",
    "pipeline.max_staleness": 2,
}
CONFIG = load_config("configs/tiny_moe_cpu.yaml", [f"{key}={value}" for key, value in OVERRIDES.items()])


def feed_of(shared, folder, **pipeline):
    """A feed whose next step trains with the weights that the engine has."""
    folder.mkdir()
    facts = SimpleNamespace(eos_token_ids=(1,))
    config, given = with_keys(CONFIG, "pipeline", **pipeline), (shared.groups, Verifiers(), folder, shared.store)
    rollouts = Rollouts(config, facts, TASK, *given)
    rollouts.batches.trace_root = shared.store._local()
    rollouts.batches.codec = SimpleNamespace(text=lambda one: "", decode=lambda ids: "")
    for step in range(shared.old):
        rollouts.ledger.record(step, [step], [rollouts.source.at(step, 1)[0].id], "")
    files = GroupFiles(folder / "groups", rollouts.kept, rollouts.ledger)
    return GroupFeed(rollouts, files, step=shared.old + 1, version=shared.old)


async def two_steps(shared, feed):
    """New weights go in while the groups of the second step are sampled."""
    await feed.begin()
    await forwarded(shared.groups, 60)
    await shared.send(SimpleNamespace(take_weights=feed.update))
    batches = [await feed.take(shared.old + 1), await feed.take(shared.old + 2)]
    await feed.stop()  # the groups of later steps, which the engine would go on to sample
    kept = [feed.rollouts.kept.load(shared.old + n) for n in (1, 2)]
    assert [len(batch.sequences) for batch in kept] == [len(batch.sequences) for batch in batches]
    return [one for batch in kept for one in batch.sequences], [batch.metrics for batch in batches]


@pytest.mark.seeds(3)
@pytest.mark.parametrize("way", ["keep", pytest.param("first", marks=pytest.mark.long), "exact"])
def test_what_a_step_gets(flight, tmp_path, way):  # noqa: F811
    async def run():
        feed = feed_of(flight, tmp_path / "run", kv="keep" if way == "keep" else "recompute",
                       segments="exact" if way == "exact" else "first")  # fmt: skip
        return await two_steps(flight, feed)

    sequences, metrics = asyncio.run(run())
    both = 0
    for one in sequences:
        record, tokens = flight.store.read(one.routes), one.prompt_token_ids + one.token_ids
        np.testing.assert_array_equal(record.token_ids, tokens[:-1])
        sampled = [span.weight_version for span in one.versions for _ in range(span.tokens)]
        assert sampled == versions_of(record)[len(one.prompt_token_ids) - 1 :]
        trainer_reads(flight.store, one.key, one.prompt_token_ids, one.token_ids, one.versions, one.routes,
                      version=flight.new)  # fmt: skip
        both += len(one.versions) == 2
        seen = SimpleNamespace(key=one.key, prompt_token_ids=one.prompt_token_ids, token_ids=one.token_ids,
                               versions=one.versions, routes=one.routes, logprobs=one.rollout_logprobs)  # fmt: skip
        if way != "first" or len(one.versions) == 1:
            # kept KV, or a segment behind the prefix rows of its own version
            check_kept(seen, flight.store, flight.change, flight.old, flight.new)
    pieces = [one for one in sequences if one.segment_of]
    assert bool(both) == (way != "exact") and bool(pieces) == (way == "exact")
    for one in pieces:
        assert len(one.versions) == 1 and len(set(versions_of(flight.store.read(one.routes)))) == 1
    assert (max(m["pipeline/prefilled_again"] for m in metrics) > 0) == (way != "keep")
    assert (max(m["pipeline/kv_age"] for m in metrics) > 0) == (way == "keep")
