"""Sends an update from the trainer: all ranks export their weights, and rank 0 has the sampler load and confirm
them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.config.training import TrainConfig
from moe_rl.errors import ConfigError, WeightSyncError, describe
from moe_rl.planning.transfer import Place, Way, weight_transfer
from moe_rl.weights.broadcast import Sender
from moe_rl.weights.conservation import Conservation, Content
from moe_rl.weights.digest import TensorDigests, dtype_name
from moe_rl.weights.handles import HandleWay
from moe_rl.weights.shared_disk import DiskWay
from moe_rl.weights.shared_memory import MemoryWay
from moe_rl.weights.start import Checkpoint, check_start
from moe_rl.weights.stream import Ranks, Recipient, Round, WeightStream, broadcast, take_part
from moe_rl.weights.update import Bucket, Merge, SenderAt, TensorInfo, WeightUpdate, is_loopback, own_address

FP8_BLOCK = 128
"""Rows and columns of a weight matrix that share one scale."""
_ANY_PORT = 9
_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max  # 448


class Exporter(Protocol):
    """Exports the weights that are sent: `megatron.policy.Policy`."""

    moves: int
    """How many updates have changed the weights so far."""

    def export_rounds(self, dtype: torch.dtype, limit: float, *, host: bool) -> list[Round]:
        """Return this rank's tensors in rounds of at most `limit` bytes. One rank of one replica exports each
        tensor."""

    def adapter_rounds(self, limit: float, *, host: bool) -> list[Round]:
        """Return this rank's adapters in rounds, as `export_rounds` does tensors."""

    def content(self, dtype: torch.dtype, *, updated: bool) -> Content:
        """Return, for each part of the model, the values that all ranks hold, in this precision.

        All ranks call it together.

        Args:
            dtype: the precision.
            updated: an optimizer has written the weights since the last call.

        Raises:
            WeightSyncError: the ranks do not hold what the optimizer wrote.
        """


class _Workers(msgspec.Struct, frozen=True):
    """Tells the other ranks which workers the samplers have, and by which address they reach rank 0."""

    names: list[str]
    address: str


