"""Tests what is said of the files of a checkpoint: packed and quantised tensors, buffers that are not used, dtypes."""

import json
import struct
from fractions import Fraction

import pytest

from moe_rl.errors import ConfigError
from moe_rl.models.hf import expected_tensors, read_model, read_published
from moe_rl.models.weight_files import checkpoint_tensors, is_derived, notes, read_checkpoint
from tests.config.test_configs import ROOT
from tests.support.refusals import refused, tells

BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | dict.fromkeys(
    ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
)
BITS |= dict.fromkeys(("I16", "U16", "F16", "BF16"), 16) | dict.fromkeys(("I32", "U32", "F32"), 32)
BITS |= dict.fromkeys(("I64", "U64", "F64", "C64"), 64)


def write(folder, tensors):
    """Write a file of zeros, without its bytes on the disk. tensors: {name: (dtype, shape)}."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = Fraction(BITS[dtype], 8)
        for one in shape:
            size *= one
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + int(size)]}
        end += int(size)
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture
def published(tmp_path):
    """published(name, folder, changes, **keys of config.json) -> (folder, its facts): a checkpoint in bfloat16 with the
    config.json of a shipped model and one layer of experts. changes(name, shape) -> what stands in the files instead.
    """

    def make(name, folder, change=lambda name, shape: {name: ("BF16", shape)}, **keys):
        path = tmp_path / folder
        path.mkdir()
        raw = json.loads((ROOT / f"configs/models/{name}.json").read_text()) | keys
        (path / "config.json").write_text(json.dumps(raw))
        (path / "tokenizer.json").write_text("{}")
        facts = read_published(path / "config.json")
        tensors = {}
        for tensor, shape in expected_tensors(facts).items():
            tensors |= change(tensor, shape)
        write(path, tensors)
        return path, read_model(path)

    return make


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_of_the_format_is_read(tmp_path, dtype):
    write(tmp_path, {"x": (dtype, (4, 2)), "y": (dtype, ())} if BITS[dtype] >= 8 else {"x": (dtype, (4, 2))})
    assert checkpoint_tensors(tmp_path)["x"] == (dtype, (4, 2), "model.safetensors")


def test_a_dtype_of_a_later_version_is_no_damage(tmp_path):
    write(tmp_path, {"x": ("U8", (4, 2))})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"U8", b"Z8"))
    with refused(ConfigError, key="model.path", file=file, got="`Z8`", fault=""):
        checkpoint_tensors(tmp_path)


@pytest.mark.parametrize(("listed", "stored"), [(True, False), (False, True)])
def test_an_index_need_not_agree_on_derived_buffers(tmp_path, listed, stored):
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write(tmp_path, {"x": ("F32", (4,))} | ({buffer: ("F32", (2,))} if stored else {}))
    weight_map = dict.fromkeys(["x", *([buffer] if listed else [])], "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert checkpoint_tensors(tmp_path).keys() - {buffer} == {"x"}
    weight_map["y"] = "model.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with refused(ConfigError, "lack", got=("1: y",)):
        checkpoint_tensors(tmp_path)


@pytest.mark.parametrize("dtype", ["U32", "F8_E8M0", "U16", "F64", "F4"])
def test_a_model_in_another_dtype_is_told_its_name(published, dtype):
    path, facts = published("moonlight_16b_a3b", "model", lambda name, shape: {name: (dtype, shape)})
    with refused(ConfigError, key="model.path") as error:
        read_checkpoint(path, facts)
    (problem,) = error.value.problems
    tells(problem, f"embed_tokens.weight {dtype}")


def packs(**suffixes):
    """Have each projection's weight stored as these tensors: {suffix: (dtype, how the shape changes)}."""

    def change(name, shape):
        if not name.endswith("_proj.weight"):
            return {name: ("BF16", shape)}
        base = name.removesuffix("weight")
        return {base + one.replace("__", "."): (dtype, how(*shape)) for one, (dtype, how) in suffixes.items()}

    return change


def same(rows, columns):
    return rows, columns


