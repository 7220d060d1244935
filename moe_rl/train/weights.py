"""Trainer weights into the running sampler, and the canary that both score afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch.distributed as dist

from moe_rl.megatron import world
from moe_rl.megatron.microbatch import pack
from moe_rl.megatron.model import DTYPES
from moe_rl.megatron.policy import Policy
from moe_rl.planning.packing import fill_rounds
from moe_rl.rollout.engine import VllmEngine
from moe_rl.sync.precision import fp8_rounded, is_rounded
from moe_rl.sync.weights import expected_digest, write_part
from moe_rl.types import Sequence


def send_weights(
    policy: Policy, engine: VllmEngine | None, folder: Path, version: int, *, dtype: str, weights: str
) -> int:
    """Every rank writes its share, rank 0 has the engine load and confirm all of it. Returns the bytes written.

    engine: on rank 0 only. One rank of one replica writes each tensor; the parts are deleted once they are loaded.
    dtype, weights: as in the config's `rollout`.
    Raises WeightSyncError on rank 0 when the engine read anything else than what was written.
    """
    parts = folder / f"v{version}"
    parts.mkdir(parents=True, exist_ok=True)
    dense, experts = world.holds_first_replica()
    tensors = policy.export(DTYPES[dtype], dense=dense, experts=experts)
    if weights == "fp8_e4m3":
        tensors = {name: fp8_rounded(tensor) if is_rounded(name) else tensor for name, tensor in tensors.items()}
    if tensors:
        write_part(parts / f"rank{dist.get_rank():05d}.safetensors", tensors)
    dist.barrier()
    sent = 0
    if engine is not None:
        files = sorted(parts.iterdir())
        sent = sum(file.stat().st_size for file in files)
        engine.update_weights(files, version, expected_digest(files))
        shutil.rmtree(parts)
    return sent


class Canary:
    """A fixed run of tokens whose log-probabilities both engines compute from the weights they hold."""

    def __init__(self, tokens: tuple[int, ...]):
        self.tokens = tokens
        canary = Sequence(
            key="canary",
            prompt_token_ids=tokens[:1],
            token_ids=tokens[1:],
            rollout_logprobs=np.zeros(len(tokens) - 1, np.float32),
            reward=0.0,
            weight_version=0,
            routes=None,
        )
        (plan,) = fill_rounds([[[0]]], world.microbatches_in_a_round())
        self.microbatches = [pack([canary], one, world.device(), world.context_parallel()) for one in plan]

    def difference(self, policy: Policy, engine: VllmEngine | None) -> float:
        """Mean |log-probability difference| in nats, both routing natively, on rank 0; 0 on the others."""
        ours, *_ = policy.logprobs(self.microbatches, None, temperature=1.0)
        return float(np.abs(ours.cpu().numpy() - engine.score(self.tokens)).mean()) if engine is not None else 0.0