class WeightSender:
    """Sends the trainer's weights to samplers. All ranks call it together; only rank 0 has samplers.

    One rank of one replica exports each tensor, in rounds. In each round, every rank puts one bucket of its tensors
    where the sampler finds it, and rank 0 has the sampler load these buckets. A rank therefore holds one bucket at a
    time, whatever the size of the model and of its share. For broadcasts, and CUDA IPC to one engine, see `stream`.
    """

    def __init__(
        self,
        policy: Exporter,
        rollout: RolloutConfig,
        folder: Path,
        ranks: Ranks,
        *,
        train: TrainConfig | None = None,
        in_turn: bool = True,
        way: Way | None = None,
    ):
        """Choose the transport.

        Args:
            policy: exports the weights.
            rollout: the config section.
            folder: on a disk shared by trainer and samplers; only the transport "disk" uses it.
            ranks: the trainer's ranks.
            train: says whether only adapters are sent. None: all weights are.
            in_turn: whether the samplers rest while the trainer works.
            way: the transport. None: the one that `rollout.weight_transfer` selects for these ranks and a sampler
                beside rank 0.

        Raises:
            ConfigError: there is no such transport.
        """
        self._policy, self._rollout, self._ranks = policy, rollout, ranks
        sends_adapters = train is not None and train.lora is not None and train.lora.sync == "adapter"
        self._adapters = train if sends_adapters else None
        self._dtype: torch.dtype = getattr(torch, rollout.dtype)
        self._bucket_bytes = int(rollout.weight_bucket_mib * 2**20)
        self._named = way or _way(rollout, ranks, in_turn)
        self._way: DiskWay | MemoryWay | HandleWay | None = None
        if self._named == "disk":
            self._way = DiskWay(folder, dist.get_rank())
        elif self._named == "shared_memory":
            self._way = MemoryWay()
        elif self._named == "cuda_ipc" and rollout.engines > 1:
            self._way = HandleWay(ranks, rollout.engines)
            self._bucket_bytes //= dist.get_world_size()  # a rank with an engine holds the buckets of all
        self._sender: Sender | None = None
        self._workers = _Workers([], "")  # those that it is for
        self._conservation = Conservation()
        self._held, self._moves = 0, policy.moves

    def check_start(self, checkpoint: Checkpoint) -> int:
        """Check before the first update that the export equals the checkpoint, see `start`. Returns the tensor
        count."""
        count = check_start(self._exported(host=True), checkpoint, self._ranks)
        self._conservation.settled(self._policy.content(self._dtype, updated=False), 0)
        return count

    def send(self, sampler: Recipient | None, version: int, *, beside: Callable[[], None] = lambda: None) -> int:
        """Have the sampler load and confirm all weights as `version`, or the adapters and what they make of its
        checkpoint.

        A sleeping sampler is woken: first for its weights, and for its KV cache when it has the weights. Before each,
        the ranks give back what training, or the transfer, has left reserved on GPUs that they share with it.

        Args:
            beside: called on all ranks while the sampler loads the last part, or after it if ranks send while it loads.

        Returns:
            The bytes that the sampler received; 0 on other ranks.

        Raises:
            WeightSyncError: on rank 0, the sampler did not receive what was sent; on all ranks, before the sampler may
                use the weights, the exported weights differ from those that the ranks hold.
        """
        changed = self._policy.moves > self._moves
        held = self._policy.content(self._dtype, updated=changed)
        self._conservation.begin(held, version)
        merge = self._merge(self._adapters) if self._adapters is not None else None

        def part(number: int, **about) -> WeightUpdate:
            first = None if number else merge
            return WeightUpdate(version, self._held, number, changed=changed, merge=first, **about)

        self._wake(sampler, "weights")
        if self._way is not None:
            sent = self._place(self._way, sampler, part, beside)
        else:
            sent = self._stream(sampler, part)
            beside()
        self._wake(sampler, "kv_cache")
        self._held, self._moves = version, self._policy.moves
        return sent

    def _merge(self, train: TrainConfig) -> Merge:
        """Say what the adapters make of the checkpoint. The weights are exported for their digests, and not sent."""
        assert train.lora is not None
        digests, whole = TensorDigests(), list[TensorInfo]()
        for run in self._conservation.watched(self._exported(host=False)):
            for name, tensor in run.tensors:
                digests.add(name, tensor)
                whole.append(TensorInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape)))
        known = digests.read()
        tensors = [msgspec.structs.replace(info, digest=known[info.name]) for info in whole]
        self._conservation.settle(self._ranks.device())
        adapters = [info for run in self._rounds(host=False) for info in run.infos]
        everyone = [self._ranks.gather(infos, list[TensorInfo]) for infos in (adapters, tensors)]
        sent, made = ([info for rank in ranks for info in rank] for ranks in everyone)
        return Merge(train.lora.alpha / train.lora.rank, train.dtype, sent, made)

    def _settle(self) -> None:
        """Compare what was exported for sending with what the ranks hold. Adapters have been compared by then."""
        if self._adapters is None:
            self._conservation.settle(self._ranks.device())

    def _wake(self, sampler: Recipient | None, part: str) -> None:
        """Wake the sampler into memory that its GPUs have free. All ranks call this together."""
        engines = self._rollout.engines
        shares = sampler is not None or dist.get_rank() < engines
        if shares and not self._rollout.servers:  # they have their own GPUs
            self._ranks.give_back()
        if engines > 1:
            dist.barrier()
        if sampler is not None:
            sampler.wake(part)

    def _place(
        self,
        way: DiskWay | MemoryWay | HandleWay,
        sampler: Recipient | None,
        part: Callable[..., WeightUpdate],
        beside: Callable[[], None],
    ) -> int:
        rounds = self._rounds(host=way.on_host)
        count = max(self._ranks.gather(len(rounds), int))
        way.begin()
        dist.barrier()
        sent, number = 0, 0
        waiting: list[Bucket] = []
        for index in range(count):
            everyone = self._ranks.gather(way.bucket(rounds[index].tensors if index < len(rounds) else ()), Bucket)
            way.spread(everyone)
            final = index == count - 1
            if final:
                self._settle()
            if sampler is not None:
                waiting += [bucket for bucket in everyone if bucket.tensors]
                if final or not way.one_call:
                    infos = [info for bucket in waiting for info in bucket.tensors]
                    update = part(number=number, final=final, tensors=infos, source=way.source(waiting))
                    if final:
                        with ThreadPoolExecutor(1, "weight update") as thread:
                            loading = thread.submit(sampler.update_weights, update)
                            beside()
                            loading.result()
                    else:
                        sampler.update_weights(update)
                    sent, number, waiting = sent + sum(info.size for info in infos), number + 1, []
            elif final:
                beside()
            dist.barrier()  # no rank overwrites its bucket before the sampler has read it
        way.end()
        return sent

    def _stream(self, sampler: Recipient | None, part: Callable[..., WeightUpdate]) -> int:
        if self._named == "cuda_ipc":
            stream = WeightStream(self._rounds(host=False), self._ranks)
            if sampler is not None:
                # Imported here: vLLM's packed buckets take seconds to import, and only this way needs them.
                from moe_rl.weights.cuda_ipc import by_cuda_ipc

                return by_cuda_ipc(stream, sampler, part, self._bucket_bytes, self._settle)
            stream.hand_over()
            self._settle()
            return 0
        own_workers = _Workers(sampler.workers, sampler.address) if sampler is not None else _Workers([], "")
        workers, *others = self._ranks.gather(own_workers, _Workers)
        # Samplers that reach the trainer by a loopback address reach no other host.
        near = is_loopback(workers.address) and not _one_host(1 + len(others))
        stream = WeightStream(
            self._rounds(host=False), self._ranks, senders=1 if near else self._rollout.weight_senders
        )
        self._listen(workers, stream)
        places = self._ranks.gather([self._sender.at] if self._sender is not None else [], list[SenderAt])
        if sampler is None:
            take_part(stream, self._sender, self._ranks, self._settle)
            return 0
        assert self._sender is not None  # rank 0 always sends
        senders = [sender for ranks_at in places for sender in ranks_at]
        return broadcast(stream, self._sender, senders, sampler, self._ranks, part, self._settle)

    def _listen(self, workers: _Workers, stream: WeightStream) -> None:
        """Keep a broadcast sender for these workers if this rank sends, else none."""
        # If a server returns between two updates, the workers are as many as before, but its own begin anew.
        if self._sender is not None and (not stream.sends or self._workers != workers):
            self._sender.close()
            self._sender = None
        if self._sender is None and stream.sends:
            # Another host sends from its own address on the route to rank 0's, in the samplers' network.
            try:
                address = own_address(workers.address, _ANY_PORT) if stream.rank else workers.address
                self._sender = Sender(stream.rank, address, len(workers.names), self._ranks.device())
                self._workers = workers
            except OSError as error:
                raise WeightSyncError(
                    "A rank cannot listen for the workers of the samplers",
                    where={"rank": stream.rank, "host": workers.address},
                    got=error,
                    do="look at this host's network, or send from rank 0 only: rollout.weight_senders=1",
                ) from error

    def _rounds(self, *, host: bool) -> list[Round]:
        if self._adapters is not None:
            return self._policy.adapter_rounds(self._bucket_bytes, host=host)
        rounds = self._conservation.watched(self._exported(host=host))
        if self._rollout.weights == "fp8_e4m3":
            rounds = [Round(run.whole, map(_as_fp8, run.tensors)) for run in rounds]
        return rounds

    def _exported(self, *, host: bool) -> list[Round]:
        return self._policy.export_rounds(self._dtype, self._bucket_bytes, host=host)


