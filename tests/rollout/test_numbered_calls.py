"""Tests calls that are under way at once, with a stand-in for the engine. Real engines do it in test_in_flight.py."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_rl.errors import DiskError, EngineError, RequestRefused, TraceDiskError, TraceError, WeightSyncError
from moe_rl.rollout.child_process import ChildProcess
from moe_rl.rollout.engine import NumberedCalls, VllmEngine
from moe_rl.vllm import wire
from moe_rl.vllm.child import _failure

ROOT = str(Path(__file__).parents[2])


def test_a_long_call_is_sent_while_long_replies_come(tmp_path):
    """More than a socket holds goes both ways, and the child reads only when its replies were read."""
    child = ChildProcess(
        "stand-in",
        "tests.rollout.busy_child",
        log_path=tmp_path / "engine.log",
        environment=os.environ | {"PYTHONPATH": ROOT},
        replies=wire.REPLIES,
        alive=wire.Alive,
        silence_seconds=20.0,
    )
    try:
        settings = wire.EngineSettings(tmp_path, "float32", 8, 1, 1, None, "", tmp_path / "engine.log", 20.0, 0)
        child.send(wire.Start(settings))
        assert child.started(wire.Ready, 20.0) == wire.Ready("0")
        calls, heard = NumberedCalls(child), []
        answers = [calls.submit(wire.AskCounts(), heard.append)[1] for _ in range(2)]
        tokens = [10**6] * 400_000
        answers.append(calls.submit(wire.Score([tokens], None))[1])
        counts = [answer.result(20.0).counts for answer in answers]
        assert [len(one) for one in counts] == [10_000, 10_000, 1] and counts[2] == {"tokens": len(tokens)}
        assert [[(at, one.key) for at, one in told] for told in heard] == [[(0, "key")]] * 2 and child.alive()
    finally:
        child.close(wire.Close())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestRefused("planted: too long"), RequestRefused),
        (TraceError("planted: the shard exists"), RequestRefused),
        (TraceDiskError("planted: the disk is full"), EngineError),
        (DiskError("planted: the disk is full"), EngineError),
        (EngineError("planted: NaN in the weights"), EngineError),
        (WeightSyncError("planted: other weights"), WeightSyncError),
        (RuntimeError("planted: vLLM is broken"), EngineError),
    ],
)
def test_only_a_call_that_is_at_fault_is_refused(error, kind):
    """An agent is told that its request was refused, and any other error ends a run."""
    engine = SimpleNamespace(_name="engine", pid=7, _settings=SimpleNamespace(log_path="log"))
    with pytest.raises(EngineError, match="planted.*pid 7") as caught:
        VllmEngine.checked(engine, _failure(error), wire.Done)
    assert type(caught.value) is kind
