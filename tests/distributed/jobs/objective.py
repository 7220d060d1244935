"""A job for ranks of the proof that a gradient does not depend on how the batch was cut."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from moe_rl.config.load import load_config
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import read_model
from moe_rl.objectives.losses import global_denominator
from moe_rl.proof.trial import whole_gradients
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore, signed
from moe_rl.train.credit import trust
from moe_rl.train.loss import LossSums, UpdateLoss
from moe_rl.train.step import TrainStep
from moe_rl.train.step_metrics import loss_metrics
from moe_rl.types import Provenance, Sequence, Span, sampled_by

ROOT = Path(__file__).parents[3]
VERSION = 5
# (prompt, completion) tokens: one completion of most of the tokens, some of a single one, and an empty one
LENGTHS = [(5, 4), (3, 30), (7, 1), (4, 6), (6, 0), (2, 18), (5, 5), (9, 2), (3, 1), (4, 7), (1, 1), (1, 2), (2, 12)]
WITHOUT_ADVANTAGE = (2, 6)
SEGMENTS = {8: 7, 9: 7}  # that continue the completion of another one
HEAD = 5
# The learning rate is below what a weight can resolve: every case starts from the same ones.
COMMON = [
    "train.dtype=float32",
    "train.updates_per_step=1",
    "train.optimizer.lr=1e-30",
    "train.optimizer.warmup_steps=0",
    "train.optimizer.clip_grad=1e9",
    "rollout.max_completion_tokens=32",
]


def batch(facts):
    """Random sequences, and for each random routes [T, L, K]. The sampler's logprobs are filled in later."""
    rng = np.random.default_rng(3)
    sequences, routes = [], []
    for number, (prompt, completion) in enumerate(LENGTHS):
        tokens = rng.integers(0, facts.vocab, prompt + completion).tolist()
        begins = SEGMENTS.get(number, number)
        reward = 0.0 if number in WITHOUT_ADVANTAGE else float(rng.choice([-1, 1]) * rng.uniform(0.2, 1.5))
        if begins != number:
            reward = sequences[begins].reward
        sequences.append(Sequence(f"s{number}", tuple(tokens[:prompt]), tuple(tokens[prompt:]),
                                  np.zeros(completion, np.float32), reward, sampled_by(VERSION, completion), None,
                                  segment_of=f"s{begins}" if begins in SEGMENTS.values() else ""))  # fmt: skip
        scores = rng.random((prompt + completion - 1, len(facts.moe_layers), facts.num_experts))
        routes.append(np.argsort(scores, -1)[..., : facts.top_k].astype(np.uint8))
    return sequences, routes


def head_of(sequence):
    """The sampler's likeliest tokens, as a recorder keeps them: any but the sampled one, with nine tenths of the
    probability."""
    rng, size = np.random.default_rng([9, len(sequence.prompt_token_ids), *sequence.token_ids]), len(sequence.token_ids)
    ids = np.array([rng.permutation(np.delete(np.arange(HEAD + 1), t) if t <= HEAD else HEAD)[:HEAD]
                    for t in sequence.token_ids], np.int32).reshape(size, HEAD)  # fmt: skip
    shares = np.sort(0.9 * rng.dirichlet(np.ones(HEAD), size))[:, ::-1]
    return {"head_ids": ids, "head_logprobs": np.log(shares).astype(np.float32)}


def stored(sequences, routes, spec, folder):
    """The sequences, with references to their routes in a store."""
    ready = []
    with ShardWriter(folder, "step", spec) as writer:
        for sequence, table in zip(sequences, routes, strict=True):
            tokens = np.array(sequence.prompt_token_ids + sequence.token_ids, np.int32)[:-1]
            spans = [Span(len(tokens), VERSION, Provenance.PREFILL)] if len(tokens) else []
            aux = head_of(sequence)
            ref = signed(writer.add(sequence.key, table, tokens, spans, aux=aux), table, spec.moe_layers, tokens,
                         versions=VERSION)  # fmt: skip
            ready.append(replace(sequence, routes=ref))
    return ready


class Scores:
    """Logprobs of every sequence's completion: the trainer's before the update, the sampler's, the reference's.

    They are those of the first layout with noise, and so the same in all of them: apart by less than a clip range for
    some tokens and by more for others.
    """

    def __init__(self, base):
        rng = np.random.default_rng(7)

        def near(values, sizes):
            # of each sequence a shift of all its tokens, and one of each token; sizes in turn
            noise = [rng.normal(0, 0.02) + rng.normal(0, sizes[n % len(sizes)], len(v)) for n, v in enumerate(values)]
            return [(v + n).astype(np.float32) for v, n in zip(values, noise, strict=True)]

        self.old = near(base, [0.02, 0.2])
        self.rollout = near(self.old, [0.01, 0.1, 0.4])
        self.reference = near(base, [0.3])


