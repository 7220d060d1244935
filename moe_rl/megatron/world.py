"""Sets up the ranks of a run: process groups, and small messages between ranks that are not pickled."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import UnionType
from typing import Any, overload

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from moe_rl import messages
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import Fact, MoeRLError, ReplayError, describe
from moe_rl.planning.dispatch import DispatchGroup


def start(parallel: ParallelConfig, *, seed: int, timeout_seconds: float) -> None:
    """Join the process group (see `join`), and create Megatron's parallel groups."""
    join(timeout_seconds=timeout_seconds)
    lay_out(parallel, seed=seed)


def join(*, timeout_seconds: float) -> None:
    """Join the process group that torchrun describes in the environment; without torchrun, a group of only this
    process.

    Chooses the device backend once: CUDA with NCCL if there is a GPU, otherwise the host with gloo.
    """
    if torch.cuda.is_available():
        # With a device, torch connects all ranks at once. Otherwise it would make a communicator for each pair of ranks
        # that a weight sync sends between (pytorch/pytorch#129140).
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend, place = "nccl", {"device_id": device}
    else:
        torch.set_num_threads(1)  # one rank per core: more threads would only take turns
        backend, place = "gloo", {}
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # how many collectives torch's flight recorder keeps
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), **alone, **place)


def lay_out(parallel: ParallelConfig, *, seed: int) -> None:
    """Create Megatron's parallel groups from the ranks that joined, replacing earlier groups.

    They wait as long as the group of all ranks.
    """
    clear()
    parallel_state.initialize_model_parallel(**group_sizes(parallel))
    # Megatron takes a time, 30 minutes by default, but does not give it to all of its groups. Torch has no public way.
    timeout = dist.group.WORLD._get_backend(device()).options._timeout
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timeout, group)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def group_sizes(parallel: ParallelConfig) -> dict[str, int | None]:
    """Return the parallel sizes under Megatron's names."""
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def ranks_of_this_node() -> range:
    """Return the ranks that torchrun started on this node, this one included."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    first = dist.get_rank() - int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    return range(first, first + here)


def begun_collectives() -> tuple[dict[str, int], bytes]:
    """Return how many collectives of each process group this rank has begun, and torch's records of the last ones: a
    JSON object with "gloo" and, where torch has it, "nccl".

    May be called by a thread while a collective runs.
    """
    groups = distributed_c10d._world.pg_map
    begun = {distributed_c10d._world.pg_names[group]: group._get_sequence_number_for_group() for group in groups}
    recorders, dumps = torch._C._distributed_c10d, {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    records = {name: getattr(recorders, dump)() for name, dump in dumps.items() if hasattr(recorders, dump)}
    return begun, b"{%s}" % b", ".join(b'"%s": %s' % (name.encode(), record) for name, record in records.items())


def clear() -> None:
    """Destroy Megatron's parallel groups. Megatron only forgets them, and every gloo group keeps a thread running."""
    parallel_state.destroy_model_parallel()
    for group in set(distributed_c10d._world.pg_map) - {dist.group.WORLD}:
        dist.destroy_process_group(group)
    gc.collect()


def stop() -> None:
    """Destroy all process groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def device() -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_name() -> str:
    """Return the name of this rank's device, such as "NVIDIA H100 80GB HBM3"; "CPU" without a GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def peak_memory() -> dict[str, float]:
    """Return the most memory in bytes that a rank has had since its start: on the host, and on the GPU if there is one.

    All ranks call this together.
    """
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    if not torch.cuda.is_available():
        return {"memory/host_peak_bytes": all_reduce([host], dist.ReduceOp.MAX)[0]}
    host, device = all_reduce([host, torch.cuda.max_memory_reserved()], dist.ReduceOp.MAX)
    return {"memory/host_peak_bytes": host, "memory/device_peak_bytes": device}


