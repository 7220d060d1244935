"""The public API: the examples of docs/howto/library.md print what the page shows, and a checker knows their types."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_rl

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/howto/library.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def run(*command: object, folder: Path) -> str:
    """What a command printed, in a folder that has the assets of this repository."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def scripts(tmp_path) -> list[Path]:
    """Each example as a script, in their order."""
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    paths = [tmp_path / f"example{number}.py" for number in range(len(EXAMPLES))]
    for path, (code, _) in zip(paths, EXAMPLES, strict=True):
        path.write_text(code, encoding="utf-8")
    return paths


@pytest.mark.long
def test_every_example_prints_what_the_page_shows(scripts):
    assert len(EXAMPLES) == PAGE.count("```python") == 4
    for path, (code, shown) in zip(scripts, EXAMPLES, strict=True):
        assert 20 <= len(code.splitlines()) <= 40
        printed = run(path, folder=path.parent).splitlines()
        assert [line for line in printed if line in shown.splitlines()] == shown.splitlines()


@pytest.mark.long
def test_the_examples_pass_a_strict_type_check(scripts):
    folder = scripts[0].parent
    strict = ("-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", "--cache-dir", folder / "cache")
    assert "no issues found in 4 source files" in run(*strict, *scripts, folder=folder)


def test_the_names_are_there_and_the_stub_has_the_same():
    assert set(moe_rl.__all__) <= set(dir(moe_rl))
    stub = ast.parse((ROOT / "moe_rl/__init__.pyi").read_text(encoding="utf-8"))
    imported = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == moe_rl._HOMES
    for name in moe_rl.__all__:
        assert getattr(moe_rl, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = moe_rl.nothing


def test_importing_the_package_imports_nothing_else():
    script = "import sys, moe_rl; print(sorted({'numpy', 'torch', 'vllm', 'megatron'} & set(sys.modules)))"
    assert run("-c", script, folder=ROOT).strip() == "[]"
