"""The kit for a machine with a GPU and without network: what it packs, and how large files travel."""

import hashlib

import pytest

from tools.dev import gpu_kit
from tools.dev.runs import ROOT


def test_everything_that_it_packs_is_pinned():
    pins = gpu_kit.pinned(ROOT / "requirements/cpu.txt") | gpu_kit.pinned(ROOT / "requirements/gpu.txt")
    assert set(gpu_kit.NAMES) <= pins.keys()
    carried = [line.partition("==")[0] for line in gpu_kit.carried(pins)]
    assert {"torch", "vllm", "triton", "nvidia-ml-py"} <= set(carried) and "nvidia-nccl-cu13" not in carried


def test_a_large_file_travels_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_kit, "PART", 1000)
    wheel, octets = tmp_path / "a.whl", bytes(range(256)) * 10
    wheel.write_bytes(octets)
    assert gpu_kit.split(wheel) == hashlib.sha256(octets).hexdigest() and not wheel.exists()
    parts = sorted(tmp_path.glob("a.whl.*"))
    assert [part.stat().st_size for part in parts] == [1000, 1000, 560]
    assert b"".join(part.read_bytes() for part in parts) == octets


def test_a_kit_that_is_too_large_is_refused(tmp_path, monkeypatch, capsys):
    def pip(*arguments):
        (tmp_path / "kit/site").mkdir(parents=True)
        (tmp_path / "kit/site/large.py").write_bytes(bytes(2000))

    monkeypatch.setattr(gpu_kit, "_pip", pip)
    assert gpu_kit.main(["--out", str(tmp_path / "kit")]) == 0
    assert f"{tmp_path}/kit/site" in capsys.readouterr().out
    monkeypatch.setattr(gpu_kit, "LIMIT", 1000)
    with pytest.raises(SystemExit):
        gpu_kit.main(["--out", str(tmp_path / "kit")])
    assert "more than" in capsys.readouterr().err
