"""The main job with its trainer on the pretend CUDA device of the tests, and the real engine on the CPU."""

import json
import os
import subprocess

import pytest

from moe_rl.parent import torchrun
from tests.end_to_end.conftest import BRIEF
from tools.dev.runs import ROOT, python_path

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_run_trains_on_the_device_and_consumes_all_routes(tmp_path):
    settings = ["rollout.weight_transfer=shared_memory", "parallel.expert=1", "rollout.engines=1"]
    command = [*torchrun(1), "-m", "tests.support.pretend_train", "--config", "configs/tiny_moe_cpu.yaml"]
    environment = os.environ | python_path() | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([*command, *BRIEF, *settings, f"run.runs_dir={tmp_path}"], cwd=ROOT, env=environment, check=True)
    (file,) = tmp_path.glob("*/summary.json")
    summary = json.loads(file.read_text())
    assert summary["steps"] == 2 and summary["routes_applied_mismatch"] == 0
    assert summary["routes_consumed"] == summary["routes_expected"] > 0
