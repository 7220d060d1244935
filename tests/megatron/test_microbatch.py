"""Packing: which row predicts which token, and which tokens are fed."""

import dataclasses

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from moe_rl.errors import ReplayError
from moe_rl.megatron.microbatch import pack
from moe_rl.planning.packing import PAD_MULTIPLE, padded_length
from moe_rl.types import InsertedTokens, RewardedTurn, SamplingSupport, Sequence, VersionSpan, sampled_by, unit_lengths
from tests.support.refusals import refused


def sequence(key, prompt, completion, reward):
    return Sequence(
        key,
        tuple(prompt),
        tuple(completion),
        np.arange(len(completion), dtype=np.float32),
        reward,
        sampled_by(0, len(completion)),
        None,
    )


def test_rows_targets_and_padding():
    sequences = [
        sequence("a", [1, 2, 3], [4, 5], 0.5),
        sequence("unused", [9], [9], 9.0),
        sequence("b", [6], [7, 8], -1),
    ]
    packed = pack(sequences, [2, 0], torch.device("cpu"))
    # All but the last token of each sequence, then padding as one more sequence.
    assert packed.tokens.tolist() == [[6, 7, 1, 2, 3, 4, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    assert packed.lengths == (2, 4, 2) and sum(packed.lengths) == padded_length(6)
    assert packed.predicts.tolist() == [0, 1, 4, 5]
    assert packed.targets.tolist() == [7, 8, 4, 5] and packed.predicted.tolist() == [0, 1, 2, 3]
    assert packed.sequence_ids.tolist() == [0, 0, 1, 1]
    assert packed.rollout_logprobs.tolist() == [0, 1, 0, 1]
    assert packed.advantages.isnan().tolist() == [True, True]
    mixed = dataclasses.replace(sequences[0], versions=(VersionSpan(1, 3), VersionSpan(1, 5)))
    assert pack([mixed, sequences[2]], [1, 0], torch.device("cpu")).versions.tolist() == [0, 0, 3, 5]
    packed.give_advantages([[0.5], [9.0], [-1]])
    assert packed.advantages.tolist() == [-1, 0.5] and packed.advantages.dtype == torch.float32
    params = packed.begin_forward(None, 0)
    assert params.cu_seqlens_q.tolist() == [0, 2, 6, 8] and params.cu_seqlens_q.dtype == torch.int32
    assert params.max_seqlen_q == 4 and params.replay is None


class Copies(TorchFunctionMode):
    """Notes for each copy from the host to the device whether the host waits for it. Here "meta" is the device."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.pin_memory:
            return args[0]  # without a driver nothing can be pinned
        result = function(*args, **kwargs or {})
        source = [one.device.type for one in args[-1:] if isinstance(one, torch.Tensor)]
        if function is torch.Tensor.to and result.is_meta:
            self.waits.append(not (kwargs or {}).get("non_blocking", False))
        elif function is torch.tensor and result.is_meta or function is torch.Tensor.copy_ and source == ["cpu"]:
            self.waits.append(True)
        return result


def test_the_host_waits_for_no_copy_to_the_device():
    """A blocking copy waits for all work that the device still has: the layers of the microbatch before."""
    sequences = [sequence("a", [1, 2, 3], [4, 5], 0.5), sequence("b", [6], [7, 8], -1)]
    supports = [
        SamplingSupport(np.arange(2), np.array([1, 2]), np.array([4, 5, 6])),
        SamplingSupport(np.arange(2), np.ones(2, int), np.array([7, 8])),
    ]
    with Copies() as copies:
        packed = pack(sequences, None, torch.device("meta"), supports=supports)
        packed.give_advantages([[0.5], [-1]])
    assert len(copies.waits) > 10 and not any(copies.waits)
    with Copies() as copies:
        packed.begin_forward(None, 0)
    assert copies.waits == []


def test_turns_with_rewards_of_their_own_are_units_of_the_loss():
    turns = (RewardedTurn(0, None, 1, 0.5), RewardedTurn(1, 0, 2, 1.0))
    played = dataclasses.replace(
        sequence("a", [1, 2], [3, 4, 5], 1.5), turns=turns, inserted=(InsertedTokens(1, (8, 9)),), segment_of="e"
    )
    branch = dataclasses.replace(
        sequence("b", [1, 2, 3, 7], [6], 1.5), turns=(RewardedTurn(2, 0, 1, 0.0),), segment_of="e"
    )
    packed = pack([played, branch], [1, 0], torch.device("cpu"))
    assert packed.units == (1, 2) and packed.counts == (1, 3)
    assert packed.targets.tolist() == [6, 3, 4, 5] and packed.sequence_ids.tolist() == [0, 1, 2, 2]
    packed.give_advantages([[0.5, 2.0], [-1.0]])
    assert packed.advantages.tolist() == [-1.0, 0.5, 2.0]
    assert unit_lengths([played, branch]) == [1, 2, 1]


def test_the_tokens_of_segments_are_of_their_completion():
    first, other = sequence("a", [1], [2, 3], 0.5), sequence("b", [6], [7], -1)
    first = dataclasses.replace(first, segment_of="a")
    later = dataclasses.replace(sequence("a/1", [1, 2, 3], [4], 0.5), segment_of="a")
    packed = pack([other, first, later], None, torch.device("cpu"))
    assert packed.sequence_ids.tolist() == [0, 1, 1, 1] and packed.counts == (1, 2, 1)
    packed = pack([other, first, later], [2, 0], torch.device("cpu"))  # what has no earlier segment here is the first
    assert packed.sequence_ids.tolist() == [0, 1] and packed.counts == (1, 1)
    apart = [dataclasses.replace(one, alone=True) for one in (first, later)]
    assert pack([other, *apart], None, torch.device("cpu")).sequence_ids.tolist() == [0, 1, 1, 2]


def test_two_sequences_of_one_key_are_refused():
    """They would be one unit of the loss."""
    twice = [sequence("0", [1], [2, 3], 0.5), sequence("0", [6], [7], -1)]
    with refused(ReplayError, fault="keys", got="1 keys for 2 sequences"):
        pack(twice, None, torch.device("cpu"))


def test_a_rank_without_sequences_still_has_a_microbatch_to_run():
    packed = pack([], [], torch.device("cpu"))
    assert packed.tokens.shape == (1, PAD_MULTIPLE) and packed.lengths == (PAD_MULTIPLE,)
    assert packed.predicts.numel() == packed.targets.numel() == packed.advantages.numel() == 0
    assert packed.fed([]) == []


def test_rows_targets_and_padding_where_two_ranks_share_sequences():
    sequences = [sequence("a", [1, 2, 3], [4, 5, 6, 7], 1.0), sequence("b", [8], [9], -1.0)]
    first, second = (pack(sequences, [0, 1], torch.device("cpu"), (rank, 2)) for rank in (0, 1))
    # a: 1 2 3 4 5 6 and two rows of padding, in 4 chunks of 2 of which rank 0 has the outer ones; b: 8 and three rows
    assert first.lengths == second.lengths == (8, 4, 4)
    assert first.tokens.tolist() == [[1, 2, 0, 0, 8, 0, 0, 0]]
    assert second.tokens.tolist() == [[3, 4, 5, 6, 0, 0, 0, 0]]
    assert first.positions.tolist() == [[0, 1, 6, 7, 0, 3, 0, 3]]
    assert second.positions.tolist() == [[2, 3, 4, 5, 1, 2, 1, 2]]
    # 7 tokens are fed, padding rows are numbered on from there as they lie in the run
    assert first.rows.tolist() == [0, 1, 7, 8, 6, 11, 12, 15]
    assert second.rows.tolist() == [2, 3, 4, 5, 9, 10, 13, 14]
    # a's completion is predicted on the rank that is fed the token before it
    assert (first.predicts.tolist(), first.targets.tolist(), first.predicted.tolist()) == ([4], [9], [4])
    assert second.predicts.tolist() == [0, 1, 2, 3] and second.targets.tolist() == [4, 5, 6, 7]
    assert second.predicted.tolist() == [0, 1, 2, 3]
    for packed in (first, second):
        assert packed.sequence_ids.tolist() == [0, 0, 0, 0, 1] and packed.rollout_logprobs.tolist() == [0, 1, 2, 3, 0]
        params = packed.begin_forward(None, 0)
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv_padded.tolist() == [0, 8, 12, 16]


def shared_sets(draw, tokens):
    """A support of this many tokens, some of which share a set."""
    counts = draw.integers(-3, 4, 3)
    return SamplingSupport(draw.integers(0, 3, tokens), counts, draw.integers(0, 99, np.abs(counts).sum()))


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), max_size=6)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5))
def test_ranks_share_what_one_would_be_fed_and_predict(lengths, ranks):
    draw = np.random.default_rng(1)
    sequences = [
        sequence(str(i), draw.integers(1, 99, p), draw.integers(1, 99, c), 1.0) for i, (p, c) in enumerate(lengths)
    ]
    fed = [token for s in sequences for token in (s.prompt_token_ids + s.token_ids)[:-1]]
    where = [(s, position) for s, (p, c) in zip(sequences, lengths, strict=True) for position in range(p + c - 1)]
    completion = [(s, number) for s in sequences for number in range(len(s.token_ids))]
    supports = [shared_sets(draw, c) for _, c in lengths]
    listed = [np.split(s.ids, np.cumsum(np.abs(s.counts))[:-1]) for s in supports]
    sets = [(s.counts[number], list(ids[number])) for s, ids in zip(supports, listed, strict=True) for number in s.sets]
    numbers, predicted = [], []
    for rank in range(ranks):
        packed = pack(sequences, range(len(sequences)), torch.device("cpu"), (rank, ranks), supports)
        s = packed.support
        got = [(s.counts[number], s.ids[s.starts[number] : s.starts[number + 1]].tolist()) for number in s.sets]
        assert got == [sets[place] for place in packed.predicted]
        assert packed.tokens.shape[1] * ranks == sum(packed.lengths)
        assert packed.sequence_ids.tolist() == [i for i, s in enumerate(sequences) for _ in s.token_ids]
        for number, token, position in zip(packed.rows, packed.tokens[0], packed.positions[0], strict=True):
            assert (token, position) == (fed[number], where[number][1]) if number < len(fed) else token == 0
        for row, target, place in zip(packed.predicts, packed.targets, packed.predicted, strict=True):
            owner, position = where[packed.rows[row]]
            assert (owner, position) == (completion[place][0], len(owner.prompt_token_ids) - 1 + completion[place][1])
            assert target == owner.token_ids[completion[place][1]]
        numbers += packed.rows.tolist()
        predicted += packed.predicted.tolist()
        assert [tokens.tolist() for tokens in packed.fed(sequences)] == [
            list((s.prompt_token_ids + s.token_ids)[:-1]) for s in sequences
        ]
    assert sorted(numbers) == list(range(padded_length(len(numbers) // ranks * ranks, ranks)))
    assert sorted(predicted) == list(range(len(completion)))


def test_what_is_fed_is_read_off_the_rows_of_this_rank():
    sequences = [sequence("a", [1, 2, 3], [4, 5, 6, 7], 1.0)]
    whole = [[1, 2, 3, 4, 5, 6]]
    first, second = (pack(sequences, [0], torch.device("cpu"), (rank, 2)) for rank in (0, 1))
    assert [part.tolist() for part in first.fed(sequences)] == whole
    # A token that differs from the sequence is detected on the rank that feeds it.
    first.tokens[0, 1] = 99
    assert [part.tolist() for part in first.fed(sequences)] == [[1, 99, 3, 4, 5, 6]]
    # A rank that has the rows of another rank is detected too.
    shifted = dataclasses.replace(second, rows=first.rows)
    assert [part.tolist() for part in shifted.fed(sequences)] == [[3, 4, 3, 4, 5, 6]]
