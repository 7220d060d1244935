"""Tests the progress bar on a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from pathlib import Path
from conftest import metrics
from moe_rl.report.log import RunLog
log = RunLog(Path(sys.argv[1]), total_steps=40, mode="r3")
log.note("starting [the] sampler")
with log.phase("sampling now"):
    log.step(1, metrics(1))
    log._progress.refresh()
assert log._progress.tasks[0].description == "starting"
log.close()
"""


def run_on_terminal(tmp_path: Path, *, stdout_too: bool) -> tuple[str, str]:
    """Return what a program's terminal showed, and what its redirected stdout got."""
    master, slave = pty.openpty()
    shown: list[bytes] = []

    def drain() -> None:
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:
                return
            if not data:
                return
            shown.append(data)

    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
        "TERM": "xterm",
        "COLUMNS": "150",
    }
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment,
        stdin=slave,
        stderr=slave,
        stdout=slave if stdout_too else subprocess.PIPE,
    ) as process:
        os.close(slave)
        reader = threading.Thread(target=drain)
        reader.start()
        out = "" if stdout_too else process.stdout.read().decode()
        assert process.wait(60) == 0, b"".join(shown).decode()
    reader.join(10)
    os.close(master)
    return b"".join(shown).decode(), out


def test_bar_below_the_lines_on_one_terminal(tmp_path):
    shown, _ = run_on_terminal(tmp_path, stdout_too=True)
    assert "starting [the] sampler" in shown  # brackets are text, not markup
    assert "sampling now" in shown and "1/40" in shown and "1536/1536" in shown


def test_redirected_stdout_gets_plain_lines_only(tmp_path):
    shown, out = run_on_terminal(tmp_path, stdout_too=False)
    assert "sampling now" in shown and "1536/1536" not in shown
    note, header, line = out.splitlines()
    assert note == "starting [the] sampler" and "kl k3" in header and "1536/1536" in line
    assert "\x1b" not in out
