"""The public API: the examples of docs/howto/library.md print what the page shows, and a checker knows their types."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moe_rl
from moe_rl import messages
from moe_rl.models.hf import read_model
from moe_rl.trace import ShardWriter, TraceSpec, signed
from moe_rl.types import Provenance, Sequence, Span, sampled_by

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


def _check(path: Path, shown: str) -> None:
    printed = run(path, folder=path.parent).splitlines()
    assert [line for line in printed if line in shown.splitlines()] == shown.splitlines()


@pytest.fixture
def recorded(scripts) -> None:
    """Leave what the first example leaves, a store and sequences, without an engine."""
    folder, rng = scripts[0].parent, np.random.default_rng(0)
    spec, sequences = TraceSpec.of(read_model(ROOT / "assets/tiny_moe/policy")), []
    with ShardWriter(folder / "routes", "step0", spec) as writer:
        for key, prompt, sampled in (("step0/0", 6, 5), ("step0/1", 4, 3)):
            tokens, rows = tuple(map(int, rng.integers(2, 300, prompt + sampled))), prompt + sampled - 1
            scores = rng.random((rows, len(spec.moe_layers), spec.num_experts))
            routes = np.sort(np.argsort(scores, -1)[..., : spec.top_k]).astype(np.uint8)
            ref = writer.add(key, routes, np.array(tokens[:-1], np.int32), [Span(rows, 0, Provenance.DECODE)])
            ref = signed(ref, routes, spec.moe_layers, tokens[:-1])
            logprobs, versions = np.zeros(sampled, np.float32), sampled_by(0, sampled)
            sequences.append(Sequence(key, tokens[:prompt], tokens[prompt:], logprobs, 1.0, versions, ref))
    (folder / "sequences").write_bytes(messages.encode(sequences))


def test_the_examples_behind_the_recording_print_what_the_page_shows(scripts, recorded):
    for path, (_, shown) in list(zip(scripts, EXAMPLES, strict=True))[1:]:
        _check(path, shown)


@pytest.mark.long
def test_every_example_prints_what_the_page_shows(scripts):
    assert len(EXAMPLES) == PAGE.count("```python") == 4
    for path, (code, shown) in zip(scripts, EXAMPLES, strict=True):
        assert 20 <= len(code.splitlines()) <= 40
        _check(path, shown)


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
