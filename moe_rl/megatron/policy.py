"""The trained policy: megatron's own schedule, forward-only for log-probabilities, with gradients for an update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from moe_rl.config.hf import ModelFacts
from moe_rl.config.schema import OptimizerConfig, TrainConfig
from moe_rl.megatron import hf_map
from moe_rl.megatron.microbatch import Microbatch
from moe_rl.megatron.model import build_model, first_local_expert, transformer_config, unwrap, wrap_for_training
from moe_rl.objectives.logprobs import token_logprobs
from moe_rl.replay.session import ReplaySession

# (microbatch number, logprobs [N] with gradient) -> the microbatch's share of the loss, divided by its denominator
LossFunction = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """grad_norm: global, before clipping. applied: False when a non-finite norm made all ranks skip the step."""

    grad_norm: float
    lr: float
    applied: bool


def learning_rate(settings: OptimizerConfig, update: int) -> float:
    """Linear warm-up over `warmup_steps` updates, then constant. update counts from 0."""
    return settings.lr * min(1.0, (update + 1) / max(1, settings.warmup_steps))


def completion_logprobs(microbatch: Microbatch, logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[N] float32 from the model's logits [1, T, V], for the completion tokens only."""
    return token_logprobs(logits[0].index_select(0, microbatch.predicts), microbatch.targets, temperature)


class Policy:
    """A GPTModel with replay, its optimizer, and the passes the loop needs. All ranks call every method together."""

    def __init__(self, facts: ModelFacts, train: TrainConfig, checkpoint, *, expert_parallel: int, temperature: float):
        self.facts = facts
        self.temperature = temperature
        self.settings = train.optimizer
        self.config = transformer_config(facts, train, expert_parallel=expert_parallel)
        self.model, self.optimizer = wrap_for_training(build_model(facts, self.config, checkpoint), self.config, train)
        self.updates = 0
        self._schedule = get_forward_backward_func()

    @property
    def layers(self) -> tuple[int, ...]:
        """Global 0-based numbers of the MoE layers this rank holds."""
        return tuple(layer.layer_number - 1 for layer in unwrap(self.model).decoder.layers if layer.is_moe_layer)

    @torch.no_grad()
    def logprobs(
        self, microbatches: list[Microbatch], session: ReplaySession | None, temperature: float | None = None
    ) -> list[torch.Tensor]:
        """Log-probabilities [N] float32 of the completion tokens of each microbatch, no gradient.

        session: replays or observes; None routes natively, uncompared. temperature: None is that of sampling.
        """
        results = {}

        def collect(number, logits, non_loss_data=True):
            results[number] = completion_logprobs(microbatches[number], logits, temperature or self.temperature)
            return number

        self.model.eval()
        self._run(microbatches, session, collect, forward_only=True, collect_non_loss_data=True)
        self.model.train()
        return [results[number] for number in range(len(microbatches))]

    def update(self, microbatches: list[Microbatch], session: ReplaySession | None, loss: LossFunction) -> UpdateResult:
        """One optimizer step on the gradient of the summed losses. A non-finite gradient changes nothing, anywhere."""

        def loss_of(number, logits):
            value = loss(number, completion_logprobs(microbatches[number], logits, self.temperature))
            return value, torch.zeros([], dtype=torch.int), {}

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(microbatches, session, loss_of, forward_only=False)
        lr = learning_rate(self.settings, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # The norm is reduced over all ranks, so all of them see the same value and decide alike. Megatron's step would
        # scale by a non-finite norm and write it into every weight.
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        applied = math.isfinite(grad_norm)
        if applied:
            self.optimizer.step()
            self.updates += 1
        return UpdateResult(grad_norm=grad_norm, lr=lr, applied=applied)

    def export(self, dtype: torch.dtype, *, dense: bool, experts: bool) -> dict[str, torch.Tensor]:
        """This rank's share of the weights under Hugging Face names, in the sampler's precision, on the host."""
        tensors = hf_map.export(
            unwrap(self.model), self.facts, first_expert=first_local_expert(self.facts), dense=dense, experts=experts
        )
        return {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}

    def _run(self, microbatches, session, after_forward, *, forward_only, **options):
        def forward_step(iterator, model):
            number, microbatch = next(iterator)
            logits = model(
                microbatch.tokens, microbatch.positions, None, packed_seq_params=microbatch.seq_params(session, number)
            )
            return logits, partial(after_forward, number)

        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=enumerate(microbatches),
            model=[self.model],
            num_microbatches=len(microbatches),
            seq_length=max(m.tokens.shape[1] for m in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
            **options,
        )


class ReferencePolicy:
    """The frozen initial policy. It always routes natively: its own choices are what it is a reference for."""

    def __init__(self, facts: ModelFacts, train: TrainConfig, checkpoint, *, expert_parallel: int, temperature: float):
        self.temperature = temperature
        config = transformer_config(facts, train, expert_parallel=expert_parallel)
        self.model = build_model(facts, config, checkpoint).eval().requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        """As Policy.logprobs, natively routed."""
        results = []
        for number, microbatch in enumerate(microbatches):
            logits = self.model(
                microbatch.tokens, microbatch.positions, None, packed_seq_params=microbatch.seq_params(None, number)
            )
            results.append(completion_logprobs(microbatch, logits, self.temperature))
        return results
