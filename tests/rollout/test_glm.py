"""GLM-4.5 in vLLM: recorded routes equal those of `transformers`, before and after an update that moves the bias."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from moe_rl.config.hf import is_mtp_tensor, read_model
from tests.rollout.conftest import TOP_K, VOCAB
from tests.rollout.test_recording import agree, play, requests  # noqa: F401 - `play` is a fixture
from tests.sync.sending import by_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """A dense layer, then 3 with 16 experts in 4 groups, of which a token may use 2, and two shared ones; one tensor of
    a multi-token-prediction layer."""
    from safetensors.torch import load_file, save_file
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    folder = tmp_path_factory.mktemp("glm")
    torch.manual_seed(1)
    config = Glm4MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=16,
        n_shared_experts=2,
        num_experts_per_tok=TOP_K,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
        max_position_embeddings=1024,
        num_nextn_predict_layers=1,
        initializer_range=0.15,
        eos_token_id=1,
    )
    model = Glm4MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith((BIAS, "proj.bias", "gate.weight")):
                tensor.normal_(0, 0.15)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}, file, {"format": "pt"})
    return folder


class GlmRouter:
    """The routers of a checkpoint in `transformers`, float32; what they return is what `agree` compares with."""

    def __init__(self, folder):
        from transformers import Glm4MoeForCausalLM

        self._facts = read_model(folder)
        self._model = Glm4MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._chosen, self._gaps = [], []
        for layer in self._facts.moe_layers:
            self._model.model.layers[layer].mlp.gate.register_forward_hook(self._look)

    def _look(self, gate, inputs, output):
        logits, _, chosen = output
        scores = logits.sigmoid() + gate.e_score_correction_bias
        by_group = scores.view(len(scores), self._facts.groups, -1)
        groups = by_group.topk(2, -1).values.sum(-1).topk(self._facts.top_groups + 1, -1)
        allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(1, groups.indices[:, :-1], True)
        best = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(1).topk(TOP_K + 1, -1).values
        self._chosen.append(chosen.sort(-1).values)
        # Either the last expert or the last group could have been another.
        self._gaps.append(torch.minimum(best[:, -2] - best[:, -1], groups.values[:, -2] - groups.values[:, -1]))

    @torch.no_grad()
    def __call__(self, tokens):
        """Sorted sets [T, L, K], gaps [T, L], nothing, logprobs [T, V]."""
        self._chosen.clear()
        self._gaps.clear()
        output = self._model(torch.tensor([list(tokens)]), use_cache=False)
        sets, gaps = torch.stack(self._chosen, 1).numpy(), torch.stack(self._gaps, 1).numpy()
        return sets, gaps, None, output.logits[0].log_softmax(-1).numpy()


def test_recorded_before_and_after_an_update(play, glm, tmp_path):  # noqa: F811
    from safetensors.torch import load_file, save_file

    facts = read_model(glm)
    old = load_file(glm / "model.safetensors")
    # What a trainer sends: the decoder alone. The bias is moved by more than any score, so that it decides.
    sent = {name: tensor.clone() for name, tensor in old.items() if not is_mtp_tensor(facts, name)}
    assert len(sent) == len(old) - 1
    for name in filter(lambda name: name.endswith(BIAS), sent):
        sent[name] = torch.randn(16, generator=torch.Generator().manual_seed(3))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((glm / "config.json").read_text())
    (other / "tokenizer.json").write_text("{}")
    save_file(sent, other / "model.safetensors", {"format": "pt"})

    update = msgspec.to_builtins(by_disk(tmp_path, sent, version=5))
    outcome = play(
        [
            {"sample": requests(4, 2), "sink": "before"},
            {"update": update},
            {"sample": requests(4, 2, seed=9), "sink": "after"},
        ],
        engine={"model": str(glm)},
    )
    before, after = GlmRouter(glm), GlmRouter(other)
    assert agree(outcome, before) > 1000
    assert agree(outcome, after, act=1, version=5) > 1000
    record = outcome.store.read(outcome.ref(outcome.completions(1)[0]))
    assert record.spec.layer_map == "dmmm"
    # the update is what decided: the old model would have chosen otherwise
    completion = outcome.completions(1)[0]
    sets, *_ = before([*completion["prompt"], *completion["token_ids"]])
    assert (np.sort(record.routes, -1) != sets[:-1]).any(-1).mean() > 0.5
