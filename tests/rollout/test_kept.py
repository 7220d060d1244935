"""Kept rollouts are read back as written or refused, and kept as long as their routes."""

import dataclasses

import numpy as np
import pytest

from moe_rl.errors import DataError
from moe_rl.rollout.group_files import GroupFiles
from moe_rl.rollout.kept import (
    KeptRollouts,
    RolloutBatch,
    group_shard_name,
    kept_steps,
    shard_group,
    shard_name,
)
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.types import Provenance, RoutePart, RouteRef, Sequence, Span, sampled_by
from tests.support.refusals import refused

SPEC = TraceSpec("model", 8, 2, "mm")


@pytest.fixture
def kept(tmp_path):
    (tmp_path / "trace").mkdir()
    return KeptRollouts(tmp_path / "rollouts", TraceStore(tmp_path / "trace"))


def batch(step):
    ref = RouteRef(f"s{step}/p0/c0", 3, (RoutePart(shard_name(step), "0123456789abcdef"),), 0, "fedcba9876543210")
    logprobs = np.array([-0.5, -1.25], np.float32)
    one = Sequence(f"s{step}/p0/c0", (1, 2), (3, 4), logprobs, reward=0.5, versions=sampled_by(step - 1, 2), routes=ref)
    return RolloutBatch([one, dataclasses.replace(one, key="other", routes=None)], [0, 1], {"reward/mean": 0.25}, "abc")


def shard(kept, step):
    with ShardWriter(kept.store._local(), shard_name(step), SPEC) as writer:
        routes = np.tile(np.array([0, 1], np.uint8), (3, 2, 1))
        writer.add(f"s{step}/p0/c0", routes, [1, 2, 3], [Span(3, step - 1, Provenance.DECODE)])


def values(batch):
    plain = dataclasses.asdict(batch)
    return [[x.tolist() if isinstance(x, np.ndarray) else x for x in s.values()] for s in plain.pop("sequences")], plain


def test_a_batch_comes_back_with_every_field(kept):
    kept.save(12, batch(12))
    assert values(kept.load(12)) == values(batch(12))
    assert [path.name for path in kept.folder.iterdir()] == ["step000012.rollout"]


def test_no_bit_may_flip_and_nothing_may_be_cut_off(kept):
    kept.save(3, batch(3))
    path = kept.folder / "step000003.rollout"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with refused(DataError, file=("step000003.rollout",)):
            kept.load(3)
    for damaged in (whole[:-1], whole[:20], b""):
        path.write_bytes(damaged)
        with refused(DataError, fault="damaged"):
            kept.load(3)
    path.write_bytes(whole)
    assert values(kept.load(3)) == values(batch(3))


def test_a_missing_step_is_named(kept):
    with refused(DataError, fault="absent", file=("step000007.rollout",)):
        kept.load(7)


def test_kept_are_the_last_ones_and_those_of_kept_weights():
    assert kept_steps(40, 4, [20, 30], 0) == {1, 21, 31, 37, 38, 39, 40}
    assert kept_steps(40, 4, [20, 40], 1) == {1, 21, 22, 37, 38, 39, 40, 41, 42}
    assert kept_steps(2, 4, [], 0) >= {1, 2}
    assert 11 not in kept_steps(40, 4, [20, 30], 0)


def test_files_and_shards_go_together(kept):
    for step in (1, 2, 3, 4):
        kept.save(step, batch(step))
        shard(kept, step)
    kept.store.remove(shard_name(3))
    assert kept.steps() == [1, 2, 4]  # rollouts without their routes cannot be scored
    (kept.folder / "step000003.rollout.tmp").write_bytes(b"cut")
    being_written = kept.folder / "step000004.rollout.tmp"  # the pool writes this file while rank 0 deletes others
    being_written.write_bytes(b"half")
    for name in ("step000004-engine1", "step000004-round2-server0", "eval-greedy"):
        with ShardWriter(kept.store._local(), name, SPEC):
            pass
    kept.retain({1, 4})
    assert being_written.read_bytes() == b"half"
    being_written.unlink()
    assert sorted(path.name for path in kept.folder.iterdir()) == ["step000001.rollout", "step000004.rollout"]
    assert kept.store.shards() == ["step000001", "step000004", "step000004-engine1", "step000004-round2-server0"]
    kept.retain(range(4))
    assert kept.steps() == [1]


def test_lines_of_shards_that_a_killed_run_left_without_a_file_go_unless_they_are_kept(kept):
    for step in (1, 2, 3):
        shard(kept, step)
    with ShardWriter(kept.store._local(), "canary-version000001", SPEC):
        pass
    for name in (shard_name(1), shard_name(2), "canary-version000001"):
        (kept.store._local() / f"{name}.safetensors").unlink()
    kept.retain({2, 3})
    assert list(kept.store.manifest().published) == [shard_name(2), shard_name(3)], "a lost shard stays a fault"
    assert kept.store.shards() == [shard_name(3)]


def test_shards_of_groups_stay_as_long_as_somebody_needs_them(kept):
    names = ["group000007-0", "group000007-12-server3", "group000008-1-engine0.pp0of2", "group1000000-0"]
    for name in names:
        with ShardWriter(kept.store._local(), name, SPEC):
            pass
    assert [shard_group(name) for name in names] == [(7, 0), (7, 12), (8, 1), (1000000, 0)]
    assert shard_group(group_shard_name(9, 2)) == (9, 2) and shard_group(shard_name(9)) is None
    files = GroupFiles(kept.folder, kept, PromptLedger(kept.folder / "none"))
    assert files.shard(7) == "group000007-13"  # no name is used twice
    kept.retain(())
    assert kept.store.shards() == names
    kept.retain((), {7})
    assert kept.store.shards() == names[:2]
