"""Checkpoint folders: errors are named, packed tensors are unpacked, and a written folder is complete or absent."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_rl.errors import ConfigError
from moe_rl.models.hf import expected_tensors
from moe_rl.models.quantised import unpacked
from moe_rl.models.safetensors_header import read_header
from moe_rl.whereabouts import HERE
from tests.megatron.models import facts

FACTS = facts(mtp_layers=1)
NORM, HEAD = "model.norm.weight", "lm_head.weight"
EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """Write a checkpoint of random numbers in the shape of FACTS, with one tensor of a multi-token-prediction layer."""
    torch.manual_seed(0)
    path = tmp_path / "source"
    path.mkdir()
    tensors = {name: torch.randn(shape) for name, shape in expected_tensors(FACTS).items()}
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.randn(3, 3)}, path / "model.safetensors")
    (path / "config.json").write_text('{"torch_dtype": "bfloat16", "quantization_config": {}, "x": 2}')
    (path / "tokenizer.json").write_text("{}")
    return path


def change(path, **tensors):
    """Replace tensors; None removes one."""
    file = path / "model.safetensors"
    held = load_file(file) | {name: t for name, t in tensors.items() if t is not None}
    save_file({name: t for name, t in held.items() if tensors.get(name, 0) is not None}, file)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({EXPERT: None}, f"lacks .*{EXPERT}"),
        ({"extra.weight": torch.zeros(1)}, r"does not ask for.*extra\.weight"),
        ({NORM: torch.zeros(9)}, rf"another shape.*{NORM} \[9\] instead of \[16\]"),
        ({HEAD: torch.zeros(96, 16, dtype=torch.int8)}, f"{HEAD} I8"),
        ({HEAD: torch.zeros(96, 16).to(torch.float8_e4m3fn)}, f"{HEAD} F8_E4M3"),  # without scales
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_named_before_it_is_read(folder, changes, named):
    from moe_rl.megatron.hf_files import CheckpointReader

    CheckpointReader(folder, FACTS)
    change(folder, **changes)
    with pytest.raises(ConfigError, match=named):
        CheckpointReader(folder, FACTS)


def test_any_part_of_a_tensor_in_float8_is_what_its_blocks_say(folder):
    """The part that a rank reads cuts through blocks of 128 x 128."""
    from moe_rl.megatron.hf_files import CheckpointReader

    held = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.5
    wide = facts(mtp_layers=1, hidden_size=200, moe_intermediate_size=300)
    tensors = {name: torch.zeros(shape) for name, shape in expected_tensors(wide).items()}
    save_file(tensors | {EXPERT: held, f"{EXPERT}_scale_inv": scales}, folder / "model.safetensors")
    whole = held.float() * scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    reader = CheckpointReader(folder, wide)
    assert reader.packing == {EXPERT: "fp8"}
    assert torch.equal(reader.whole(EXPERT), whole)
    before, moves = reader.bytes_read, HERE.moves
    assert torch.equal(reader.read(EXPERT, (slice(100, 250), slice(0, 200))), whole[100:250])
    assert reader.bytes_read - before == 150 * 200 + 2 * 2 * 4
    assert HERE.moves > moves, "a rank that reads on is no hang, however large the model"
    assert torch.equal(reader.read(EXPERT, (slice(130, 140), slice(150, 190))), whole[130:140, 150:190])


def test_4_bit_floats_are_unpacked_as_transformers_does(folder):
    from transformers.integrations import mxfp4

    from moe_rl.megatron.hf_files import CheckpointReader

    torch.manual_seed(1)
    oss = facts(
        architecture="GptOssForCausalLM", hidden_size=64, moe_intermediate_size=32, qk_norm=False, attention_bias=True,
        linear_bias=True, sinks=True,
    )  # fmt: skip
    tensors = {name: torch.zeros(shape) for name, shape in expected_tensors(oss).items()}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    del tensors[name]
    blocks = torch.randint(0, 256, (12, 64, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (12, 64, 2), dtype=torch.uint8)
    save_file(tensors | {f"{name}_blocks": blocks, f"{name}_scales": scales}, folder / "model.safetensors")
    reader = CheckpointReader(folder, oss)
    theirs = mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert reader.tensors[name][1] == tuple(theirs.shape) == (12, 64, 64)
    assert torch.equal(reader.whole(name), theirs) and theirs.unique().numel() > 100
    before = reader.bytes_read
    part = reader.read(name, (slice(3, 9), slice(0, 64), slice(0, 64)))
    assert torch.equal(part, theirs[3:9]) and reader.bytes_read - before == 6 * 64 * 2 * 17


def test_a_half_of_a_packed_tensor_stays_what_it_is(tmp_path):
    halves = {"a_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8), "b": torch.zeros(4, 4).to(torch.float8_e4m3fn)}
    save_file(halves | {"b_scale_inv": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    found = read_header(tmp_path / "x.safetensors")
    assert unpacked(found) == (found, {})


def test_a_written_checkpoint_takes_over_what_is_not_trained(one_rank, folder, tmp_path):
    from moe_rl.megatron.hf_files import CheckpointReader, write_checkpoint

    source, out = CheckpointReader(folder, FACTS), tmp_path / "out"
    ours = {name: torch.randn(shape) for name, shape in expected_tensors(FACTS).items()}
    write_checkpoint(out, ours.items(), FACTS, source, torch.bfloat16, shard_bytes=3000)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    written = {name: load_file(out / file)[name] for name, file in index.items()}
    assert written.keys() == source.tensors.keys() and len(set(index.values())) > 5
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in ours.items())
    kept = load_file(folder / "model.safetensors")["model.layers.2.eh_proj.weight"]
    assert torch.equal(written["model.layers.2.eh_proj.weight"], kept) and kept.dtype == torch.float32
    assert json.loads((out / "config.json").read_text()) == {"torch_dtype": "bfloat16", "x": 2}
    assert (out / "tokenizer.json").is_file()
    CheckpointReader(out, FACTS)


def test_a_checkpoint_that_is_not_whole_is_not_there(one_rank, folder, tmp_path):
    from moe_rl.megatron.hf_files import CheckpointReader, write_checkpoint

    source = CheckpointReader(folder, FACTS)
    ours = {name: torch.zeros(shape) for name, shape in expected_tensors(FACTS).items() if name != EXPERT}
    with pytest.raises(ConfigError, match=f"lacks .*{EXPERT}"):
        write_checkpoint(tmp_path / "a", ours.items(), FACTS, source, torch.float32)
    twice = [*ours.items(), (EXPERT, torch.zeros(8, 16)), ("model.layers.2.eh_proj.weight", torch.zeros(3, 3))]
    with pytest.raises(ConfigError, match=r"tensor model\.layers\.2\.eh_proj"):
        write_checkpoint(tmp_path / "b", twice, FACTS, source, torch.float32)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    asked = []
    for path in (folder, tmp_path / "no" / "parent"):
        with pytest.raises(ConfigError, match="must be written into a new folder"):
            write_checkpoint(path, (asked.append(one) or one for one in twice), FACTS, source, torch.float32)
    assert not asked
