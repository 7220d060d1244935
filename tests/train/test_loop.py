"""Tests a step of the loop by itself; tests/end_to_end runs whole trainings."""

import traceback
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from moe_rl.clock import Clock
from moe_rl.commands.train import _told
from moe_rl.config.load import load_config
from moe_rl.errors import CheckpointError, CollapseError, EngineError, SamplerGone, Stopped
from moe_rl.train import hangs, loop, trainer
from moe_rl.train.loop import _saying_how_to_go_on
from moe_rl.train.peers import StopRequested
from moe_rl.train.rank_zero import RankZero
from moe_rl.train.run_folder import RunFolder
from tests.megatron.models import facts


@pytest.mark.parametrize(
    "error, saved, told",
    [
        (EngineError("planted"), [2, 4], "planted; go on after step 4 with --resume {run}"),
        (EngineError("planted"), [], "planted; no checkpoint is complete: begin the run again in its folder with "
                                     "--resume {run} --step 0"),
        (EngineError("planted\n  | a log"), [2], "planted\n  | a log\ngo on after step 2 with --resume {run}"),
        # The newest checkpoint holds the collapsed model, or cannot be read, so the message names the other
        # checkpoints.
        (CollapseError("planted"), [2, 4], "planted; go on from another checkpoint with --resume {run} --step N; "
                                           "N may be 2"),
        (CheckpointError("planted"), [2], "planted"),
    ],
)  # fmt: skip
def test_whatever_ends_a_run_says_how_to_go_on(tmp_path, error, saved, told):
    def end():
        for step in saved:  # the last checkpoint appears while the run shuts down
            (tmp_path / f"checkpoints/step-{step:06d}").mkdir(parents=True)

    with pytest.raises(type(error)) as raised, _saying_how_to_go_on(tmp_path), ExitStack() as stack:
        stack.callback(end)
        raise error
    assert _told(raised.value) == told.format(run=tmp_path)


def test_an_error_that_nobody_expected_says_it_too(tmp_path):
    with pytest.raises(KeyError) as raised, _saying_how_to_go_on(tmp_path):
        raise KeyError("planted")
    text = "".join(traceback.format_exception(raised.value))
    assert "planted" in text and text.rstrip().endswith(f"--resume {tmp_path} --step 0")


@pytest.mark.parametrize("where", ["nowhere", "inside", "behind"])
def test_rollouts_are_trained_on_when_all_of_them_are_kept(monkeypatch, where):
    """The request to stop may arrive while rollouts are written, or just behind them."""

    def take(step, clock):
        if where == "inside":
            raise StopRequested
        run.peers.asked = where == "behind"
        return SimpleNamespace(sequences=[])

    @contextmanager
    def phase(*_, **__):
        yield

    run = SimpleNamespace(
        main=RankZero(
            SimpleNamespace(phase=phase),
            SimpleNamespace(),
            SimpleNamespace(),
            SimpleNamespace(take=take, unusable=[]),
            SimpleNamespace(),
        ),
        peers=SimpleNamespace(phase=phase, to_be_left=nullcontext, asked=False),
        keeping=SimpleNamespace(poll=lambda step: None),
        config=SimpleNamespace(task=SimpleNamespace(environment=None)),
        _rest=lambda main, clock: None,
        _retain_rollouts=lambda main, step: None,
    )
    monkeypatch.setattr(trainer.world, "broadcast", lambda batch, kind: batch)
    batch = trainer.Trainer.sample(run, 1, Clock(lambda part: None))
    assert (batch is None) == (where != "nowhere")


@pytest.mark.parametrize(("ahead", "leaves"), [(0, False), (1, False), (1, True)])
def test_a_stop_need_not_wait_for_the_next_batch(monkeypatch, ahead, leaves):
    """Only a sampler that works ahead is waited for, and all ranks learn whether it was left."""
    did = []

    def settle(clock):
        did.append("settle")
        if leaves:
            raise StopRequested

    def left(*, late):
        return nullcontext(did.append(f"late {late}"))

    run = SimpleNamespace(
        config=SimpleNamespace(pipeline=SimpleNamespace(ahead=ahead)),
        main=SimpleNamespace(rollouts=SimpleNamespace(settle=settle)),
        peers=SimpleNamespace(phase=lambda *_: nullcontext(), to_be_left=left),
    )
    monkeypatch.setattr(trainer.world, "broadcast", lambda settled, kind: did.append(settled) or settled)
    assert trainer.Trainer.settle(run, 4, Clock(lambda part: None)) is not leaves
    assert did == (["late True", "settle", not leaves] if ahead else [])


