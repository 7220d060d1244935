"""Tests what several benchmarks share, and what those of peers compare."""

import ast
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from moe_rl.models.hf import read_model

ROOT = Path(__file__).parents[2]


def bound(path: Path) -> set[str]:
    """Names that a module defines or imports."""
    tree = ast.parse(path.read_text())
    found = {
        alias.asname or alias.name for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) for alias in one.names
    }
    for one in ast.walk(tree):
        if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(one.name)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
    return found


def test_what_scripts_import_from_here_exists():
    """A benchmark that no test runs would otherwise break unseen when a name moves."""
    scripts = [path for folder in ("benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    missing = []
    for script in scripts:
        text = script.read_text()
        for one in ast.walk(ast.parse(text)):
            if not isinstance(one, ast.ImportFrom) or (one.module or "").split(".")[0] not in (
                "moe_rl",
                "tools",
                "tests",
            ):
                continue
            home = ROOT.joinpath(*one.module.split("."))
            module = home.with_suffix(".py") if home.with_suffix(".py").is_file() else home / "__init__.py"
            names = bound(module) if module.is_file() else set()
            for alias in one.names:
                inside = home / alias.name
                if alias.name not in names and not inside.with_suffix(".py").is_file() and not inside.is_dir():
                    missing.append(f"{script.relative_to(ROOT)}: {one.module}.{alias.name}")
    assert len(scripts) > 60 and missing == []


def test_one_round_is_its_own_quartiles(benchmark):
    ratio = benchmark("updates").ratio
    assert ratio([3.0], [2.0], "a : b") == {"a : b": 1.5, "a : b, quartiles": [1.5, 1.5]}
    assert ratio([2.0, 8.0, 4.0], [2.0] * 3, "a : b") == {"a : b": 2.0, "a : b, quartiles": [1.5, 3.0]}


WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from peer_sides.turns import answer, asked
for number, _ in enumerate(asked(), 1):
    if number > 2:
        sys.exit(3)
    print("a line of a library")
    answer(number / 4)
"""


def test_a_side_answers_each_time_it_is_asked_and_its_end_is_noticed(benchmark, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    folder = str(Path(benchmark("peers").__file__).parent)
    with benchmark("peer_sides.turns").Side([str(worker), folder], [{}]) as side:
        assert [side.work(), side.work()] == [0.25, 0.5]
        with pytest.raises(SystemExit):
            side.work()
    assert side.first.returncode == 3


def test_peers_train_on_an_update_of_the_demo(benchmark, tmp_path):
    peers = benchmark("peers")
    policy = peers.DEMO / "policy"
    (tmp_path / "model").mkdir()
    shutil.copy(policy / "tokenizer.json", tmp_path / "model")
    tokens = peers.write_sequences(tmp_path)
    sequences = json.loads((tmp_path / "sequences.json").read_text())
    assert len(sequences) == 256  # 64 prompts, 8 completions each, in two updates
    assert sum(len(prompt) + len(answer) for prompt, answer in sequences) == tokens
    ends = read_model(policy).eos_token_ids
    assert all(answer[-1] in ends for _, answer in sequences)


def test_the_long_answers_end_at_a_token_that_nothing_else_ends_at(benchmark, tmp_path):
    peers = benchmark("peers")
    short, long = read_model(peers.DEMO / "policy"), read_model(peers.endless(tmp_path / "long"))
    assert long.eos_token_ids == (peers.UNKNOWN_END[0],)
    assert not set(long.eos_token_ids) & set(short.eos_token_ids)


SPINS = "import time\nend = time.monotonic() + 30\nprint('begun', flush=True)\nwhile time.monotonic() < end: pass"


def begun(command):
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "begun\n"
    return child


def grown(own, *, by, since):
    """Wait until what the benchmark has used has grown so much, and return it."""
    deadline = time.monotonic() + 60
    while (now := own()) < since + by:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return now


def test_what_a_benchmark_starts_is_no_load_beside_it(benchmark):
    """Neither while it runs, nor when it has ended, nor when it was killed with its parent."""
    output = benchmark("output")
    before = output._own()
    child = begun([sys.executable, "-c", SPINS])
    running = grown(output._own, by=0.3, since=before)
    child.kill()
    child.wait()
    ended = output._own()
    assert ended > running - 1e-9  # the same hundredths of a second, added in another order
    parent = begun([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}])"])
    grown(output._own, by=0.3, since=ended)
    (grandchild,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    grandchild.kill()
    assert output._own() >= ended + 0.25


@pytest.mark.parametrize(("others", "hold"), [(0.0, True), (0.09, True), (0.11, False), (3.0, False)])
def test_a_figure_says_whether_it_holds_beside_others(benchmark, monkeypatch, tmp_path, capsys, others, hold):
    """For a second on two processors, of which others use a twentieth at most."""
    output = benchmark("output")
    monkeypatch.setattr(output.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: 11.0))
    monkeypatch.setattr(output, "_BEGAN", (10.0, 50.0, 5.0))
    monkeypatch.setattr(output, "_busy", lambda: 50.7 + others)
    monkeypatch.setattr(output, "_own", lambda: 5.7)
    output.tell({"seconds": 1.5}, tmp_path / "result.json")
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["seconds"] == 1.5 and written["figures_hold"] is hold
    assert written["machine_load"] == pytest.approx(others / 2)
    assert ("DO NOT HOLD" in capsys.readouterr().out) is not hold


# A benchmark that prints the seconds of others while the process with this number uses one second.
LOOKS = """
import sys, time
import psutil
import output
other, busy, own = psutil.Process(int(sys.argv[1])), output._busy(), output._own()
end = sum(other.cpu_times()[:2]) + 1.0
while sum(other.cpu_times()[:2]) < end:
    time.sleep(0.05)
print((output._busy() - busy) - (output._own() - own))
"""


def test_a_process_of_somebody_else_is_load():
    other = begun([sys.executable, "-c", SPINS])
    try:
        command, folder = [sys.executable, "-c", LOOKS, str(other.pid)], Path(__file__).parents[2] / "benchmarks"
        assert float(subprocess.run(command, cwd=folder, capture_output=True, check=True, text=True).stdout) > 0.5
    finally:
        other.kill()
        other.wait()


ALONE = {
    "simulate_cluster.py", "pairs.py", "stability_study.py", "adapter_study.py", "low_precision.py", "staleness.py",
    "one_node.py", "simulate_queue.py",
}  # fmt: skip


def test_every_benchmark_that_measures_writes_the_load_beside_it():
    """The others model or count, or only give parts to those."""
    folder = Path(__file__).parents[2] / "benchmarks"
    writers = [path for path in folder.glob("*.py") if "options.json" in path.read_text() and path.name not in ALONE]
    assert len(writers) > 10
    for path in writers:
        text = path.read_text()
        assert "from output import" in text and ("tell(" in text or "write(" in text or "beside()" in text), path.name


def test_the_factor_of_a_score_is_that_of_the_objective(benchmark):
    """1 where nothing moved, whatever the objective; else what its formula says, and without a clip the exact one."""
    staleness = benchmark("staleness")
    sequences = [
        SimpleNamespace(token_ids=(1,) * length, rollout_logprobs=np.full(length, -1.0, np.float32), reward=reward)
        for length, reward in ((2, 1.0), (1, 0.0))
    ]
    still = staleness.Batch(sequences, [0, 0], [np.full(2, -1.0), np.full(1, -1.0)], 0)
    for name, objective in staleness.OBJECTIVES.items():
        assert still.factors(objective).tolist() == pytest.approx([1, 1, 1]), name
        assert staleness.measured([still], objective) == pytest.approx({"error": 0, "ess": 1, "zero": 0}, abs=1e-12)
    drift = np.array([0.3, -0.1]), np.array([-0.2])
    moved = staleness.Batch(sequences, [0, 0], [-1.0 + one for one in drift], 2)
    whole, ratios = np.exp([0.2, 0.2, -0.2]), np.exp(np.concatenate(drift))
    assert moved.exact.tolist() == pytest.approx(whole)
    expected = {
        "no ratio": [1, 1, 1],
        "token truncate": ratios,
        "sequence truncate, vtrace": np.minimum(whole, 1),
        "decoupled": ratios,
        "topr": [1, 1, whole[2]],  # a negative advantage has the truncated ratio
        "gspo, sampler": [0, 0, 0],  # pushed further than the clip range on both sides
    }
    for name, factors in expected.items():
        assert moved.factors(staleness.OBJECTIVES[name]).tolist() == pytest.approx(list(factors)), name
