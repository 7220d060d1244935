"""Runs what docs/howto/own_task.md says, as it stands there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/howto/own_task.md").read_text()


@pytest.fixture
def run(tmp_path):
    """Runs a command of the page in a folder that looks like the repository; returns its output."""
    for name in ("assets", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])

    def run(command: str, seconds: float) -> str:
        command = re.sub(r"^python ", f"{sys.executable} ", command)
        command = re.sub(r"^moe-rl ", f"{sys.executable} -m moe_rl ", command)
        command = re.sub(r"^torchrun ", f"{sys.executable} -m torch.distributed.run ", command)
        ended = subprocess.run(
            command, shell=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, timeout=seconds,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout[-3000:]
        return ended.stdout

    return run


@pytest.fixture
def written(run, tmp_path):
    """Writes the files of the whole task, and runs its commands."""
    section = PAGE[PAGE.index("## A whole task") : PAGE.index("## Look, then run")]
    blocks = dict(re.findall(r"```(python|yaml|sh)\n(.*?)```", section, re.DOTALL))
    (tmp_path / "my_task.py").write_text(blocks["python"])
    (tmp_path / "my_task.yaml").write_text(blocks["yaml"])
    assert sum(bool(line.strip()) for line in blocks["python"].splitlines()) <= 30
    commands = blocks["sh"].splitlines()
    assert len(commands) == 3
    for command in commands:
        run(command, 60)
    return tmp_path


def commands_of_the_run() -> list[str]:
    (block,) = re.findall(
        r"```sh\n(.*?)```", PAGE[PAGE.index("## Look, then run") : PAGE.index("## Prompts")], re.DOTALL
    )
    setting, *commands = block.splitlines()
    assert setting.startswith("export PYTHONPATH=$PWD")
    return commands


@pytest.mark.long
def test_the_plan_of_the_task_finds_no_problem(run, written):
    plan, _ = commands_of_the_run()
    assert "1000 prompts" in run(plan, 120)
    # The same page says that an argument without a column is told here.
    module = written / "my_task.py"
    module.write_text(module.read_text().replace("numbers: list[int])", "figures: list[int])"))
    with pytest.raises(AssertionError, match="figures.*question, numbers, carry"):
        run(f"{plan} task.chat=null", 120)  # without a template, which takes seconds to import what renders it


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_task_trains(run, written):
    _, train = commands_of_the_run()
    run(f"{train} run.steps=2", 700)
    (metrics,) = written.glob("runs/*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [step for step in steps if "reward/part/right" in step]
    assert len(rewards) == 2
    for step in rewards:
        assert step["reward/failed_verdicts"] == 0
        assert 0 < step["reward/part/right"] < 1 and 0 < step["reward/part/short"] <= 1
