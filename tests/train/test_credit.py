"""Tests how rewards, less a KL penalty, become the advantages of every microbatch."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.config.objective import CorrectionConfig, GspoConfig
from moe_rl.errors import MoeRLError
from moe_rl.megatron import world
from moe_rl.megatron.microbatch import Share, Work, pack
from moe_rl.objectives.advantages import ADVANTAGES, RESOLUTION, advantages
from moe_rl.objectives.corrections import token_weights
from moe_rl.train import credit
from moe_rl.types import RewardedTurn, Sequence, sampled_by
from tests.support.refusals import refused

LENGTHS, REWARDS, GROUPS = [2, 3, 1, 4, 2], [1.0, 0.0, 0.5, 0.5, 3.0], [0, 0, 1, 1, 1]


def sequences():
    return [
        Sequence(
            f"s{n}", (1, 2), tuple(range(length)), np.zeros(length, np.float32), reward, sampled_by(0, length), None
        )
        for n, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True))
    ]


class Rank:
    """One rank's part of two updates: microbatches of these sequences, by their number in the batch."""

    def __init__(self, whole, updates, planted=()):
        self.shares = []
        rng = np.random.default_rng(1)
        # A sequence gets the same numbers on any rank.
        old, ref = ([rng.normal(-2, 0.5, n) for n in LENGTHS] for _ in range(2))
        for number, value in enumerate(planted, start=1):
            ref[number][0] = value
        self.old, self.ref = old, ref
        for members, microbatches in updates:
            ours = [whole[i] for i in members]
            packed = [pack(ours, [members.index(i) for i in chosen], torch.device("cpu")) for chosen in microbatches]
            of_old, of_ref = (
                [torch.tensor([x for i in chosen for x in part[i]]) for chosen in microbatches] for part in (old, ref)
            )
            work = [Work(m, None, *scores) for m, *scores in zip(packed, of_old, of_ref, strict=True)]
            self.shares.append(Share(work, 1, 1, 1, all=tuple(ours)))

    def advantages(self):
        return {
            share.all[i].key: value
            for share in self.shares
            for one in share.work
            for i, value in zip(one.microbatch.indices, one.microbatch.advantages.tolist(), strict=True)
        }


# The two ranks of a batch: update 0 has the first group, update 1 the second.
TWO_RANKS = [
    [([0, 1], [[1]]), ([2, 3, 4], [[4, 2]])],
    [([0, 1], [[0], []]), ([2, 3, 4], [[3]])],
]


def both(monkeypatch, objective, layouts=TWO_RANKS, speaks=(True, True), whole=None, **options):
    """Return {key: advantage} over both ranks, and each rank's metrics. The ranks exchange sums as `world` would."""
    whole, ranks, sent, metrics = whole or sequences(), [], [], []
    monkeypatch.setattr(credit.world, "all_reduce", lambda values: sent.append(values) or values)
    for layout, speaking in zip(layouts, speaks, strict=True):
        monkeypatch.setattr(world, "speaks_for_its_sequences", lambda speaking=speaking: speaking)
        if objective.kl_in == "reward":
            credit._sequence_kl(objective.kl_estimator, whole, Rank(whole, layout, **options).shares)
    monkeypatch.setattr(credit.world, "all_reduce", lambda values: np.sum(sent, 0).tolist())
    for layout, speaking in zip(layouts, speaks, strict=True):
        monkeypatch.setattr(world, "speaks_for_its_sequences", lambda speaking=speaking: speaking)
        ranks.append(Rank(whole, layout, **options))
        metrics.append(credit.give_credit(objective, whole, GROUPS, ranks[-1].shares))
    return {key: value for rank in ranks for key, value in rank.advantages().items()}, metrics, ranks[0]


