"""Each file of examples/ is the text of a block of the docs, or called by one, which `make docs-test` runs."""

import os
import re
import subprocess
import sys

from tools.dev.docs_blocks import ROOT, blocks, docs


def test_the_docs_run_every_example():
    shown = {block.text for page in docs() for block in blocks(str(page), page.read_text()) if block.language != "text"}
    files = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".yaml"))
    assert len(files) >= 6
    called = {word for text in shown for word in text.split() if word.startswith("examples/")}
    assert [
        path.name for path in files if path.read_text() not in shown and f"examples/{path.name}" not in called
    ] == []


def test_the_smallest_loop_samples_replays_and_updates(tmp_path):
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    code = (ROOT / "examples/loop.py").read_text()
    small = code.replace("STEPS, PROMPTS, GROUP = 3, 16, 8", "STEPS, PROMPTS, GROUP = 2, 4, 4")
    assert small != code and len(code.splitlines()) <= 250
    (tmp_path / "loop.py").write_text(small)
    done = subprocess.run(
        [sys.executable, "loop.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(
        r"^step (\d): reward \d\.\d\d, policy KL (\S+) native, (\S+) replayed$", done.stdout, re.MULTILINE
    )
    assert [step for step, *_ in found] == ["0", "1"]
    assert all(0 < float(kl) < 0.05 for _, *both in found for kl in both)