def blocks(rows, columns):
    return -(-rows // 128), -(-columns // 128)


FORMATS = {
    "GPTQ": (
        {"qweight": ("I32", lambda r, c: (c // 8, r)), "qzeros": ("I32", lambda r, c: (c // 128, r // 8)),
         "scales": ("F16", lambda r, c: (c // 128, r)), "g_idx": ("I32", lambda r, c: (c,))},
        {"quant_method": "gptq", "bits": 4}, "GPTQ-Int4",
    ),
    "AWQ": (
        {"qweight": ("I32", lambda r, c: (c, r // 8)), "qzeros": ("I32", lambda r, c: (c // 128, r // 8)),
         "scales": ("F16", lambda r, c: (c // 128, r))},
        {"quant_method": "awq", "bits": 4}, "AWQ",
    ),
    "compressed-tensors": (
        {"weight": ("F8_E4M3", same), "weight_scale": ("BF16", lambda r, c: (r, 1))},
        {"quant_method": "compressed-tensors", "format": "float-quantized"}, "FP8-dynamic",
    ),
    "compressed-tensors ": (
        {"weight_packed": ("I32", lambda r, c: (r, c // 8)), "weight_scale": ("BF16", lambda r, c: (r, c // 128)),
         "weight_shape": ("I64", lambda r, c: (2,))},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}, "w4a16",
    ),
    "NVFP4": (
        {"weight": ("U8", lambda r, c: (r, c // 2)), "weight_scale": ("F8_E4M3", lambda r, c: (r, c // 16)),
         "weight_scale_2": ("F32", lambda r, c: ()), "input_scale": ("F32", lambda r, c: ())},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4",
    ),
    "bitsandbytes": (
        {"weight": ("U8", lambda r, c: (r * c // 2, 1)), "weight__absmax": ("U8", lambda r, c: (r * c // 64,)),
         "weight__quant_map": ("F32", lambda r, c: (16,)),
         "weight__quant_state__bitsandbytes__nf4": ("U8", lambda r, c: (90,))},
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb-4bit",
    ),
    "MLX": (
        {"weight": ("U32", lambda r, c: (r, c // 8)), "scales": ("BF16", lambda r, c: (r, c // 64)),
         "biases": ("BF16", lambda r, c: (r, c // 64))},
        {}, "MLX-4bit",
    ),
    "FP8": (  # one scale for the whole tensor
        {"weight": ("F8_E4M3", same), "weight_scale": ("F32", lambda r, c: ())}, {"quant_method": "fp8"}, "FP8",
    ),
    "tensors of F8_E4M3 without": (
        {"weight": ("F8_E4M3", same)}, {"quant_method": "fp8"}, "FP8",
    ),
    "tensors of I8 without": (
        {"weight": ("I8", same), "weight_scales": ("F16", lambda r, c: (r,))}, {"quant_method": "eetq"}, "eetq",
    ),
    "tensors of U8 without": (
        {"W_q": ("U8", lambda r, c: (r // 2, c)), "scale": ("F16", lambda r, c: (r, 1))},
        {"quant_method": "hqq"}, "hqq",
    ),
    "FP8 in blocks": (  # of another size
        {"weight": ("F8_E4M3", same), "weight_scale_inv": ("F32", lambda r, c: (-(-r // 64), -(-c // 64)))},
        {"quant_method": "fp8", "weight_block_size": [64, 64]}, "FP8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_is_told_its_format_and_what_to_take_instead(published, name):
    """One message for all of its 18,624 tensors."""
    suffixes, settings, suffix = FORMATS[name]
    keys = {"quantization_config": settings} if settings else {}
    path, facts = published("qwen3_30b_a3b", f"Qwen3-30B-A3B-{suffix}", packs(**suffixes), **keys)
    with refused(ConfigError, key="model.path", field="quantization_config", folder=path) as error:
        read_checkpoint(path, facts)
    (problem,) = error.value.problems
    tells(problem, "bfloat16", "from: Qwen3-30B-A3B", got=(name.strip(), settings.get("quant_method", "nothing")))
    assert "experts" not in problem and len(problem) < 500


@pytest.mark.parametrize("scales", ["F32", "BF16"])
def test_float8_in_blocks_is_unpacked_with_scales_of_either_precision(published, scales):
    suffixes = {"weight": ("F8_E4M3", same), "weight_scale_inv": (scales, blocks)}
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path, facts = published("qwen3_30b_a3b", "Qwen3-30B-A3B-FP8", packs(**suffixes), quantization_config=settings)
    found = read_checkpoint(path, facts)
    assert len(found.packing) == 18_624 and set(found.packing.values()) == {"fp8"}
    assert {name: one[1] for name, one in found.tensors.items()} == expected_tensors(facts)
    raw = json.loads((path / "config.json").read_text())
    for other in ({"quant_method": "gptq"}, settings | {"weight_block_size": [64, 64]}, {"quant_method": "mxfp4"}):
        (path / "config.json").write_text(json.dumps(raw | {"quantization_config": other}))
        with refused(ConfigError, key="model.path", field="quantization_config") as error:
            read_checkpoint(path, facts)
        tells(error.value.problems[0], got="FP8 in blocks", expected=(other["quant_method"],))


def test_a_key_beside_tensors_in_bfloat16_is_refused_and_an_empty_one_is_not(published):
    path, facts = published("moonlight_16b_a3b", "model")
    raw = json.loads((path / "config.json").read_text())

    def told(**keys):
        (path / "config.json").write_text(json.dumps(raw | keys))
        try:
            read_checkpoint(path, facts)
        except ConfigError as error:
            (problem,) = error.problems
            return tells(problem, "the key from config.json", key="model.path", field="quantization_config")
        return None

    assert told() is None and told(quantization_config=None) is None and told(quantization_config={}) is None
    for method in ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq", "bitsandbytes", "modelopt", "quark"):
        assert method in told(quantization_config={"quant_method": method})
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": "fp8"}))
    with refused(ConfigError, field="quantization_config", got="fp8", expected="a mapping"):
        read_checkpoint(path, facts)
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert "NVFP4" in told()
    (path / "hf_quant_config.json").write_text('{"quantization": [4]}')
    with refused(ConfigError, field="quantization", expected="a mapping"):
        read_checkpoint(path, facts)


def test_derived_buffers_are_left_out_counted_and_shown(published):
    """Moonlight as published has the angles of 27 layers."""

    def change(name, shape):
        also = {}
        if name.endswith(".self_attn.o_proj.weight"):
            also = {name.replace("o_proj.weight", "rotary_emb.inv_freq"): ("F32", (32,))}
        return {name: ("BF16", shape)} | also

    path, facts = published("moonlight_16b_a3b", "model", change)
    found = read_checkpoint(path, facts)
    assert len(found.stored) == len(found.tensors) + 27 == 5_317 + 27 and found.tensors.keys() == set(
        expected_tensors(facts)
    )
    assert notes(path, facts) == ["27 tensors of the checkpoint are not used: rotary_emb.inv_freq"]


@pytest.mark.parametrize(
    ("name", "derived"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("model.rotary_emb.inv_freq", True),
        ("model.rotary_emb.original_inv_freq", True),
        ("model.layers.3.self_attn.rotary_emb.cos_cached", True),
        ("model.layers.3.self_attn.rotary_emb.sin_cached", True),
        ("model.rotary_pos_emb.inv_freq", True),
        ("model.layers.3.self_attn.rotary_emb._cos_cached", True),
        ("model.layers.3.self_attn.rotary_emb._sin_cached", True),
        ("model.rotary_emb.cos_sin_cache", True),
        ("rope.freqs", True),
        ("model.inv_freq", True),
        ("model.layers.3.self_attn.rotary_embs.inv_freq", True),
        ("model.layers.3.self_attn.rotary_emb.long_inv_freq", True),
        ("model.causal_mask", True),
        ("model.layers.3.self_attn.attn_mask", True),
        ("model.layers.3.self_attn._extra_state", True),
        ("freqs_cis", True),
        ("model.layers.3.self_attn.freqs_cis", True),
        ("model.embed_tokens.position_ids", True),
        ("model.layers.3.self_attn.masked_bias", True),
        ("transformer.h.0.attn.bias", True),
        ("model.layers.3.self_attn.q_proj.bias", False),
        ("model.layers.3.mlp.gate.e_score_correction_bias", False),
        ("model.layers.3.self_attn.inv_freq_proj.weight", False),
        ("model.layers.3.mlp.router.bias", False),
        ("model.layers.3.self_attn.rope.weight", False),
        ("model.freqs_cis.weight", False),
    ],
)
def test_a_derived_buffer_is_known_by_its_name(name, derived):
    assert is_derived(name) == derived
