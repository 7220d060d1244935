"""Tests how `make venv` calls pip, with a Python that only writes down how it is called."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*)
    mkdir -p "$4/bin" && cp "$0" "$4/bin/python"
    for wheel in nccl cu13; do mkdir -p "$4/lib/python3.12/site-packages/nvidia/$wheel/include"; done ;;
*"-m pip"*) echo "$CPATH $*" >> "$CALLS" ;;
esac
"""


@pytest.mark.parametrize("already", ["", "/headers/of/mine"])
def test_what_is_compiled_finds_the_headers_of_the_environment(tmp_path, already):
    """A machine with nvcc alone has no nccl.h and no cusparse.h; torch's wheels have both."""
    python, calls, venv = tmp_path / "python", tmp_path / "calls", tmp_path / "venv"
    python.write_text(PYTHON)
    python.chmod(0o755)
    subprocess.run(
        ["make", "-s", f"VENV={venv}", "GPU=1", f"PYTHON={python}", f"{venv}/.installed"],
        cwd=ROOT,
        env={**os.environ, "CALLS": str(calls), "CPATH": already},
        check=True,
        capture_output=True,
    )
    wheels, compiled = calls.read_text().splitlines()
    assert "gpu.txt" in wheels and "gpu_built.txt" in compiled and "--no-build-isolation" in compiled
    headers = [f"{venv}/lib/python3.12/site-packages/nvidia/{wheel}/include" for wheel in ("cu13", "nccl")]
    assert compiled.split()[0].split(":") == [*headers, *([already] if already else [])]
