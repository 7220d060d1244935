"""Joins the processes of one engine that spans several nodes, and ends them together.

    node 0: vLLM's API server, scheduler and workers          nodes 1, 2 ...: only workers
            listens at the master address <--- connection --- each tells what it was started with

vLLM watches workers only on their own node, and waits for those of a lost node without end. So the connections stay
open: when one breaks, what is left of the engine ends with status 3 and names the node.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

import moe_rl
from moe_rl.errors import EngineError, SamplerGone, first_of
from moe_rl.messages import Channel, Message, decoder

PORT = 29600
"""Default of the master port."""
_MEET_SECONDS = 600.0
_HELLO_SECONDS = 10.0
_LONGEST_HELLO = 1 << 20
# The kernel finds within 25 s that the host at the other end is gone: seconds of silence before it asks, seconds
# between two questions, questions without an answer.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
# Arguments that differ between the nodes of an engine.
_OWN = ("node_rank", "host", "port")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Describes an engine's nodes to one of them.

    Attributes:
        count: number of nodes, at least 2.
        rank: number of this node; node 0 serves.
        address: of node 0, as the others reach it.
        port: port of node 0 for the connections of this module. torch.distributed uses the next one.
    """

    count: int
    rank: int
    address: str
    port: int

    def arguments(self) -> dict[str, object]:
        """Return vLLM's arguments."""
        where = {"master_addr": self.address, "master_port": self.port + 1}
        return {"nnodes": self.count, "node_rank": self.rank, "distributed_executor_backend": "mp", **where}


class Hello(Message, frozen=True):
    """Introduces a node to node 0. arguments: vLLM's, as text, and the version of moe_rl."""

    rank: int
    host: str
    arguments: dict[str, str]


class Welcome(Message, frozen=True):
    """Answers it. refusal: why node 0 refuses the node, "" if it does not."""

    refusal: str = ""


class EngineStopped(Message, frozen=True):
    """Tells a node that node 0 was stopped."""


_HELLO, _ANSWER = decoder(Hello), decoder(Welcome | EngineStopped)


class Link:
    """Watches the connections to other nodes.

    Args:
        others: connections, by what a message calls the node at the other end.
        leave: ends this process with a status, after it has printed a message.
    """

    def __init__(self, others: Mapping[str, Channel], leave: Callable[[int, str], None]):
        self._others, self._leave, self._over = others, leave, False
        for name, channel in others.items():
            channel.socket.settimeout(None)
            threading.Thread(target=self._watch, args=(name, channel), daemon=True).start()

    def close(self, error: type[BaseException] | None, *_) -> None:
        """End the engine's other nodes: with status 0 if this one was stopped, with 3 after an error."""
        stopped, self._over = error is None and not self._over, True
        for channel in self._others.values():
            with suppress(OSError):
                if stopped:
                    channel.send(EngineStopped())
                channel.socket.shutdown(socket.SHUT_RDWR)

    def _watch(self, name: str, channel: Channel) -> None:
        message = None
        with suppress(OSError, EOFError, ValueError):
            message = channel.receive()
        if self._over:
            return
        self._over = True  # the first node that is lost takes the others along
        if isinstance(message, EngineStopped):
            self._leave(0, f"{name} was stopped")
        else:
            self._leave(3, f"{name} is gone, and with it this engine")


def join(nodes: Nodes, arguments: Mapping[str, object], leave: Callable[[int, str], None]) -> Link:
    """Connect to node 0 and compare the arguments. Waits 10 minutes for it.

    Raises:
        EngineError: node 0 does not come, or was started with other arguments.
        SamplerGone: it is gone again.
    """
    where = f"{nodes.address}:{nodes.port}"
    channel = Channel(_dialed(nodes, where), _ANSWER)
    _listen_at(channel.socket.getsockname()[0])
    try:
        channel.socket.settimeout(_MEET_SECONDS)
        channel.send(Hello(nodes.rank, socket.gethostname(), _texts(arguments)))
        answer = channel.receive()
    except (OSError, EOFError, ValueError) as error:
        raise SamplerGone("node 0 is gone", where={"host": where}, got=error) from None
    if not isinstance(answer, Welcome) or answer.refusal:
        raise EngineError("node 0 refuses this node", where={"host": where}, got=getattr(answer, "refusal", "its end"))
    return Link({f"node 0 ({where})": channel}, leave)


