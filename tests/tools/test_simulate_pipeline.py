"""Tests the arithmetic of the simulated pipeline by hand, and what must hold of every mode."""

from dataclasses import replace

import numpy as np
import pytest


@pytest.fixture(scope="module")
def model(benchmark):
    return benchmark("simulate_pipeline")


@pytest.fixture(scope="module")
def given(model):
    """Costs, the model, a small cluster and little work."""
    costs = model.read_costs(model.COSTS, model.Costs)[1]
    work = model.Work(prompts=8, group=4, median_tokens=300.0, longest=2_000, steps=6, warmup=3)
    return costs, model.read_published(model.MODEL), model.Cluster(8, 4, max_concurrent=16), work


def engine_with(model, given, lengths, *, context=100, cache=None):
    engine = model.Engine(*given[:3])
    engine.cache = cache or engine.cache
    engine.waiting.extend(model.Request(0, context, tokens, 0.0) for tokens in lengths)
    engine.start(0)
    return engine


def finish(engine, most=10_000):
    """Return the times at which requests end."""
    ends = []
    while engine.running and len(ends) < most:
        ends += [engine.end for _ in engine.advance(engine.end)]
        engine.start(0)
    return ends


def test_time_of_a_batch_is_that_of_its_steps_one_by_one(model, given):
    engine = engine_with(model, given, [40, 90])
    seconds = 0.0
    for step in range(90):
        batch = 2 if step < 40 else 1
        held = batch * (100 + step + 0.5)  # the middle of a step
        seconds += engine.step_seconds[batch] + engine.per_token * held
        expected = seconds if step in (39, 89) else None
        if expected:
            engine_end = engine.end
            assert engine_end == pytest.approx(expected)
            engine.advance(engine_end)
            engine.start(0)
    assert not engine.running and engine.busy == pytest.approx(seconds) and engine.held == pytest.approx(0, abs=1e-6)


def test_a_full_batch_is_faster_together_and_slower_each(model, given):
    one, many = (engine_with(model, given, [64] * count).end for count in (1, 16))
    assert one < many < 16 * one
    # 61 GB of weights on two GPUs: all experts are read by a large batch, 8 of 128 by one token
    costs, facts = given[:2]
    engine = model.Engine(costs, facts, replace(given[2], max_concurrent=2_000))
    whole = costs.decode_overhead + 61.06e9 / (2 * costs.memory_bandwidth)
    assert engine.step_seconds[2_000] == pytest.approx(whole, rel=0.01)
    assert engine.step_seconds[1] - costs.decode_overhead < 0.15 * (whole - costs.decode_overhead)


def test_a_full_cache_lets_the_last_wait_and_loses_nothing(model, given):
    roomy, narrow = (engine_with(model, given, [500] * 4, cache=cache) for cache in (100_000, 1_500))
    roomy_ends, narrow_ends = finish(roomy), finish(narrow)
    assert len(roomy_ends) == len(narrow_ends) == 4
    assert narrow_ends[-1] > 1.2 * roomy_ends[-1]
    assert narrow.held == pytest.approx(0, abs=1e-6)


def test_modes_keep_their_bounds_and_their_order(model, given):
    modes = ("sync", "one_step_off", "async 1", "async 3")
    found = {mode: model.simulate(*given, mode) for mode in modes}
    for mode, result in found.items():
        assert sum(result.staleness.values()) == pytest.approx(1)
        assert 0 <= result.sampler_idle <= 1 and 0 <= result.trainer_idle <= 1 and 0 < result.slots <= 1
        bound = {"sync": 0, "one_step_off": 1}.get(mode) if "async" not in mode else int(mode[-1])
        assert max(result.staleness) <= bound
    rates = [found[mode].groups_per_second for mode in modes]
    assert rates == sorted(rates) and rates[-1] > 1.2 * rates[0]
    assert found["sync"].versions == 1 and found["async 3"].versions > 1


def test_without_staleness_the_asynchronous_loop_takes_the_time_of_the_synchronous_one(model, given):
    """The two loops share no code. All groups of a batch have slots, so they begin at once in both."""
    costs, facts, cluster, work = given
    sync, asynchronous = (
        model.simulate(costs, facts, cluster, work, "sync"),
        model._asynchronous(model.Run(costs, facts, cluster, work, 1), 0),
    )
    assert asynchronous.step_seconds == pytest.approx(sync.step_seconds, rel=1e-6)
    assert asynchronous.trainer_idle == pytest.approx(sync.trainer_idle, abs=1e-6)
    assert asynchronous.sampler_idle == pytest.approx(sync.sampler_idle, abs=1e-6)


def test_shared_gpus_pay_the_switch_and_have_more_of_both(model, given):
    costs, facts, _, work = given
    free = replace(costs, switch=0.0)
    shared = model.Cluster(8, 8, max_concurrent=16, shared=True)
    apart = model.simulate(free, facts, model.Cluster(8, 8, max_concurrent=16), work, "sync")
    together = model.simulate(free, facts, shared, work, "sync")
    assert together.step_seconds == pytest.approx(apart.step_seconds) and together.trainer_idle is None
    paid = model.simulate(costs, facts, shared, work, "sync")
    assert paid.step_seconds - together.step_seconds == pytest.approx(costs.switch)


def test_lengths_are_long_tailed_and_the_same_for_every_mode(model):
    lengths = model.Work().lengths(0)
    assert np.array_equal(model.Work().lengths(3)[: len(lengths)], lengths)
    assert lengths.max() == 8_192 and np.median(lengths) == pytest.approx(2_000, rel=0.05)
    assert lengths.mean() > 1.3 * np.median(lengths)
    of_prompts = np.log(lengths).mean(axis=1).var()
    assert 0.3 < of_prompts / np.log(lengths).var() < 0.7


def test_a_queue_gains_where_an_engine_is_slow_and_changes_nothing_where_all_begin_at_once(benchmark, given):
    queue = benchmark("simulate_queue")
    work = queue.Work(prompts=64, group=4, median_tokens=200, longest=800, steps=1, warmup=0)
    seconds = {most: queue.sample_seconds(*given[:2], work, 4.0, most) for most in (None, 8, 1000)}
    assert seconds[1000] == seconds[None] > 2 * seconds[8]
