"""Which server samples which requests."""

from __future__ import annotations

from collections.abc import Sequence

from moe_rl.types import GenerateRequest


def assign(requests: Sequence[GenerateRequest], servers: Sequence[int]) -> dict[int, list[int]]:
    """Server -> positions of its requests, ascending; servers without any are left out.

    Requests with the same prompt stay together: it is computed and stored once. Groups go to the server with the least
    load so far, largest first; the load of a request is the tokens that it may come to. The same requests and servers
    always give the same shares.
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
