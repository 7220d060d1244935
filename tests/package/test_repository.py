"""What a repository has for its visitors: a workflow that runs what is run here, templates, and metadata."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def test_the_workflow_runs_the_continuous_integration_and_nothing_else():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step and "if" not in step] == [".ci/run"]


_LEFT_OUT = "make test-part is left out: style and tests took 25 minutes, 25 or more"


@pytest.mark.parametrize(("minutes", "last"), [(0, "make test-part"), (25, _LEFT_OUT)])
def test_a_slow_machine_leaves_out_the_long_tests(tmp_path, minutes, last):
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "make $1"\n')
    make.chmod(0o755)
    # bash begins to count its seconds at the number in its environment.
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SECONDS": str(60 * minutes)}
    said = subprocess.run([script], env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    assert said == ["make lint", "make test", last]


def test_the_forms_of_issues_are_whole():
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 2
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form["name"] and form["description"]
        for part in form["body"]:
            assert part["type"] == "textarea" and part["attributes"]["label"]


def test_setup_and_citation_agree():
    setup, cited = (ROOT / "setup.py").read_text(encoding="utf-8"), yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f'author="{cited["authors"][0]["name"]}"' in setup
    assert f'license="{cited["license"]}"' in setup
