"""Run folders that were damaged while nobody ran."""

import shutil

import pytest

from tests.chaos import faults
from tools.dev.runs import Launch

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]


def cut(lines):
    lines[1] = lines[1][: len(lines[1]) // 2] + "\n"


def lost(lines):
    del lines[[line.startswith('{"step": 2, "kind": "train"') for line in lines].index(True)]


DAMAGES = {"metrics.jsonl: a line cut in the middle": cut, "metrics.jsonl: the line of a step lost": lost}


@pytest.mark.parametrize("fault", faults.of("folder"), ids=lambda fault: fault.name)
def test_it_is_named(untouched, tmp_path, fault):
    folder = tmp_path / untouched.name
    shutil.copytree(untouched, folder)
    path = folder / "metrics.jsonl"
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    DAMAGES[fault.name](lines)
    path.write_text("".join(lines))
    assert path.read_text() != whole
    run = Launch(tmp_path, "--resume", folder)
    status = run.wait()
    told = run.text().split("torch/distributed/elastic")[0]
    assert all(part in told for part in fault.says), told
    if fault.after == faults.REFUSED:
        assert status != 0 and "moe_rl: " in told and "exitcode  : 2" in run.text()
    else:
        assert status == 0
