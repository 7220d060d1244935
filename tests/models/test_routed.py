"""Tests what is read from the config.json of models that are not trained here: published ones, by their expert keys."""

import json
from unittest.mock import patch

import numpy as np
import pytest

from moe_rl import record
from moe_rl.cli import main
from moe_rl.errors import ConfigError, TraceError
from moe_rl.models.hf import FAMILIES, fingerprint_of, read_published
from moe_rl.models.routed import find_experts
from moe_rl.trace import TraceStore
from moe_rl.trace.model_spec import checkpoint_spec, routed_fingerprint
from tests.support.refusals import refused


def nested(architecture: str, model_type: str, key: str = "text_config", /, **text) -> dict:
    """A config of a model that sees images too."""
    beside = {"vision_config": {"num_hidden_layers": 27, "hidden_size": 1152, "num_experts": 2}}
    return {"architectures": [architecture], "model_type": model_type} | beside | {key: text}


def qwen3_vl(layers: int, **text) -> dict:
    text = {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": layers} | text
    return nested("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", **text)


def qwen3_5(experts: int, top_k: int, layers: int, shared: int) -> dict:
    text = {"num_experts": experts, "num_experts_per_tok": top_k, "num_hidden_layers": layers}
    text |= {"shared_expert_intermediate_size": shared, "model_type": "qwen3_5_moe_text"}
    return nested("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", **text)


def gemma_4(experts: int | None, top_k: int | None, layers: int) -> dict:
    text = {"num_experts": experts, "top_k_experts": top_k, "enable_moe_block": experts is not None}
    return nested("Gemma4ForConditionalGeneration", "gemma4", **text, num_hidden_layers=layers)


def llama_4(experts: int, step: int) -> dict:
    text = {"num_local_experts": experts, "num_experts_per_tok": 1, "interleave_moe_layer_step": step}
    return nested("Llama4ForConditionalGeneration", "llama4", **text, num_hidden_layers=48)


KIMI = {"n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_layer_freq": 1}
KIMI |= {"first_k_dense_replace": 1, "num_hidden_layers": 61, "architectures": ["DeepseekV3ForCausalLM"]}
PACKED = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def kimi(**more) -> dict:
    return nested("KimiK25ForConditionalGeneration", "kimi_k25", **KIMI) | more


# {model: (config.json, experts, of them for a token)}
PUBLISHED = {
    "Qwen3-VL-30B-A3B-Instruct": (qwen3_vl(48), 128, 8),
    "Qwen3-VL-235B-A22B-Instruct": (qwen3_vl(94), 128, 8),
    "Qwen3.5-35B-A3B": (qwen3_5(256, 8, 40, 512), 256, 8),
    "Qwen3.6-35B-A3B-NVFP4": (qwen3_5(256, 8, 40, 512) | PACKED, 256, 8),
    "Qwen3.5-122B-A10B": (qwen3_5(256, 8, 48, 1024), 256, 8),
    "Qwen3.5-122B-A10B-NVFP4": (qwen3_5(256, 8, 48, 1024) | PACKED, 256, 8),
    "Qwen3.5-397B-A17B": (qwen3_5(512, 10, 60, 1024), 512, 10),
    "Qwen3.5-397B-A17B-NVFP4": (qwen3_5(512, 10, 60, 1024) | PACKED, 512, 10),
    "gemma-4-26B-A4B": (gemma_4(128, 8, 30), 128, 8),
    "gemma-4-26B-A4B-NVFP4": (gemma_4(128, 8, 30) | PACKED, 128, 8),
    "Llama-4-Scout": (llama_4(16, 1), 16, 1),
    "Llama-4-Maverick": (llama_4(128, 2), 128, 1),
    "Kimi-K2.5": (kimi(), 384, 8),
    "Kimi-K2.5-NVFP4": (kimi(**PACKED), 384, 8),
    "Kimi-K2.6-NVFP4": (kimi(**PACKED), 384, 8),
    "Kimi-K2.7-Code-NVFP4": (kimi(**PACKED), 384, 8),
    "Kimi-K3": (
        nested("KimiK3ForConditionalGeneration", "kimi_k3", num_experts=896, num_experts_per_token=16,
               num_shared_experts=2, num_hidden_layers=61), 896, 16,
    ),
    "MiniMax-M3-NVFP4": (
        nested("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", num_local_experts=128,
               num_experts_per_tok=4, moe_layer_freq=[0] * 3 + [1] * 57, num_hidden_layers=60), 128, 4,
    ),
}  # fmt: skip
OTHERS = {
    "llm_config": (nested("A", "a", "llm_config", num_experts=64, num_experts_per_tok=6), 64, 6),
    "language_config": (nested("A", "a", "language_config", n_routed_experts=72, num_experts_per_tok=6), 72, 6),
    "thinker_config": (
        {"architectures": ["Qwen3OmniMoeForConditionalGeneration"],
         "talker_config": {"text_config": {"num_experts": 32, "num_experts_per_tok": 2}},
         "thinker_config": {"audio_config": {"num_experts": 4}, "num_hidden_layers": 3,
                            "text_config": {"num_experts": 128, "num_experts_per_tok": 8}}}, 128, 8,
    ),
    "DBRX": (
        {"architectures": ["DbrxForCausalLM"], "n_layers": 40, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}},
        16, 4,
    ),
    "Mixtral": ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}, 8, 2),
    "ERNIE": ({"architectures": ["Ernie4_5_VLMoe"], "moe_num_experts": [64, 64], "moe_k": 6}, 64, 6),
    "expert_num": ({"architectures": ["A"], "expert_num": 64, "moe_topk": 6}, 64, 6),
    "num_experts_list": ({"architectures": ["A"], "num_experts_list": [0, 32, 64], "moe_k": 4}, 64, 4),
    "n_expert": ({"architectures": ["A"], "expert_count": 60, "expert_used_count": 4}, 60, 4),
    "Megatron": ({"architectures": ["A"], "num_moe_experts": 8, "moe_router_topk": 2}, 8, 2),
    "shared": ({"architectures": ["A"], "num_shared_experts": 2, "num_experts": 16, "num_active_experts": 3}, 16, 3),
    "in a section": ({"architectures": ["A"], "top_k": 50, "moe": {"num_experts": 8, "top_k": 2}}, 8, 2),
    "twice nested": (
        nested("A", "a", moe_config={"nb_experts": 40, "num_experts_per_token": 5}, num_hidden_layers=2), 40, 5,
    ),
    "a section a layer": (
        {"architectures": ["NemotronHPuzzleForCausalLM"], "num_experts_per_tok": 6,
         "block_configs": [{"block_type": "mamba"}, {"block_type": "moe", "n_routed_experts": 64},
                           {"block_type": "moe", "n_routed_experts": 128}]}, 128, 6,
    ),
    "null beside": ({"num_experts": None, "num_local_experts": 8, "num_experts_per_tok": 2}, 8, 2),
}  # fmt: skip
DENSE = {
    "gemma-4-31B": gemma_4(None, None, 60),
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 28},
    "one expert": {"architectures": ["HunYuanDenseV1ForCausalLM"], "num_experts": 1, "moe_topk": 1},
    "shared alone": {"architectures": ["A"], "num_shared_experts": 2, "n_redundant_experts": 4, "top_k": 50},
    "groups": {"architectures": ["A"], "n_expert_groups": 8, "expert_layer_period": 2, "expert_capacity": 64},
    "no experts": {"architectures": ["JambaForCausalLM"], "num_experts": 0},
}