def _one_host(ranks: int) -> bool:
    """Return whether all of this many trainer ranks are on one host."""
    return ranks == int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def _way(rollout: RolloutConfig, ranks: Ranks, in_turn: bool) -> Way:
    place: Place = "servers" if rollout.servers else "child" if rollout.engines == 1 else "children"
    gpu = ranks.device().type == "cuda"
    one_host = _one_host(dist.get_world_size())
    transfer = weight_transfer(rollout.weight_transfer, gpu=gpu, place=place, one_host=one_host, in_turn=in_turn)
    if transfer.way is None:
        raise ConfigError(transfer.problem or "")
    return transfer.way


def _as_fp8(item: tuple[str, Tensor]) -> tuple[str, Tensor]:
    name, tensor = item
    return name, fp8_rounded(tensor) if is_rounded(name) else tensor


def is_rounded(name: str) -> bool:
    """Return whether a Hugging Face tensor is rounded to float8: the matrices of attention, experts and dense layers.

    Routers, embeddings, the output head and norms keep their precision.
    """
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def fp8_rounded(weight: Tensor) -> Tensor:
    """Round weight [rows, columns] to the nearest values in float8 e4m3; returned contiguous, in the weight's dtype.

    This emulates the weights of a sampler with lower precision than the trainer on machines without float8 kernels.
    Float8 activations are not emulated. Each block of 128 x 128 has a float32 scale that maps its largest |value| to
    448 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

    Raises:
        ValueError: the tensor is not a matrix or not finite.
    """
    if weight.ndim != 2 or not weight.isfinite().all():
        got = f"shape {tuple(weight.shape)}" if weight.ndim != 2 else "values that are not finite"
        raise ValueError(describe("this cannot be rounded to float8", got=got, expected="a finite matrix"))
    rows, columns = weight.shape
    blocks = torch.nn.functional.pad(weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = blocks.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
    scale = blocks.abs().amax((1, 3), keepdim=True) / _LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    held = (blocks / scale).clamp(-_LARGEST, _LARGEST).to(_FP8).float() * scale
    return held.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(weight.dtype).contiguous()
