"""Tests that an update learns from each of its sequences once, and from what was sampled and judged."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.errors import ReplayError
from moe_rl.megatron import world
from moe_rl.megatron.microbatch import Share, Work, pack
from moe_rl.train import step
from moe_rl.train.step import check_batch, check_update
from moe_rl.types import InsertedTokens, Sequence, sampled_by
from tests.support.refusals import refused

GROUPS = [0, 0, 1, 1]


def sequences():
    found = []
    for n, length in enumerate((3, 1, 3, 4)):
        logprobs = np.linspace(-1, -2, length).astype(np.float32)
        inserted = (InsertedTokens(2, (9, 9)),) if n == 3 else ()
        one = Sequence(
            f"s{n}", (1, 2), tuple(range(10 * n, 10 * n + length)), logprobs, float(n), sampled_by(0, length), None,
            inserted=inserted,
        )  # fmt: skip
        found.append(one.judged(GROUPS[n]))
    return found


@pytest.fixture
def share(monkeypatch):
    """The only rank's part of an update: two microbatches, whose losses were computed once."""
    monkeypatch.setattr(world, "is_last_stage", lambda: True)
    monkeypatch.setattr(world, "data_parallel", lambda: (0, 1))
    monkeypatch.setattr(world, "all_reduce", list)
    monkeypatch.setattr(step.dist, "get_world_size", lambda: 1)
    return of(sequences())


def of(whole):
    found = Share([], 4, 4, 11, all=tuple(whole))
    found.credit.update({one.key: [one.reward / 3] for one in whole})
    for indices in ([0, 3], [2, 1], []):
        packed = pack(whole, indices, torch.device("cpu"))
        packed.give_advantages([found.credit[one.key] for one in whole])
        found.work.append(Work(packed, None, packed.rollout_logprobs))
    return found


ONCE = Counter({0: 1, 1: 1, 2: 1})


def test_a_sound_update_passes(share):
    check_batch(sequences(), GROUPS, ())
    check_update(share, ONCE)


def test_a_microbatch_that_is_replaced_by_another_is_named(share):
    share.work[1] = share.work[0]
    with refused(ReplayError, "s1 0 times", "s2 0 times", "s3 2 times", request="s0", fault="not once"):
        check_update(share, ONCE)


@pytest.mark.parametrize("calls", [{0: 1, 2: 1}, {0: 1, 1: 2, 2: 1}])
def test_a_microbatch_whose_loss_is_not_computed_once_is_named(share, calls):
    with refused(ReplayError, request="s1", fault="not once"):
        check_update(share, Counter(calls))


def test_a_sequence_that_two_ranks_hold_is_named(share, monkeypatch):
    monkeypatch.setattr(step.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(world, "data_parallel", lambda: (0, 2))
    monkeypatch.setattr(world, "all_reduce", lambda values: (np.array(values) + [0, 0, 1, 0, *[0] * 4]).tolist())
    with refused(ReplayError, "s2 2 times", request="s2", fault="not once"):
        check_update(share, ONCE)


CHANGES = {
    "the last sampled token": lambda one: one.targets[-1].add_(1),
    "another sampled token": lambda one: one.targets[4].add_(1),
    "a log-probability": lambda one: one.rollout_logprobs[-1].mul_(1.0001),
    "the loss mask one late": lambda one: one.predicts.add_(1),
    "the loss mask one early": lambda one: one.predicts.sub_(1),
    "the unit of a token": lambda one: one.sequence_ids.copy_(one.sequence_ids.flip(0)),
    "a weight version": lambda one: one.versions[-1].add_(1),
    "an advantage": lambda one: one.advantages.copy_(one.advantages.flip(0)),
    "the key of another": lambda one: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_loss_got_otherwise_than_it_was_sampled_is_named(share, change):
    CHANGES[change](share.work[0].microbatch)
    if change == "the key of another":  # of equal length, and behind the sampler
        one, other = share.all[0], share.all[2]
        whole = [replace(one, token_ids=other.token_ids), *share.all[1:]]
        share = of(whole)
    with refused(ReplayError, fault="not as sampled") as caught:
        check_update(share, ONCE)
    named = "s0" if change == "the key of another" else "s3"
    assert named in str(caught.value) and caught.value.everywhere  # so all ranks keep evidence of it together


def test_the_last_row_of_the_mask_is_compared_too(share):
    """With one token alone nothing follows the row that predicts it."""
    share.work[1].microbatch.predicts[-1].sub_(1)
    with refused(ReplayError, request="s1", fault="not as sampled"):
        check_update(share, ONCE)


@pytest.mark.parametrize("before", [(), ("s2",)])
def test_a_group_that_is_delivered_twice_is_named(before):
    whole = sequences()
    twice = whole if before else [*whole, *whole[2:]]
    with refused(ReplayError, request="s2", fault="delivered twice") as caught:
        check_batch(twice, [*GROUPS, 1, 1][: len(twice)], before)
    assert caught.value.everywhere


def rotated(values):
    return [*values[1:], values[0]]


def test_rewards_and_groups_that_are_rotated_are_named():
    whole = sequences()
    rewards = rotated([one.reward for one in whole])
    others = [replace(one, reward=reward) for one, reward in zip(whole, rewards, strict=True)]
    for batch, groups in ((others, GROUPS), (whole, rotated(GROUPS)), (whole, [0, 1, 0, 1])):
        with refused(ReplayError, fault="verdict"):
            check_batch(batch, groups, ())


def test_a_sequence_that_was_never_judged_is_named():
    whole = sequences()
    with refused(ReplayError, request="s3", fault="verdict"):
        check_batch([*whole[:3], replace(whole[3], verdict="")], GROUPS, ())


def test_tokens_that_are_made_anew_do_not_have_the_verdict():
    """The last sampled token altered before the batch is made, with a seal to match."""
    whole = sequences()
    altered = replace(whole[3], token_ids=(*whole[3].token_ids[:-1], 99), seal="")
    assert altered.seal != whole[3].seal
    with refused(ReplayError, request="s3", fault="verdict"):
        check_batch([*whole[:3], altered], GROUPS, ())
