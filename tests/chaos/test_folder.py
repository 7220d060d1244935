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


def changed(lines):
    at = next(at for at, one in enumerate(lines[1]) if one.isdigit() and lines[1][at - 1] == ".")
    lines[1] = f"{lines[1][:at]}{(int(lines[1][at]) + 1) % 10}{lines[1][at + 1 :]}"


def edited(key, value):
    def edit(lines):
        at = next(at for at, line in enumerate(lines) if line.startswith(f"  {key}:"))
        lines[at] = f"  {key}: {value}\n"

    return edit


DAMAGES = {
    "metrics.jsonl: a line cut in the middle": cut,
    "metrics.jsonl: the line of a step lost": lost,
    "metrics.jsonl: a digit changed": changed,
    "config.yaml: clip_low edited": edited("clip_low", 0.25),
    "config.yaml: temperature edited": edited("temperature", 0.75),
}


@pytest.mark.parametrize("fault", faults.of("folder"), ids=lambda fault: fault.name)
def test_it_is_named(untouched, tmp_path, fault):
    folder = tmp_path / untouched.name
    shutil.copytree(untouched, folder)
    path = folder / fault.name.partition(":")[0]
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