def test_a_stop_saves_a_checkpoint_without_a_call_to_the_pool():
    """The request may have left the pool in the middle of a call, which refuses every further one."""

    def retain(steps):
        raise SamplerGone("the pool was left in the middle of a call")

    saved, nothing = [], SimpleNamespace(finish=lambda: None)
    checkpoints = SimpleNamespace(finish=lambda: None, last=0, pending=None, steps=lambda: [])
    run = trainer.Trainer.__new__(trainer.Trainer)
    run.main = SimpleNamespace(
        rollouts=SimpleNamespace(ledger=SimpleNamespace(digest=lambda step: "digest"), retain=retain)
    )
    run.config = SimpleNamespace(replay=SimpleNamespace(keep_shards=1), pipeline=SimpleNamespace(ahead=1))
    run.peers = SimpleNamespace(
        phase=lambda *_: nullcontext(), part=lambda name: None, stopped=lambda: saved.append("stopped")
    )
    run.keeping = SimpleNamespace(
        part=lambda *_: nullcontext(), checkpoints=checkpoints, exports=nothing,
        save=lambda step, *_, whole: saved.append((step, whole)),
    )  # fmt: skip
    run.train_step = None
    with pytest.raises(Stopped, match="after step 2, with a checkpoint"):
        run.stop(2)
    assert saved == [(2, True), "stopped"]
    with pytest.raises(SamplerGone):
        run.save(3, whole=False)


class Resumed:
    """Stands in for the trainer of a run that is resumed after its last step, and for what the loop opens before."""

    def __init__(self, monkeypatch, folder, *, asked):
        self.asked, self.did, self.part = asked, [], ""
        self.config = load_config("configs/tiny_moe_cpu.yaml", ["run.steps=3"])
        self.keeping = SimpleNamespace(export=lambda *_, last: self.did.append(f"export, last {last}"))
        self.policy = None
        no_world = SimpleNamespace(
            start=lambda *_, **__: None, stop=lambda: None, begun_collectives=None, ranks_of_this_node=lambda: None
        )
        given = {
            "world": no_world,
            "dist": SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1),
            "open_folder": lambda *_: (SimpleNamespace(path=folder, config=None), 3),
            "load_config": lambda path: self.config,
            "Peers": lambda *_, **__: nullcontext(SimpleNamespace(part=self.enter)),
            "Trainer": lambda *_: self,
            "restore": lambda *_: self.did.append(f"restore in {self.part}"),
        }
        for name, value in given.items():
            monkeypatch.setattr(loop, name, value)

    def enter(self, part):
        self.part = part

    def sync(self, version):
        self.did.append(f"sync in {self.part}")

    def evaluate(self, step, *, last):
        self.did.append("evaluate")
        return ""

    def reason_to_stop(self, *, last):
        return "the run was asked to stop" if self.asked else ""

    def stop(self, done, why):
        raise Stopped(why)

    def report(self, done, collapse, early):
        self.did.append("report")


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_that_is_asked_to_stop_during_its_last_evaluation_is_not_finished(monkeypatch, tmp_path, asked):
    """Here the evaluation is repeated after the last step: the process that trained it was asked to stop, too.

    Restore and sync are parts of the start of their own: in the start itself no hang is noticed.
    """
    run = Resumed(monkeypatch, tmp_path, asked=asked)
    with pytest.raises(Stopped) if asked else nullcontext():
        loop.train(run.config, RunFolder(tmp_path), None, [])
    began = ["restore in restore", "sync in sync"]
    assert run.did == [*began, "evaluate", "export, last True", *([] if asked else ["report"])]


class Places:
    """Stands in for the peers: remembers the phase and its part."""

    now = hangs.START

    def phase(self, name, step):
        self.now = name, ""
        return nullcontext()

    def part(self, name):
        self.now = self.now[0], name


