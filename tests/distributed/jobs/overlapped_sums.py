"""A job for two ranks: gradients that are summed while others are computed."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from moe_rl.errors import ReplayError
from moe_rl.megatron import model as built
from moe_rl.megatron import world
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import read_model
from moe_rl.proof.cases import Case
from moe_rl.proof.trial import Trial, whole_gradients

OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 3000}


class Sums:
    """A policy from the model's folder, its batch, and how many sums had begun when the backward pass ended."""

    def __init__(self, checkpoint, parallel, train, settings, chunks):
        self.case = Case(2, parallel, {**train, "megatron_optimizer": settings}, overlap_chunks=chunks)
        self.facts = read_model(checkpoint)
        world.lay_out(self.case.parallel_config, seed=1)
        build = (self.facts, self.case.train_config, self.case.parallel_config, checkpoint)
        self.policy = Policy(*build, temperature=1.0)
        self.trial = Trial(self.facts, self.case, self.policy)

    def update(self, loss=None):
        """What the update returned, how many sums had begun when the backward pass ended, and how many there are."""
        groups = [g for c in self.policy.chunks for g in c.bucket_groups + c.expert_parallel_bucket_groups]
        begun, finish = [], built.finalize_model_grads

        def counted(*given, **options):
            begun.append(sum(group.grad_reduce_handle is not None for group in groups))
            finish(*given, **options)

        with patch.object(built, "finalize_model_grads", counted):
            result, _ = self.trial.update(self.trial.tables, loss)
        return result, begun[0], len(groups)


def one(checkpoint, parallel, train, chunks):
    """{way: the gradients of three updates} of both ways, and what becomes of faults on rank 1 in the second way."""
    seen = {"gradients": {}, "begun": {}}
    for way, settings in (("after", {"overlap_grad_reduce": False}), ("during", OVERLAPPED)):
        sums = Sums(checkpoint, parallel, train, settings, chunks)
        seen["gradients"][way], seen["begun"][way] = [], []
        for _ in range(3):
            result, *begun = sums.update()
            assert result.applied
            seen["begun"][way].append(begun)
            seen["gradients"][way].append(whole_gradients(sums.policy, sums.facts))

    def spoiled(number, logprobs):
        if dist.get_rank() == 1 and logprobs.numel():
            logprobs.register_hook(lambda gradient: gradient * torch.inf)
        return sums.trial.loss(number, logprobs)

    seen["spoiled"] = sums.update(spoiled)[0].nonfinite
    router = unwrap(sums.policy.chunks[0]).decoder.layers[-1].mlp.router.weight
    if world.data_parallel()[1] == 2:
        lost = router.register_hook(lambda gradient: gradient * (dist.get_rank() != 1))
        seen["lost"] = refused(sums)
        lost.remove()

    def once_more(*given, **options):
        sums.policy.chunks[0].param_to_bucket_group[router].register_grad_ready(router)
        finish(*given, **options)

    finish = built.finalize_model_grads
    with patch.object(built, "finalize_model_grads", once_more):
        seen["late"] = refused(sums)
    return seen


def refused(sums):
    """The error of an update."""
    try:
        sums.update()
    except ReplayError as error:
        return str(error)
    return ""
