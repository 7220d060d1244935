"""The night's parts: each runs once on a state of the code, and a failure stops no other."""

import json
import subprocess

import pytest

from tools.dev import nightly
from tools.dev.gpu_day import Part


@pytest.fixture
def night(tmp_path, monkeypatch):
    """night(*arguments) -> exit status, and which parts ran. `bad` fails until the file `mended` is there."""
    count = f"open(r'{tmp_path}/ran', 'a').write"
    parts = {
        "bad": Part(
            "fails", 30, ("-c", f"import os; {count}('bad ');assert os.path.exists(r'{tmp_path}/mended')"), writes=False
        ),
        "good": Part("passes", 30, ("-c", f"{count}('good '); print('1 passed')"), writes=False),
    }
    monkeypatch.setattr(nightly, "PARTS", parts)
    monkeypatch.setattr(nightly, "state_of_the_code", lambda: (tmp_path / "state").read_text())

    def run(*arguments: str) -> tuple[int, list[str]]:
        (tmp_path / "ran").write_text("")
        status = nightly.main([*arguments, "--out", str(tmp_path / "out")])
        return status, (tmp_path / "ran").read_text().split()

    (tmp_path / "state").write_text("one")
    return run


def test_a_part_that_passed_runs_again_only_on_another_state(night, tmp_path):
    assert night() == (1, ["bad", "good"])
    found = json.loads((tmp_path / "out/nightly.json").read_text())
    assert "AssertionError" in found["bad"]["failed"] and found["good"]["result"] == "1 passed"
    (tmp_path / "mended").touch()
    assert night("good") == (0, [])
    assert night() == (0, ["bad"])
    assert night() == (0, [])
    assert night("--again", "good") == (0, ["good"])
    (tmp_path / "state").write_text("two")
    assert night() == (0, ["bad", "good"])
    with pytest.raises(SystemExit):
        night("other")


def test_a_change_that_is_not_committed_is_another_state(tmp_path, monkeypatch):
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "code.py").write_text("one")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    states = [nightly.state_of_the_code()]
    (tmp_path / "code.py").write_text("two")
    states.append(nightly.state_of_the_code())
    (tmp_path / "new.py").write_text("three")
    states.append(nightly.state_of_the_code())
    assert states[1].startswith(states[0] + "+") and len(set(states)) == 3
    (tmp_path / "new.py").unlink()
    assert nightly.state_of_the_code() == states[1]
