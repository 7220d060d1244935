import json
import math
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_rl.errors import ConfigError
from moe_rl.models.hf import (
    expected_tensors,
    is_mtp_tensor,
    parameter_count,
    read_config,
    read_model,
    tokenizer_vocabulary,
)
from moe_rl.models.weight_files import checkpoint_tensors, tensor_problems
from tests.support.refusals import tells


def refusal_of(call, *arguments) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return caught.value


def test_facts(model):
    facts = read_model(model)
    assert facts.moe_layers == (0, 2)
    assert (facts.layers, facts.num_experts, facts.top_k, facts.head_dim, facts.vocab) == (3, 4, 2, 4, 24)
    assert (facts.rope_theta, facts.norm_topk_prob, facts.eos_token_ids, facts.dtype) == (1e6, True, (1,), "float32")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mlp_only_layers": []}, (0, 1, 2)),
        ({"mlp_only_layers": None, "decoder_sparse_step": 2}, (1,)),
        ({"mlp_only_layers": [0], "decoder_sparse_step": 3}, (2,)),
    ],
)
def test_moe_layers(tmp_path, changes, expected, write_model):
    assert read_model(write_model(tmp_path, **changes)).moe_layers == expected


def test_spellings_of_transformers_5(tmp_path, write_model):
    new = write_model(
        tmp_path / "new",
        rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, num_experts=None,
        num_local_experts=4, torch_dtype=None, dtype="bfloat16",
    )  # fmt: skip
    facts = read_model(new)
    assert (facts.rope_theta, facts.num_experts, facts.dtype) == (5e5, 4, "bfloat16")


def test_eos_ids_come_from_both_files(model):
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    assert read_model(model).eos_token_ids == (1, 3)


