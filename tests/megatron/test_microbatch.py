"""Packing: which row predicts which token, and what is fed."""

import numpy as np
import pytest
import torch

from moe_rl.megatron.microbatch import PAD_MULTIPLE, pack, padded_length
from moe_rl.megatron.policy import learning_rate
from moe_rl.types import Sequence


def sequence(key, prompt, completion, advantage):
    return Sequence(
        key, tuple(prompt), tuple(completion), np.arange(len(completion), dtype=np.float32), advantage, 0, None
    )


def test_rows_targets_and_padding():
    sequences = [
        sequence("a", [1, 2, 3], [4, 5], 0.5),
        sequence("unused", [9], [9], 9.0),
        sequence("b", [6], [7, 8], -1),
    ]
    packed = pack(sequences, [2, 0], torch.device("cpu"))
    # all but the last token of each, then padding that is a sequence of its own
    assert packed.tokens.tolist() == [[6, 7, 1, 2, 3, 4, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    assert packed.lengths == (2, 4, 2) and sum(packed.lengths) == padded_length(6)
    assert packed.predicts.tolist() == [0, 1, 4, 5]
    assert packed.targets.tolist() == [7, 8, 4, 5]
    assert packed.sequence_ids.tolist() == [0, 0, 1, 1]
    assert packed.rollout_logprobs.tolist() == [0, 1, 0, 1]
    assert packed.advantages.tolist() == [-1, 0.5]
    params = packed.seq_params(None, 0)
    assert params.cu_seqlens_q.tolist() == [0, 2, 6, 8] and params.cu_seqlens_q.dtype == torch.int32
    assert params.max_seqlen_q == 4 and params.replay is None


def test_a_rank_without_sequences_still_has_a_microbatch_to_run():
    packed = pack([], [], torch.device("cpu"))
    assert packed.tokens.shape == (1, PAD_MULTIPLE) and packed.lengths == (PAD_MULTIPLE,)
    assert packed.predicts.numel() == packed.targets.numel() == packed.advantages.numel() == 0


@pytest.mark.parametrize(("update", "expected"), [(0, 0.25), (1, 0.5), (3, 1.0), (9, 1.0)])
def test_learning_rate_warms_up_and_stays(update, expected):
    from moe_rl.config.schema import OptimizerConfig

    assert learning_rate(OptimizerConfig(lr=2.0, warmup_steps=4), update) == pytest.approx(2.0 * expected)
    assert learning_rate(OptimizerConfig(lr=2.0), update) == 2.0
