"""Decides how new weights reach the samplers, from what is known before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_rl.config.check_cluster import has_servers
from moe_rl.config.schema import Config
from moe_rl.errors import Problem, describe

Way = Literal["shared_memory", "cuda_ipc", "broadcast", "disk"]
Place = Literal["child", "children", "servers"]
"""Says where samplers run: in a child process of rank 0, on its GPU if it has one; in several, on the GPUs of rank 0's
node; or in vLLM servers on any host."""
_WHERE = {"child": "beside rank 0", "children": "beside several ranks", "servers": "in servers"}


@dataclass(frozen=True, slots=True)
class Transfer:
    """Holds the decision.

    Attributes:
        way: None if no way works; `problem` then says why.
        why: the reason in words, for --plan.
    """

    way: Way | None
    why: str
    problem: Problem | None = None


def weight_transfer(
    wanted: Literal["auto"] | Way, *, gpu: bool, place: Place, one_host: bool, in_turn: bool = True
) -> Transfer:
    """Resolve `rollout.weight_transfer`, including "auto".

    GPUs that trainer and samplers use in turn hand weights over in place; several engines need all ranks on their host.
    Separate GPUs use NCCL, which allows one process per GPU. Else one host uses shared memory, and several hosts use a
    folder.

    Args:
        gpu: whether trainer and samplers compute on GPUs.
        one_host: whether all trainer ranks run on one host.
        in_turn: whether samplers rest while the trainer works, as with `pipeline.mode` sync.
    """
    child, shared = place == "child", place != "servers"
    near = shared and one_host
    in_place = gpu and in_turn and (child or near)
    if in_place or (gpu and not shared):
        auto: Way = "cuda_ipc" if shared else "broadcast"
        why = {"cuda_ipc": "trainer and sampler are on the same GPUs", "broadcast": "from GPU to GPU"}[auto]
    else:
        auto = "shared_memory" if near else "disk"
        why = {"shared_memory": "one host holds trainer and sampler", "disk": "they share a folder, not a host"}[auto]
    if wanted == "auto":
        return Transfer(auto, f"{why}; chosen by rollout.weight_transfer auto")
    obstacles = {
        "shared_memory": "" if near else "engines that rank 0 starts, on the host of all trainer ranks",
        "cuda_ipc": "" if in_place else "engines that rank 0 starts on GPUs of ranks, all on its host",
        "broadcast": "servers, on their own GPUs: NCCL allows one process per GPU" if gpu and shared else "",
        "disk": "",
    }
    if obstacles[wanted]:
        ranks = f"{'GPUs' if gpu else 'CPUs'} of {'one host' if one_host else 'several hosts'}"
        problem = describe(
            "no such way between this trainer and its samplers",
            where={"key": "rollout.weight_transfer", "given": f"a trainer on {ranks}, samplers {_WHERE[place]}"},
            got=wanted,
            expected=obstacles[wanted],
            do=f"set it to auto, which is {auto} here",
        )
        return Transfer(None, "", problem)
    return Transfer(wanted, "set by rollout.weight_transfer")


def planned_transfer(config: Config, world_size: int) -> Transfer:
    """Choose the way for a run on the GPUs of the config's cluster, or on the CPUs of one host if there is no
    cluster.
    """
    cluster = config.cluster
    one_host = cluster is None or world_size <= cluster.gpus_per_node
    place: Place = "servers" if has_servers(config) else "child" if config.rollout.engines == 1 else "children"
    in_turn = config.pipeline.mode == "sync"
    gpu = cluster is not None
    return weight_transfer(config.rollout.weight_transfer, gpu=gpu, place=place, one_host=one_host, in_turn=in_turn)