def test_fingerprint_sees_the_model_not_its_writer(tmp_path, hf_config, write_model):
    plain = read_model(write_model(tmp_path / "a")).fingerprint
    assert read_model(write_model(tmp_path / "b", transformers_version="9")).fingerprint == plain
    assert read_model(write_model(tmp_path / "c", num_experts_per_tok=3)).fingerprint != plain
    (tmp_path / "b/config.json").write_text(json.dumps(dict(reversed(hf_config.items())), indent=3))
    assert read_model(tmp_path / "b").fingerprint == plain


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"], "num_experts": None},
            ["no field", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"],
        ),
        ({"architectures": ["MixtralForCausalLM"]}, ["no field", "MixtralForCausalLM"]),
        ({"architectures": None, "model_type": "x", "num_experts": None}, ["no field", "got x"]),
        ({"mlp_only_layers": [0, 1, 2]}, ["mlp_only_layers", "dense"]),
        ({"mlp_only_layers": [3]}, ["mlp_only_layers", "0 to 2"]),
        ({"num_experts": 0}, ["num_experts", "got 0"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers", "from 1 to 512"]),
        ({"num_experts": True}, ["num_experts", "got True"]),
        ({"num_experts_per_tok": 5}, ["num_experts_per_tok", "num_experts = 4"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "got 3"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, ["rope_scaling.rope_type", "linear"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling.original_max_position_embeddings"]),
        ({"attention_bias": True}, ["attention_bias", "got True"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "silu"]),
        ({"num_experts_per_tok": 1}, ["norm_topk_prob", "got True"]),
        ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps", "'1e-6'"]),
        ({"eos_token_id": "x"}, ["eos_token_id", "x"]),
        ({"eos_token_id": 24}, ["eos_token_id", "0 to 23"]),
        ({"eos_token_id": [1, -1]}, ["eos_token_id", "0 to 23"]),
    ],
)
def test_unsupported_models_are_refused(model, changes, parts, hf_config):
    raw = {key: value for key, value in (hf_config | changes).items() if value is not None}
    (model / "config.json").write_text(json.dumps(raw))
    field, *pieces = parts
    tells(refusal_of(read_model, model), *pieces, field=field)


def test_all_faults_of_config_json_at_once(model, hf_config):
    (model / "config.json").write_text(
        json.dumps(hf_config | {"hidden_size": 0, "vocab_size": "24", "num_experts": -1})
    )
    (model / "tokenizer.json").unlink()
    *wrong, tokenizer = refusal_of(read_model, model).problems
    assert {problem.about["field"] for problem in wrong} == {"hidden_size", "vocab_size", "num_experts"}
    tells(tokenizer, "tokenizer.json", folder=model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(model, name):
    (model / name).unlink()
    tells(refusal_of(read_model, model), name.replace("model.", "*."), folder=model)


def test_a_missing_folder_is_named(tmp_path):
    tells(refusal_of(read_model, tmp_path / "nowhere"), key="model.path", folder=tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": 1} x'])
def test_config_json_that_is_no_mapping(model, text):
    (model / "config.json").write_text(text)
    tells(refusal_of(read_model, model), file=model / "config.json")


def test_expected_tensors_are_those_of_transformers(tmp_path, write_model):
    """The reference implementation saves the same names and shapes, so a checkpoint that passes here loads there."""
    import transformers

    model = write_model(tmp_path / "ours")
    reference = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig.from_pretrained(model))
    reference.save_pretrained(tmp_path / "theirs")
    saved = {name: shape for name, (_, shape, _) in checkpoint_tensors(tmp_path / "theirs").items()}
    facts = read_model(model)
    assert saved == expected_tensors(facts)
    assert parameter_count(facts).total == sum(parameter.numel() for parameter in reference.parameters())
    experts = sum(math.prod(shape) for name, shape in saved.items() if ".experts." in name)
    assert parameter_count(facts).expert == experts > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_qk_norm": False, "attention_bias": False, "n_shared_experts": 1, "first_k_dense_replace": 0},
        {"first_k_dense_replace": 2, "num_nextn_predict_layers": 1},
    ],
)
def test_expected_tensors_of_the_second_family(tmp_path, write_glm, changes):
    import transformers

    model = write_glm(tmp_path / "ours", **changes)
    reference = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig.from_pretrained(model))
    reference.save_pretrained(tmp_path / "theirs")
    saved = {name: shape for name, (_, shape, _) in checkpoint_tensors(tmp_path / "theirs").items()}
    facts = read_model(model)
    assert saved == expected_tensors(facts)
    count = parameter_count(facts)
    assert count.total == sum(math.prod(shape) for shape in saved.values())
    assert count.expert == sum(math.prod(shape) for name, shape in saved.items() if ".mlp.experts." in name)


def test_facts_of_the_second_family(tmp_path, write_glm):
    facts = read_model(write_glm(tmp_path, n_group=2, topk_group=1, num_nextn_predict_layers=1))
    assert (facts.moe_layers, facts.num_experts, facts.shared_intermediate_size) == ((1, 2), 4, 12)
    assert (facts.score_function, facts.expert_bias, facts.norm_topk_prob, facts.routed_scaling) == (
        "sigmoid", True, True, 2.5,
    )  # fmt: skip
    assert (facts.groups, facts.top_groups, facts.rotary_fraction, facts.mtp_layers) == (2, 1, 0.5, 1)
    assert is_mtp_tensor(facts, "model.layers.3.eh_proj.weight")
    assert not any(is_mtp_tensor(facts, f"model.layers.{n}.eh_proj.weight") for n in (2, 4, 33))
    # choosing from all groups is choosing from all experts
    everything = read_model(write_glm(tmp_path, n_group=2, topk_group=2))
    assert (everything.groups, everything.top_groups) == (1, 1)
    new = {"rope_theta": None, "partial_rotary_factor": None}
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}
    assert read_model(write_glm(tmp_path, rope_parameters=rope, **new)).rotary_fraction == 1.0


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"first_k_dense_replace": 3}, ["first_k_dense_replace", "num_hidden_layers = 3"]),
        ({"norm_topk_prob": False}, ["norm_topk_prob", "got False"]),
        ({"num_experts_per_tok": 1}, ["num_experts_per_tok", "at least 2"]),
        ({"n_group": 3}, ["n_group", "divisor of n_routed_experts = 4"]),
        ({"topk_group": 2}, ["topk_group", "n_group = 1"]),
        ({"n_group": 4, "topk_group": 1}, ["topk_group", "num_experts_per_tok = 2"]),
        ({"n_group": 4, "topk_group": 2}, ["n_group", "at least 2"]),
        ({"routed_scaling_factor": 0}, ["routed_scaling_factor", "got 0"]),
        ({"partial_rotary_factor": 0.3}, ["partial_rotary_factor", "head_dim = 4"]),
        ({"n_shared_experts": 0}, ["n_shared_experts", "got 0"]),
        ({"num_nextn_predict_layers": -1}, ["num_nextn_predict_layers", "got -1"]),
    ],
)
def test_what_the_second_family_may_not_have(tmp_path, write_glm, changes, parts):
    model = write_glm(tmp_path)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | changes))
    field, *pieces = parts
    tells(refusal_of(read_model, model), *pieces, field=field)


