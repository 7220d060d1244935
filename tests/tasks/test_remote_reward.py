"""A remote verifier that does all that a server can do wrong, and the reward that asks it."""

import asyncio
import json
import threading
from collections import Counter

import pytest

from moe_rl.config.reward_kinds import RemoteReward
from moe_rl.tasks.verifiers import RewardItem


class Server:
    """An HTTP server on a loopback port. The completion names what it does; `asked` counts the requests."""

    def __init__(self):
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.busy = self.most_busy = 0
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/score"
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self, reader, writer):
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _request(self, reader, writer) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert head.startswith("post /score ")
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        told = body["completion"]
        self.asked[told] += 1
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            return await self._answer(writer, told)
        finally:
            self.busy -= 1

    async def _answer(self, writer, told: str) -> bool:
        word, _, rest = told.partition(" ")
        status, more = 200, ""
        if word == "close":
            return False
        if word == "closes_then" and self.asked[told] == 1:
            return False
        if word == "slow":
            await asyncio.sleep(float(rest))
        if word == "drip":  # each piece comes in time, but never the end
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            for _ in range(1000):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
        if word == "flood":  # an answer without an end
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(b" " * 65536)
                await writer.drain()
        if word == "status":
            codes = [int(code) for code in rest.split(",")]
            status = codes[min(self.asked[told], len(codes)) - 1]
        if status in (301, 307):
            more = f"location: {self.url}\r\n"
        answer = rest if word == "say" else '{"reward": 0.5, "why": "half"}'
        data = f"HTTP/1.1 {status} X\r\n{more}content-length: {len(answer.encode())}\r\n\r\n{answer}".encode()
        if word == "twice":  # a second answer, which nobody asked for
            data += data.replace(b"0.5", b"1.0")
        writer.write(data)
        await writer.drain()
        return True


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def ask(make_pool, server):
    """Scores completions by the server; returns the verdicts."""

    def score(*completions: str, **keys):
        keys = {"timeout_seconds": 30.0, "attempts": 2, "arguments": ("completion", "answer")} | keys
        with make_pool(kinds={"judge": RemoteReward(kind="remote", url=server.url, **keys)}) as pool:
            return pool.score([RewardItem("", one, {"answer": 7, "hidden": 1}) for one in completions])

    return score


HOSTILE = [  # what the server does, attempts at it, part of the reason
    ("slow 9", 2, "no answer within 3 s"),
    ("drip", 2, "no answer within 3 s"),
    ("close", 2, "RemoteProtocolError"),
    ("status 503", 2, "503"),
    ("status 404", 1, "404"),
    ("status 301", 1, "redirect"),
    ("status 307", 1, "redirect"),
    ("status 204", 1, "204"),
    ("flood", 1, "65536"),
    ("say " + " " * 70_000, 1, "65536"),
    ("say nonsense", 1, "nonsense"),
    ("say", 1, "number"),
    ("say 0.5", 1, "number"),
    ("say [0.5]", 1, "number"),
    ("say {}", 1, "number"),
    ('say {"reward": "0.5"}', 1, "number"),
    ('say {"reward": null}', 1, "number"),
    ('say {"reward": true}', 1, "number"),
    ('say {"reward": NaN}', 1, "number"),
    ('say {"reward": Infinity}', 1, "number"),
    ('say {"reward": 1e999}', 1, ""),
    ('say {"reward": 1e300}', 1, "1e+300"),
    ("say " + "[" * 60_000, 1, ""),
    ('say \xff{"reward": 1}', 1, "number"),
]
MENDED = ["status 500,200", "status 429,200", "status 408,200", "closes_then"]
HALF = ("scored", 0.5, "")


def seen(verdicts):
    return [(verdict.status, verdict.reward, verdict.detail) for verdict in verdicts]


def test_a_hostile_server_fails_its_items_and_no_others(ask, server):
    first, *others, last = ask("a", *(does for does, *_ in HOSTILE), "b", timeout_seconds=3.0)
    for (does, attempts, reason), failed in zip(HOSTILE, others, strict=True):
        assert (failed.status, failed.reward) == ("failed", None), does
        assert failed.detail.startswith("judge: ") and reason in failed.detail and len(failed.detail) < 1000
        assert server.asked[does] == attempts, does
    assert seen([first, last]) == [HALF] * 2


def test_a_fault_that_passes_is_asked_about_again(ask, server):
    assert seen(ask(*MENDED)) == [HALF] * len(MENDED)
    assert [server.asked[does] for does in MENDED] == [2] * len(MENDED)


@pytest.mark.parametrize("does", ["twice", "status 204"])
def test_what_comes_behind_an_answer_answers_no_other_request(ask, server, does):
    first, *others = ask(does, "a", "b", concurrent_requests=1, attempts=1)
    assert first.scored == (does == "twice")
    assert seen(others) == [HALF] * 2
    assert [body["completion"] for body in server.bodies] == [does, "a", "b"]


def test_one_attempt_is_one_attempt(ask, server):
    assert [verdict.scored for verdict in ask("status 500,200", attempts=1)] == [False]


def test_a_server_that_is_not_there_fails_all(make_pool):
    judge = RemoteReward(kind="remote", url="http://127.0.0.1:9/", arguments=("completion",), attempts=1)
    with make_pool(kinds={"judge": judge}) as pool:
        verdicts = pool.score([RewardItem("", "a")] * 3)
    assert [verdict.status for verdict in verdicts] == ["failed"] * 3
    assert all("ConnectError" in verdict.detail for verdict in verdicts)


def test_only_the_named_arguments_are_sent(ask, server):
    [verdict] = ask("x", arguments=("finish_reason", "completion", "answer"))
    assert verdict.parts == {"judge": 0.5}
    assert server.bodies == [{"finish_reason": "stop", "completion": "x", "answer": 7}]


def test_requests_go_out_together_but_not_more_than_configured(ask, server):
    verdicts = ask(*(f"slow 0.3{i:02}" for i in range(12)), concurrent_requests=4, timeout_seconds=10.0)
    assert all(verdict.scored for verdict in verdicts)
    assert server.most_busy == 4


def test_a_remote_reward_may_take_longer_than_a_function(make_pool, server):
    judge = RemoteReward(kind="remote", url=server.url, arguments=("completion",), timeout_seconds=30.0, attempts=1)
    with make_pool("good", kinds={"judge": judge}, timeout=1.0) as pool:
        [verdict] = pool.score([RewardItem("", "slow 1.5")])
    assert verdict.parts == {"good": 1.0, "judge": 0.5}
