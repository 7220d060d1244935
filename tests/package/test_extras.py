"""The wheel works with what it asks for and nothing else: alone, and with each extra."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from moe_rl.errors import what_lacks
from tests.package.test_wheel import call, wheel

__all__ = ["wheel"]

CHECKED = """
import numpy as np
import moe_rl
rng = np.random.default_rng(0)
tokens, lengths = rng.integers(0, 50, 320), [40] * 8
scores = np.stack([one[tokens] + 0.5 * one[np.roll(tokens, 1)] for one in rng.normal(size=(3, 50, 16))], 1)
routes = np.argsort(-scores, -1)[..., :4].astype(np.int64)
for name, record in ("good", routes), ("late", np.roll(routes, 1, 0)), ("empty", np.zeros_like(routes)):
    np.savez(f"{name}.npz", token_ids=tokens, lengths=lengths, routes=record, native_topk=routes)
for name in ("TraceStore", "MemoryTrace", "validate", "Sequence", "read_model", "to_megatron", "to_verl"):
    getattr(moe_rl, name)
"""
TRAINED = """
import torch
import moe_rl
logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]], requires_grad=True)
weights, experts = moe_rl.replay_topk(logits, torch.tensor([[0, 1]]))
weights[0, 0].backward()
assert experts.tolist() == [[0, 1]] and logits.grad[0, 2] == 0 < logits.grad[0, 0]
for name in ("policy_loss", "advantages", "token_logprobs", "reference_kl", "MismatchSums", "audit", "verl_loss"):
    getattr(moe_rl, name)
"""
ROOMS = {
    "train": "commands.train commands.plan commands.compare commands.prove train.trainer train.loop megatron.model",
    "serve": "commands.serve commands.patch gateway.standalone gateway.web vllm.sampling vllm.offline",
}


def needs(file: Path, extra: str = "") -> list[Requirement]:
    """What a wheel asks for, with an extra."""
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    asked = [Requirement(field) for field in fields]
    return [one for one in asked if one.marker is None or one.marker.evaluate({"extra": extra})]


def link(site: Path, asked: list[Requirement]) -> None:
    """Link these packages, and what they need, from this environment into another; leave out what is not installed."""
    waiting, done = [(one.name, one.extras) for one in asked], set()
    while waiting:
        name, extras = waiting.pop()
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if re.sub("[-_.]+", "-", name).lower() in done:
            continue
        done.add(re.sub("[-_.]+", "-", name).lower())
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)
        further = [Requirement(line) for line in found.requires or ()]
        chosen = [{"extra": extra} for extra in ("", *extras)]
        waiting += [
            (one.name, one.extras)
            for one in further
            if one.marker is None or any(one.marker.evaluate(extra) for extra in chosen)
        ]


def environment(home: Path, file: Path, extra: str = "") -> Path:
    """bin/ of a new environment that has a wheel and what it asks for."""
    venv.create(home, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", home / "bin/python", "install", "-q"]
    call(*pip, "--no-deps", "--no-index", file, cwd=home)
    site = Path(call(home / "bin/python", "-c", "import site; print(site.getsitepackages()[0])", cwd=home).strip())
    link(site, needs(file, extra))
    return home / "bin"


def check_alone(programs: Path, folder: Path) -> None:
    """A batch is checked, and what needs an extra names it."""
    call(programs / "python", "-c", CHECKED, cwd=folder)
    assert "refused" not in call(programs / "moe-rl", "check-replay", "good.npz", "--experts", 16, cwd=folder)
    found = call(programs / "moe-rl", "check-replay", "empty.npz", "--experts", 16, cwd=folder, status=1)
    assert re.search("unwritten +refused", found), found
    assert "usage: moe-rl trace" in call(programs / "moe-rl", "trace", "--help", cwd=folder)
    old = "Python 3.12" if "3.12" not in call(programs / "python", "--version", cwd=folder) else ""
    for command, extra in (("plan", "train"), ("serve", "serve")):
        said = call(programs / "moe-rl", command, "--help", cwd=folder, status=2)
        assert (old or f"'.[{extra}]'") in said and "Traceback" not in said, said
    said = call(programs / "python", "-c", "import moe_rl; moe_rl.policy_loss", cwd=folder, status=1)
    assert "moe_rl.policy_loss needs torch" in said and "'.[objectives]'" in said, said


def test_the_wheel_alone_checks_batches_and_names_the_extra_of_the_rest(wheel, tmp_path):
    assert {one.name for one in needs(wheel)} == {"msgspec", "numpy", "xxhash", "zstandard"}
    check_alone(environment(tmp_path, wheel), tmp_path)


def test_the_extra_objectives_is_enough_for_losses_replay_and_the_claims_of_alignment(wheel, tmp_path):
    programs = environment(tmp_path, wheel, "objectives")
    call(programs / "python", "-c", CHECKED + TRAINED, cwd=tmp_path)
    found = call(programs / "moe-rl", "check-replay", "late.npz", "--experts", 16, cwd=tmp_path, status=1)
    assert re.search("shift +refused", found), found


@pytest.mark.long
@pytest.mark.parametrize("extra", [*ROOMS])
def test_each_further_extra_is_enough_for_its_rooms(wheel, tmp_path, extra):
    programs = environment(tmp_path, wheel, extra)
    rooms = [f"moe_rl.{room}" for room in ROOMS[extra].split()]
    call(programs / "python", "-c", f"import importlib; [*map(importlib.import_module, {rooms})]", cwd=tmp_path)


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", ["", "objectives", *ROOMS])
def test_pip_installs_it(wheel, tmp_path, extra):
    """Alone and with `objectives` also under the oldest Python, where there is one."""
    oldest = [*Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.10*/bin/python")]
    for number, python in enumerate([sys.executable, *(oldest[:1] if extra not in ROOMS else [])]):
        home = tmp_path / str(number)
        subprocess.run([python, "-m", "venv", home], check=True)
        named = f"{wheel}[{extra}]" if extra else str(wheel)
        subprocess.run([home / "bin/python", "-m", "pip", "install", "-q", named], check=True)
        if extra == "":
            check_alone(home / "bin", home)
        elif extra == "objectives":
            call(home / "bin/python", "-c", CHECKED + TRAINED, cwd=home)
        else:
            assert f"usage: moe-rl {extra}" in call(home / "bin/moe-rl", extra, "--help", cwd=home)


@pytest.mark.parametrize(
    ("missing", "said"),
    [("vllm", "'.[gpu]' in the folder of moe_rl's source; without a GPU '.[cpu]'"), ("uvicorn", "'.[serve]'")],
)
def test_what_is_lacking_names_the_extra_that_brings_it(missing, said):
    text = what_lacks("moe-rl serve", ModuleNotFoundError(name=missing), "serve")
    assert f"needs {missing}" in text and said in text
    assert what_lacks("moe-rl serve", ModuleNotFoundError(name="moe_rl.nothing"), "serve") == ""
