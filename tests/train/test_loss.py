"""The loss of an update hides nothing that is not finite, whichever parts it consists of."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from moe_rl.config.objective import LOSS_PARAMETERS, LOSSES, AnyObjective
from moe_rl.megatron.microbatch import Share, Work, pack
from moe_rl.objectives import corrections, second_moment
from moe_rl.objectives.losses import TOKEN_MEANS
from moe_rl.train.loss import LossSums, UpdateLoss
from moe_rl.train.shares import divisors
from moe_rl.types import InsertedTokens, RewardedTurn, Sequence, sampled_by

IDS, ADVANTAGES = [0, 0, 1, 1, 1, 3], [1.0, -1.0, 0.5, 0.0]
LEVELS = [
    {"rule": "veto", "level": "token", "low": 0.7},
    {"rule": "reject", "level": "geometric", "high": 1.2},
    {"rule": "reject", "level": "sequence", "low": 0.5},
]
GIVEN = ("logprobs", "old", "rollout", "ref", "entropies", "advantages")


@st.composite
def objectives(draw, name):
    """Return an objective section as a config may have it."""
    rules = [
        {"rule": "veto", "level": "token", "low": 0.3},
        {"rule": "reject", "level": "geometric", "low": 0.5},
        {"rule": "truncate", "level": "sequence", "high": 2.0},
        {"rule": "mask", "level": "token", "low": 0.5, "high": 2.0},
    ]
    section = {
        "name": name,
        **LOSS_PARAMETERS[name],
        "corrections": draw(st.lists(st.sampled_from(rules), max_size=2)),
        "second_moment_limit": draw(st.sampled_from([None, 1e-3])),
        "off_policy_delta": draw(st.sampled_from([None, 1e-3, 1.0])),
        "kl_coef": draw(st.sampled_from([0.0, 0.1])),
        "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3"])),
        "kl_unbiased": draw(st.booleans()),
        "entropy_coef": draw(st.sampled_from([0.0, 0.01])),
    }
    if section["kl_coef"] == 0:
        section |= {"kl_estimator": "k3", "kl_unbiased": False}
    elif section["kl_estimator"] != "k3":
        section["kl_unbiased"] = section["kl_estimator"] == "k1"
    try:
        return TypeAdapter(AnyObjective).validate_python(section)
    except ValidationError:  # not every loss supports every correction
        return TypeAdapter(AnyObjective).validate_python(section | {"corrections": (), "second_moment_limit": None})


def evaluated(objective, tensors):
    """Return the loss and its sums."""
    microbatch = SimpleNamespace(
        rollout_logprobs=tensors["rollout"], advantages=tensors["advantages"], sequence_ids=torch.tensor(IDS)
    )
    work = SimpleNamespace(
        microbatch=microbatch, old_logprobs=tensors["old"], ref_logprobs=tensors["ref"], trusted=None
    )
    if objective.second_moment_limit is not None:
        values, region = second_moment.squares(
            *(tensors[key] for key in ("old", "rollout", "advantages")), torch.tensor(IDS)
        )
        work.trusted = ~region | (values <= second_moment.largest_kept(values[region].numpy(), 1e-3))
    share = SimpleNamespace(work=[work], denominator=5, sequences=3, tokens=6)
    sums = LossSums()
    return UpdateLoss(objective, share, sums)(0, tensors["logprobs"], tensors["entropies"]).item(), sums


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_term_of_a_loss_hides_it(name, data):
    objective = data.draw(objectives(name))
    seed = data.draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    old = -1 - torch.rand(6, generator=generator)
    tensors = {key: old + 0.3 * torch.randn(6, generator=generator) for key in ("logprobs", "rollout", "ref")}
    tensors |= {"old": old, "entropies": torch.rand(6, generator=generator), "advantages": torch.tensor(ADVANTAGES)}
    assert math.isfinite(evaluated(objective, tensors)[0])
    looked_at = {
        "rollout": objective.corrected or objective.weighs_by_sampler,
        "ref": objective.kl_coef > 0,
        "entropies": objective.entropy_coef > 0,
    }
    planted = data.draw(st.sampled_from([key for key in GIVEN if looked_at.get(key, True)]))
    tensors[planted] = tensors[planted].clone()
    at = data.draw(st.integers(0, len(tensors[planted]) - 1))
    tensors[planted][at] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    loss, sums = evaluated(objective, tensors)
    assert not math.isfinite(loss) and not math.isfinite(float(sums.loss))
    if objective.corrected and planted not in ("ref", "entropies") and not (planted == "advantages" and at == 2):
        assert math.isnan(corrections.metrics(sums.corrections.tolist())["weight_mean"])


def sequence(key, tokens, logprobs, reward, segment_of="", prompt=(1, 2)):
    size = len(tokens)
    return Sequence(key, prompt, tokens, logprobs, reward, sampled_by(0, size), None, segment_of)


@pytest.mark.parametrize("name", LOSSES)
def test_a_completion_has_the_same_loss_whole_and_in_segments(name):
    """Value, gradient and sums are those of the whole completion, whose loss is compared with plain references."""
    rng, tokens, reward = np.random.default_rng(5), (3, 4, 5, 6, 7), 1.5
    rollout = rng.normal(-2, 0.3, 9).astype(np.float32)
    before, behind = sequence("a", (3, 4), rollout[:2], -1.0), sequence("c", (5, 6), rollout[7:], -0.5)
    whole = [before, sequence("b", tokens, rollout[2:7], reward), behind]
    parts = [
        sequence(f"b/{at}" if at else "b", tokens[first:last], rollout[2 + first : 2 + last], reward, "b",
                 (1, 2, *tokens[:first]))
        for at, (first, last) in enumerate([(0, 1), (1, 4), (4, 5)])
    ]  # fmt: skip
    section = {"name": name, **LOSS_PARAMETERS[name], "kl_coef": 0.3, "off_policy_delta": 0.2, "entropy_coef": 0.1}
    if LOSSES[name].model_fields["old_logprobs"].default == "trainer":
        section["corrections"] = LEVELS
    objective = TypeAdapter(AnyObjective).validate_python(section)
    near = [torch.from_numpy(rollout + rng.normal(0, 0.15, 9).astype(np.float32)) for _ in range(3)]
    found = []
    for sequences in (whole, [before, *parts, behind]):
        microbatch = pack(sequences, None, torch.device("cpu"))
        microbatch.give_advantages([[one.reward] for one in sequences])
        logprobs, old, ref = near[0].clone().requires_grad_(), near[1], near[2]
        share = Share([Work(microbatch, None, old, ref)], *divisors(name, sequences, 20))
        sums = LossSums()
        loss = UpdateLoss(objective, share, sums)(0, logprobs, torch.linspace(0, 1, 9))
        loss.backward()
        found.append([loss, logprobs.grad, torch.as_tensor(sums.corrections), *map(torch.as_tensor, (
            sums.loss, sums.kl, sums.clip_events, sums.clip_units, sums.ratio))])  # fmt: skip
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    # a token of the middle segment has a gradient of its own
    assert found[0][1][4] != 0


@pytest.mark.parametrize("name", LOSSES)
def test_a_turn_counts_in_the_loss_as_a_completion_does(name):
    """An episode of two turns has the value and the gradient of two completions with the same advantages."""
    rng = np.random.default_rng(6)
    rollout = rng.normal(-2, 0.3, 7).astype(np.float32)
    before, first, second = (0, 2), (2, 5), (5, 7)
    apart = [sequence(f"s{at}", (3,) * (b - a), rollout[a:b], 0.0) for at, (a, b) in enumerate((before, first, second))]
    turns = tuple(RewardedTurn(n, n - 1 if n else None, b - a, 0.0) for n, (a, b) in enumerate((first, second)))
    episode = replace(sequence("e", (3,) * 5, rollout[2:], 0.0), turns=turns, inserted=(InsertedTokens(3, (8, 9)),))
    alone = replace(apart[0], turns=(RewardedTurn(0, None, 2, 0.0),))
    section = {"name": name, **LOSS_PARAMETERS[name], "kl_coef": 0.3, "off_policy_delta": 0.2, "entropy_coef": 0.1}
    objective = TypeAdapter(AnyObjective).validate_python(section)
    near = [torch.from_numpy(rollout + rng.normal(0, 0.15, 7).astype(np.float32)) for _ in range(3)]
    found = []
    for sequences, advantages in ((apart, [[1.0], [-0.5], [2.0]]), ([alone, episode], [[1.0], [-0.5, 2.0]])):
        microbatch = pack(sequences, None, torch.device("cpu"))
        microbatch.give_advantages(advantages)
        logprobs = near[0].clone().requires_grad_()
        share = Share([Work(microbatch, None, near[1], near[2])], *divisors(name, sequences, 20))
        loss = UpdateLoss(objective, share, LossSums())(0, logprobs, torch.linspace(0, 1, 7))
        loss.backward()
        found.append([loss, logprobs.grad])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert (found[1][1] != 0).any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_branch_counts_in_the_loss_as_a_completion_does(name):
    """An episode of two branches has the gradient of two completions with its advantage, also over two microbatches. A
    loss that divides by tokens has that of the episode as one unit."""
    rng = np.random.default_rng(7)
    rollout = rng.normal(-2, 0.3, 7).astype(np.float32)
    bounds, advantages = ((0, 2), (2, 5), (5, 7)), [1.0, -0.5, -0.5]
    whole = [sequence(f"s{at}", (3,) * (b - a), rollout[a:b], 0.0) for at, (a, b) in enumerate(bounds)]
    episode = [whole[0], *(replace(one, segment_of="e") for one in whole[1:])]
    branches = [whole[0], *(replace(one, alone=True) for one in episode[1:])]
    section = {"name": name, **LOSS_PARAMETERS[name], "entropy_coef": 0.1}
    near = [torch.from_numpy(rollout + rng.normal(0, 0.15, 7).astype(np.float32)) for _ in range(3)]

    def gradient(sequences, microbatches, **more):
        objective = TypeAdapter(AnyObjective).validate_python(section | more)
        logprobs, divided, sums = near[0].clone().requires_grad_(), divisors(name, sequences, 20), LossSums()
        work, tokens = [], [torch.arange(7).split([b - a for a, b in bounds])]
        for chosen in microbatches:
            packed, own = pack(sequences, chosen, torch.device("cpu")), torch.cat([tokens[0][at] for at in chosen])
            packed.give_advantages([[value] for value in advantages])
            work.append((Work(packed, None, near[1][own], near[2][own]), own))
        loss = UpdateLoss(objective, Share([one for one, _ in work], *divided), sums)
        for number, (_, own) in enumerate(work):
            loss(number, logprobs[own], torch.linspace(0, 1, 7)[own]).backward()
        return logprobs.grad

    more = {"kl_coef": 0.3, "off_policy_delta": 0.2}
    expected = gradient(whole, [[0, 1, 2]], **more)
    assert (expected != 0).all()
    for microbatches in ([[0, 1, 2]], [[0, 1], [2]], [[2], [0], [1]]):
        torch.testing.assert_close(gradient(branches, microbatches, **more), expected, rtol=1e-6, atol=0)
    same = torch.allclose(gradient(branches, [[0, 1], [2]]), gradient(episode, [[0, 1, 2]]), rtol=1e-6, atol=0)
    assert same == (name in TOKEN_MEANS)