def await_device() -> None:
    """Wait until this rank's GPU, if it has one, has done all that it was asked to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def give_back() -> None:
    """Give memory of the GPU that this process has reserved and does not use to other processes on it.

    This waits for all work on the GPU. So call it only when no collective is under way that waits for this rank.
    """
    torch.cuda.empty_cache()


def holds_first_replica() -> tuple[bool, bool]:
    """Return whether this rank's dense parameters, and whether its experts, belong to the first replica."""
    # Context-parallel ranks hold the same dense parameters. For experts, Megatron counts them among the replicas
    # already.
    dense = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return dense == 0, parallel_state.get_expert_data_parallel_rank() == 0


def data_parallel() -> tuple[int, int]:
    """Return (which share of the sequences this rank works on, the number of shares)."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def context_parallel() -> tuple[int, int]:
    """Return (which part of each of its sequences this rank works on, the number of parts)."""
    return parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()


def speaks_for_its_sequences() -> bool:
    """Return True on exactly one of the ranks that work on the same sequences, so that sums count each sequence once.

    This rank is in the last pipeline stage, where the loss is computed.
    """
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return first and is_last_stage()


def microbatches_in_a_round() -> int:
    """Return the number that the count of microbatches must be a multiple of: the number of stages if these are
    interleaved, else 1."""
    interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    return parallel_state.get_pipeline_model_parallel_world_size() if interleaved else 1


def stage() -> int:
    """Return this rank's stage of the pipeline."""
    return parallel_state.get_pipeline_model_parallel_rank()


def is_last_stage() -> bool:
    """Return whether this rank holds the end of the model."""
    return parallel_state.is_pipeline_last_stage()


def share_from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """Return the last pipeline stage's `values` on every stage. Other stages pass a tensor of the same shape."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and values.numel():
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, last, group=parallel_state.get_pipeline_model_parallel_group())
    return values


def any_stage(flags: torch.Tensor) -> torch.Tensor:
    """Return bool flags that are true where any pipeline stage's flags are true. All stages pass the same shape."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and flags.numel():
        flags = flags.to(torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=parallel_state.get_pipeline_model_parallel_group())
    return flags.bool()


def sum_over_share(values: torch.Tensor) -> torch.Tensor:
    """Sum int64 values, modulo 2**64, over all ranks that work on the same sequences.

    These ranks may hold different layers and rows of the sequences. All pass the same shape.
    """
    groups = (
        parallel_state.get_tensor_and_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    values = values.clone()
    for group in groups:
        if group.size() > 1 and values.numel():
            dist.all_reduce(values, group=group)
    return values


def sum_over_dispatch(counts: torch.Tensor) -> torch.Tensor:
    """Sum integers over all ranks that dispatch tokens to each other's experts. All pass the same shape."""
    counts = counts.clone()
    dist.all_reduce(counts, group=parallel_state.get_expert_tensor_and_model_parallel_group())
    return counts


def gather_over_dispatch(counts: np.ndarray) -> np.ndarray:
    """Gather integers from all G ranks that dispatch tokens to each other's experts, as [G, ...]. All pass the same
    shape."""
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    if group.size() == 1:
        return counts[None]
    mine = torch.from_numpy(np.ascontiguousarray(counts)).to(device())
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone).cpu().numpy()


def dispatch_group(experts: int) -> DispatchGroup:
    """Return the group of ranks that dispatch tokens to each other, for a layer with this many experts."""
    return DispatchGroup(
        experts,
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_expert_tensor_and_model_parallel_group().rank(),
    )


def dispatch_nodes(node_ranks: int | None) -> np.ndarray:
    """Return int64 [G]: the first rank on the node of each rank that dispatches tokens to the same experts.

    All ranks call this together.

    Args:
        node_ranks: How many neighbouring ranks make a node. None: those that torchrun started together.
    """
    rank = dist.get_rank()
    first = ranks_of_this_node().start if node_ranks is None else rank - rank % node_ranks
    return gather_over_dispatch(np.array([first]))[:, 0]


def dispatching_shares() -> int:
    """Return how many neighbouring shares of the sequences are dispatched to the same copies of the experts.

    It is also 1 if one share has more ranks than hold one copy of the experts, so that a share is not dispatched as a
    whole.
    """
    dispatching = parallel_state.get_expert_tensor_and_model_parallel_world_size()
    of_one_share = (
        parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_context_parallel_world_size()
    )
    return dispatching // of_one_share if dispatching % of_one_share == 0 else 1


