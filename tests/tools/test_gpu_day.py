"""Tests the day on a GPU without one: what becomes of parts that fail, and whether real commands run at small sizes."""

import json
import sys
import time

import psutil
import pytest

from moe_rl.commands.machine import Machine
from tools.dev import gpu_day
from tools.dev.gpu_day import PARTS, Part, main, page

WRITES = "import json, sys; json.dump({'GB/s': 2.5, 'all': [1]}, open(sys.argv[-1], 'w')); print('written')"
STAND_INS = {
    "good": Part("what is good", 30, ("-c", WRITES)),
    "bad": Part("what raises", 30, ("-c", "raise ValueError('planted | cause')")),
    "slow": Part("what hangs", 1.0, ("-c", "import time; print('begun', flush=True); time.sleep(60)")),
    "silent": Part("what writes nothing", 30, ("-c", "pass")),
    "engine": Part("what needs vLLM", 30, ("-c", WRITES), needs_vllm=True),
    "last": Part("what prints", 30, ("-c", "print('12 passed')"), writes=False),
}


def test_without_vllm_all_parts_take_eight_minutes_together():
    seconds = [(part.seconds, part.needs_vllm) for part in PARTS.values()]
    assert sum(most for most, needs_vllm in seconds if not needs_vllm) == 8 * 60
    assert sum(most for most, needs_vllm in seconds if needs_vllm) == 7 * 60


def test_a_part_that_fails_stops_no_other_and_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_day, "PARTS", STAND_INS)
    monkeypatch.setattr(gpu_day, "found_version", lambda part: "")
    first, second, written = tmp_path / "one", tmp_path / "two", tmp_path / "gpu.md"
    assert main(["good", "bad", "--dry", "--out", str(first)]) == 1
    file = first / "gpu_day.json"
    assert (
        main(
            [
                "slow",
                "silent",
                "engine",
                "last",
                "--dry",
                "--out",
                str(second),
                "--with",
                str(file),
                "--page",
                str(written),
            ]
        )
        == 1
    )
    found = json.loads((second / "gpu_day.json").read_text())
    parts = found["parts"]
    assert list(parts) == [name for name in STAND_INS if name != "engine"] and parts["good"]["result"] == {
        "GB/s": 2.5,
        "all": [1],
    }
    assert parts["last"]["result"] == "12 passed" and not parts["good"]["failed"] + parts["last"]["failed"]
    assert "status 1" in parts["bad"]["failed"] and "planted | cause" in parts["bad"]["failed"]
    assert "5 s" in parts["slow"]["failed"] and (second / parts["slow"]["log"]).read_text() == "begun\n"
    assert parts["silent"]["failed"] and parts["silent"]["result"] is None
    assert "vLLM is not installed: engine" in capsys.readouterr().out and found["versions"]["transformer-engine"]
    text = written.read_text()
    assert "**Never run on a GPU.**" in text and "2.5" not in text and "planted   cause" in text
    real = {name: one | {"dry": False, "device": "H100"} for name, one in parts.items()}
    text = page(found | {"parts": real})
    assert "ran on one H100" in text and "| GB/s | 2.5 |" in text and "12 passed" in text and "## bad" not in text
    with pytest.raises(SystemExit) as ended:
        main(["other"])
    assert ended.value.code == 2


def test_a_second_run_does_what_the_first_did_not(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "PARTS", {name: STAND_INS[name] for name in ("good", "bad", "last")})
    first, second, told = tmp_path / "one", tmp_path / "two", tmp_path / "told.json"
    assert main(["--dry", "--out", str(first), "--json", str(told)]) == 1
    found = json.loads(told.read_text())
    assert (found["parts_done"], found["parts_failed"], found["failed"]) == (2, 1, ["bad"])
    monkeypatch.setitem(gpu_day.PARTS, "bad", STAND_INS["good"])
    earlier = ["--with", str(first / "gpu_day.json")]
    assert main(["--dry", "--out", str(second), "--json", str(told), *earlier]) == 0
    assert json.loads(told.read_text())["parts_done"] == 3 and not (second / "good.log").exists()


CRASHED = """Traceback (most recent call last):
  File "a.py", line 3, in <module>
[rank1]: Traceback (most recent call last):
[rank1]:   File "b.py", line 4, in <module>
[rank1]: moe_rl.errors.ReplayError: the root (layer 3): got 1, expected 2
[rank0]: torch.distributed.DistBackendError: a peer is gone
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.
"""


def test_a_failed_part_tells_the_error_that_the_others_follow_from(tmp_path):
    log = tmp_path / "log"
    log.write_text(CRASHED)
    assert gpu_day.root_error(log) == "moe_rl.errors.ReplayError: the root (layer 3): got 1, expected 2"
    log.write_text("subprocess.CalledProcessError: Command\n12 errors\n")
    assert gpu_day.root_error(log) == "12 errors"


def test_other_versions_than_ours_are_labelled_and_no_reason_to_stop():
    found = {"torch": "2.11.0+cu130", "numpy": "2.3.5", "vLLM": ""}
    labels = gpu_day.labelled(Machine(found, "absent", (), "absent", {}))
    assert labels == {"torch": "2.11.0+cu130 (not >=2.13,<2.14)", "numpy": "2.3.5", "vLLM": "missing"}


OF_ITS_OWN = """
import signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "100"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit(1)))
print(child.pid, flush=True)
time.sleep(100)
"""


def test_a_part_that_takes_too_long_ends_its_own_sessions(tmp_path):
    log = tmp_path / "log"
    assert gpu_day.ended([sys.executable, "-c", OF_ITS_OWN], log, seconds=8) is None
    child, deadline = int(log.read_text()), time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_a_gpu_only_a_dry_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("moe_rl.commands.machine.gpus", lambda: ())
    with pytest.raises(SystemExit) as ended:
        main(["tests", "--out", str(tmp_path / "none")])
    assert ended.value.code == 2 and not (tmp_path / "none").exists()


def test_a_part_finds_what_stands_on_the_path_and_its_tests_need_no_vllm(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("raise ImportError('vLLM is not on this machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    without = ("-p", "no:xdist", "-p", "no:timeout")  # the kit has neither
    part = Part(
        "the tests", 200, ("-m", "pytest", *without, "-m", "gpu", "-q", "--collect-only", "tests/gpu"), writes=False
    )
    outcome = gpu_day.run("tests", part, tmp_path, "CPU", dry=True)
    assert not outcome.failed and "tests collected" in outcome.result, (tmp_path / outcome.log).read_text()
    part = Part("vLLM", 60, ("-c", "import vllm"), writes=False)
    assert "vLLM is not on this machine" in gpu_day.run("vllm", part, tmp_path, "CPU", dry=True).failed


@pytest.mark.long
def test_the_cheapest_parts_run_dry(tmp_path):
    assert main(["smoke", "digest", "step_overhead", "--dry", "--out", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "gpu_day.json").read_text())["parts"]
    assert parts["smoke"]["result"]["pretended"] and parts["smoke"]["result"]["largest difference of two passes"] == 0
    assert parts["digest"]["result"]["device"] == "cpu" and parts["step_overhead"]["result"]["device"] == "CPU"
