"""Runs training on one rank through its command, with the stand-in sampler of `one_step`. Every step but the first gets
one number that is not finite: a sampler logprob, a gradient, a weight.

    python not_finite_run.py OUT ARGUMENT ...

OUT/steps.json says for each step whether weights, optimizer and random generators kept the same bits.
"""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import torch

from moe_rl.megatron import rng
from moe_rl.megatron.model import unwrap
from moe_rl.objectives import losses
from moe_rl.rollout import rollouts
from moe_rl.train import step as train_step
from tests.train.one_step import RandomSampler

LOGPROB, GRADIENT, WEIGHT = 2, 3, 4
"""The steps in which one of them is planted."""
steps: list[dict[str, object]] = []


class Sampler(RandomSampler):
    def _completed(self, request, writer):
        made = super()._completed(request, writer)
        if request.key != f"s{LOGPROB}/p0/c1":
            return made
        logprobs = made.logprobs.copy()
        logprobs[2] = torch.nan
        return replace(made, logprobs=logprobs, seal="")


def held(policy):
    """Return everything that an update may change, as bytes."""
    (optimizer,) = policy.optimizers
    parameters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    moments = [optimizer.optimizer.state[p][name] for p in parameters for name in sorted(optimizer.optimizer.state[p])]
    weights = [t for chunk in policy.chunks for t in unwrap(chunk).state_dict().values() if torch.is_tensor(t)]
    tensors = [*weights, *parameters, *moments, *rng.state().values()]
    found = [torch.as_tensor(t).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    return found, policy.updates


def main(out: Path, arguments: list[str]) -> None:
    run, sound = train_step.TrainStep.run, losses.POLICY_LOSSES["gspo"]

    def watched(self, *args, step, **options):
        if step == WEIGHT:
            router = unwrap(self.policy.chunks[0]).decoder.layers[3].mlp.router
            router.weight.data[5, 7] = torch.nan
        before = held(self.policy)
        try:
            return run(self, *args, step=step, **options)
        finally:
            steps.append({"step": step, "same": held(self.policy) == before})
            (out / "steps.json").write_text(json.dumps(steps))

    def gspo(inputs, **options):
        if len(steps) + 1 == GRADIENT:

            def spoil(gradient):
                gradient = gradient.clone()
                gradient[0] = torch.inf
                return gradient

            inputs.logprobs.register_hook(spoil)
        return sound(inputs, **options)

    train_step.TrainStep.run = watched
    losses.POLICY_LOSSES["gspo"] = gspo
    rollouts.start_sampler = Sampler
    sys.argv = ["train_moe_rl.py", *arguments]
    runpy.run_path("tools/train_moe_rl.py", run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
