"""Runs one training step on one rank through its command, with random completions and routes instead of a sampler.
During the step, the innermost loss function writes down the call stack.

    python one_step.py OUT DOOR ARGUMENT ...

DOOR is the file of the command, run as __main__. OUT/stack.json is [[file, function], ...] of all frames, outermost
first.
"""

import json
import runpy
import sys
from pathlib import Path

import numpy as np

from moe_rl.objectives import losses
from moe_rl.rollout import rollouts
from moe_rl.trace import ShardWriter, TraceSpec, signed
from moe_rl.types import Completion, Provenance, ScoredTokens, Span, sampled_by


class RandomSampler:
    """Stands in for an engine. It accepts weights and ignores them."""

    vllm_version, workers, address, places = "none", ["worker"], "127.0.0.1", (0,)

    def __init__(self, config, facts, folder):
        self.vocabulary, self.root, self.version = facts.vocab, folder / "trace", 0
        self.spec = TraceSpec.from_layers(
            facts.fingerprint, facts.num_experts, facts.top_k, facts.moe_layers, facts.layers
        )

    async def sample(self, place, requests, *, shard, leave, ended):
        with ShardWriter(self.root, shard, self.spec) as writer:
            completions = [self._completed(request, writer) for request in requests]
        for at, completion in enumerate(completions):
            ended(at, completion)
        return completions

    def _completed(self, request, writer):
        rng = np.random.default_rng([request.seed, self.version])
        tokens = tuple(rng.integers(0, self.vocabulary, 4).tolist())
        fed = np.array([*request.prompt_token_ids, *tokens[:-1]], np.int32)
        scores = rng.random((len(fed), len(self.spec.moe_layers), self.spec.num_experts))
        routes = np.argsort(scores, -1)[..., : self.spec.top_k].astype(np.uint8)
        ref = writer.add(request.key, routes, fed, [Span(len(fed), self.version, Provenance.DECODE)])
        ref = signed(ref, routes, self.spec.moe_layers, fed, versions=self.version)
        logprobs = rng.normal(-4, 0.1, len(tokens)).astype(np.float32)
        return Completion(
            request.key, request.prompt_token_ids, tokens, logprobs, "length", sampled_by(self.version, 4), ref,
            drawing=request.drawing,
        )  # fmt: skip

    async def score(self, runs, *, shard=None):
        return [ScoredTokens([np.zeros(len(run) - 1, np.float32) for run in runs], [], "nobody")]

    async def counts(self):
        return {}

    async def take_weights(self, update):
        self.version = update.version

    async def sleep(self, level):
        return False

    async def wake(self, part):
        pass

    def close(self):
        pass


def main(out: Path, door: str, arguments: list[str]) -> None:
    innermost = losses.POLICY_LOSSES["gspo"]

    def gspo(inputs, **options):
        frame, stack = sys._getframe(), []
        while frame is not None:
            stack.append([frame.f_code.co_filename, frame.f_code.co_name])
            frame = frame.f_back
        (out / "stack.json").write_text(json.dumps(stack[::-1]))
        return innermost(inputs, **options)

    losses.POLICY_LOSSES["gspo"] = gspo
    rollouts.start_sampler = RandomSampler
    sys.argv = [door, *arguments]
    runpy.run_path(door, run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
