"""Tests how the nodes of one engine meet and end together. Without vLLM; tests/rollout/test_two_nodes.py has it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import Queue

import pytest

from moe_rl.errors import EngineError, SamplerGone
from moe_rl.vllm import nodes
from moe_rl.vllm.nodes import Nodes
from tests.support.ports import free_port

ARGUMENTS = {"dtype": "float32", "node_rank": 0, "host": "10.0.0.5", "port": 8000}


class Engine:
    """Holds the links of nodes that meet at one port, and what made each leave."""

    def __init__(self, count: int):
        self.count, self.port = count, free_port()
        self.left: Queue[tuple[int, int, str]] = Queue()
        self.links: dict[int, nodes.Link] = {}
        self.errors: dict[int, Exception] = {}
        self.threads: list[threading.Thread] = []

    def start(self, rank: int, **changes: object) -> threading.Thread:
        def meet() -> None:
            node = Nodes(self.count, rank, "127.0.0.1", self.port)
            way = nodes.join if rank else nodes.gather
            try:
                own = ARGUMENTS | {"node_rank": rank, "host": f"host-{rank}", **changes}
                self.links[rank] = way(node, own, lambda status, text: self.left.put((rank, status, text)))
            except Exception as error:
                self.errors[rank] = error

        self.threads.append(threading.Thread(target=meet, daemon=True))
        self.threads[-1].start()
        return self.threads[-1]

    def all_there(self) -> None:
        for thread in self.threads:
            thread.join(20)
        assert sorted(self.links) == list(range(self.count)) and not self.errors


@pytest.fixture
def engine(monkeypatch) -> Iterator[Engine]:
    for name in ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "unset")  # restored afterwards
        monkeypatch.delenv(name)
    made = Engine(3)
    yield made
    for link in made.links.values():
        link.close(None)


def test_nodes_meet_in_any_order_and_know_their_address(engine, monkeypatch):
    engine.start(2)
    engine.start(0)
    engine.start(1)
    engine.all_there()
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert Nodes(3, 2, "a", 7).arguments()["master_port"] == 8, "the port beside ours is torch.distributed's"


def test_a_node_that_is_lost_ends_the_others_and_is_named(engine):
    for rank in range(3):
        engine.start(rank)
    engine.all_there()
    engine.links.pop(1).close(EngineError)
    rank, status, text = engine.left.get(timeout=20)
    assert (rank, status) == (0, 3) and text.startswith(f"node 1 ({socket.gethostname()}) is gone")
    engine.links.pop(0).close(None)  # as its process does, in which this is no order to stop
    rank, status, text = engine.left.get(timeout=20)
    assert (rank, status) == (2, 3) and f"node 0 (127.0.0.1:{engine.port}) is gone" in text


@pytest.mark.parametrize(("error", "status", "said"), [(None, 0, "was stopped"), (SamplerGone, 3, "is gone")])
def test_the_end_of_node_0_ends_the_others_alike(engine, error, status, said):
    for rank in range(3):
        engine.start(rank)
    engine.all_there()
    engine.links.pop(0).close(error)
    for rank, got, text in sorted(engine.left.get(timeout=20) for _ in "12"):
        assert rank and got == status and said in text
    assert engine.left.empty()


@pytest.mark.parametrize(
    ("rank", "changes", "said"),
    [
        (1, {"dtype": "bfloat16"}, "dtype: got bfloat16, expected float32"),
        (1, {"extra": 1}, "extra: got 1, expected nothing"),
        (2, {}, "node 2 .* is there already"),
        (3, {}, "there are nodes 1 to 2"),
    ],
)
def test_a_node_that_does_not_belong_is_refused_and_the_others_still_meet(engine, capsys, rank, changes, said):
    engine.start(0)
    engine.start(2).join(20)
    engine.start(rank, **changes).join(20)
    error = engine.errors.pop(rank)
    with pytest.raises(EngineError, match=said):
        raise error
    assert f"refused node {rank}" in capsys.readouterr().err
    engine.start(1)
    engine.all_there()


@pytest.mark.parametrize("then", [(2, 1), (1, 2)])
def test_strangers_and_a_node_that_came_again_do_no_harm(engine, then):
    engine.start(0)
    first = engine.start(2)
    first.join(20)
    engine.links.pop(2).close(EngineError)
    for text in (b"", b"GET / HTTP/1.1\r\n\r\n"):
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", engine.port)) as stranger:
            stranger.sendall(text)
    for rank in then:
        engine.start(rank).join(20)
    engine.all_there()


def test_who_does_not_come_is_told(engine, monkeypatch):
    monkeypatch.setattr(nodes, "_MEET_SECONDS", 0.3)
    engine.start(0).join(20)
    assert "node 1, 2 not there" in str(engine.errors[0])
    engine.start(1).join(20)
    assert "Node 0 cannot be reached" in str(engine.errors[1])


def test_an_address_of_no_interface_is_told():
    with pytest.raises(EngineError, match="No interface"):
        nodes._listen_at("192.0.2.77")


def test_node_0_is_where_the_address_is(engine):
    with pytest.raises(EngineError, match="Node 0 cannot listen"):
        nodes.gather(Nodes(2, 0, "192.0.2.77", engine.port), {}, lambda *_: None)