def test_every_microbatch_gets_its_own(monkeypatch):
    got, metrics, _ = both(monkeypatch, GspoConfig(advantage="group_mean"))
    assert got == pytest.approx({"s0": 0.5, "s1": -0.5, "s2": -5 / 6, "s3": -5 / 6, "s4": 5 / 3}, rel=1e-6)
    assert metrics == [{"objective/zero_advantage_fraction": 0.0}] * 2


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_the_whole_completion_is_taken_off_first(monkeypatch, estimator):
    """Compares with loops in plain Python, over sequences on different ranks."""
    objective = GspoConfig(advantage="leave_one_out", kl_in="reward", kl_coef=0.3, kl_estimator=estimator)
    got, metrics, rank = both(monkeypatch, objective)
    sums = []
    for old, ref in zip(rank.old, rank.ref, strict=True):
        total = 0.0
        for l_old, l_ref in zip(old, ref, strict=True):
            d = l_ref - l_old
            total += {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]
        sums.append(total)
    rewards = [reward - 0.3 * total for reward, total in zip(REWARDS, sums, strict=True)]
    for number, group in enumerate(GROUPS):
        others = [r for i, r in enumerate(rewards) if GROUPS[i] == group and i != number]
        assert got[f"s{number}"] == pytest.approx(rewards[number] - sum(others) / len(others), rel=1e-5)
    assert metrics[0] == metrics[1]
    assert metrics[0]["reward/kl_penalty"] == pytest.approx(-0.3 * sum(sums) / 5, rel=1e-5)
    per_token = [total / length for total, length in zip(sums, LENGTHS, strict=True)]
    assert metrics[0]["objective/kl_ref"] == pytest.approx(sum(per_token) / 5, rel=1e-5)


def test_branches_on_two_ranks_have_the_advantage_of_their_episode(monkeypatch):
    """Its reward is compared once, less the KL of all its tokens."""
    whole = [
        replace(one, segment_of="e" * (at > 2), reward=3.0 if at > 2 else one.reward, alone=at > 2)
        for at, one in enumerate(sequences())
    ]
    got, *_ = both(monkeypatch, GspoConfig(advantage="group_mean"), whole=whole)
    assert got["s3"] == got["s4"] == -got["s2"] == 1.25
    objective = GspoConfig(advantage="group_mean", kl_in="reward", kl_coef=0.3, kl_estimator="k1")
    got, _, rank = both(monkeypatch, objective, whole=whole)
    kl = [float(old.sum() - ref.sum()) for old, ref in zip(rank.old, rank.ref, strict=True)]
    expected = (3.0 - 0.3 * (kl[3] + kl[4]) - 0.5 + 0.3 * kl[2]) / 2
    assert got["s3"] == got["s4"] == -got["s2"] == pytest.approx(expected, rel=1e-5)


def test_ranks_that_share_a_sequence_speak_once(monkeypatch):
    objective = GspoConfig(kl_in="reward", kl_coef=0.3)
    everything = [([0, 1], [[0, 1]]), ([2, 3, 4], [[2, 3], [4]])]
    once = both(monkeypatch, objective)[0]
    assert both(monkeypatch, objective, [everything] * 2, speaks=(True, False))[0] == pytest.approx(once, rel=1e-6)
    with refused(MoeRLError, request="s0", got="2 ranks"):
        both(monkeypatch, objective, [everything] * 2)


def test_a_dropped_sequence_has_no_kl_and_is_in_no_statistic(monkeypatch):
    objective = GspoConfig(advantage="group_mean", kl_in="reward", kl_coef=1e-9)
    without = [TWO_RANKS[0][:1] + [([2, 3], [[2]])], TWO_RANKS[1][:1] + [([2, 3], [[3]])]]
    got, _, _ = both(monkeypatch, objective, without)
    assert "s4" not in got and got["s2"] == pytest.approx(0, abs=1e-6)  # the remaining rewards are 0.5 and 0.5
    # Without a KL penalty its reward is known, so it counts.
    got, _, _ = both(monkeypatch, GspoConfig(advantage="group_mean"), without)
    assert got["s2"] == pytest.approx(-5 / 6)


