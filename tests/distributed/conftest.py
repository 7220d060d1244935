"""A tiny random Qwen3-MoE, torchrun, and the independent single-process reference that layouts are compared with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moe_rl.config.schema import ParallelConfig

ONE = ParallelConfig()
WORKER = Path(__file__).with_name("policy_worker.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)  # sharper routing and larger logits than at initialisation
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def torchrun(ranks, *arguments, script=WORKER, timeout=240):
    """Run a worker script under torchrun on a free port; the finished process, output captured."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(script),
    ]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="session")
def run_policy(checkpoint, tmp_path_factory):
    """run_policy(ranks, parallel, dtype, recompute, mode, fault) -> (process, [what each rank saw]); cached."""
    cache = {}

    def run(ranks, parallel=ONE, dtype="float32", recompute="none", mode="replay", fault="none"):
        key = (ranks, parallel, dtype, recompute, mode, fault)
        if key not in cache:
            out = tmp_path_factory.mktemp("ranks")
            process = torchrun(ranks, checkpoint, out, parallel.model_dump_json(), dtype, recompute, mode, fault)
            seen = [torch.load(out / f"rank{r}.pt") for r in range(ranks) if (out / f"rank{r}.pt").exists()]
            cache[key] = process, seen
        return cache[key]

    return run


@pytest.fixture(scope="session")
def reference(checkpoint):
    """reference(forced) -> (logprobs {sequence: [N]}, gradients {name: tensor}) by transformers in one process."""
    from transformers import Qwen3MoeForCausalLM

    from moe_rl.config.hf import read_model
    from tests.distributed.policy_worker import batch

    cache = {}

    def compute(forced):
        if forced in cache:
            return cache[forced]
        model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
        sequences, routes = batch(read_model(checkpoint))
        current = {}

        def gate(self, hidden):
            logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
            probs = torch.softmax(logits.float(), -1)
            chosen = current["routes"][:, self.number] if forced else probs.topk(self.top_k, -1)[1]
            weights = probs.gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.number = number
            layer.mlp.gate.forward = gate.__get__(layer.mlp.gate)
        logprobs = {}
        for number, (sequence, table) in enumerate(zip(sequences, routes, strict=True)):
            tokens = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
            current["routes"] = torch.from_numpy(table.astype("int64"))
            predicted = model(tokens[:, :-1]).logits[0].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            predicted = predicted[len(sequence.prompt_token_ids) - 1 :]
            (-(predicted * sequence.advantage).sum() / len(sequences)).backward()
            logprobs[number] = predicted.detach()
        gradients = {}
        for name, parameter in model.named_parameters():
            prefix = name.rsplit(".", 1)[0]
            if name.endswith("experts.gate_up_proj"):
                for expert, both in enumerate(parameter.grad):
                    gate_grad, up_grad = both.chunk(2, 0)
                    gradients[f"{prefix}.{expert}.gate_proj.weight"] = gate_grad
                    gradients[f"{prefix}.{expert}.up_proj.weight"] = up_grad
            elif name.endswith("experts.down_proj"):
                for expert, one in enumerate(parameter.grad):
                    gradients[f"{prefix}.{expert}.down_proj.weight"] = one
            else:
                gradients[name] = parameter.grad
        cache[forced] = logprobs, gradients
        return cache[forced]

    return compute
