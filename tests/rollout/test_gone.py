"""Tests the error for a dead child, with a stand-in for it. Real engines die in test_faults.py."""

import os
from pathlib import Path
from unittest import mock

import pytest

from moe_rl.errors import EngineError, SamplerGone
from moe_rl.rollout.child_process import ChildProcess
from moe_rl.vllm import wire

ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize("ready", [True, False])
def test_only_a_child_that_was_there_is_gone(tmp_path, ready):
    """A run whose sampler is gone exits with 3, to be resumed. Resuming would not help if the sampler cannot start."""
    child = ChildProcess(
        "stand-in",
        "tests.rollout.gone_child",
        log_path=tmp_path / "engine.log",
        environment=os.environ | {"PYTHONPATH": ROOT, "READY": "yes" if ready else ""},
        replies=wire.REPLIES,
        alive=wire.Alive,
        silence_seconds=20.0,
    )
    ask = wire.Numbered(0, wire.AskCounts())
    with pytest.raises(EngineError, match=r"died \(pid \d+, .*engine.log\): got exit code 7") as raised:
        child.send(ask)
        reply = child.started(wire.Ready, 20.0)
        assert ready and reply == wire.Ready("0")
        child.send(ask)
        child.receive()
    assert isinstance(raised.value, SamplerGone) == ready and not child.alive()
    with pytest.raises(SamplerGone, match="exit code 7"):
        child.send(ask)


@pytest.mark.parametrize("hears", [True, False])
def test_a_child_that_hears_a_goodbye_in_the_middle_of_a_call_may_leave_in_order(tmp_path, hears):
    left = tmp_path / "left"
    child = ChildProcess(
        "stand-in",
        "tests.rollout.waiting_child",
        log_path=tmp_path / "engine.log",
        environment=os.environ | {"PYTHONPATH": ROOT, "LEFT": str(left)},
        replies=wire.REPLIES,
        alive=wire.Alive,
        silence_seconds=60.0,
    )
    ask = wire.Numbered(0, wire.AskCounts())
    child.send(ask)
    child.started(wire.Ready, 60.0)
    child.send(ask)
    with mock.patch.object(child, "_received", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        child.receive()
    child.close(wire.Close(), hears=hears)
    assert left.exists() == hears and child._process.returncode is not None
