"""Tests an engine whose two workers are on two simulated hosts: two_nodes.py, in a namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout import two_nodes
from tests.rollout.serving import ROOT


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_an_engine_spans_two_nodes_and_ends_when_it_loses_one(checkpoint, other_checkpoint, tmp_path):
    command = [sys.executable, two_nodes.__file__, str(checkpoint), str(other_checkpoint), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if done.returncode == two_nodes.NO_NAMESPACES:
        pytest.skip(done.stderr)
    logs = [log.read_text(errors="replace")[-2000:] for log in Path(tmp_path).rglob("node*.log")]
    assert done.returncode == 0, done.stderr[-3000:] + "\n".join(logs)
