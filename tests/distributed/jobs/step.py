"""Jobs for ranks: a training step on routes that are not all there, or not all of the present weights, and on tokens
that were not drawn from the whole vocabulary."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from moe_rl.clock import Clock
from moe_rl.config.load import load_config
from moe_rl.config.objective import ObjectiveConfig
from moe_rl.errors import MoeRLError
from moe_rl.megatron import microbatch as microbatch_module
from moe_rl.megatron import world
from moe_rl.megatron.frozen_policy import ReferencePolicy
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import read_model
from moe_rl.objectives import logprobs as logprobs_module
from moe_rl.objectives.logprobs import (
    Support,
    hidden_scores,
    token_logprobs,
    token_logprobs_and_entropies,
    token_scores,
)
from moe_rl.proof.batch import batch
from moe_rl.replay.alignment import Alignment, AlignmentTest
from moe_rl.replay.routes import microbatch_routes
from moe_rl.replay.tables import MicrobatchRoutes
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore, signed
from moe_rl.trace.spans import versions_of_rows
from moe_rl.train import step as step_module
from moe_rl.train.step import TrainStep
from moe_rl.types import Provenance, Span, sampled_by

ROOT = Path(__file__).parents[3]
VERSION = 5
HEAD_IDS = 100  # heads have ids below this


def supports_of(sequences, vocabulary):
    """{key: ids of each completion token}: a few random ones and its own; the first token of each: all, as []."""
    rng = np.random.default_rng(17)
    return {
        s.key: [[]] + [sorted({t, *rng.integers(0, vocabulary, 6).tolist()}) for t in s.token_ids[1:]]
        for s in sequences
    }


def aux_of(number, sequence, support, plan):
    support = [list(ids) for ids in support]
    if number in plan.get("unsupported", ()):
        support[-1].remove(sequence.token_ids[-1])
    if number in plan.get("uncounted", ()):
        del support[-1]
    tokens, size = np.array(sequence.token_ids), plan.get("heads", 0)
    return {
        "support_sets": np.arange(len(support), dtype=np.uint32),
        "support_counts": np.array([len(ids) for ids in support], np.int32),
        "support_ids": np.array([i for ids in support for i in ids], np.int32),
        "head_ids": (tokens[:, None] + 1 + np.arange(size)).astype(np.int32) % HEAD_IDS,
        "head_logprobs": np.full((len(tokens), size), np.log(0.2), np.float32),
    }


def shared_logits(dtype=torch.float32):
    """Logits [9, 40], targets, and a support for each: some in one half of the vocabulary alone."""
    generator = torch.Generator().manual_seed(4)
    logits = (5 * torch.randn(9, 40, generator=generator)).to(dtype)
    logits[4] += 1e4
    targets = torch.tensor([0, 19, 20, 39, 7, 25, 3, 33, 20])
    ids = [[], [3, 19], [1, 2, 20], [20, 39], [], [25], [0, 3, 38], list(range(40)), []]
    counts, flat = np.array([len(one) for one in ids]), np.array([i for one in ids for i in one])
    return logits, targets, Support.of(np.arange(len(ids)), counts, flat, logits.device)


def scores_of(logits, targets, support, group=None):
    """[(logprobs, entropies, gradient of a function of both)] with and without the support; one without entropy; and
    (all scores, gradient) with the logprobs of other ids."""
    seen = []
    for restricted in (support, None):
        leaf = logits.clone().requires_grad_()
        scores = token_logprobs_and_entropies(leaf, targets, 0.8, support=restricted, group=group)
        (scores[0].exp().sum() + (scores[1] ** 2).sum()).backward()
        seen.append((*(values.detach() for values in scores), leaf.grad))
    leaf = logits.clone().requires_grad_()
    values = token_logprobs(leaf, targets, 0.8, group=group)
    values.sum().backward()
    seen.append((values.detach(), leaf.grad))
    leaf = logits.clone().requires_grad_()
    others = (targets[:, None] + torch.tensor([1, 17, 30])) % 40
    values = token_scores(leaf, targets, 0.8, others=others, entropy=True, group=group)
    (values * torch.arange(1.0, 6.0, dtype=values.dtype)[:, None]).sum().backward()
    return [*seen, (values.detach(), leaf.grad)]


def scores_of_hidden(rank=0, ranks=1, group=None):
    """Scores of hidden states, and the gradients of the states and of this rank's part of the output matrix."""
    generator = torch.Generator().manual_seed(6)
    hidden, matrix = (torch.randn(rows, 7, generator=generator) for rows in (12, 40))
    leaves = [leaf.clone().requires_grad_() for leaf in (hidden, matrix.chunk(ranks)[rank])]
    _, targets, support = shared_logits()
    places = torch.tensor([0, 1, 3, 4, 5, 7, 8, 9, 11])
    values = hidden_scores(*leaves, places, targets, 0.8, entropy=True, support=support, group=group)
    (values * torch.arange(1.0, 3.0)[:, None]).sum().backward()
    return values.detach(), *(leaf.grad for leaf in leaves)


