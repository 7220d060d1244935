"""Makes updates of a policy with plain transformers when it is asked to: `transformers_updates.py FOLDER DTYPE`, see
`our_updates`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from peer_sides.turns import answer, asked

NOT_TRAINED = -100


def main() -> None:
    folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-12)
    tokens, mask, targets = _rectangle(json.loads((folder / "sequences.json").read_text()))
    for _ in asked():
        start = time.perf_counter()
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NOT_TRAINED, reduction="sum")
        (loss / 1e4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        answer(time.perf_counter() - start)


def _rectangle(sequences: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens that are fed, padded at their end to the longest, the mask, and the tokens to predict."""
    longest = max(len(prompt) + len(completion) - 1 for prompt, completion in sequences)
    tokens, mask = torch.zeros(2, len(sequences), longest, dtype=torch.int64)
    targets = torch.full_like(tokens, NOT_TRAINED)
    for row, (prompt, completion) in enumerate(sequences):
        fed = len(prompt) + len(completion) - 1
        tokens[row, :fed] = torch.tensor((prompt + completion)[:-1])
        mask[row, :fed] = 1
        targets[row, len(prompt) - 1 : fed] = torch.tensor(completion)
    return tokens, mask, targets


if __name__ == "__main__":
    main()