@pytest.mark.parametrize("planted", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf]])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_that_is_not_finite_spoils_the_step_for_the_guards_to_see(monkeypatch, planted, estimator):
    objective = GspoConfig(kl_in="reward", kl_coef=0.3, kl_estimator=estimator)
    got, metrics, _ = both(monkeypatch, objective, planted=planted)
    assert len(got) == 5 and all(math.isnan(value) for value in got.values())
    assert all(math.isnan(metrics[0][key]) for key in ("objective/kl_ref", "reward/kl_penalty"))
    assert metrics[0]["objective/zero_advantage_fraction"] == 0


def test_equal_rewards_are_counted(monkeypatch):
    whole = [replace(one, reward=0.5) for one in sequences()]
    found = credit.give_credit(GspoConfig(), whole, GROUPS, [])
    assert found == {"objective/zero_advantage_fraction": 1.0}


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_groups_that_the_kl_tells_apart_are_those_that_have_advantages(monkeypatch, estimator):
    """All rewards are equal. The KL of the first group is rounding, as in a step whose policy has not moved, and that
    of the second is not."""
    same = [replace(one, reward=1.0) for one in sequences()]
    monkeypatch.setattr(credit, "_sequence_kl", lambda *_: [1e-4, 3e-4, 0.0, 2.0, 1e-4])
    objective = GspoConfig(kl_in="reward", kl_coef=1e-3, advantage=estimator)
    found = credit.give_credit(objective, same, GROUPS, [])
    assert (found["group/zero_variance"], found["group/zero_variance_fraction"]) == (1, 0.5)
    assert found["objective/zero_advantage_fraction"] == (0.0 if estimator == "reinforce_pp" else 2 / 5)
    monkeypatch.setattr(credit, "_sequence_kl", lambda *_: [1e-4, 3e-4, 0.0, 2e-4, 1e-4])
    found = credit.give_credit(objective, same, GROUPS, [])
    assert found["group/zero_variance"] == 2 and found["objective/zero_advantage_fraction"] == 1.0


@pytest.mark.parametrize("estimator", ADVANTAGES)
@pytest.mark.parametrize("coefficient", [1e-9, 1e-3, 0.1])
def test_a_penalty_alone_gives_advantages_of_its_own_size(monkeypatch, estimator, coefficient):
    """All rewards are equal, as in a batch that passes. In the first step KLs are what two engines differ by: replayed
    routes and native ones, 5e-3 nats in a completion."""
    same, kl = [replace(one, reward=1.0) for one in sequences()], [0.0, 5e-3, 1e-4, 2e-3, 4e-3]
    monkeypatch.setattr(credit, "_sequence_kl", lambda *_: kl)
    given = []
    share = SimpleNamespace(
        all=same, credit={}, work=[SimpleNamespace(microbatch=SimpleNamespace(give_advantages=given.extend))]
    )
    objective = GspoConfig(kl_in="reward", kl_coef=coefficient, advantage=estimator)
    credit.give_credit(objective, same, GROUPS, [share])
    largest = max(abs(value) for (value,) in given)
    if coefficient * 5e-3 < RESOLUTION:
        assert largest == 0, "a penalty of the size of rounding tells nothing"
    else:
        assert coefficient * 1e-3 < largest <= coefficient * 5e-3 * 1.01


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_where_rewards_differ_the_deviation_is_of_what_is_compared(monkeypatch, estimator):
    monkeypatch.setattr(credit, "_sequence_kl", lambda *_: [0.0, 5e-3, 1e-4, 2e-3, 4e-3])
    given = {}
    monkeypatch.setattr(credit, "advantages", lambda *all: given.update(all=all) or advantages(*all))
    credit.give_credit(GspoConfig(kl_in="reward", kl_coef=0.1, advantage=estimator), sequences(), GROUPS, [])
    name, rewards, groups, lengths, before = given["all"]
    assert before == REWARDS and advantages(name, rewards, groups, lengths) == advantages(*given["all"])