def shared_vocabulary():
    """What this rank makes of one half of the vocabulary."""
    rank, seen = dist.get_rank(), {}
    for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        logits, targets, support = shared_logits(dtype)
        seen[name] = scores_of(logits.chunk(2, 1)[rank], targets, support, dist.group.WORLD)
    logprobs_module._CHUNK_ELEMENTS, whole = 4 * 20, logprobs_module._CHUNK_ELEMENTS
    seen["chunks"] = scores_of(shared_logits()[0].chunk(2, 1)[rank], *shared_logits()[1:], dist.group.WORLD)
    seen["hidden"] = scores_of_hidden(rank, 2, dist.group.WORLD)
    logprobs_module._CHUNK_ELEMENTS = whole
    return seen


def stored(sequences, routes, spec, folder, plan, vocabulary):
    """The batch as a sampler leaves it: routes in a store, references in the sequences."""
    ready, supports = [], supports_of(sequences, vocabulary)
    with ShardWriter(folder, "step", spec) as writer:
        for number, (sequence, table) in enumerate(zip(sequences, routes, strict=True)):
            tokens = np.array(sequence.prompt_token_ids + sequence.token_ids, np.int32)[:-1]
            start, prompt = 2 if number in plan.get("short", ()) else 0, len(sequence.prompt_token_ids)
            # The last row of the prompt is of the weights that sampled the first token.
            old = prompt - 1 - start if number in plan.get("old", ()) else 0
            spans = [
                Span(old, VERSION - 1, Provenance.PREFILL),
                Span(prompt - start - old, VERSION, Provenance.PREFILL),
            ]
            spans.append(Span(len(tokens) - max(prompt, start), VERSION, Provenance.DECODE))
            spans = [span for span in spans if span.rows > 0]
            aux = aux_of(number, sequence, supports[sequence.key], plan)
            ref = writer.add(sequence.key, table[start:], tokens[start:], spans, aux=aux)
            ref = signed(
                replace(ref, start=start),
                table[start:],
                spec.moe_layers,
                tokens[start:],
                versions=versions_of_rows(spans),
            )
            ref = None if number in plan.get("missing", ()) else ref
            if number in plan.get("lost", ()):
                ref = replace(ref, parts=tuple(replace(part, digest="0" * 16) for part in ref.parts))
            ready.append(replace(sequence, versions=sampled_by(VERSION, len(sequence.token_ids)), routes=ref))
    return ready


