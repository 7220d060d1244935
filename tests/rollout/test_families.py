"""Tests the model families in vLLM: routes and log-probabilities equal those of `transformers`, before and after an
update of every weight. Qwen3-MoE with an output matrix of its own is in test_recording.py."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import torch

from moe_rl.models.hf import expected_tensors, is_mtp_tensor, read_model
from moe_rl.models.weight_files import is_left_out
from moe_rl.models.weight_table import EMBEDDING, HEAD
from moe_rl.vllm.loader import FORMAT
from tests.rollout.conftest import TOP_K, VOCAB
from tests.rollout.test_recording import agree, play, requests, scenarios  # noqa: F401 - two are fixtures
from tests.support.independent import BIAS, Independent
from tests.weights.sending import by_disk

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "eos_token_id": 1,
}
# A dense layer, then 3 layers with 16 experts in 4 groups, 2 of which a token may use, and two shared experts.
GROUPS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1}
GROUPS |= {"routed_scaling_factor": 1.5}
# vLLM's CPU kernel for latent attention accepts only the published key widths.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": None}
LATENT |= {"initializer_range": 0.08}
MODELS = {
    "qwen": ("Qwen3Moe", {"num_experts": 16, "num_key_value_heads": 2, "head_dim": 32, "norm_topk_prob": True}),
    "glm": (
        "Glm4Moe",
        GROUPS | {"num_key_value_heads": 2, "head_dim": 32, "use_qk_norm": True, "attention_bias": True},
    ),
    # as Moonlight: no query down-projection, plain rotary angles
    "moonlight": ("DeepseekV3", GROUPS | LATENT | {"num_key_value_heads": 4}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 16, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 8}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
           | {"original_max_position_embeddings": 256, "beta_fast": 8.0, "beta_slow": 1.0}},
    ),
}  # fmt: skip
# A tensor to drop while loading, and the vLLM parameter that then lacks values.
LOST = {
    "glm": ("self_attn.k_proj.weight", "self_attn.qkv_proj.weight"),
    "moonlight": ("mlp.experts.3.up_proj.weight", "w13_weight"),
    "gpt-oss": ("input_layernorm.weight", "input_layernorm.weight"),
}


def make_checkpoint(name, folder, *, tied=False):
    """Make a random model of MODELS with spread-out biases, sinks and routers. tied: its embedding is also its output
    matrix.

    GLM's has a tensor of a multi-token-prediction layer.
    """
    import transformers
    from safetensors.torch import load_file, save_file

    family, settings = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | settings), tie_word_embeddings=tied)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith((BIAS, "bias", "sinks", "gate.weight", "router.weight")):
                tensor.normal_(0, 0.15)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    if family == "Glm4Moe":
        file = folder / "model.safetensors"
        save_file(load_file(file) | {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}, file, {"format": "pt"})
    if family == "DeepseekV3":  # as published, and not as transformers saves it
        config = json.loads((folder / "config.json").read_text())
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.seeds(3)
@pytest.mark.parametrize("name, amx", [*((name, False) for name in LOST), ("moonlight", True)])
def test_recorded_before_and_after_an_update(play, name, amx, seeds, tmp_path):  # noqa: F811
    """amx: vLLM is told that this CPU has AMX, which must not be used in float32. One engine gets the weights of each
    seed by an update."""
    make_checkpoint(name, tmp_path / "model")
    told = _updated(play, name, tmp_path, f"model.layers.1.{LOST[name][0]}", amx=amx, seeds=seeds)
    assert "model.layers.1." in told and LOST[name][1] in told
    assert ("2" if name == "glm" else "1") + " incomplete parameters" in told  # with the bias that is beside it


@pytest.mark.parametrize("name, copied", [*((name, False) for name in MODELS), ("qwen", True), ("glm", True)])
def test_a_tied_output_matrix_is_the_new_embedding(play, name, copied, tmp_path):  # noqa: F811
    """Nobody sends an output matrix, whether vLLM ties it or makes one of its own. copied: the checkpoint has a copy of
    the embedding under the name of the output matrix, and buffers that nobody reads."""
    from safetensors.torch import load_file, save_file

    model = make_checkpoint(name, tmp_path / "model", tied=True)
    file = model / "model.safetensors"
    if copied:
        tensors = load_file(file)
        buffers = {f"model.layers.0.self_attn.{one}": torch.zeros(1) for one in ("rotary_emb.inv_freq", "masked_bias")}
        save_file(tensors | {HEAD: tensors[EMBEDDING].clone()} | buffers, file, {"format": "pt"})
    assert (HEAD in load_file(file)) == copied
    assert "got 1 incomplete parameters: lm_head.weight" in _updated(play, name, tmp_path, HEAD)


def _updated(play, name, tmp_path, lost, *, amx=False, seeds=range(1)) -> str:  # noqa: F811
    """Check updates of `tmp_path`/model by all tensors that a trainer sends. Return what the last one is told, which
    loses a tensor."""
    from safetensors.torch import load_file, save_file

    model, version = tmp_path / "model", 0
    facts = read_model(model)
    old = load_file(model / "model.safetensors")
    acts = [{"sample": requests(4, 2), "sink": "before"}]
    for seed in seeds:
        # As a trainer sends it: only the decoder, a tied embedding once. Every tensor changes, the bias by more than
        # any score.
        noise = torch.Generator().manual_seed(3 + seed)
        sent = {
            key: torch.randn(tensor.shape, generator=noise) * (1.0 if key.endswith(BIAS) else 0.05) + tensor
            for key, tensor in old.items()
            if not (is_mtp_tensor(facts, key) or is_left_out(facts, key))
        }
        assert sent.keys() == expected_tensors(facts).keys()
        other = tmp_path / f"other{seed}"
        other.mkdir()
        (other / "config.json").write_text((model / "config.json").read_text())
        (other / "tokenizer.json").write_text("{}")
        save_file(sent, other / "model.safetensors", {"format": "pt"})
        update = msgspec.to_builtins(by_disk(tmp_path, sent, version=version + 5, replaces=version))
        acts += [{"update": update}, {"sample": requests(4, 2, seed=9 + seed), "sink": other.name}]
        version += 5
    again = msgspec.to_builtins(by_disk(tmp_path, sent, version=version + 1, replaces=version, changed=False))
    outcome = play(
        [*acts, {"update": again, "lost": lost}],
        engine={"model": str(model)} | ({"load_format": FORMAT} if facts.tie_word_embeddings else {}),
        amx=amx,
    )
    before = Independent(model)
    assert agree(outcome, before) > 1000
    for number, seed in enumerate(seeds, 1):
        assert agree(outcome, Independent(tmp_path / f"other{seed}"), act=number, version=5 * number) > 1000
    record = outcome.store.read(outcome.ref(outcome.completions(1)[0]))
    assert record.spec.layer_map == "".join("m" if at in facts.moe_layers else "d" for at in range(4))
    told = outcome.result["acts"][-1]["failed"]
    assert not outcome.result["acts"][-1]["whole"] and "did not load all new weights" in told
    # Witness that the update took effect: the old model would have chosen other experts.
    completion = outcome.completions(1)[0]
    sets = before([*completion["prompt"], *completion["token_ids"]]).sets
    assert (np.sort(record.routes, -1) != sets).any(-1).mean() > 0.5
    return told
