"""Whether ranks on several nodes can reach each other, as far as one of them can tell alone."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping

from moe_rl.errors import describe

INTERFACE = "GLOO_SOCKET_IFNAME"


def several_nodes(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started ranks on other nodes too."""
    ranks = environment.get("WORLD_SIZE", "1")
    return int(ranks) > int(environment.get("LOCAL_WORLD_SIZE", ranks))


def node_problems(environment: Mapping[str, str]) -> Iterator[str]:
    """Why gloo, which connects the ranks on CPUs and writes checkpoints everywhere, would not find its way.

    Without an interface it takes the address that the host's name leads to, which on many systems is loopback: the
    ranks then wait for each other in vain.
    """
    if not several_nodes(environment):
        return
    do = "set it, and NCCL_SOCKET_IFNAME, to the interface between the nodes (ip -brief address)"
    if interface := environment.get(INTERFACE):
        known = [name for _, name in socket.if_nameindex()]
        if interface not in known:
            where = socket.gethostname()
            yield describe(f"{INTERFACE}: no such interface", where=where, got=interface, expected=known, do=do)
        return
    host = socket.gethostname()
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        yield describe(f"{INTERFACE} is not set and the host's name has no address", where=host, got=error, do=do)
        return
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        yield describe(
            f"{INTERFACE} is not set and the host's name leads to loopback, where no other node is",
            where=host,
            got=", ".join(sorted(found)),
            do=do,
        )
