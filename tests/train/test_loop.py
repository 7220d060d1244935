"""A step of the loop by itself; whole runs: tests/end_to_end."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from moe_rl.train import trainer
from moe_rl.train.peers import StopRequested
from moe_rl.train.step_metrics import Clock


@pytest.mark.parametrize("where", ["nowhere", "collect", "save"])
def test_rollouts_are_trained_on_when_all_of_them_are_kept(monkeypatch, where):
    """The request to stop may come while they are written, before the thread that listens has noted it."""

    def left(at):
        if where == at:
            raise StopRequested

    def collect(step, clock):
        source.cursor = 8
        left("collect")
        return SimpleNamespace(sequences=[])

    @contextmanager
    def phase(*_, **__):
        yield

    source = SimpleNamespace(cursor=3, seek=lambda cursor: setattr(source, "cursor", cursor))
    run = SimpleNamespace(
        main=trainer.RankZero(SimpleNamespace(phase=phase), SimpleNamespace(source=source, collect=collect)),
        peers=SimpleNamespace(phase=phase, to_be_left=nullcontext, asked=False),
        store=SimpleNamespace(check_published=lambda shards: None),
        kept=SimpleNamespace(save=lambda *_: left("save")),
        checkpoints=SimpleNamespace(pending=None),
        _rest=lambda main, clock: None,
        _retain_rollouts=lambda step: None,
    )
    monkeypatch.setattr(trainer.world, "broadcast", lambda batch, kind: batch)
    batch = trainer.Trainer.sample(run, 1, Clock(lambda part: None))
    assert (batch is None, source.cursor) == ((False, 8) if where == "nowhere" else (True, 3))
