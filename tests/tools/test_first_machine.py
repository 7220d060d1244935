"""The first day on a GPU, run dry with what a likely first machine has installed, and the kit."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tools.dev import gpu_kit
from tools.dev.gpu_day import PARTS
from tools.dev.runs import ROOT

pytestmark = [pytest.mark.long, pytest.mark.nightly, pytest.mark.timeout(3600)]
ITS_TORCH = ("torch==2.11.0", "triton==3.6.0")
ITS_OTHERS = ("numpy==2.5.*", "transformers==5.17.*", "sympy", "networkx", "jinja2", "setuptools")


def test_every_part_that_needs_no_vllm_is_done(tmp_path):
    python = machine(tmp_path / "machine")
    assert gpu_kit.main(["--out", str(tmp_path / "kit")]) == 0
    path = os.pathsep.join([str(tmp_path / "kit/site"), str(ROOT)])
    told = tmp_path / "told.json"
    command = [python, "-m", "tools.dev.gpu_day", "--dry", "--out", str(tmp_path / "day"), "--json", str(told)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    found = json.loads(told.read_text())
    assert found["parts_failed"] == 0, {name: found["parts"][name]["failed"] for name in found["failed"]}
    assert set(found["done"]) == {name for name, part in PARTS.items() if not part.needs_vllm}
    assert set(found["left_out"]) == PARTS.keys() - set(found["done"])
    assert all(found["versions"][name].endswith(")") for name in ("torch", "transformers")), "versions are not ours"
    assert found["versions"]["numpy"].startswith("2.5.") and found["versions"]["megatron-core"]


def machine(folder: Path) -> Path:
    """An environment with the first machine's versions. torch for a CPU is in no package index that we use: the CUDA
    build runs without a GPU, with the CUDA libraries of our own environment."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", "--no-compile"]
    subprocess.run([*pip, "--no-deps", *ITS_TORCH], check=True)
    subprocess.run([*pip, *ITS_OTHERS], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "nvidia").symlink_to(Path(sysconfig.get_path("purelib")) / "nvidia")
    return python