@pytest.fixture
def folder(tmp_path):
    """folder(config.json) -> a folder with nothing else."""

    def write(raw):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return tmp_path

    return write


@pytest.mark.parametrize("name", PUBLISHED | OTHERS)
def test_a_mixture_of_experts_of_another_family_is_named_with_what_is_supported(name, folder):
    raw, experts, top_k = (PUBLISHED | OTHERS)[name]
    found = find_experts(raw)
    assert (found.num_experts, found.top_k) == (experts, top_k)
    family = [*raw.get("architectures", ["no architecture"]), f"{experts} experts"]
    with refused(ConfigError, *FAMILIES, key="model.path", got=tuple(family), fault=""):
        read_published(folder(raw) / "config.json")


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_is_called_dense(name, folder):
    with refused(ConfigError, fault="dense", got=(DENSE[name]["architectures"][0],)):
        read_published(folder(DENSE[name]) / "config.json")
    with refused(ConfigError, fault="dense"):
        checkpoint_spec(folder(DENSE[name]), layer_map="m*4")
    with refused(ConfigError, fault="dense"):
        routed_fingerprint(folder(DENSE[name]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_routes_are_imported_and_checked_with_a_layer_map(name, folder, tmp_path):
    raw, experts, top_k = PUBLISHED[name]
    model, layers = folder(raw), raw["text_config"]["num_hidden_layers"]
    letters = f"d,m*{layers - 1}"
    spec = checkpoint_spec(model, layer_map=letters)
    assert (spec.num_experts, spec.top_k, spec.layer_map) == (experts, top_k, "d" + "m" * (layers - 1))
    assert spec.model_fingerprint == routed_fingerprint(model) == fingerprint_of(raw)
    drawn = np.random.default_rng(0).random((12, layers - 1, experts))
    np.save(tmp_path / "routes.npy", np.sort(np.argsort(drawn)[..., :top_k]).astype(np.uint16))
    np.save(tmp_path / "tokens.npy", np.arange(12))
    ask = ["trace", "import", str(tmp_path / "store"), str(tmp_path / "routes.npy"), "--format", "npy"]
    ask += ["--model", str(model), "--token-ids", str(tmp_path / "tokens.npy"), "--key", "k", "--weight-version", "0"]
    assert main(ask) == 2, "no layer map"
    ask += ["--layer-map", letters]
    assert main([*ask, "--check"]) == 0 and main(ask) == 0
    (ref,) = TraceStore(tmp_path / "store").records("imported")
    assert ref.rows == 12


def test_what_is_given_and_config_json_must_agree(folder):
    raw, *_ = PUBLISHED["Kimi-K2.5"]
    model = folder(raw)
    with refused(ConfigError, "KimiK25ForConditionalGeneration", "--layer-map", field="layer_map"):
        checkpoint_spec(model)
    with refused(TraceError, field="layer_map", got=("60",), expected=("61",)):
        checkpoint_spec(model, layer_map="d,m*59")
    assert checkpoint_spec(model, layer_map="d,m*60,t").moe_layers == tuple(range(1, 61))
    with refused(TraceError, field="num_experts", got="64", expected="384"):
        checkpoint_spec(model, layer_map="d,m*60", num_experts=64)
    with refused(ConfigError, "--top-k", field="top_k"):
        checkpoint_spec(folder({"architectures": ["A"], "num_experts": 4}), layer_map="m")
    assert checkpoint_spec(folder({"num_experts": 4}), layer_map="m", top_k=2, fingerprint="mine").top_k == 2


def test_a_family_that_is_trained_needs_no_layer_map_and_no_weights(folder, hf_config):
    assert checkpoint_spec(folder(hf_config)).layer_map == "mdm"
    assert checkpoint_spec(folder(hf_config), layer_map="mdmr").layer_map == "mdmr"
    with refused(ConfigError, field="rope_scaling.rope_type"):
        checkpoint_spec(folder(hf_config | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}))


def test_an_offline_llm_records_any_family_with_a_layer_map(folder):
    import vllm

    raw, *_ = PUBLISHED["Qwen3-VL-30B-A3B-Instruct"]
    with refused(ConfigError, field="layer_map"):
        record(folder(raw))
    with patch.object(vllm, "LLM", side_effect=InterruptedError) as started, pytest.raises(InterruptedError):
        record(folder(raw), layer_map="m*48")
    assert started.call_args.kwargs["additional_config"]["moe_rl"]["model_fingerprint"] == fingerprint_of(raw)
