"""The patch series on a copy of the files it touches: exact both ways, and refused where it does not fit."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_rl.errors import PatchError
from moe_rl.rollout import patches

WORKER = "v1/worker/gpu_worker.py"
EXPERTS = "model_executor/layers/fused_moe/unquantized_fused_moe_method.py"
COMMAND = Path(patches.__file__).parents[2] / "tools" / "apply_patches.py"


def digests(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def tree(tmp_path):
    """An unpatched copy of the files that the series touches, and a bystander."""
    installed = patches.inspect()
    root = tmp_path / "vllm"
    for path in ("_version.py", *installed.files):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes((installed.root / path).read_bytes())
    (root / "bystander.py").write_text("x = 1\n")
    patches.revert(root)
    return root


def test_apply_and_revert_are_exact_and_idempotent(tree):
    pristine = digests(tree)
    (tree / WORKER).chmod(0o640)
    base = {target.path: target for target in patches.inspect(tree).series.targets}
    assert patches.inspect(tree).summary == "pristine"
    assert {path: pristine[path] for path in base} == {path: target.pristine for path, target in base.items()}
    assert patches.apply(tree).summary == "patched"
    patched = digests(tree)
    assert {name for name in patched if patched[name] != pristine[name]} == set(base) == {WORKER, EXPERTS}
    assert (tree / WORKER).stat().st_mode & 0o777 == 0o640
    modified = (tree / WORKER).stat().st_mtime_ns
    assert patches.apply(tree).summary == "patched"
    assert (tree / WORKER).stat().st_mtime_ns == modified
    assert patches.check(tree).summary == "patched"
    assert patches.problems(tree) == []
    for _ in range(2):
        assert patches.revert(tree).summary == "pristine"
        assert digests(tree) == pristine


def test_patched_files_are_python_and_differ_by_hook_lines_only(tree):
    before = (tree / WORKER).read_text().splitlines()
    patches.apply(tree)
    after = (tree / WORKER).read_text().splitlines()
    for path in (WORKER, EXPERTS):
        compile((tree / path).read_text(), path, "exec")
    added = iter(after)
    assert all(line in added for line in before), "a line of vLLM was changed or removed"
    assert len(after) - len(before) == 12


def test_unpatched_is_one_message_with_the_command(tree):
    (message,) = patches.problems(tree)
    assert str(tree) in message
    assert "Run python tools/apply_patches.py --apply" in message
    with pytest.raises(PatchError, match="not patched"):
        patches.check(tree)


def test_half_patched_is_refused_and_can_be_reverted(tree):
    pristine = digests(tree)
    untouched = (tree / EXPERTS).read_bytes()
    patches.apply(tree)
    (tree / EXPERTS).write_bytes(untouched)
    assert patches.inspect(tree).summary == "half patched"
    (message,) = patches.problems(tree)
    assert EXPERTS in message
    assert "--revert" in message
    with pytest.raises(PatchError, match=EXPERTS):
        patches.apply(tree)
    assert patches.revert(tree).summary == "pristine"
    assert digests(tree) == pristine


@pytest.mark.parametrize("command", [patches.apply, patches.revert, patches.check])
def test_a_changed_file_is_refused_and_nothing_is_written(tree, command):
    with open(tree / EXPERTS, "a") as file:
        file.write("# mine\n")
    before = digests(tree)
    with pytest.raises(PatchError, match=rf"changed by someone else.*{EXPERTS}.*reinstall|Reinstall"):
        command(tree)
    assert digests(tree) == before


def test_a_missing_file_is_named(tree):
    (tree / WORKER).unlink()
    assert any(WORKER in message and "missing" in message for message in patches.problems(tree))


def test_another_version_is_refused(tree):
    version = tree / "_version.py"
    version.write_text(version.read_text().replace("0.32.0", "0.33.1"))
    (message,) = patches.problems(tree)
    assert "got 0.33.1" in message
    assert "0.32.0" in message
    with pytest.raises(PatchError, match="0.33.1"):
        patches.apply(tree)


def test_a_local_version_suffix_is_the_same_version(tree):
    version = tree / "_version.py"
    version.write_text(version.read_text().replace("'0.32.0'", "'0.32.0+cu130'"))
    assert patches.apply(tree).version == "0.32.0"


def test_an_interrupted_write_leaves_whole_files(tree, monkeypatch):
    pristine = digests(tree)
    calls = []

    def fail(source, target):
        calls.append(target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(patches.os, "replace", fail)
    with pytest.raises(PatchError, match="No space left"):
        patches.apply(tree)
    assert len(calls) == 1
    assert digests(tree) == pristine


def test_no_vllm_is_one_message(monkeypatch):
    monkeypatch.setattr(patches.importlib.util, "find_spec", lambda name: None)
    (message,) = patches.problems()
    assert "vLLM is not installed" in message


def test_looking_does_not_import_vllm():
    code = "import sys; from moe_rl.rollout import patches; print(patches.inspect().version, 'vllm' in sys.modules)"
    root = str(Path(patches.__file__).parents[2])
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0.32.0", "False"]


def test_the_command(tree, tmp_path):
    def run(*arguments):
        command = [sys.executable, str(COMMAND), "--vllm", str(tree), *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    report = tmp_path / "state.json"
    unpatched = run("--json", str(report))
    assert unpatched.returncode == 2
    assert "not patched" in unpatched.stderr
    assert json.loads(report.read_text())["state"] == "pristine"
    applied = run("--apply", "--json", str(report))
    assert (applied.returncode, applied.stderr) == (0, "")
    assert json.loads(report.read_text())["files"] == {WORKER: "patched", EXPERTS: "patched"}
    assert run("--check").returncode == 0
    assert run("--revert").stdout.rstrip().endswith("pristine")
