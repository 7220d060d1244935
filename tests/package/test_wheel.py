"""A wheel of the package, installed into an environment of its own, works in a folder that has nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from moe_rl.cli import VERBS

ROOT = Path(__file__).parents[2]


def call(*command: object, cwd: Path, status: int = 0) -> str:
    """What a command printed on both streams, in an environment without PYTHONPATH. Fails on another exit status."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of what git has, so that nothing of an earlier build gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = call("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps"]
    call(*pip, "--no-build-isolation", "-w", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """bin/ of an environment that has the wheel, and beside it only what the wheel needs."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", home / "bin/python", "install", "-q"]
    call(*pip, "--no-deps", "--no-index", wheel, cwd=home)
    site = Path(call(home / "bin/python", "-c", "import site; print(site.getsitepackages()[0])", cwd=home).strip())
    # A line of a .pth file is a folder to look in; the .pth files of that folder, an editable moe_rl, are not read.
    (site / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = call(home / "bin/python", "-c", "import moe_rl; print(moe_rl.__file__)", cwd=home).strip()
    assert Path(where).is_relative_to(home), "the checkout is tested instead of the wheel"
    return home / "bin"


def test_wheel_has_the_command_configs_patches_and_types(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry = next(archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert "moe-rl = moe_rl.cli:main" in entry
    shipped = {
        f"moe_rl/{path.relative_to(ROOT)}" for folder in ("configs", "assets", "patches") for path in files_of(folder)
    }
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "moe_rl/report/templates").iterdir()}
    assert templates and shipped | templates | {"moe_rl/py.typed"} <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"moe_rl"}


def files_of(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]


@pytest.mark.long
def test_every_verb_answers(installed, tmp_path):
    further = {"play", "report", "show", "compare", "prove", "patch", "export", "explain", "doctor", "check-replay"}
    assert set(VERBS) == {"train", "plan", "serve", "trace"} | further
    overview = call(installed / "moe-rl", "--help", cwd=tmp_path)
    for verb in VERBS:
        assert verb in overview
        assert f"usage: moe-rl {verb}" in call(installed / "moe-rl", verb, "--help", cwd=tmp_path)
    assert "usage: moe-rl train" in call(installed / "python", "-m", "moe_rl", "train", "--help", cwd=tmp_path)


def test_patch_and_plan_find_what_ships(installed, tmp_path):
    assert ": patched" in call(installed / "moe-rl", "patch", "--check", cwd=tmp_path)
    plan = tmp_path / "plan.json"
    printed = call(installed / "moe-rl", "plan", "--config", "qwen3_30b_a3b", "--json", plan, cwd=tmp_path)
    document = json.loads(plan.read_text())
    assert document["problems"] == [], printed
    assert document["plan"] is not None