def test_the_segments_of_a_completion_count_as_one(monkeypatch):
    """s1 is cut in two: its parts get its advantage, and no statistic changes."""
    whole = sequences()
    first = replace(whole[1], key="s1", token_ids=(0,), segment_of="s1")
    later = replace(whole[1], key="s1/1", prompt_token_ids=(1, 2, 0), token_ids=(1, 2), segment_of="s1")
    cut = [whole[0], first, later, *whole[2:]]
    given = {}

    def advantages(name, rewards, groups, lengths, _):
        given["of"] = rewards, groups, lengths
        return [float(n) for n in range(len(rewards))]

    monkeypatch.setattr(credit, "advantages", advantages)
    taken = []
    share = SimpleNamespace(
        all=cut,
        credit={},
        work=[SimpleNamespace(microbatch=SimpleNamespace(give_advantages=taken.extend))],
    )
    found = credit.give_credit(GspoConfig(), cut, [0, 0, 0, 1, 1, 1], [share])
    assert given["of"] == (REWARDS, GROUPS, LENGTHS)
    assert taken == [[0.0], [1.0], [1.0], [2.0], [3.0], [4.0]] and found == {"objective/zero_advantage_fraction": 0.2}
    # the KLs of the parts add up
    monkeypatch.setattr(credit, "_sequence_kl", lambda *_: [1.0, 0.25, 0.5, 1.0, 1.0, None])
    objective = GspoConfig(kl_in="reward", kl_coef=0.5, advantage="group_mean")
    credit.give_credit(objective, cut, [0, 0, 0, 1, 1, 1], [])
    assert given["of"][0] == [0.5, -0.375, 0.0, 0.0, None]


# Two episodes of a group: turns 0, 1 and 3 in a row and turn 2 behind turn 0, then one of two turns; and one alone.
EPISODES = {
    "e0": (0, {0: (None, 1.0), 1: (0, 0.0), 2: (0, 0.5), 3: (1, 2.0)}, [[0, 1, 3], [2]]),
    "e1": (0, {0: (None, 0.0), 1: (0, -1.0)}, [[0, 1]]),
    "e2": (1, {0: (None, 7.0)}, [[0]]),
}


def episodes():
    found, groups = [], []
    for name, (group, turns, runs) in EPISODES.items():
        for run in runs:
            rewarded = tuple(RewardedTurn(n, turns[n][0], 2, turns[n][1]) for n in run)
            size = 2 * len(run)
            found.append(
                Sequence(f"{name}/{run[-1]}", (1,), tuple(range(size)), np.zeros(size, np.float32), 0.0,
                         sampled_by(0, size), None, name, turns=rewarded)
            )  # fmt: skip
            groups.append(group)
    return found, groups


def test_a_turn_has_the_advantages_of_itself_and_of_what_continues_it():
    """Compares with GRPO's process supervision, by loops: rewards less the group's mean, over its std, then summed."""
    whole, groups = episodes()
    packed = pack(whole, None, torch.device("cpu"))
    share = Share([Work(packed, None, None)], 1, 1, 1, all=tuple(whole))
    found = credit.give_credit(GspoConfig(advantage="group_std"), whole, groups, [share])
    rewards = {group: [] for group in (0, 1)}
    for group, turns, _ in EPISODES.values():
        rewards[group] += [reward for _, reward in turns.values()]
    expected = []
    for sequence in whole:
        group, turns, _ = EPISODES[sequence.segment_of]
        own = rewards[group]
        mean = sum(own) / len(own)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in own) / (len(own) - 1)) + 1e-6 if len(own) > 1 else 1.0
        for turn in sequence.turns:
            total = 0.0
            for number, (_, reward) in turns.items():
                at = number
                while at is not None and at != turn.number:
                    at = turns[at][0]
                total += (reward - mean) / std if at == turn.number else 0.0
            expected.append(total)
    assert packed.advantages.tolist() == pytest.approx(expected, rel=1e-6)
    assert found == {"objective/zero_advantage_fraction": 1 / 7}


