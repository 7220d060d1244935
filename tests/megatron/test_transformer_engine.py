"""The models of TransformerEngine's layers, by their names and shapes: its Python part without its compiled one."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

from tools.dev.gpu_kit import pinned
from tools.dev.runs import ROOT, python_path

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]  # needs the network


def test_weights_experts_and_checkpoints_of_every_family_keep_their_places(tmp_path):
    version = pinned(ROOT / "requirements/gpu.txt")["transformer-engine"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(tmp_path)]
    subprocess.run([*pip, f"transformer-engine=={version}"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.stubbed_te", str(tmp_path)],
        cwd=ROOT, text=True, capture_output=True, check=False, timeout=800,
        env=os.environ | python_path(tmp_path / "site") | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) >= 5 and not any(found.values()), found
