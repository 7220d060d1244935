"""Tests the command line of the export, and that it unpacks a packed checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_rl.cli import main
from tests.config.conftest import DEEPSEEK_CONFIG, _write_model
from tests.distributed.ranks import torchrun

PACKED = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("arguments", "environment", "part"),
    [
        (["--model", "m", "--out", "o", "--step", "2"], {"RANK": "0"}, "--step and overrides of parallel.*"),
        (["--model", "no such", "--out", "o"], {}, "there is no such folder"),
        (["--run", "no such", "--out", "o"], {}, "there is no such folder"),
    ],
)
def test_a_mistake_is_said_before_torch_is_imported(monkeypatch, capsys, arguments, environment, part):
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["export", *arguments]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.long
def test_a_packed_checkpoint_is_unpacked(tmp_path):
    model = _write_model(tmp_path / "packed", DEEPSEEK_CONFIG, quantization_config={"quant_method": "fp8"})
    file = model / "model.safetensors"
    held, scale = torch.randn(12, 8).to(torch.float8_e4m3fn), torch.full((1, 1), 0.75)
    save_file(load_file(file) | {PACKED: held, f"{PACKED}_scale_inv": scale}, file)
    done = torchrun(2, "tools/export_hf.py", "--model", model, "--out", tmp_path / "out", "--dtype", "float32")
    assert done.returncode == 0 and "1 tensors unpacked" in done.stdout, done.stderr[-3000:]
    written = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    assert torch.equal(written[PACKED], held.float() * 0.75)
    assert written.keys() == load_file(file).keys() - {f"{PACKED}_scale_inv"}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
