"""Rollouts left by an ended process: the step trains on them if everything agrees, and samples again if anything does
not."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.load import load_config
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import CheckpointError, DataError, MoeRLError, SupportError
from moe_rl.megatron import checkpoint, world
from moe_rl.rollout.kept import KeptRollouts, RolloutBatch, SampledStep, shard_name
from moe_rl.rollout.trajectories import Trajectory
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSet, PromptSource
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore, signed
from moe_rl.train import resume
from moe_rl.train.resume import check_of_this_run, left_behind, restore
from moe_rl.types import Completion, Prompt, Provenance, Sequence, Span, Verdict, sampled_by

SPEC = TraceSpec("model", 8, 2, "mm")
DONE, STEP = 1, 2


class Left:
    """The files of a process that was killed after it had sampled step 2; its checkpoint is of step 1."""

    def __init__(self, folder, *, version=DONE):
        (folder / "trace").mkdir()
        self.source = PromptSource([PromptSet("all", [Prompt(f"p{n}", "?", (1, 2)) for n in range(8)])], seed=1)
        self.ledger = PromptLedger(folder / "prompts.jsonl")
        self.kept = KeptRollouts(folder / "rollouts", TraceStore(folder / "trace"))
        ids = [prompt.id for prompt in self.source.at(0, 4)]
        self.ledger.record(0, [0, 1], ids[:2], "first")
        self.ledger.record(1, [2, 3], ids[2:], "second")
        with ShardWriter(folder / "trace", shard_name(STEP), SPEC) as writer:
            routes = np.tile(np.array([0, 1], np.uint8), (3, 2, 1))
            routes[1:] += 1
            ref = writer.add("s2/p0/c0", routes, [1, 2, 3], [Span(3, version, Provenance.DECODE)])
            ref = signed(ref, routes, SPEC.moe_layers, [1, 2, 3], versions=version)
        logprobs = np.array([-0.5, -1.25], np.float32)
        sequence = Sequence("s2/p0/c0", (1, 2), (3, 4), logprobs, 0.5, sampled_by(DONE, 2), routes=ref)
        self.batch = RolloutBatch([sequence], [0], {"reward/mean": 0.5}, "second")
        self.kept.save(STEP, self.batch)

    def find(self, lag=0, microbatch_tokens=9, **needed):
        given = {"lag": lag, "microbatch_tokens": microbatch_tokens, **needed}
        return left_behind(STEP, self.ledger, self.source, self.kept, SPEC, **given)

    @property
    def completion(self):
        """The sequence as the sampler returned it."""
        one = self.batch.sequences[0]
        return Completion(
            one.key, one.prompt_token_ids, one.token_ids, one.rollout_logprobs, "stop", one.versions, one.routes
        )

    def keep_sampled(self, completions, trajectories=()):
        """Leave completions without a batch."""
        self.kept.save_sampled(STEP, SampledStep(2, completions, {}, "second", list(trajectories)))
        self.kept.folder.joinpath("step000002.rollout").unlink(missing_ok=True)

    def change(self, **fields):
        sequence = dataclasses.replace(self.batch.sequences[0], **fields)
        self.kept.save(STEP, dataclasses.replace(self.batch, sequences=[sequence]))


@pytest.fixture
def left(tmp_path):
    return Left(tmp_path)


def refused(left, **needed):
    with pytest.raises(MoeRLError) as caught:
        left.find(**needed)
    return str(caught.value)


def test_what_is_whole_is_taken(left):
    entry, batch = left.find()
    assert entry.cursors == [[2, 2]]
    assert [s.token_ids for s in batch.sequences] == [(3, 4)] and batch.metrics == {"reward/mean": 0.5}


def test_completions_without_a_batch_are_taken_if_they_are_whole(left):
    made = left.completion
    sampled = SampledStep(2, [[made]], {"rollout/witnessed_rows": 3.0}, "second")
    left.kept.save_sampled(STEP, sampled)
    assert isinstance(left.find()[1], RolloutBatch), "a batch is more than its completions"
    path = left.kept.folder / "step000002.rollout"
    path.unlink()
    found = left.find()[1]
    assert isinstance(found, SampledStep) and found.metrics == sampled.metrics and found.first == 2
    assert [c.token_ids for group in found.completions for c in group] == [(3, 4)]
    left.kept.save_sampled(STEP, dataclasses.replace(sampled, digest="other"))
    assert "other completions" in refused(left)
    older = dataclasses.replace(made, versions=sampled_by(0, 2))
    left.kept.save_sampled(STEP, dataclasses.replace(sampled, completions=[[older]]))
    assert "belong to other weights" in refused(left)
    left.kept.save_sampled(STEP, sampled)
    path = path.with_suffix(".sampled")
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert "the completions of a step are damaged" in refused(left)
    path.write_bytes(whole)
    left.kept.save(STEP, left.batch)
    assert not path.exists(), "nobody needs it any more"
    left.kept.save_sampled(STEP + 1, sampled)
    left.kept.retain({STEP})
    assert [one.name for one in left.kept.folder.iterdir()] == ["step000002.rollout"]


def test_a_step_that_was_not_entered_is_not_taken(left):
    left.ledger.rewind(1)
    assert "no line for the step in the prompt ledger" in refused(left)
    left.ledger.path.write_bytes(left.ledger.path.read_bytes() + b'{"step": 1, "cur')
    assert "no line for the step" in refused(left)


def test_a_step_without_its_file_or_with_another_is_not_taken(left):
    left.kept.save(STEP, dataclasses.replace(left.batch, digest="other"))
    assert "other completions: got digest other, expected second" in refused(left)
    path = left.kept.folder / "step000002.rollout"
    path.write_bytes(path.read_bytes()[:-1])
    assert "damaged" in refused(left)
    path.unlink()
    assert "were not kept" in refused(left)


def test_other_prompts_are_not_taken(left):
    left.source = PromptSource([PromptSet("all", [Prompt(f"p{n}", "?", (1, 2)) for n in range(8)])], seed=2)
    assert "belong to other prompts" in refused(left)


def test_other_weights_are_not_taken(left, tmp_path):
    left.change(versions=sampled_by(0, 2))
    assert "belong to other weights: got versions [0] in s2/p0/c0, expected version 1" in refused(left)
    (tmp_path / "older").mkdir()
    assert "weight version 0" in refused(Left(tmp_path / "older", version=0))


def test_older_weights_are_taken_as_far_as_sampling_runs_ahead(tmp_path):
    left = Left(tmp_path, version=DONE - 1)
    left.change(versions=sampled_by(DONE - 1, 2))
    assert len(left.find(lag=1)[1].sequences) == 1
    with pytest.raises(MoeRLError, match="belong to other weights"):
        left.find(lag=0)


def test_routes_that_are_damaged_gone_or_of_other_tokens_are_not_taken(left, tmp_path):
    left.change(token_ids=(5, 4))
    assert "s2/p0/c0" in refused(left)
    left.kept.save(STEP, left.batch)
    left.find()
    shard = tmp_path / "trace/step000002.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert "step000002" in refused(left)
    shard.unlink()
    assert "step000002" in refused(left)


def test_rollouts_without_what_the_trainer_now_needs_of_the_sampler_are_not_taken(left):
    left.find()
    for needed in ({"support": 9}, {"head": (9, 2)}):
        with pytest.raises(SupportError):
            left.find(**needed)


def test_what_fits_into_no_microbatch_is_not_taken(left):
    """A resumed run may have smaller microbatches. Three tokens of each sequence were forwarded."""
    one = left.batch.sequences[0]
    segments = [
        dataclasses.replace(one, segment_of="episode"),
        dataclasses.replace(one, segment_of="episode", key="s2/p0/c0/1", routes=None),
    ]
    apart = [dataclasses.replace(segment, alone=True) for segment in segments]
    for sequences, tokens in (([one], 3), (segments, 6), (apart, 3)):
        left.kept.save(STEP, dataclasses.replace(left.batch, sequences=sequences, group_ids=[0] * len(sequences)))
        left.find(microbatch_tokens=tokens)
        told = refused(left, microbatch_tokens=tokens - 1)
        assert f"do not fit into a microbatch: got {2 if sequences is apart else 1} too long, such as" in told
        assert sequences[0].completion in told and f"at most train.microbatch_tokens = {tokens - 1}" in told


@pytest.mark.parametrize(("credit", "status", "fits"), [
    ("trajectory", "scored", False), ("trajectory", "failed", True), ("branch", "scored", True),
])  # fmt: skip
def test_an_episode_that_fits_into_no_microbatch_is_not_judged_again(left, credit, status, fits):
    """An episode that failed for its length is not trained on."""
    verdict = Verdict(status, 1.0 if status == "scored" else None)
    left.keep_sampled([], [[Trajectory("episode", [left.completion] * 2, verdict, 2, 0, 2, "d")]])
    left.find(microbatch_tokens=6, credit=credit)
    if fits:
        left.find(microbatch_tokens=5, credit=credit)
    else:
        assert "do not fit into a microbatch" in refused(left, microbatch_tokens=5, credit=credit)


def test_completions_of_an_older_text_of_their_prompt_are_not_judged_again(left):
    """--accept lets the text of a row change whose id stays."""
    left.keep_sampled([[left.completion]])
    left.find()
    left.source = PromptSource([PromptSet("all", [Prompt(f"p{n}", "?", (1, 2, 9)) for n in range(8)])], seed=1)
    assert "belong to other texts of their prompts" in refused(left)
    left.kept.save(STEP, left.batch)
    left.find()  # its verdicts were made with the older text


@pytest.mark.parametrize("what", ["lost", "damaged"])
def test_a_shard_whose_line_the_manifest_lost_is_not_taken(left, tmp_path, what):
    """The shard's own digests agree; only the manifest says that this run published it."""
    manifest = tmp_path / "trace/manifest.jsonl"
    line = manifest.read_bytes()
    manifest.write_bytes(b"" if what == "lost" else line[:40] + line[41:])
    told = refused(left)
    assert f"the manifest of the trace has lost the line of a shard (shard step000002, {manifest})" in told
    assert ("lines 1 are damaged" in told) == (what == "damaged")
    assert left.kept.store.unpublished() == ["step000002"]
    manifest.write_bytes(line)
    left.find()
    assert left.kept.store.unpublished() == []


