"""What is wrong with `rollout.servers` as it is written; whether they answer is asked in `rollout.attach`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from moe_rl.config.schema import Config
from moe_rl.errors import describe


def server_problems(config: Config) -> Iterator[str]:
    """One message each."""
    rollout, cluster = config.rollout, config.cluster
    count = len(rollout.servers)
    for key, value in (("token_file", rollout.token_file), ("max_lost_servers", rollout.max_lost_servers)):
        if value and not count:
            yield describe(
                f"rollout.{key}: is of rollout.servers, and there are none", got=value, do="name them, or remove it"
            )
    if not count:
        return
    for url in rollout.servers:
        if reason := _no_address(url):
            yield describe(f"rollout.servers: {reason}", got=repr(url), expected="http://host:port")
    for url, times in Counter(url.rstrip("/").lower() for url in rollout.servers).items():
        if times > 1:
            yield describe("rollout.servers: named more than once", got=url, expected="every server once")
    if rollout.token_file is None:
        yield describe(
            "rollout.token_file: the servers let nobody in without their token",
            got="null",
            expected="the file that serve_vllm.py --token-file made",
        )
    if rollout.max_lost_servers >= count:
        yield describe(
            "rollout.max_lost_servers: none would be left",
            got=rollout.max_lost_servers,
            expected=f"less than {count}, the servers there are",
        )
    if rollout.capture == "native":
        yield describe(
            "rollout.capture: a server cannot record by vLLM's own capture",
            got="native",
            expected="rollout.capture patch or worker",
        )
    if rollout.sleep_level:
        yield describe(
            "rollout.sleep_level: servers have GPUs of their own and do not sleep", got=rollout.sleep_level, expected=0
        )
    if rollout.prompts_per_step < count:
        yield describe(
            "rollout.servers: more than the prompts of a step, whose completions stay on one server",
            got=count,
            expected=f"at most rollout.prompts_per_step = {rollout.prompts_per_step}",
        )
    if cluster is not None and cluster.engines != count:
        yield describe(
            "cluster.engines: not the servers that there are",
            got=cluster.engines,
            expected=f"{count}, as in rollout.servers",
        )


def has_servers(config: Config) -> bool:
    """Whether a run samples from servers, named or only planned: rank 0 itself starts one engine, on one GPU."""
    cluster = config.cluster
    planned = cluster is not None and (cluster.engines, cluster.gpus_per_engine) != (1, 1)
    return planned or bool(config.rollout.servers)


def start_problems(config: Config) -> Iterator[str]:
    """What may be planned, but not started."""
    cluster = config.cluster
    if has_servers(config) and not config.rollout.servers:
        yield describe(
            "rollout.servers: the cluster's engines are servers, and none is named",
            where=f"cluster.engines is {cluster.engines}, cluster.gpus_per_engine is {cluster.gpus_per_engine}",
            got="no servers",
            expected=f"{cluster.engines}",
            do="start them with tools/serve_vllm.py --config and name them, see docs/cluster.md",
        )


def _no_address(url: str) -> str:
    """Why it is no address of a server; "" when it is one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"no URL ({error})"
    if parts.scheme != "http":
        return "they speak http"
    if not host or not port:
        return "host and port are both needed"
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        return "nothing but host and port belongs into it"
    return ""
