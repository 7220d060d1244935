"""Tests the error for a dead engine, with a stand-in for its process. Real engines die in test_faults.py."""

import socket
import subprocess
import sys

import pytest

from moe_rl.errors import EngineError, SamplerGone
from moe_rl.messages import Channel
from moe_rl.rollout.engine import VllmEngine
from moe_rl.vllm import wire
from moe_rl.vllm.process import Scratch
from moe_rl.vllm.wire import EngineSettings


@pytest.mark.parametrize("ready", [True, False])
def test_only_an_engine_that_was_there_is_gone(tmp_path, ready):
    """A run whose sampler is gone exits with 3, to be resumed. Resuming would not help if the sampler cannot start."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"], start_new_session=True)
    log = tmp_path / "engine.log"
    settings = EngineSettings(tmp_path, "float32", 8, 1, 1, None, "", log, startup_timeout_seconds=1.0, seed=0)
    engine = VllmEngine(settings, process, Channel(ours, wire.REPLIES), Scratch())
    engine.vllm_version = "0" if ready else ""
    theirs.close()
    with pytest.raises(EngineError, match=r"died \(pid \d+, log .*engine.log\): got exit code 7") as raised:
        engine.score([[1, 2, 3]])
    assert isinstance(raised.value, SamplerGone) == ready
