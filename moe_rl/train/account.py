"""Checks that an update learns from each of its sequences exactly once, and from what was sampled and judged.

    sampler --seal--> completion --verdict--> batch --> credit --> microbatches --> loss --> optimizer
               |                    |                     |                          |
               `--------------------+----- compared ------+--------- compared -------'

A completion is sealed when it is made, and a verdict's digest is made when its reward and group are joined to it
(`types.py`). `check_batch` compares both before anything is computed. `check_update` recomputes the seals from the
tensors that the loss used, after the gradient is computed and before the optimizer moves a weight. All digests are made
on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch.distributed as dist

from moe_rl.errors import ReplayError, first_of
from moe_rl.megatron import world
from moe_rl.megatron.share import Share
from moe_rl.types import Sequence

_REPORT = "weights are as they were before this update. Look for what changes, exchanges or repeats sequences"


def check_batch(sequences: Seq[Sequence], group_ids: Seq[int], before: Collection[str]) -> None:
    """Check that a batch has no sequence twice, and that each sequence has the reward and group of its own verdict.

    Args:
        group_ids: For each sequence, the number of its prompt.
        before: Keys of sequences that earlier steps have trained on.

    Raises:
        ReplayError: A sequence came twice, or with the reward or group of another sequence. The message names it.
    """
    counts = Counter(one.key for one in sequences)
    counts.update(key for key in before if key in counts)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise ReplayError(
            "a sequence was delivered more than once",
            where={"request": twice[0]},
            got=f"{len(twice)} repeated sequences: {first_of(twice)}",
            expected="each sequence in one step, once",
            do="look for a group that the feed gave twice, or rollouts of another step",
            fault="delivered twice",
        ).by_all()
    wrong = [one.key for one, group in zip(sequences, group_ids, strict=True) if one.verdict != one.verdict_of(group)]
    if wrong:
        raise ReplayError(
            "a sequence does not have the reward and the group that it was judged with",
            where={"request": wrong[0]},
            got=f"{len(wrong)} of {len(sequences)} sequences: {first_of(wrong)}",
            expected="the digest of completion, rewards and group that was made with the verdict",
            do="look for what exchanges rewards or groups between the verifiers and the trainer",
            fault="verdict",
        ).by_all()


def check_update(share: Share, calls: Mapping[int, int]) -> None:
    """Check what an update learned from. All ranks call this together, before the optimizer moves a weight.

    Args:
        share: This rank's part of the update.
        calls: How often the loss of each microbatch was computed on this rank.

    Raises:
        ReplayError: A sequence did not enter the loss exactly once, or entered it with tokens, log-probabilities,
            places or advantages that are not its own. Raised on all ranks, naming the sequence.
    """
    place = {one.key: at for at, one in enumerate(share.all)}
    counts, wrong = (np.zeros(len(share.all)) for _ in range(2))
    computes = world.is_last_stage()
    for number, work in enumerate(share.work):
        packed = [share.all[i] for i in work.microbatch.indices]
        for one in packed:
            counts[place[one.key]] += calls.get(number, 0) if computes else 1
        if computes:
            seals, credit = work.microbatch.seals(packed), work.microbatch.given_advantages()
            for one, seal, given in zip(packed, seals, credit, strict=True):
                own = np.asarray(share.credit[one.key], np.float32)
                if seal != one.seal or not np.array_equal(given, own, equal_nan=True):
                    wrong[place[one.key]] += 1
    ranks = dist.get_world_size() // world.data_parallel()[1]  # that work on the same sequences
    reduced = np.array(world.all_reduce([*counts, *wrong])).reshape(2, -1)
    if uneven := np.flatnonzero(reduced[0] != ranks).tolist():
        told = [f"{share.all[at].key} {reduced[0, at] / ranks:g} times" for at in uneven]
        raise ReplayError(
            "an update did not learn from each of its sequences exactly once",
            where={"request": share.all[uneven[0]].key},
            got=f"{len(uneven)} of {len(share.all)} sequences: {first_of(told)}",
            expected="once each, over all ranks and microbatches",
            do=f"{_REPORT}: a microbatch was replaced, repeated or left out after the batch was divided",
            fault="not once",
        ).by_all()
    if other := [share.all[at].key for at in np.flatnonzero(reduced[1])]:
        raise ReplayError(
            "an update learned from something other than what was sampled and judged",
            where={"request": other[0]},
            got=f"{len(other)} of {len(share.all)} sequences: {first_of(other)}",
            expected="the sampled tokens with their log-probabilities, each predicted by the row before it, and "
            "the advantage of its sequence",
            do=f"{_REPORT}, or a loss mask that is shifted",
            fault="not as sampled",
        ).by_all()