def test_tied_embeddings_have_no_head(tmp_path, write_model):
    facts = read_model(write_model(tmp_path, tie_word_embeddings=True))
    assert "lm_head.weight" not in expected_tensors(facts)


def test_checkpoint_tensors_of_one_file_and_of_shards_agree(model, tmp_path):
    whole = checkpoint_tensors(model)
    assert whole["lm_head.weight"] == ("F32", (24, 8), "model.safetensors")
    shard(model)
    sharded = checkpoint_tensors(model)
    assert {name: entry[:2] for name, entry in sharded.items()} == {name: entry[:2] for name, entry in whole.items()}
    assert {entry[2] for entry in sharded.values()} == {"a.safetensors", "b.safetensors"}


def shard(model) -> dict:
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, model / file)
    (model / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda m: m.update({"lm_head.weight": "../secret.safetensors"}), "../secret"),
        (lambda m: m.update({"lm_head.weight": "gone.safetensors"}), "gone.safetensors"),
        (lambda m: m.update({"no.such": "a.safetensors"}), "no.such"),
        (lambda m: m.pop("lm_head.weight"), "lm_head.weight"),
        (lambda m: m.clear(), "weight_map"),
    ],
)
def test_a_wrong_index_is_refused(model, change, part):
    index = shard(model)
    change(index["weight_map"])
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    tells(refusal_of(checkpoint_tensors, model), part, file=model / "model.safetensors.index.json")


def frame(header, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 50) + b"{}",
        frame(b"\xff\xff"),
        frame(b"[]"),
        frame(b"[" * 100_000),
        frame({"a": 3}),
        frame({"a": ENTRY}),
        frame({"a": ENTRY}, b"\0" * 9),
        frame({"a": ENTRY | {"shape": [3]}}, b"\0" * 8),
        frame({"a": ENTRY | {"shape": [-2]}}, b"\0" * 8),
        frame({"a": ENTRY | {"shape": [2.0]}}, b"\0" * 8),
        frame({"a": ENTRY | {"shape": [2**62, 0]}}, b"\0" * 8),
        frame({"a": ENTRY | {"data_offsets": [8, 16]}}, b"\0" * 16),
        frame({"a": ENTRY, "b": ENTRY}, b"\0" * 8),
    ],
)
def test_a_damaged_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    tells(refusal_of(checkpoint_tensors, tmp_path), file=tmp_path / "model.safetensors", fault="damaged")


def test_a_pointer_of_git_lfs_is_called_that(tmp_path):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 12\n")
    for read in (checkpoint_tensors, read_config):
        tells(refusal_of(read, tmp_path), "git lfs pull", got="a pointer of Git LFS")


def test_the_undamaged_frame_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(frame({"__metadata__": {}, "a": ENTRY}, b"\0" * 8))
    assert checkpoint_tensors(tmp_path) == {"a": ("F32", (2,), "model.safetensors")}


def test_every_truncation_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(2, np.float32), "b": np.zeros((2, 3), np.float32)}, file)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        tells(refusal_of(checkpoint_tensors, tmp_path), file=file, fault="damaged")


def test_tensor_problems_name_the_first_and_count_the_rest(model):
    expected = expected_tensors(read_model(model))
    found = checkpoint_tensors(model)
    assert tensor_problems(expected, found, {"folder": "w"}) == []
    experts = [name for name in found if ".experts." in name]
    for name in experts[:5]:
        del found[name]
    found["extra.weight"] = ("F32", (1,), "f")
    found["model.norm.weight"] = ("F32", (9,), "f")
    found["lm_head.weight"] = ("I8", (24, 8), "f")
    missing, extra, shape, dtype = tensor_problems(expected, found, {"folder": "w"})
    tells(missing, key="model.path", folder="w", got=("5: ",))
    assert all(name in missing for name in experts[:5])
    tells(extra, got=("extra.weight",))
    tells(shape, got=("model.norm.weight [9]", "[8]"))
    tells(dtype, got=("lm_head.weight I8",))


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 6}}, "added_tokens": [{"id": 3}]}, 7),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 30}]}, 31),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}, 2),
    ],
)
def test_tokenizer_vocabulary(tmp_path, tokenizer, size):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert tokenizer_vocabulary(tmp_path) == size


def test_a_tokenizer_without_vocabulary_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    tells(refusal_of(tokenizer_vocabulary, tmp_path), file=tmp_path / "tokenizer.json")
