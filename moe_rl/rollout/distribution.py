"""Distributes the requests of a step among servers."""

from __future__ import annotations

from collections.abc import Sequence

from moe_rl.types import GenerateRequest


def assign(requests: Sequence[GenerateRequest], servers: Sequence[int]) -> dict[int, list[int]]:
    """Distribute the requests: server -> indexes of its requests, ascending. Servers without requests are left out.

    Requests with the same prompt stay together, so the prompt is computed and stored once. Groups are assigned largest
    first, each to the server with the least load so far; a request's load is the most tokens it can have. The same
    requests and servers always give the same distribution.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for at, request in enumerate(requests):
        groups.setdefault(request.prompt_token_ids, []).append(at)
    load = {
        members[0]: sum(len(requests[at].prompt_token_ids) + requests[at].max_tokens for at in members)
        for members in groups.values()
    }
    shares: dict[int, list[int]] = {server: [] for server in servers}
    loads = dict.fromkeys(servers, 0)
    for members in sorted(groups.values(), key=lambda members: (-load[members[0]], members[0])):
        server = min(servers, key=lambda server: (loads[server], server))
        loads[server] += load[members[0]]
        shares[server] += members
    return {server: sorted(share) for server, share in shares.items() if share}
