"""Tests `moe-rl trace` as a user runs it: what it prints, writes and returns."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_rl.cli import main
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.types import Provenance, Span

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "trace" / "fixtures"
SPEC = TraceSpec("tool", 16, 2, "dmm")
MODEL = ["--experts", "16", "--top-k", "2", "--fingerprint", "fixture", "--layer-map", "d,m*2,d,m"]


@pytest.fixture
def tool():
    """Calls `moe-rl trace` with a list of arguments."""
    return lambda arguments: main(["trace", *arguments])


def write(root, rows=20, name="s"):
    routes = np.sort(np.argsort(np.random.default_rng(3).random((rows, 2, 16)))[..., :2]).astype(np.uint8)
    with ShardWriter(root, name, SPEC) as writer:
        for key in ("a", "b"):
            writer.add(key, routes, np.arange(rows) * 2, [Span(rows, 5, Provenance.DECODE)])
    return routes


def test_inspect_prints_and_writes_the_facts(tool, tmp_path, capsys):
    write(tmp_path)
    assert tool(["inspect", str(tmp_path), "--json", str(tmp_path / "facts.json")]) == 0
    out = capsys.readouterr().out
    assert "2 of 16 experts, layers dmm" in out and "bound 6.91" in out
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["models"][0]["tokens"] == 40


def test_verify_tells_by_its_status_and_names_the_record(tool, tmp_path, capsys):
    write(tmp_path)
    path = tmp_path / "s.safetensors"
    assert tool(["verify", str(tmp_path)]) == 0
    assert tool(["verify", str(path)]) == 0
    data = bytearray(path.read_bytes())
    data[data.index(b"MRF2", data.index(b"MRF2") + 1) - 3] ^= 4  # the last bytes of the first record's routes
    path.write_bytes(data)
    capsys.readouterr()
    assert tool(["verify", str(tmp_path), "--json", str(tmp_path / "found.json")]) == 1
    out = capsys.readouterr().out
    assert "record a" in out and "record b" not in out and "1 shards: 1 faults" in out
    assert len(json.loads((tmp_path / "found.json").read_text())["faults"]) == 1


def test_cat_gives_the_slice_that_was_asked_for(tool, tmp_path, capsys):
    routes = write(tmp_path)
    assert tool(["cat", str(tmp_path), "--key", "b", "--layers", "2-9", "--rows", "3:5"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["routes"] == routes[3:5, 1:].tolist() and record["token_ids"] == [6, 8]
    assert record["spans"] == [[2, 5, "decode"]] and record["layers"] == [2]
    assert tool(["cat", str(tmp_path), "--layers", "7"]) == 2
    assert "no such layer was recorded" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "lines"), [([], 10), (["--limit", "3"], 3), (["--limit", "0"], 12)])
def test_cat_stops_at_its_limit_and_says_so(tool, tmp_path, capsys, limit, lines):
    for name in "uvwxyz":
        write(tmp_path, name=name)
    assert tool(["cat", str(tmp_path), *limit]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == lines and bool(said.err) == (lines < 12)


def test_cat_into_head_ends_quietly(tmp_path):
    write(tmp_path, rows=2000)
    command = f"{sys.executable} tools/trace.py cat {tmp_path} | head -c 5"
    run = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.stderr) == ('{"key', "")


def test_import_takes_replies_and_says_what_is_wrong_with_others(tool, tmp_path, capsys):
    file = str(FIXTURES / "sglang_024911f2.jsonl")
    done = tmp_path / "done.json"
    given = ["import", str(tmp_path), file, "--format", "sglang", "--shard", "new", *MODEL]
    assert tool([*given, "--json", str(done)]) == 0
    assert [ref.rows for ref in TraceStore(tmp_path).records("new")] == [10, 15]
    told = json.loads(done.read_text())["references"]
    assert [one["rows"] for one in told] == [10, 15] and all(one["source_sum"] for one in told), "what replay needs"
    assert tool(given) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert tool(["import", str(tmp_path), file, "--format", "sglang", "--check", *MODEL]) == 0
    wrong = [*MODEL[:-1], "d,d,m,m,m"]
    found = tmp_path / "found.json"
    assert tool(["import", str(tmp_path), file, "--format", "sglang", "--check", *wrong, "--json", str(found)]) == 1
    assert "layer map" in {finding["rule"] for finding in json.loads(found.read_text())["findings"]}
    assert tool(["import", str(tmp_path), file, "--format", "sglang"]) == 2
    assert "--model" in capsys.readouterr().err


def test_import_of_npy_with_the_layer_map_of_a_checkpoint(tool, tmp_path, capsys):
    with np.load(FIXTURES / "tiny_policy.npz", allow_pickle=False) as known:
        np.save(tmp_path / "routes.npy", known["routes"])
        np.save(tmp_path / "tokens.npy", known["token_ids"])
    what = ["--format", "npy", "--model", str(ROOT / "assets/tiny_moe/policy"), "--token-ids"]
    what += [str(tmp_path / "tokens.npy")]
    assert tool(["import", str(tmp_path), str(tmp_path / "routes.npy"), *what]) == 2
    assert "--weight-version" in capsys.readouterr().err
    what += ["--key", "k", "--weight-version", "0"]
    assert tool(["import", str(tmp_path), str(tmp_path / "routes.npy"), *what]) == 0
    (ref,) = TraceStore(tmp_path).records("imported")
    assert ref.rows == 100
    assert tool(["import", str(tmp_path), str(tmp_path / "routes.npy"), *what, "--check"]) == 0


def test_repair_saves_an_unsealed_shard(tool, tmp_path, capsys):
    routes = np.sort(np.argsort(np.random.default_rng(3).random((9, 2, 16)))[..., :2]).astype(np.uint8)
    writer = ShardWriter(tmp_path, "dead", SPEC)
    writer.add("a", routes, np.arange(9), [Span(9, 5, Provenance.DECODE)])
    (live,) = tmp_path.glob(".dead.*.tmp")
    assert tool(["repair", str(live)]) == 2
    assert "still being written" in capsys.readouterr().err
    left = tmp_path / ".dead.00000000.tmp"
    shutil.copy(live, left)
    writer.abandon()
    left.write_bytes(left.read_bytes() + b"half a frame")
    assert tool(["repair", str(left)]) == 0
    assert "1 records saved" in capsys.readouterr().out
    (ref,) = TraceStore(tmp_path).records("dead-recovered")
    np.testing.assert_array_equal(TraceStore(tmp_path).read(ref).routes, routes)
    assert tool(["inspect", str(tmp_path)]) == 0
    assert f"not sealed: {left.name}" in capsys.readouterr().out


def test_export_needs_pyarrow_and_says_so(tool, tmp_path, capsys, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert tool(["export", str(tmp_path), str(tmp_path / "out.parquet")]) == 2
    assert "pip install 'pyarrow" in capsys.readouterr().err
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("per", ["layer", "token"])
def test_export_has_every_set(tool, tmp_path, per):
    from pyarrow import parquet

    routes = write(tmp_path)
    assert tool(["export", str(tmp_path), str(tmp_path / "out.parquet"), "--key", "b", "--per", per]) == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    assert set(table["key"].to_pylist()) == {"b"} and set(table["provenance"].to_pylist()) == {"decode"}
    if per == "token":
        assert table["position"].to_pylist() == list(range(20))
        assert table["layer_2"].to_pylist() == routes[:, 1].tolist()
    else:
        assert table["layer"].to_pylist() == [1, 2] * 20
        assert table["experts"].to_pylist() == routes.reshape(40, 2).tolist()


def test_bench_and_plot_write_what_they_say(tool, tmp_path, capsys):
    write(tmp_path / "store")
    assert tool(["bench", str(tmp_path / "store"), "--json", str(tmp_path / "bench.json")]) == 0
    rates = {k: v for k, v in json.loads((tmp_path / "bench.json").read_text()).items() if "_gb_" in k}
    assert len(rates) == 4 and all(rate > 0 for rate in rates.values())
    said = [float(number) for number in re.findall(r"([\d.e+,-]+) MB/s", capsys.readouterr().out)]
    assert said == pytest.approx([1e3 * rate for rate in rates.values()], rel=0.01)
    assert tool(["plot", str(tmp_path / "store"), "--out", str(tmp_path / "plots")]) == 0
    written = capsys.readouterr().out.split()
    assert len(written) == 4 and all(Path(path).stat().st_size > 1000 for path in written)


@pytest.mark.parametrize("command", ["inspect", "verify", "cat", "bench"])
def test_a_store_that_is_not_there_is_one_message(command, tmp_path):
    run = subprocess.run(
        [sys.executable, "tools/trace.py", command, str(tmp_path / "none")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.count("\n") == 1 and "there is no such store" in run.stderr