def test_ranks_that_wait_for_each_other_are_in_no_phase_that_waits_for_a_sampler(monkeypatch):
    """There a hang would go unnoticed. A phase lasts until the next one begins."""
    peers, met = Places(), {}

    def meet(name, result):
        met[name] = peers.now
        return result

    monkeypatch.setattr(trainer.world, "broadcast", lambda metrics, kind: meet("evaluate", metrics))
    monkeypatch.setattr(trainer.world, "all_reduce", lambda values, op: meet("stop", values))
    monkeypatch.setattr(trainer.dist, "barrier", lambda: meet("end", None))
    progress = SimpleNamespace(evaluations={}, add=lambda *_: None, why_end=lambda: "")
    main = SimpleNamespace(trackers=SimpleNamespace(look=lambda: None), end_run=lambda *_, **__: meet("report", None))
    exports = SimpleNamespace(finish=lambda: meet("export", None))
    run = SimpleNamespace(
        config=SimpleNamespace(eval=SimpleNamespace(every_steps=2), run=SimpleNamespace(max_hours=None)),
        keeping=SimpleNamespace(progress=progress, exports=exports), main=main, peers=peers, replay_ends=None,
        _evaluated=lambda *_: meet("sampling", {}), longest_step=0.0, step_ended=0.0, began=0.0, folder=None,
    )  # fmt: skip
    peers.asked = False
    assert trainer.Trainer.evaluate(run, 2, last=False) == trainer.Trainer.reason_to_stop(run, last=False) == ""
    assert trainer.Trainer.evaluate(run, 3, last=False) == "", "none is due"
    assert not hangs._waits(peers.now)
    trainer.Trainer.report(run, 3, None, "")
    waits = {name: hangs._waits(place) for name, place in met.items()}
    alone = dict.fromkeys(("sampling", "report"), True)
    assert waits == alone | dict.fromkeys(("evaluate", "stop", "export", "end"), False)


@pytest.mark.parametrize(("peak", "adapters"), [(None, False), (1e9, False), (1e9, True)])
def test_utilization_is_what_training_needs_over_what_its_devices_can_do(monkeypatch, peak, adapters):
    """Two ranks of 10^9 operations a second had 0.5 s for sequences of 5 and 3 tokens; None: nobody knows. Weights
    under adapters need no gradients."""
    monkeypatch.setattr(trainer.world, "peak_memory", dict)
    monkeypatch.setattr(trainer.dist, "get_world_size", lambda: 2)
    model, metrics, clock = facts(), {}, Clock(lambda part: None)
    clock.seconds = dict.fromkeys(trainer._TRAINING, 0.5)
    guards = SimpleNamespace(after_step=lambda step, metrics: None)
    run = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(lora=object() if adapters else None)),
        facts=model, peak_flops=peak, main=None, train_step=SimpleNamespace(guards=guards),
        keeping=SimpleNamespace(spent=dict), evidence=SimpleNamespace(of=lambda *_, **__: nullcontext()),
    )  # fmt: skip
    batch = SimpleNamespace(metrics={}, sequences=[SimpleNamespace(forwarded=length) for length in (5, 3)])
    logged = {}
    guards.after_step = lambda step, metrics: logged.update(metrics)
    trainer.Trainer.finish(run, 1, batch, metrics, clock)
    assert logged["throughput/trained_tokens_per_second"] == 16
    # of each token 2 layers of attention (768 elements), router (192) and 4 experts (384 each), and the output matrix
    matrices = 2 * (768 + 12 * 16 + 4 * 3 * 8 * 16) + 96 * 16
    needed = (2 if adapters else 3) * 2 * matrices * 8 + 3 * 2 * 2 * 2 * (8 + 8) * (15 + 6)
    assert logged.get("throughput/mfu") == (None if peak is None else needed / (0.5 * 2 * 1e9))


def test_a_replay_ends_where_the_run_that_it_replays_has_ended():
    run = SimpleNamespace(replay_ends=3, config=SimpleNamespace(run=SimpleNamespace(replays="runs/RUN")))
    ends = [trainer.Trainer.evaluate(run, step, last=False) for step in (0, 2, 3)]
    assert ends[:2] == ["", ""] and "runs/RUN" in ends[2]
    assert trainer.Trainer.evaluate(run, 3, last=True) == ""  # it is the last step anyway
    assert trainer.Trainer.sync(run, 3) == {}