def made(name, plan, checkpoint, out):
    """(TrainStep, its batch, the group of each sequence). For `plan` see `one`."""
    facts = read_model(checkpoint)
    spec = TraceSpec.of(facts)
    overrides = [f"model.path={checkpoint}", "train.microbatch_tokens=40", "train.dtype=float32"]
    overrides.append("guards.alignment=false")  # no router chose these routes
    config = load_config(ROOT / "configs/tiny_moe_cpu.yaml", [*overrides, *plan.get("overrides", [])])
    world.lay_out(config.parallel, seed=1)
    folder, rank = out / name / "trace", dist.get_rank()
    sequences, routes = (part[: plan.get("first")] for part in batch(facts))
    if "reward" in plan:
        sequences = [replace(sequence, reward=plan["reward"]) for sequence in sequences]
    if rank == 0:
        stored(sequences, routes, spec, folder, plan, facts.vocab)
    dist.barrier()
    ready = stored(sequences, routes, spec, out / name / f"own{rank}", plan, facts.vocab)
    build = (facts, config.train, config.parallel, checkpoint)
    policy = Policy(*build, temperature=1.0)
    reference = ReferencePolicy(*build, temperature=1.0) if config.objective.kl_coef else None
    groups = [number // 2 for number in range(len(ready))]
    ready = [one.judged(group) for one, group in zip(ready, groups, strict=True)]
    return TrainStep(config, policy, reference, TraceStore(folder), spec), ready, groups


def one(name, plan, checkpoint, out):
    """(metrics, or the error with the number of passes that had begun; in how many chunks planned layers overlapped in
    each pass).

    plan: {"overrides": [config overrides], "missing": [sequences without routes], "short": [sequences whose first two
    tokens have none], "lost": [sequences whose record is not in the store], "old": [sequences whose prompt, but for its
    last token, older weights routed], "unsupported": [sequences whose last token is not in its own support],
    "uncounted": [sequences whose last token has no support], "misread": [sequences whose rows move by one when read],
    "heads": so many other tokens that the sampler found likeliest at each token, "first": only so many sequences,
    "reward": the same for all, "ahead": score every sequence for the old policy in a pass of its own}.
    """
    step, ready, groups = made(name, plan, checkpoint, out)
    replay, passes = step.policy._replay, []

    def replayed(work, mode, *given, **options):
        passes.append([one.plan for one in work] if mode == "replay" else [])
        return replay(work, mode, *given, **options)

    step.policy._replay = replayed
    before = tables_alive()
    ahead = patch.object(ObjectiveConfig, "needs_old_first", True) if plan.get("ahead") else nullcontext()
    wrong = {ready[number].key for number in plan.get("misread", ())}

    def misread(parts, *given, **options):
        moved = [replace(part, routes=np.roll(part.routes, 1, 0)) if part.key in wrong else part for part in parts]
        return microbatch_routes(moved, *given, **options)

    try:
        with ahead, patch.object(microbatch_module, "microbatch_routes", misread):
            seen = step.run(ready, groups, step=1, weight_version=VERSION, measure_native=True, clock=Clock())
        assert tables_alive() == before, "a step that has ended keeps its routes on the device"
    except MoeRLError as error:
        seen = f"{type(error).__name__}: {error} [{len(passes)} passes]"
    step.policy.release()
    return seen, [chunks(plans) for plans in passes]


def judged(name, plan, checkpoint, out):
    """[(microbatches, lags of their rows, the pass that ended it)] of each alignment test of a step; for `plan` see
    `one`."""
    seen = []

    class Noted(AlignmentTest):
        def __init__(self, layers, places, device, **given):
            super().__init__(layers, places, device, **given)
            self.about = len(places), sorted({int(lag) for rows in places for lag in rows.lag})

        def verdict(self, where=None):
            if len(self._names) < self.about[0]:
                return None
            seen.append((*self.about, where["run"]))
            return Alignment()  # no router chose these routes

    with patch.object(step_module, "AlignmentTest", Noted):
        one(name, plan | {"overrides": [*plan["overrides"], "guards.alignment=true"]}, checkpoint, out)
    return seen


def tables_alive():
    gc.collect()
    return sum(isinstance(one, MicrobatchRoutes) for one in gc.get_objects())


def chunks(plans):
    layers = [layer for plan in plans if plan is not None for layer in plan.values()]
    return sorted({len(layer.chunks) * layer.overlapped for layer in layers})
