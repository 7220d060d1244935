"""Holds the frozen policy that the objective's KL penalty compares with. It always routes natively, because its own
expert choice is part of the reference."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from moe_rl.config.training import ParallelConfig, TrainConfig
from moe_rl.megatron import schedule
from moe_rl.megatron.adapters import without_adapters
from moe_rl.megatron.microbatch import Work
from moe_rl.megatron.model import build_model, transformer_config, unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import ModelFacts


class ReferencePolicy:
    """Holds a second model with the weights of a checkpoint, and adapters where `train.lora` asks for them."""

    def __init__(
        self, facts: ModelFacts, train: TrainConfig, parallel: ParallelConfig, checkpoint, *, temperature: float
    ):
        self.facts, self.temperature = facts, temperature
        config = transformer_config(facts, train, parallel)
        self.chunks = [
            chunk.eval().requires_grad_(False) for chunk in build_model(facts, config, checkpoint, train.lora)
        ]
        self.trains_adapters = train.lora is not None

    def score(self, work: Seq[Work]) -> None:
        """Set the `ref_logprobs` of these microbatches."""
        scored = schedule.logprobs(self.chunks, [item.microbatch for item in work], None, self.temperature)
        for item, values in zip(work, scored, strict=True):
            item.ref_logprobs = values[0]


class BaseOfAdapters:
    """Is the policy without its adapters: the model that they began with, without a second copy of its weights."""

    def __init__(self, policy: Policy):
        self._policy = policy

    def score(self, work: Seq[Work]) -> None:
        """Set the `ref_logprobs` of these microbatches."""
        with without_adapters(map(unwrap, self._policy.chunks)):
            scored = self._policy.score(work, None, "reference logprobs")
        for item, values in zip(work, scored.logprobs, strict=True):
            item.ref_logprobs = values
