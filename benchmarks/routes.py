"""Makes routes to measure with: uniform, Zipf, and recorded from the tiny model of this repository."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "tiny_moe"


def random_routes(
    tokens: int, layers: int, num_experts: int, top_k: int, *, exponent: float = 0.0, seed: int = 0
) -> np.ndarray:
    """Return uint8 or uint16 [T, L, K]: random sets of experts, drawn without replacement, in random order.

    exponent: 0 makes all experts equally popular. Otherwise the i-th expert of a layer, in an order drawn for the
    layer, has the weight i**-exponent.
    """
    rng = np.random.default_rng(seed)
    routes = np.empty((tokens, layers, top_k), np.uint8 if num_experts <= 256 else np.uint16)
    weights = np.arange(1, num_experts + 1, dtype=np.float32) ** -exponent
    for layer in range(layers):
        log_weight = np.log(weights[rng.permutation(num_experts)])
        # The top k of log w + Gumbel noise is a sample without replacement with weights w.
        noise = -np.log(np.maximum(rng.standard_exponential((tokens, num_experts), dtype=np.float32), 1e-30))
        routes[:, layer] = np.argpartition(-(log_weight + noise), top_k - 1, axis=1)[:, :top_k]
    return routes


def recorded_routes(sequences: int = 256, tokens: int = 48, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return routes uint8 [T, 8, 4] and token ids int32 [T] of the shipped policy, sampled with transformers."""
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM.from_pretrained(ASSETS / "policy", dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(ASSETS / "policy" / "tokenizer.json"))
    lines = (ASSETS / "task" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:sequences]
    prompts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    routes, token_ids = [], []
    with torch.no_grad():
        sampled = model.generate(padded, attention_mask=mask, do_sample=True, max_new_tokens=tokens, pad_token_id=0)
        for prompt, row in zip(prompts, sampled, strict=True):
            completion = row[width:]
            ends = torch.nonzero(completion == model.config.eos_token_id)
            # The last sampled token is never an input.
            kept = completion[: int(ends[0]) if len(ends) else len(completion) - 1]
            forwarded = torch.cat([torch.tensor(prompt), kept])
            logits = model(forwarded[None], output_router_logits=True).router_logits
            chosen = [layer.topk(model.config.num_experts_per_tok, dim=-1).indices for layer in logits]
            routes.append(torch.stack(chosen, dim=1).numpy().astype(np.uint8))
            token_ids.append(forwarded.numpy().astype(np.int32))
    return routes, token_ids
