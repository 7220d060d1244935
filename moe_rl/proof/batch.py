"""Makes the batch and the model of a proof: small, random, and the same in every process."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_rl.models.hf import ModelFacts
from moe_rl.types import Sequence, sampled_by

# (prompt, completion) tokens: lengths are uneven, some completions have a single token, and some sequences have fewer
# tokens than context parallelism splits them into.
LENGTHS = [(5, 4), (3, 9), (7, 1), (4, 6), (6, 3), (2, 8), (5, 5), (9, 2), (3, 3), (4, 7), (1, 1), (1, 2), (2, 1)]


def quiet() -> None:
    """Turn off the progress bars of `transformers`, which small models do not need."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def make_checkpoint(path: Path, *, layers: int = 4, experts: int = 16, seed: int = 0) -> Path:
    """Write a Hugging Face checkpoint of a random Qwen3-MoE with 4 experts per token."""
    quiet()
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=4,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)  # sharper routing and larger logits than after initialisation
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def batch(facts: ModelFacts) -> tuple[list[Sequence], list[np.ndarray]]:
    """Return random sequences, and for each random routes [T, L, K] uint8, far from what any router would choose."""
    rng = np.random.default_rng(11)
    sequences, routes = [], []
    for number, (prompt, completion) in enumerate(LENGTHS):
        tokens = rng.integers(0, facts.vocab, prompt + completion).tolist()
        sequences.append(
            Sequence(
                key=f"s{number}",
                prompt_token_ids=tuple(tokens[:prompt]),
                token_ids=tuple(tokens[prompt:]),
                rollout_logprobs=rng.normal(-6, 0.3, completion).astype(np.float32),
                # keeps gradients below 1, where float32 rounding errors are below 1e-7
                reward=float(0.5 * rng.normal()),
                versions=sampled_by(0, completion),
                routes=None,
            )
        )
        scores = rng.random((prompt + completion - 1, len(facts.moe_layers), facts.num_experts))
        routes.append(np.argsort(scores, -1)[..., : facts.top_k].astype(np.uint8))
    return sequences, routes
