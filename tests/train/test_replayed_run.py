"""Which runs can be trained again from what they have kept; tests/end_to_end/test_pipeline.py trains them again."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.config.load import dump_config, load_config
from moe_rl.report import history
from moe_rl.rollout.kept import KeptRollouts, ReplayedRollouts, RolloutBatch, shard_name
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSet, PromptSource
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.train.replayed_run import replay_problems
from moe_rl.train.run_folder import RunFolder, goes_on, held
from moe_rl.types import Prompt, Provenance, Sequence, Span, sampled_by
from tests.support.refusals import tells

CONFIG = "configs/tiny_moe_cpu.yaml"
SPEC = TraceSpec("model", 8, 2, "mm")
STEPS = 3
# prompts arrive in another order than their own, and one is dropped
ARRIVED = [([2, 0], []), ([1, 4], [(3, "stale")]), ([5], [])]


class Replayed:
    """The folder of a run that has trained three steps, and what a replay of it is given."""

    def __init__(self, folder):
        self.folder = RunFolder(folder)
        self.set("pipeline.mode=async", "pipeline.max_staleness=2", "objective.old_logprobs=sampler")
        self.task = SimpleNamespace(
            train=[PromptSet("all", [Prompt(f"p{n}", "?", (1, 2)) for n in range(6)])],
        )
        self.ledger = PromptLedger(folder / "prompts.jsonl", in_order=False)
        self.kept = KeptRollouts(folder / "rollouts", TraceStore(folder / "trace"))
        (folder / "trace").mkdir()
        source, lines = PromptSource(self.task.train, 1), []
        for step, (cursors, dropped) in enumerate(ARRIVED, start=1):
            ids = [prompt.id for at in cursors for prompt in source.at(at, 1)]
            self.ledger.record(step - 1, cursors, ids, f"digest {step}", dropped)
            with ShardWriter(folder / "trace", shard_name(step), SPEC) as writer:
                routes = np.tile(np.array([0, 1], np.uint8), (3, 2, 1))
                ref = writer.add(f"s{step}", routes, [1, 2, 3], [Span(3, step - 1, Provenance.DECODE)])
            logprobs = np.array([-0.5, -1.25], np.float32)
            one = Sequence(f"s{step}", (1, 2), (3, 4), logprobs, 0.5, sampled_by(step - 1, 2), routes=ref)
            self.kept.save(step, RolloutBatch([one], [cursors[0]], {}, f"digest {step}"))
            lines.append(json.dumps({"step": step, "kind": "train"}) + "\n")
        (folder / "metrics.jsonl").write_text("".join(lines))

    def set(self, *overrides):
        self.folder.config.write_text(dump_config(load_config(CONFIG, ["run.seed=1", *overrides])))

    def config(self, *overrides):
        return load_config(self.folder.config, [f"run.replays={self.folder.path}", *overrides])

    def told(self, *overrides):
        (problem,) = replay_problems(self.config(*overrides), self.task)
        return problem


@pytest.fixture
def theirs(tmp_path):
    (tmp_path / "theirs").mkdir()
    return Replayed(tmp_path / "theirs")


def test_batches_come_in_the_order_in_which_that_run_took_them(theirs, tmp_path):
    config = theirs.config("parallel.expert=1", "train.microbatch_tokens=4096", "checkpoint.keep=7", "run.name=again")
    assert replay_problems(config, theirs.task) == []
    rollouts = ReplayedRollouts(config, theirs.task, tmp_path, theirs.folder.path, theirs.kept.store)
    for step in range(1, STEPS + 1):
        batch = rollouts.take(step, SimpleNamespace())
        assert [one.key for one in batch.sequences] == [f"s{step}"]
        rollouts.retain(set())  # nothing of that run is deleted
    assert theirs.kept.steps() == [1, 2, 3]
    assert rollouts.ledger.path.read_bytes() == theirs.ledger.path.read_bytes()


def test_a_run_that_has_not_kept_every_step_is_refused_with_what_it_lacks(theirs):
    theirs.set("replay.keep_shards=1", "pipeline.mode=async", "objective.old_logprobs=sampler")
    theirs.kept.retain({2})
    tells(theirs.told(), "1, 3", "replay.keep_shards", "run.steps", fault="absent", key="run.replays")


def test_damage_is_named(theirs):
    path = theirs.kept.folder / "step000002.rollout"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    tells(theirs.told(), str(path), step=2)
    theirs.kept.save(2, dataclasses.replace(theirs.kept.load(3), digest="digest 2"))
    assert replay_problems(theirs.config(), theirs.task) == []
    path.write_bytes(whole)
    (theirs.folder.trace / "step000003.safetensors").unlink()
    tells(theirs.told(), fault="gone", step=3, shard="step000003")


def test_another_order_of_prompts_or_other_completions_are_refused(theirs):
    lines = theirs.ledger.path.read_bytes().splitlines(keepends=True)
    entry = theirs.ledger.find(1)
    theirs.ledger.path.write_bytes(lines[0] + dataclasses.replace(entry, completions="x").line() + b"\n" + lines[2])
    tells(theirs.told(), "digest 2", step=2)
    theirs.ledger.path.write_bytes(b"".join(lines))
    theirs.task.train[0].prompts[0] = Prompt("other", "?", (1, 2))
    assert {problem.about["step"] for problem in replay_problems(theirs.config(), theirs.task)} <= {1, 2, 3}
    assert replay_problems(theirs.config(), theirs.task)


@pytest.mark.parametrize("key, value", [("train.optimizer.lr", 1e-3), ("run.seed", 2), ("run.steps", 9)])
def test_what_would_be_another_run_is_refused(theirs, key, value):
    tells(theirs.told(f"{key}={value}"), key, key="run.replays")


def test_a_run_that_goes_on_or_was_steered_or_is_none_is_refused(theirs, tmp_path):
    assert not goes_on(theirs.folder)
    with held(theirs.folder, first=True):
        written = theirs.folder.lock.read_text()
        tells(theirs.told(), fault="goes on", folder=theirs.folder.path)
        assert theirs.folder.lock.read_text() == written
    assert replay_problems(theirs.config(), theirs.task) == []
    changed = {"train.optimizer.lr": (1e-4, 2e-4), "run.steps": (2, 3), "eval.prompts": (1, 2)}
    history.record(theirs.folder.path, after=2, ranks=2, device="CPU", changed=changed, config={})
    assert "run.steps" not in tells(theirs.told(), "train.optimizer.lr", fault="steered").got
    (theirs.folder.path / history.FILE).unlink()
    (theirs.folder.path / "metrics.jsonl").unlink()
    tells(theirs.told(), fault="no step")
    tells(
        *replay_problems(load_config(CONFIG, [f"run.replays={tmp_path}"]), theirs.task),
        key="run.replays",
        folder=tmp_path,
    )