@pytest.mark.parametrize(
    ("done", "dropped", "told"),
    [
        (4, 1, "resumed after step 4; steps repeated: 1. Step 5 is sampled again: damaged"),
        (4, 0, "resumed after step 4; steps repeated: 0. Step 5 is sampled next: no rollouts of it were finished"),
        (6, 0, "the run has made all its 6 steps; run.steps=N makes it longer"),
    ],
    ids=["damaged", "never sampled", "all steps made"],
)
def test_only_what_was_sampled_is_said_to_be_sampled_again(monkeypatch, done, dropped, told):
    def broken(*_, **__):
        raise DataError("damaged")

    notes = []
    monkeypatch.setattr(resume, "left_behind", broken)
    config = load_config("tiny_moe_cpu", ["run.steps=6"])
    step = SimpleNamespace(spec=None)
    trainer = SimpleNamespace(config=config, facts=SimpleNamespace(vocab=9), train_step=step)
    ledger = SimpleNamespace(rewind=lambda steps: dropped)
    rollouts = SimpleNamespace(ledger=ledger, source=None, kept=None)
    main = SimpleNamespace(log=SimpleNamespace(note=notes.append))
    assert resume._take_left_behind(trainer, main, rollouts, done) is None
    assert notes == [told]


def test_a_checkpoint_that_lacks_a_field_is_refused_before_anything_changes(tmp_path, monkeypatch):
    path, parallel = tmp_path / checkpoints.name_of(1), ParallelConfig()
    path.mkdir()
    trainer = SimpleNamespace(
        config=SimpleNamespace(parallel=parallel, run=SimpleNamespace(seed=1)),
        folder=SimpleNamespace(checkpoints=tmp_path),
        policy=None,  # nothing of it is touched
    )
    monkeypatch.setattr(world.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(world.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(world, "broadcast", lambda message, kind: message)
    monkeypatch.setattr(world, "gather", lambda message, kind: [message])
    whole = {"step": 1, "updates": 1, "optimizer_step": 1, "optimizer": {}, "files": {}, "pieces": {}}
    whole |= {"layout": checkpoint.layout(parallel), "guards": {}, "evaluations": [], "ledger": "digest"}
    for absent in whole:
        state = {name: value for name, value in whole.items() if name != absent}
        (path / checkpoint.STATE).write_text(checkpoint.sealed(state))
        with pytest.raises(CheckpointError) as caught:
            restore(trainer, 1)
        assert f"({path / checkpoint.STATE}, {absent})" in str(caught.value)
    (path / checkpoint.STATE).write_text(checkpoint.sealed(whole))
    with pytest.raises(CheckpointError, match="not a distributed checkpoint"):  # all fields are there; tensors are next
        restore(trainer, 1)


@pytest.mark.parametrize(
    ("before", "seeded", "why"),
    [
        ({}, False, ""),
        ({"expert": 2}, True, "the parallel layout changed: expert 2 -> 1"),
        ({}, True, "the kind of device changed"),
    ],
)
def test_why_random_generators_are_seeded_again_is_told(tmp_path, monkeypatch, before, seeded, why):
    (tmp_path / checkpoints.name_of(1)).mkdir()
    parallel, trainer = ParallelConfig(), mock.MagicMock()
    monkeypatch.setattr(world.dist, "get_world_size", lambda: 1)
    state = {"guards": {}, "evaluations": [], "ledger": "digest", "optimizer": {}, "seeded": seeded}
    state |= {"layout": checkpoint.layout(parallel) | before}
    monkeypatch.setattr(checkpoint, "load", lambda *_, **__: state)
    monkeypatch.setattr(checkpoint, "check_optimizer", lambda *_: None)
    monkeypatch.setattr(resume, "_restore_rollouts", lambda *_: None)
    trainer.config.parallel = parallel
    trainer.folder.checkpoints = trainer.folder.exports = tmp_path
    trainer.keeping.progress.best_step = None
    trainer.main.rollouts.ledger.digest.return_value = "digest"
    restore(trainer, 1)
    told = [call.args[0] for call in trainer.main.log.note.call_args_list]
    assert told == [f"{why}; random generators are seeded again from run.seed"] * bool(why)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    """The checkpoint has the same config, so nothing else is wrong: steps, prompts and shapes are the same."""
    (tmp_path / "other").mkdir()
    ledgers = [PromptLedger(tmp_path / name / "prompts.jsonl") for name in (".", "other")]
    for ledger, completions in zip(ledgers, ("first", "sampled otherwise"), strict=True):
        ledger.record(0, [0], ["p0"], completions)
        ledger.record(1, [1], ["p1"], "second")
    ours, theirs = (ledger.digest(1) for ledger in ledgers)
    path = tmp_path / "checkpoints/step-000001"
    check_of_this_run(path, ours, ledgers[0].digest(1))
    ledgers[0].rewind(1)
    assert ledgers[0].digest(1) == ours != ledgers[1].digest(2)
    with pytest.raises(CheckpointError, match=f"step-000001.*got {ours}.*expected {theirs}.*--resume {tmp_path}"):
        check_of_this_run(path, theirs, ours)