def microbatch_means(step, share, sums):
    """The loss as if each microbatch were averaged by itself, then the microbatches of all ranks: what is wrong."""
    ranks = world.data_parallel()[1]
    losses = []
    for work in share.work:
        microbatch = work.microbatch
        lengths = torch.bincount(microbatch.sequence_ids, minlength=len(microbatch.indices)).tolist()
        own = global_denominator(step.config.objective.name, lengths, step.config.rollout.max_completion_tokens)
        wrong = replace(share, denominator=max(1, own) * len(share.work) * ranks)
        losses.append(UpdateLoss(step.config.objective, wrong, sums))
    return lambda number, logprobs: losses[number](number, logprobs)


def gradients(step, policy, ready, scores, order, *, wrong=False):
    """Gradients of one update with this objective, under Hugging Face names; and what the step says of it."""
    (share,), _ = step.shares.divide(ready, list(range(len(ready))), VERSION, step.policy.placement)

    def of(microbatch, values):
        own = [values[order[i]] for i in microbatch.indices]
        return torch.from_numpy(np.concatenate([np.empty(0, np.float32), *own]))

    for work in share.work:
        work.microbatch.give_advantages([[sequence.reward] for sequence in ready])
        work.old_logprobs, work.ref_logprobs = of(work.microbatch, scores.old), of(work.microbatch, scores.reference)
    limit = step.config.objective.second_moment_limit
    trusted = {} if limit is None else trust(limit, [share])
    sums = LossSums()
    loss = microbatch_means(step, share, sums) if wrong else UpdateLoss(step.config.objective, share, sums)
    policy.update(share.work, loss, "replay", "update")
    told = loss_metrics(step.config.objective, sums, 1) | trusted
    return whole_gradients(policy, policy.facts), told, len(share.work)


def compared(found, reference):
    """Largest difference of this rank's part of the gradient from the reference's, of which the largest entry."""
    difference = max((found[name] - reference[name]).abs().max().item() for name in found)
    return {"difference": difference, "largest": max(value.abs().max().item() for value in reference.values())}


def base_logprobs(step, policy, ready):
    (share,), _ = step.shares.divide(ready, list(range(len(ready))), VERSION, step.policy.placement)
    of = {}
    for work, found in policy.score(share.work, "replay", "base").pairs:
        own = found.split(work.microbatch.counts)
        of |= {i: values.numpy() for i, values in zip(work.microbatch.indices, own, strict=True)}
    return [of[i] for i in range(len(ready))]


def run(checkpoint, out, shape, cases, controls):
    """{case: see `compared`} of this rank in one layout.

    shape: {"overrides": [config overrides], "order": seed or None}. cases: {name: [overrides of the objective]}.
    controls: cases to run also with a mean of each microbatch's own. The first run in OUT, on one rank, is what all
    others are held against: it writes OUT/reference.pt.
    """
    facts = read_model(checkpoint)
    spec, file = TraceSpec.of(facts), out / "reference.pt"
    overrides = [f"model.path={checkpoint}", *COMMON, *shape["overrides"]]
    config = load_config(ROOT / "configs/tiny_moe_cpu.yaml", overrides)
    world.lay_out(config.parallel, seed=1)
    sequences, routes = batch(facts)
    folder = Path(tempfile.mkdtemp(dir=out))
    ready, store = stored(sequences, routes, spec, folder), TraceStore(folder)
    policy = Policy(facts, config.train, config.parallel, checkpoint, temperature=1.0)
    order = list(range(len(ready)))
    if shape["order"] is not None:
        order = np.random.default_rng(shape["order"]).permutation(len(ready)).tolist()
    if file.exists():
        reference = torch.load(file, weights_only=True)
    else:
        base = base_logprobs(TrainStep(config, policy, None, store, spec), policy, ready)
        reference = {"base": [torch.from_numpy(values) for values in base], "gradients": {}}
    scores = Scores([values.numpy() for values in reference["base"]])
    shuffled, seen = [replace(ready[i], rollout_logprobs=scores.rollout[i]) for i in order], {}
    for name, wrong in [(name, False) for name in cases] + [(name, True) for name in controls]:
        objective = load_config(ROOT / "configs/tiny_moe_cpu.yaml", [*overrides, *cases[name]])
        held = object() if objective.objective.kl_coef else None  # its logprobs are given
        step = TrainStep(objective, policy, held, store, spec)
        found, told, count = gradients(step, policy, shuffled, scores, order, wrong=wrong)
        if not wrong:
            reference["gradients"].setdefault(name, found)
        seen[f"{name} by microbatch" if wrong else name] = {
            **compared(found, reference["gradients"][name]),
            "names": sorted(found), "metrics": told, "microbatches": count,
        }  # fmt: skip
    policy.release()
    if not file.exists():
        torch.save(reference, file)
    return seen
