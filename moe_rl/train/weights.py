"""Trainer weights into the running sampler, and the canary that both score afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor

from moe_rl.config.schema import RolloutConfig
from moe_rl.errors import ConfigError
from moe_rl.megatron import world
from moe_rl.megatron.hf_export import Round
from moe_rl.megatron.microbatch import pack
from moe_rl.megatron.model import DTYPES
from moe_rl.megatron.policy import Policy
from moe_rl.planning.packing import fill_rounds
from moe_rl.planning.transfer import Way, weight_transfer
from moe_rl.rollout.sampler import Sampler
from moe_rl.types import Sequence
from moe_rl.weights.precision import fp8_rounded, is_rounded
from moe_rl.weights.update import WeightUpdate
from moe_rl.weights.ways import Bucket, Disk, Shared


def way_of(rollout: RolloutConfig) -> Way:
    """By which way these ranks give weights to a sampler beside rank 0. Raises ConfigError when there is none."""
    one_host = dist.get_world_size() == int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    gpu = world.device().type == "cuda"
    place = "servers" if rollout.servers else "child"
    transfer = weight_transfer(rollout.weight_transfer, gpu=gpu, place=place, one_host=one_host)
    if transfer.way is None:
        raise ConfigError(transfer.problem)
    return transfer.way


class WeightSender:
    """Gives samplers the trainer's weights. All ranks call it together; samplers are on rank 0 only.

    Every tensor is exported by one rank of one replica, in rounds: each rank puts a bucket of its tensors where the
    sampler finds them, rank 0 has the sampler load all of these, and the next round begins. A rank holds a bucket of
    its own, however large the model and its share of it. Broadcasts: see `stream`.
    """

    def __init__(self, policy: Policy, rollout: RolloutConfig, way: Way, folder: Path):
        """folder: on a disk that trainer and samplers share; used by way disk only."""
        self._policy, self._rollout = policy, rollout
        self._bucket_bytes = int(rollout.weight_bucket_mib * 2**20)
        self._way = Disk(folder, dist.get_rank()) if way == "disk" else Shared() if way == "shared_memory" else None
        self._named, self._sender = way, None
        self._held, self._moves = 0, policy.moves

    def send(self, sampler: Sampler | None, version: int) -> int:
        """Have the sampler load and confirm all weights as `version`. Returns the bytes that it got, 0 on other ranks.

        A sampler that sleeps is woken: first for its weights, and for its KV cache when it has them.
        Raises WeightSyncError on rank 0 when the sampler got anything else than what the ranks hold.
        """
        part = partial(WeightUpdate, version=version, replaces=self._held, changed=self._policy.moves > self._moves)
        if sampler is not None:
            sampler.wake("weights")
        sent = self._place(sampler, part) if self._way is not None else self._stream(sampler, part)
        if sampler is not None:
            sampler.wake("kv_cache")
        self._held, self._moves = version, self._policy.moves
        return sent

    def _place(self, sampler: Sampler | None, part: Callable[..., WeightUpdate]) -> int:
        rounds, way = self._rounds(host=True), self._way
        (count,) = map(int, world.all_reduce([len(rounds)], dist.ReduceOp.MAX))
        way.begin()
        dist.barrier()
        sent, number, waiting = 0, 0, []
        for at in range(count):
            everyone = world.gather(way.bucket(rounds[at].tensors if at < len(rounds) else ()), Bucket)
            final = at == count - 1
            if sampler is not None:
                waiting += [bucket for bucket in everyone if bucket.tensors]
                if final or not way.one_call:
                    infos = [info for bucket in waiting for info in bucket.tensors]
                    sampler.update_weights(part(number=number, final=final, tensors=infos, source=way.source(waiting)))
                    sent, number, waiting = sent + sum(info.size for info in infos), number + 1, []
            dist.barrier()  # what the sampler reads stays until it has read it
        way.end()
        return sent

    def _stream(self, sampler: Sampler | None, part: Callable[..., WeightUpdate]) -> int:
        # Imported here: vLLM's packed buckets take seconds to import, and only these ways need them.
        from moe_rl.train import stream

        rounds = self._rounds(host=False)
        if self._named == "cuda_ipc":
            return stream.by_cuda_ipc(sampler, part, rounds, self._bucket_bytes)
        if sampler is not None and (self._sender is None or self._sender.workers != sampler.workers):
            from moe_rl.weights.broadcast import Sender

            if self._sender is not None:
                self._sender.close()
            self._sender = Sender(sampler.address, sampler.workers, self._bucket_bytes, world.device())
        return stream.broadcast(self._sender, sampler, part, rounds)

    def _rounds(self, *, host: bool) -> list[Round]:
        dense, experts = world.holds_first_replica()
        dtype = DTYPES[self._rollout.dtype]
        rounds = self._policy.export_rounds(dtype, self._bucket_bytes, dense=dense, experts=experts, host=host)
        if self._rollout.weights == "fp8_e4m3":
            rounds = [Round(run.whole, map(_as_fp8, run.tensors)) for run in rounds]
        return rounds


def _as_fp8(item: tuple[str, Tensor]) -> tuple[str, Tensor]:
    name, tensor = item
    return name, fp8_rounded(tensor) if is_rounded(name) else tensor


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

    def difference(self, policy: Policy, engine: Sampler | None) -> float:
        """Mean |log-probability difference| in nats, both routing natively, on rank 0; 0 on the others. Of several
        samplers that of the worst."""
        ours, *_ = policy.logprobs(self.microbatches, None, temperature=1.0)
        if engine is None:
            return 0.0
        return float(np.abs(ours.cpu().numpy() - engine.score(self.tokens)).mean(-1).max())
