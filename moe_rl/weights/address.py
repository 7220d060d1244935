"""Addresses of this host, as others reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable


def own_address(host: str, port: int) -> str:
    """The address of this host on the way to another one. Nothing is sent. Raises OSError when there is no way."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def reached_by_all(others: Iterable[tuple[str, int]]) -> str:
    """The address of this host on the way to several (host, port), of which some may be this host itself: a loopback
    address only when all are. Raises OSError as `own_address`."""
    found = [own_address(*other) for other in others]
    outer = (address for address in found if not ipaddress.ip_address(address.partition("%")[0]).is_loopback)
    return next(outer, found[0])
