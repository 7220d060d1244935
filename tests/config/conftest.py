"""Makes a minimal valid run on disk: a checkpoint folder, prompt files and a config. Tests then change it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_rl.models.hf import expected_tensors, read_model

HF_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}

_QWEN_ONLY = ("mlp_only_layers", "decoder_sparse_step", "num_experts")
GLM_CONFIG = {key: value for key, value in HF_CONFIG.items() if key not in _QWEN_ONLY} | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
}

DEEPSEEK_CONFIG = GLM_CONFIG | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "head_dim": None,
    "partial_rotary_factor": None,
    "use_qk_norm": None,
    "attention_bias": False,
    "norm_topk_prob": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GPT_OSS_CONFIG = {key: value for key, value in HF_CONFIG.items() if key not in _QWEN_ONLY} | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "moe_intermediate_size": None,
    "num_local_experts": 4,
    "attention_bias": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "swiglu_limit": 7.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}

CONFIG = """\
run:
  name: tiny
  runs_dir: {root}/runs
  steps: 6
model:
  path: {root}/model
task:
  train:
    - {{name: sums, data: {root}/train.jsonl}}
  heldout:
    - {{name: sums, data: {root}/heldout.jsonl}}
  rewards:
    exact: {{function: moe_rl.tasks.rewards.exact_match}}
  pass_reward: exact
rollout:
  prompts_per_step: 4
  group_size: 2
  max_prompt_tokens: 10
  max_completion_tokens: 6
  kv_cache_mib: 1
train:
  updates_per_step: 2
  microbatch_tokens: 40
  optimizer: {{lr: 1e-6}}
eval:
  prompts: 5
parallel:
  expert: 2
"""


def _write_model(folder: Path, config=HF_CONFIG, nulls=(), **changes) -> Path:
    """Write a checkpoint of zeros, Qwen3-MoE by default.

    changes: keys of config.json (None removes a key). nulls: keys that are present with the value null.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = {key: value for key, value in (config | changes).items() if value is not None} | dict.fromkeys(nulls)
    (folder / "config.json").write_text(json.dumps(raw))
    vocab = {f"t{number}": number for number in range(20)}
    added = [{"id": 20, "content": "<eos>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    (folder / "model.safetensors").write_bytes(b"")
    shapes = expected_tensors(read_model(folder))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def hf_config() -> dict:
    return dict(HF_CONFIG)


@pytest.fixture
def write_model():
    return _write_model


@pytest.fixture
def write_glm():
    """Writes a GLM-4.5 checkpoint instead."""
    return partial(_write_model, config=GLM_CONFIG)


@pytest.fixture
def write_deepseek():
    """Writes a DeepSeek-V3 checkpoint instead."""
    return partial(_write_model, config=DEEPSEEK_CONFIG)


@pytest.fixture
def write_gpt_oss():
    """Writes a gpt-oss checkpoint instead."""
    return partial(_write_model, config=GPT_OSS_CONFIG)


@pytest.fixture
def model(tmp_path) -> Path:
    return _write_model(tmp_path / "model")


@pytest.fixture
def config_file(tmp_path, model) -> Path:
    """A config without problems on 2 ranks."""
    (tmp_path / "train.jsonl").write_text('{"id": "a"}\n' * 8)
    (tmp_path / "heldout.jsonl").write_text('{"id": "b"}\n' * 5)
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(root=tmp_path))
    return file