def gather(nodes: Nodes, arguments: Mapping[str, object], leave: Callable[[int, str], None]) -> Link:
    """Wait, as node 0, until all other nodes are there. Waits 10 minutes for them.

    Raises EngineError if it cannot listen, or a node does not come.
    """
    where = f"{nodes.address}:{nodes.port}"
    came: dict[int, tuple[str, Channel]] = {}
    deadline = time.monotonic() + _MEET_SECONDS
    try:
        family, _, _, _, address = socket.getaddrinfo(nodes.address, nodes.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family)
    except OSError as error:
        do = "give an address of this node, and a free port, or --node-rank of another node"
        raise EngineError("Node 0 cannot listen", where={"host": where}, got=error, do=do) from None
    with listener:
        _listen_at(listener.getsockname()[0])
        while missing := [rank for rank in range(1, nodes.count) if rank not in came or _is_gone(came[rank][1])]:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                end, _ = listener.accept()
            except TimeoutError:
                got = f"node {', '.join(map(str, missing))} not there after {_MEET_SECONDS:g} s"
                do = "start moe-rl serve with the same arguments and its --node-rank on every node"
                raise EngineError("Not all nodes came", where={"host": where}, got=got, do=do) from None
            _keep_alive(end, _HELLO_SECONDS)
            channel = Channel(end, _HELLO, _LONGEST_HELLO)
            with suppress(OSError, EOFError, ValueError):  # whoever it was, it was no node
                hello = channel.receive()
                refusal = _refusal(nodes, hello, _texts(arguments), came)
                if refusal:
                    print(f"refused node {hello.rank} ({hello.host}): {refusal}", file=sys.stderr)
                channel.send(Welcome(refusal))
                if not refusal:
                    came[hello.rank] = f"node {hello.rank} ({hello.host})", channel
    return Link(dict(came.values()), leave)


def _dialed(nodes: Nodes, where: str) -> socket.socket:
    deadline = time.monotonic() + _MEET_SECONDS
    while True:
        try:
            end = socket.create_connection((nodes.address, nodes.port), timeout=_HELLO_SECONDS)
            _keep_alive(end, _MEET_SECONDS)
            return end
        except OSError as error:
            if time.monotonic() > deadline:
                do = "start it, or correct --master-addr and --master-port"
                raise EngineError("Node 0 cannot be reached", where={"host": where}, got=error, do=do) from None
            time.sleep(1)


def _refusal(nodes: Nodes, hello: Hello, ours: Mapping[str, str], came: Mapping[int, tuple[str, Channel]]) -> str:
    if not 0 < hello.rank < nodes.count:
        return f"there are nodes 1 to {nodes.count - 1}"
    if hello.rank in came and not _is_gone(came[hello.rank][1]):
        return f"{came[hello.rank][0]} is there already"
    differ = [
        f"{name}: got {hello.arguments.get(name, 'nothing')}, expected {ours.get(name, 'nothing')}"
        for name in sorted(ours.keys() | hello.arguments.keys())
        if ours.get(name) != hello.arguments.get(name)
    ]
    return f"it was started with other arguments: {first_of(differ)}" if differ else ""


def _is_gone(channel: Channel) -> bool:
    """Return whether the node at the other end has closed its connection: it says nothing after its hello."""
    return bool(select.select([channel.socket], [], [], 0)[0])


def _texts(arguments: Mapping[str, object]) -> dict[str, str]:
    texts = {name: str(value) for name, value in arguments.items() if name not in _OWN}
    return texts | {"version of moe_rl": moe_rl.__version__}


def _keep_alive(end: socket.socket, timeout: float) -> None:
    end.settimeout(timeout)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        end.setsockopt(socket.IPPROTO_TCP, option, value)


def _listen_at(address: str) -> None:
    """Have vLLM, gloo and NCCL use this address of this node."""
    of_it = [name for name, ends in psutil.net_if_addrs().items() if any(end.address == address for end in ends)]
    if not of_it:
        raise EngineError(
            "No interface of this node has this address", where={"host": address}, do="use IPv4 addresses"
        )
    os.environ.setdefault("VLLM_HOST_IP", address)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, of_it[0])