def vtrace(rewards, ratios, cap, baseline):
    """Return the policy gradient's weights of one episode's actions, by section 4.1 of arXiv 1802.01561: the value of a
    state is the baseline times the actions that are left."""
    n = len(rewards)
    rho = c = [min(ratio, cap) for ratio in ratios]
    value = [baseline * (n - s) for s in range(n + 1)]
    delta = [rho[s] * (rewards[s] + value[s + 1] - value[s]) for s in range(n)]
    target = [value[s] + sum(math.prod(c[s:t]) * delta[t] for t in range(s, n)) if s < n else 0.0 for s in range(n + 1)]
    return [rho[s] * (rewards[s] + target[s + 1] - value[s]) for s in range(n)]


@pytest.mark.parametrize("cap", [1.0, 1.3, 50.0])
def test_vtrace_over_turns_equals_its_scalar_definition(monkeypatch, cap):
    """Episodes of three, two and one turns on two ranks. Advantage times weight is the factor of the score."""
    rng = np.random.default_rng(5)
    plays, whole, ranks = [[1.0, -0.5, 2.0], [0.0, 3.0], [4.0]], [], ([0, 2], [1])
    for number, rewards in enumerate(plays):
        size = 2 * len(rewards)
        turns = tuple(RewardedTurn(n, n - 1 if n else None, 2, reward) for n, reward in enumerate(rewards))
        logprobs = rng.normal(-2, 0.4, size).astype(np.float32)
        whole.append(
            Sequence(f"e{number}", (1,), tuple(range(size)), logprobs, 0.0, sampled_by(0, size), None, turns=turns)
        )
    moved = [one.rollout_logprobs + rng.normal(0, 0.3, len(one.token_ids)) for one in whole]
    old = [torch.tensor(one, dtype=torch.float32) for one in moved]
    correction = CorrectionConfig(level="sequence", rule="vtrace", high=cap)
    objective = GspoConfig(advantage="group_mean", corrections=(correction,))

    def share(members):
        packed = pack(whole, members, torch.device("cpu"))
        return Share([Work(packed, None, torch.cat([old[i] for i in members]))], 1, 1, 1, all=tuple(whole))

    sent = []
    monkeypatch.setattr(world, "speaks_for_its_sequences", lambda: True)
    monkeypatch.setattr(credit.world, "all_reduce", lambda values: sent.append(values) or values)
    for members in ranks:
        credit.give_credit(objective, whole, [0, 0, 0], [share(members)])
    assert len(sent) == 2
    monkeypatch.setattr(credit.world, "all_reduce", lambda values: np.sum(sent, 0).tolist())
    mean = sum(map(sum, plays)) / 6
    for members in ranks:
        mine = share(members)
        credit.give_credit(objective, whole, [0, 0, 0], [mine])
        (work,) = mine.work
        batch = work.microbatch
        weights = token_weights(
            objective.corrections, None, logprobs=work.old_logprobs, old_logprobs=work.old_logprobs,
            rollout_logprobs=batch.rollout_logprobs, advantages=batch.advantages, sequence_ids=batch.sequence_ids,
        ).values  # fmt: skip
        found = (weights * batch.advantages[batch.sequence_ids])[::2].tolist()
        expected = []
        for i in members:
            drift = (old[i].double() - torch.from_numpy(whole[i].rollout_logprobs).double()).reshape(-1, 2).sum(-1)
            expected += vtrace(plays[i], drift.exp().tolist(), cap, mean)
        assert found == pytest.approx(expected, rel=1e-6)