def own_slots(experts: int) -> slice:
    """Return the slots, of a layer with this many experts, that this rank holds wholly or in part."""
    share = experts // parallel_state.get_expert_model_parallel_world_size()
    first = share * parallel_state.get_expert_model_parallel_rank()
    return slice(first, first + share)


def expert_parallel() -> int:
    """Return the number of ranks that the experts of a layer are divided among."""
    return parallel_state.get_expert_model_parallel_world_size()


def own_rows(tokens: int) -> slice:
    """Return the rows of a microbatch that this rank's routers see: under sequence parallelism a part of them."""
    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    share = tokens // ranks  # exact: packed runs are padded to a multiple of the number of ranks
    return slice(rank * share, (rank + 1) * share)


@overload
def broadcast[T](message: T | None, kind: type[T], source: int = 0) -> T: ...


@overload
def broadcast(message: object, kind: UnionType, source: int = 0) -> Any: ...


def broadcast(message: object, kind: Any, source: int = 0) -> Any:
    """Send a value from rank `source` to all ranks, and return it on each.

    Args:
        message: The value; other ranks pass None.
        kind: The type to decode to; see `messages`.
    """
    rank = dist.get_rank()
    payload = messages.encode(message) if rank == source else b""
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device())
    dist.broadcast(length, source)
    data = torch.empty(int(length), dtype=torch.uint8, device=device())
    if rank == source:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(data, source)
    return message if rank == source else messages.decode(data.cpu().numpy().tobytes(), kind)


def gather[T](message: T, kind: type[T]) -> list[T]:
    """Gather one value from each rank, in rank order, on all ranks. For `kind` see `broadcast`."""
    payload = messages.encode(message)
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device())
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    longest = max(map(int, lengths))
    padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8).to(device())
    data = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(data, padded)
    return [messages.decode(raw[: int(n)].cpu().numpy().tobytes(), kind) for raw, n in zip(data, lengths, strict=True)]


def concatenate(values: torch.Tensor) -> torch.Tensor:
    """Return the vectors [n] of all ranks, one after the other in rank order, on all ranks. Lengths may differ."""
    size = torch.tensor([len(values)], dtype=torch.int64, device=values.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    padded = values.new_zeros(int(torch.cat(sizes).amax()))
    padded[: len(values)] = values
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return torch.cat([vector[: int(size)] for vector, size in zip(everyone, sizes, strict=True)])


def all_reduce(values: Sequence[float], op: dist.ReduceOp = dist.ReduceOp.SUM) -> list[float]:
    """Reduce float64 numbers over all ranks. The result is the same on each."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(tensor, op)
    return tensor.tolist()


@contextmanager
def agreed(what: str = "recorded routes of its sequences") -> Iterator[None]:
    """Run the body on all ranks. If it raises on one, all ranks raise at its end; it must not wait for other ranks.

    Every rank's error gives the reason, because torchrun ends all ranks as soon as one ends. The errors have
    `everywhere` set.

    Args:
        what: What the body reads or checks, for the errors of the other ranks.
    """
    refused: MoeRLError | None = None
    try:
        yield
    except MoeRLError as error:
        refused = error
    (who,) = all_reduce([dist.get_rank() + 1 if refused else 0], dist.ReduceOp.MAX)
    if not who:
        return
    rank = int(who) - 1
    mine = None if refused is None else _Refusal(refused.kind, str(refused), refused.message.fault, dict(refused.about))
    refusal = broadcast(mine, _Refusal, rank)
    if refused is None:
        message = describe(f"another rank refused the {what}", got=f"rank {rank}: {refusal.text}", fault=refusal.fault)
        message.about = refusal.about
        refused = ReplayError(message)
        refused.kind = refusal.kind
    refused.everywhere = True
    raise refused


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Holds what a rank tells the others about its error."""

    kind: str
    text: str
    fault: str
    about: dict[Fact, int | str]
