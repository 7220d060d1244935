"""Finds addresses of this host that other hosts can reach. Imports no torch: the sampling pool needs this alone."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable


def own_address(host: str, port: int) -> str:
    """Return this host's address on the route to another host. Sends nothing. Raises OSError if there is no route."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def reached_by_all(others: Iterable[tuple[str, int]]) -> str:
    """Return an address of this host that all of the given (host, port) can reach.

    Some of them may be this host itself. The address is a loopback address only if all are. Raises OSError as
    `own_address` does.
    """
    found = [own_address(*other) for other in others]
    return next((address for address in found if not is_loopback(address)), found[0])


def is_loopback(address: str) -> bool:
    """Return whether an address is reached only from its own host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
