"""Checks a run on several machines: the sampling servers, and the network between the nodes of the ranks."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping

from moe_rl.config.schema import Config
from moe_rl.errors import About, Problem, describe

INTERFACE = "GLOO_SOCKET_IFNAME"


_TELLS = "an engine beside the ranks neither logs nor serves vLLM's statistics"
# Settings of vLLM that only servers have.
_OF_SERVERS = {
    "stream_interval": "only servers send several tokens at once; an engine must tell which weights sampled each",
    "profiler_config": "only servers have routes that begin and end a profile; report.profile records a step",
    **dict.fromkeys(("cudagraph_metrics", "kv_cache_metrics", "kv_cache_metrics_sample", "enable_mfu_metrics"), _TELLS),
    **dict.fromkeys(("disable_log_stats", "aggregate_engine_logging", "enable_logging_iteration_details"), _TELLS),
}


def server_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of `rollout.servers` and `rollout.engines` that the config alone shows, one message each."""
    yield from config.rollout.server_problems()
    yield from engine_problems(config)


def neighbour_problems(config: Config, world_size: int) -> Iterator[Problem]:
    """Yield a problem if an engine has no rank beside it. A run that replays another starts no engine."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    here = min(world_size, here, config.cluster.gpus_per_node if config.cluster is not None else here)
    if config.rollout.engines > here and config.run.replays is None:
        yield describe(
            "every engine shares the GPU, or the cores, of one rank on rank 0's node",
            where={"key": "rollout.engines"},
            got=config.rollout.engines,
            expected=f"at most {here}, the ranks on this node",
        )


def engine_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem if the number of servers or engines differs from that of the cluster that the run is planned
    for, or if an engine would get a setting of servers."""
    cluster, count, engines = config.cluster, len(config.rollout.servers), config.rollout.engines
    for key, why in _OF_SERVERS.items():
        if key in config.rollout.vllm and not has_servers(config):
            yield describe(
                why,
                where={"key": f"rollout.vllm.{key}", "given": "no rollout.servers"},
                got=config.rollout.vllm[key],
                do="remove it",
            )
    if engines > 1 and cluster is not None and (cluster.engines, cluster.gpus_per_engine) != (engines, 1):
        yield describe(
            "the cluster does not have these engines, each of which shares the GPU of one rank",
            where={"key": "cluster.engines", "given": f"rollout.engines is {engines}"},
            got=f"{cluster.engines} engines of {cluster.gpus_per_engine} GPUs",
            expected=f"{engines} of 1",
            do="change cluster.engines and cluster.gpus_per_engine; larger engines are servers of moe-rl serve",
        )
    if cluster is not None and cluster.nodes_per_engine > 1 and cluster.gpus_per_engine % cluster.gpus_per_node:
        yield describe(
            "an engine of several nodes takes all GPUs of each",
            where={"key": "cluster.gpus_per_engine", "given": f"cluster.gpus_per_node is {cluster.gpus_per_node}"},
            got=cluster.gpus_per_engine,
            expected="a multiple",
        )
    if count and cluster is not None and cluster.engines != count:
        yield describe(
            "not the number of servers",
            where={"key": "cluster.engines"},
            got=cluster.engines,
            expected=f"{count}, as in rollout.servers",
        )


def queue_problems(config: Config) -> Iterator[Problem]:
    """Yield why a queue of groups, `rollout.in_flight`, would change nothing; nothing without one."""
    rollout, planned = config.rollout, 1 if config.cluster is None else config.cluster.engines
    if rollout.in_flight is None:
        return
    places = len(rollout.servers) or max(rollout.engines, planned)
    most = min(rollout.max_concurrent, (rollout.prompts_per_step - 1) // places * rollout.group_size)
    reasons = (
        (config.pipeline.by_group, "groups are sampled one by one anyway", "pipeline.mode is async"),
        (config.task.environment is not None, "turns go where there is room anyway", "task.environment is set"),
        (places == 1, "one sampler takes all groups", "one server or engine"),
        (not most, "all groups of a step begin at once", f"rollout.prompts_per_step is {rollout.prompts_per_step}"),
    )
    for wrong, what, given in reasons:
        if wrong:
            where: About = {"key": "rollout.in_flight", "given": given}
            yield describe(what, where=where, got=rollout.in_flight, expected="null")
            return
    if rollout.in_flight > most:
        yield describe(
            "all groups of a step begin at once, or wait in the samplers",
            where={"key": "rollout.in_flight"},
            got=rollout.in_flight,
            expected=f"at most {most}, by rollout.max_concurrent and the groups of a step over {places} samplers",
        )


def overlap_problem(mode: str) -> Problem:
    """Say that ranks and the engines beside them cannot work at the same time on GPUs, as pipeline.mode asks."""
    return describe(
        "a sampler that works while the ranks train would share their GPUs",
        where={"key": "pipeline.mode", "given": "rollout.servers is empty"},
        got=mode,
        expected="sync",
        do="start servers with moe-rl serve and name them in rollout.servers, or choose sync",
    )


def has_servers(config: Config) -> bool:
    """Return whether a run samples from servers, named or planned. Without servers rank 0 starts engines beside the
    ranks of its node."""
    cluster = config.cluster
    planned = cluster is not None and (cluster.engines, cluster.gpus_per_engine) != (1, 1)
    return (planned and config.rollout.engines == 1) or bool(config.rollout.servers)


def start_problems(config: Config) -> Iterator[Problem]:
    """Return the problems of a config that may be planned, but not started."""
    cluster = config.cluster
    if cluster is not None and has_servers(config) and not config.rollout.servers:
        yield describe(
            "the cluster's engines are servers, and no server is named",
            where={
                "key": "rollout.servers",
                "given": f"cluster.engines is {cluster.engines}, cluster.gpus_per_engine is {cluster.gpus_per_engine}",
            },
            got="no servers",
            expected=f"{cluster.engines}",
            do="start them with moe-rl serve --config and list their URLs, see docs/howto/cluster.md",
        )


def several_nodes(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun started ranks on other nodes too."""
    ranks = environment.get("WORLD_SIZE", "1")
    return int(ranks) > int(environment.get("LOCAL_WORLD_SIZE", ranks))


def node_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield why gloo, which connects ranks on CPUs and is used for checkpoints everywhere, would not reach other nodes.

    Without an interface gloo uses the address of the host's name. On many systems this is loopback, and the ranks then
    wait for each other forever.
    """
    if not several_nodes(environment):
        return
    do = "set it, and NCCL_SOCKET_IFNAME, to the interface between the nodes (ip -brief address)"
    if interface := environment.get(INTERFACE):
        known = [name for _, name in socket.if_nameindex()]
        if interface not in known:
            where: About = {"key": INTERFACE, "host": socket.gethostname()}
            yield describe("no such interface", where=where, got=interface, expected=known, do=do)
        return
    host = socket.gethostname()
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        yield describe(
            "not set, and the host's name has no address", where={"key": INTERFACE, "host": host}, got=error, do=do
        )
        return
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        yield describe(
            "not set, and the host's name resolves to loopback, which other nodes cannot reach",
            where={"key": INTERFACE, "host": host},
            got=", ".join(sorted(addresses)),
            do=do,
        )
