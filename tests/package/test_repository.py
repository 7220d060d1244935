"""What a repository has for its visitors: a workflow that runs what is run here, templates, and metadata."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_workflow_runs_the_continuous_integration_and_nothing_else():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step and "if" not in step] == [".ci/run"]
    targets = re.findall(r"^ *make (\S+)$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    assert targets == ["lint", "test", "test-part"]


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
