"""Tests several servers as one sampler: who samples what, what is refused, and how losses are handled.

The servers here are stand-ins that fail on demand. Real ones are in test_server.py and tools/dev/two_hosts.py.
"""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import httpx
import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.config.load import load_config
from moe_rl.errors import EngineError, MoeRLError, RequestRefused, SamplerGone, WeightSyncError
from moe_rl.models.hf import read_model
from moe_rl.rollout.attach import attach_problems
from moe_rl.rollout.fleet import ServerFleet
from moe_rl.rollout.sampler import Blocking, ServerLost, assign, nobody, sample_all
from moe_rl.rollout.server import _PUBLISH_TOKENS, VllmServer
from moe_rl.rollout.transport import Transport, collect
from moe_rl.types import Completion, GenerateRequest, RouteRef, ScoredTokens, sampled_by
from moe_rl.vllm.api_server import make_token
from moe_rl.vllm.control import GENERATE, Served
from moe_rl.vllm.sampling import Growing
from moe_rl.vllm.server_control import Control
from moe_rl.weights.update import (
    Broadcast,
    Files,
    Holding,
    SenderAt,
    SharedMemory,
    WeightUpdate,
    own_address,
    reached_by_all,
)
from tests.support.refusals import refused

SERVED = Served(
    moe_rl="0", vllm="0.32.0", trace_root="/t", model_fingerprint="f", num_experts=4, top_k=2, layer_map="m",
    vocab_size=9, max_model_len=99, dtype="float32", capture="patch", support=False, router_logits_fraction=0.0, gpus=1,
    head=0, reads_text=False, start="first", updates=0, weight_version=0, weight_digest="", weights_whole=False,
)  # fmt: skip


def asked(prompt: int, member: int, *, max_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(f"p{prompt}/c{member}", (prompt, 1, 2), 10 * prompt + member, max_tokens, 1.0, ())


@dataclass(eq=False)
class Server:
    """A stand-in server. `fails` names the calls that raise, each as often as it is listed."""

    url: str
    served_: Served = SERVED
    fails: list[str] = field(default_factory=list)
    shards: dict[str, list[str]] = field(default_factory=dict)
    updates: list[WeightUpdate] = field(default_factory=list)
    digest: str = ""
    cancelled: bool = False
    slow: bool = False
    passes: int = 0  # of the event loop, for each request
    running: int = 0
    most: int = 0
    paused: bool = False
    scored: str | None = None
    refuses: bool = False
    adopted: bool = False
    published: list[str] = field(default_factory=list)
    root: Path = Path()
    blind: bool = False  # its trace root is another folder

    async def challenge(self, folder, name):
        text = (self.root / folder / name).read_text()
        (self.root / folder / f"{name}.answer").write_text(text)
        return "another" if self.blind else text

    async def publish(self, shard, *, keep_open):
        self._may_fail("publish")
        self.published.append(f"{shard} so far" if keep_open else shard)

    async def adopt(self):
        self.adopted, self.paused = True, False
        self.served_ = msgspec.structs.replace(self.served_, weight_version=0)

    async def served(self) -> Served:
        self._may_fail("served")
        return self.served_

    async def sample(self, requests, shard, *, started, samples, ended=nobody, leave=None, keep_open=False):
        if leave is not None:
            assert started == self.served_.start and not leave.is_set()
            samples[0].token_ids += [7, 7, 7]
        try:
            await asyncio.sleep(30 if self.slow else 0)
            if self.refuses:
                raise RequestRefused("refused", got="planted")
            self._may_fail("before")
            assert keep_open or shard not in self.shards
            self.shards.setdefault(shard, []).extend(request.key for request in requests)
            self.running += len(requests)
            self.most = max(self.most, self.running)
            completions = []
            for at, r in enumerate(requests):
                for _ in range(self.passes):
                    await asyncio.sleep(0)
                logprobs, versions = np.zeros(1, np.float32), sampled_by(0, 1)
                made = Completion(r.key, r.prompt_token_ids, (r.seed,), logprobs, "stop", versions, None)
                completions.append(made)
                self.running -= 1
                ended(at, made)
            self._may_fail("after")  # published, and the answer is lost
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return completions

    async def update(self, update, seconds=None):
        self._may_fail("update")
        self.updates.append(update)
        if "wait" in self.fails:  # for a broadcast that another has refused
            await asyncio.sleep(3600)
        if "refuse" in self.fails:
            return Holding(self.served_.weight_version, "", True, "torn")
        if update.replaces != self.served_.weight_version:
            return Holding(self.served_.weight_version, "", True, "does not hold this version")
        if "drop" in self.fails:  # it says yes, and keeps what it had
            return Holding(update.version, f"digest{update.version}", True)
        digest = self.digest or f"digest{update.version}"
        self.served_ = replace_served(
            self.served_, updates=self.served_.updates + 1, version=update.version, digest=digest
        )
        return Holding(update.version, digest, True)

    async def pause(self):
        self._may_fail("pause")
        self.paused = True

    async def resume(self):
        self.paused = False

    async def score(self, runs, *, shard=None):
        self.scored = shard
        logprobs = [np.full(len(run) - 1, float(self.url[-1]), np.float32) for run in runs]
        return ScoredTokens(logprobs, [RouteRef("scored/0", 2, ())] if shard else [], self.url)

    def _may_fail(self, call: str) -> None:
        if call in self.fails:
            self.fails.remove(call)
            raise EngineError(f"planted: {call} ({self.url})")


def replace_served(served: Served, *, updates: int, version: int, digest: str, start: str = "first") -> Served:
    return msgspec.structs.replace(
        served, updates=updates, weight_version=version, weight_digest=digest, weights_whole=True, start=start
    )


@pytest.fixture
def fleet(tmp_path):
    def make(count=2, *, max_lost=0, updated=True, **settings):
        servers = [Server(f"http://host:{n}", root=tmp_path, **settings) for n in range(count)]
        workers = [1, 2, 1][:count]
        given = {"workers": workers, "max_lost": max_lost, "load_seconds": 9, "folder": "run/trace"}
        made = Blocking(ServerFleet(servers, tmp_path, "0.32.0", **given))
        if updated:
            made.update_weights(update(tmp_path, 1))
        return made, servers

    return make


def update(root, version: int) -> WeightUpdate:
    return WeightUpdate(version, version - 1, 0, True, True, [], Files([str(root / "run/sync/part0")]))


REQUESTS = [asked(prompt, member) for prompt in range(4) for member in range(3)]


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 50)), max_size=40),
    st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
)
def test_every_request_goes_to_one_server_with_those_of_its_prompt(wanted, servers):
    requests = [asked(prompt, at, max_tokens=tokens) for at, (prompt, tokens) in enumerate(wanted)]
    shares = assign(requests, servers)
    assert sorted(at for share in shares.values() for at in share) == list(range(len(requests)))
    where = {}
    for server, share in shares.items():
        assert server in servers and share and share == sorted(share)
        for at in share:
            assert where.setdefault(requests[at].prompt_token_ids, server) == server
    assert shares == assign(requests, list(servers))


def test_the_load_is_spread():
    """One prompt with long answers weighs as much as three with short ones."""
    requests = [asked(0, 0, max_tokens=60), *(asked(prompt, 0, max_tokens=18) for prompt in (1, 2, 3))]
    assert assign(requests, [4, 7]) == {4: [0], 7: [1, 2, 3]}
    assert {server: len(share) for server, share in assign(REQUESTS, [0, 1]).items()} == {0: 6, 1: 6}


def test_completions_come_back_in_order_from_shards_of_their_own(fleet):
    made, servers = fleet()
    completions = made.generate(REQUESTS, shard="step000007")
    assert [(c.key, c.token_ids) for c in completions] == [(r.key, (r.seed,)) for r in REQUESTS]
    assert [list(server.shards) for server in servers] == [["step000007-server0"], ["step000007-server1"]]
    assert sorted(key for server in servers for keys in server.shards.values() for key in keys) == sorted(
        request.key for request in REQUESTS
    )
    scored = made.score([[1, 2, 3]])
    assert [(one.by[-1], one.logprobs[0].tolist(), one.routes) for one in scored] == [
        ("0", [0, 0], []),
        ("1", [1, 1], []),
    ]
    assert all(one.routes for one in made.score([[1, 2, 3]], shard="canary"))
    assert [server.scored for server in servers] == ["canary-server0", "canary-server1"]


def queued(made, requests, in_flight, ended=nobody):
    """Sample with a queue, or with shares if in_flight is None. Returns the passes of the event loop that it took."""

    async def run():
        call = asyncio.create_task(sample_all(made.sampler, requests, shard="s", ended=ended, in_flight=in_flight))
        passes = 0
        while not call.done():
            await asyncio.sleep(0)
            passes += 1
        completions = call.result()
        assert [(c.key, c.token_ids) for c in completions] == [(r.key, (r.seed,)) for r in requests]
        return passes

    return made.run(run())


def test_a_slow_server_gets_fewer_groups_of_a_queue_and_delays_its_end_less(fleet):
    """With shares it gets as many as the other."""
    requests = [asked(prompt, member) for prompt in range(8) for member in range(3)]
    taken, passes = {}, {}
    for in_flight in (None, 3):
        made, servers = fleet()
        servers[0].passes, servers[1].passes = 1, 20
        passes[in_flight] = queued(made, requests, in_flight)
        taken[in_flight] = [len(server.shards[f"s-server{number}"]) for number, server in enumerate(servers)]
        assert sorted(key for server in servers for keys in server.shards.values() for key in keys) == sorted(
            request.key for request in requests
        )
        published = [[], []] if in_flight is None else [["s-server0"], ["s-server1"]]
        assert [server.published for server in servers] == published, "one shard a server"
        if in_flight is not None:
            assert all(in_flight <= server.most < in_flight + 3 for server in servers), "whole groups of three begin"
    assert taken[None] == [12, 12] and taken[3][1] <= 6 and sum(taken[3]) == 24
    assert passes[3] < passes[None] / 2


def test_a_queue_gives_the_largest_group_first(fleet):
    made, servers = fleet()
    requests = [asked(prompt, 0, max_tokens=tokens) for prompt, tokens in enumerate((3, 9, 5, 7))]
    servers[1].passes = 99
    queued(made, requests, 1)
    assert [server.shards[f"s-server{number}"] for number, server in enumerate(servers)] == [
        ["p1/c0", "p2/c0", "p0/c0"],
        ["p3/c0"],
    ]


@pytest.mark.parametrize("when", ["before", "after", "publish"])
def test_the_groups_of_a_lost_server_go_back_to_the_queue(fleet, when):
    """Those that it had sampled too: nobody can publish them."""
    made, servers = fleet(3, max_lost=1)
    requests, heard = [asked(prompt, member) for prompt in range(8) for member in range(3)], []

    def ended(at, completion):
        if completion.key in servers[1].shards.get("s-server1", ()):
            heard.append(completion)
            if len(heard) == 3:  # all of its first group: "after" is then, the others later
                servers[1].fails.append(when)

    for server in servers:
        server.passes = 1
    queued(made, requests, 3, ended)
    assert list(made.sampler.lost) == ["http://host:1"] and not servers[1].published and not servers[1].fails
    left = [(name, server.shards[name]) for server in (servers[0], servers[2]) for name in server.published]
    assert sorted(key for _, keys in left for key in keys) == sorted(request.key for request in requests)
    again = sum(len(keys) for name, keys in left if name.startswith("s-again1-"))
    sampled = len(servers[1].shards["s-server1"])
    assert again == {"before": 3, "after": sampled - 3, "publish": sampled}[when] > 0, "the others come first"


def test_an_open_shard_is_published_where_it_was_left_and_a_lost_server_is_told(fleet, tmp_path):
    made, servers = fleet(3, max_lost=1)

    def turn(place, shard):
        how = {"shard": shard, "leave": asyncio.Event(), "keep_open": True}
        made.run(made.sampler.sample(place, REQUESTS[:1], **how))
        servers[place].shards.clear()

    for place in (0, 1, 0):
        turn(place, "step000001")
    assert made.run(made.sampler.publish("step000001", keep_open=True)) == []
    servers[1].fails.append("publish")
    assert made.run(made.sampler.publish("step000001", keep_open=True)) == ["step000001-server1"]
    assert made.run(made.sampler.publish("step000001")) == []
    published = ["step000001-server0 so far"] * 2 + ["step000001-server0"]
    assert [server.published for server in servers] == [published, ["step000001-server1 so far"], []]
    assert list(made.sampler.lost) == ["http://host:1"]
    assert made.run(made.sampler.publish("step000001")) == []
    for place in (2, 0):
        turn(place, "step000002")
    servers[2].fails.append("update")
    made.wake("weights")
    made.update_weights(update(tmp_path, 2))  # server 1 is used again, and server 2 is lost
    made.wake("weights")
    made.update_weights(update(tmp_path, 3))
    turn(2, "step000002")
    assert made.run(made.sampler.publish("step000002")) == ["step000002-server2"]
    assert servers[2].published == ["step000002-server2-again1"] and not made.sampler.lost


def test_weights_are_named_by_their_place_below_the_trace_root(fleet, tmp_path):
    _, servers = fleet()
    assert [one.source.paths for server in servers for one in server.updates] == [["run/sync/part0"]] * 2


def test_a_lost_server_ends_the_run_and_the_others_calls(fleet):
    made, servers = fleet()
    servers[0].slow = True
    servers[1].fails.append("before")
    with pytest.raises(SamplerGone, match=r"planted: before.*server 1, http://host:1.*max_lost_servers = 0.*--resume"):
        made.generate(REQUESTS, shard="step000001")
    assert servers[0].cancelled and not servers[0].shards


@pytest.mark.parametrize("when", ["before", "after", "served"])
def test_within_the_bound_the_others_sample_what_is_lacking_and_nothing_is_doubled(fleet, when):
    made, servers = fleet(3, max_lost=1)
    servers[1].fails.append(when)
    told = []
    completions = made.generate(REQUESTS, shard="step000001", ended=lambda at, one: told.append((at, one)))
    assert [c.key for c in completions] == [r.key for r in REQUESTS]
    assert all(one.key == REQUESTS[at].key for at, one in told)
    assert all(dict(told)[at] is one for at, one in enumerate(completions)), "who hears has what is returned"
    assert len(told) == len(REQUESTS) + (when == "after") * 3
    assert list(made.sampler.lost) == ["http://host:1"] and "planted" in made.sampler.lost["http://host:1"]
    used = [key for server in (servers[0], servers[2]) for keys in server.shards.values() for key in keys]
    assert sorted(used) == sorted(r.key for r in REQUESTS), "a request was sampled twice by those that are left"
    again = [name for server in servers for name in server.shards if "-again1" in name]
    assert again and not servers[1].fails, "the fault did not fire"
    made.generate(REQUESTS, shard="step000002")
    assert not any(name.startswith("step000002") for name in servers[1].shards)
    servers[0].fails.append("before")
    with pytest.raises(SamplerGone, match="2 lost, expected at most rollout.max_lost_servers = 1"):
        made.generate(REQUESTS, shard="step000003")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"updates": 0, "version": 0, "digest": "", "start": "second"}, "version 0, no digest, 0 updates; it was st"),
        ({"updates": 2, "version": 1, "digest": "digest1"}, "2 updates"),
        ({"updates": 1, "version": 0, "digest": "digest1"}, "got version 0"),
        ({"updates": 1, "version": 1, "digest": "other"}, "digest other"),
    ],
)
def test_a_server_with_other_weights_samples_and_scores_nothing(fleet, changes, said):
    made, servers = fleet()
    servers[1].served_ = replace_served(SERVED, **changes)
    with pytest.raises(SamplerGone, match=f"http://host:1.*{said}"):
        made.score([[1, 2]])
    made, servers = fleet()
    servers[1].served_ = replace_served(SERVED, **changes)
    with pytest.raises(SamplerGone, match=f"http://host:1.*{said}"):
        made.generate(REQUESTS, shard="step000001")
    assert not servers[1].shards


def test_weights_that_are_not_whole_are_not_sampled_from(fleet):
    made, servers = fleet()
    servers[0].served_ = msgspec.structs.replace(servers[0].served_, weights_whole=False)
    with pytest.raises(SamplerGone, match="http://host:0"):
        made.generate(REQUESTS, shard="step000001")


def test_nothing_is_sampled_before_all_have_the_same_weights(fleet, tmp_path):
    made, _ = fleet(updated=False)
    with pytest.raises(WeightSyncError, match="hold no weights that all have confirmed"):
        made.generate(REQUESTS, shard="step000001")
    made, servers = fleet()
    servers[1].fails.append("refuse")
    with pytest.raises(WeightSyncError, match="http://host:1: torn"):
        made.update_weights(update(tmp_path, 2))
    assert servers[0].served_.weight_version == 2, "the witness: one of them has the new weights"
    with pytest.raises(WeightSyncError, match="hold no weights"):
        made.generate(REQUESTS, shard="step000002")
    made, servers = fleet(max_lost=1)
    servers[0].fails.append("wait")
    servers[1].fails.append("refuse")
    with pytest.raises(WeightSyncError, match="http://host:1: torn"):
        made.update_weights(update(tmp_path, 2))
    assert len(servers[0].updates) == 2 and not made.sampler.lost, (
        "one that works is not lost, and ends the wait of the other"
    )
    made, servers = fleet()
    servers[1].digest = "another"
    with pytest.raises(WeightSyncError, match="different weights.*digest2.*another"):
        made.update_weights(update(tmp_path, 2))


def test_weights_go_in_when_all_servers_pause_and_all_go_on_when_all_have_them(fleet, tmp_path):
    made, servers = fleet(3)
    groups = made.sampler

    async def run():
        servers[0].slow = True
        sampling = asyncio.create_task(groups.sample(0, REQUESTS, shard="g1"))
        await asyncio.sleep(0)
        with refused(WeightSyncError, got=("http://host:0", "http://host:2")):
            await groups.take_weights(update(tmp_path, 2))
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await groups.pause()
        assert all(server.paused for server in servers)
        servers[1].paused = False
        with refused(WeightSyncError, got=("http://host:1",)):
            await groups.take_weights(update(tmp_path, 2))
        assert not any(one.version == 2 for server in servers for one in server.updates), "no byte before all pause"
        await groups.pause()
        servers[1].fails.append("drop")
        with refused(WeightSyncError, got=("http://host:1: version 1", "http://host:2: version 2"), expected="2"):
            await groups.take_weights(update(tmp_path, 2))
        with pytest.raises(WeightSyncError):
            await groups.resume()
        assert all(server.paused for server in servers), "none goes on before all have the weights"
        servers[1].fails.clear()
        servers[1].served_ = servers[0].served_  # otherwise it refuses the next update
        await groups.take_weights(update(tmp_path, 3))
        await groups.resume()
        assert not any(server.paused for server in servers)

    asyncio.run(run())


def test_a_group_of_a_lost_server_is_lost_and_the_other_places_go_on(fleet):
    made, servers = fleet(2, max_lost=1)
    groups, never = made.sampler, asyncio.Event()

    async def run():
        assert list(groups.places) == [0, 1]
        servers[1].fails.append("before")
        with refused(ServerLost, server=1, got=("planted",)) as lost:
            await groups.sample(1, REQUESTS, shard="g1", leave=never)
        assert lost.value.tokens == 3
        assert list(groups.places) == [0]
        with refused(ServerLost, server=1):
            await groups.sample(1, REQUESTS, shard="g1-again", leave=never)
        assert len(await groups.sample(0, REQUESTS, shard="g1-again", leave=never)) == len(REQUESTS)
        assert list(servers[0].shards) == ["g1-again-server0"]
        servers[0].fails.append("pause")
        with pytest.raises(SamplerGone, match="host:0"):
            await groups.pause()

    asyncio.run(run())


def test_a_refused_call_loses_no_server(fleet, tmp_path):
    """A record that cannot be made would lose one server after the other."""
    made, servers = fleet(2, max_lost=2)
    for server in servers:
        server.refuses = True
    for leave in (asyncio.Event(), None):
        with refused(RequestRefused, got=("planted",)):
            asyncio.run(made.sampler.sample(1, REQUESTS, shard="g1", leave=leave))
    with refused(RequestRefused, got=("planted",)):
        made.generate(REQUESTS, shard="s")
    assert not made.sampler.lost and list(made.sampler.places) == [0, 1]


@pytest.mark.parametrize(
    ("status", "refuses"), [(400, True), (403, True), (413, True), (409, False), (401, False), (500, False)]
)
def test_only_the_call_is_at_fault_where_the_server_says_so(tmp_path, monkeypatch, status, refuses):
    token = tmp_path / "token"
    make_token(token)
    answers = httpx.MockTransport(lambda _: httpx.Response(status, json={"error": "planted"}))
    monkeypatch.setattr(Transport, "client", lambda *_: httpx.AsyncClient(transport=answers))
    with pytest.raises(EngineError, match="planted") as error:
        VllmServer("http://host:1", token).stats()
    assert isinstance(error.value, RequestRefused) == refuses


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("grammar", "message", "refuses"),
    [("{}", "Internal server error", True), ("", "Internal server error", False), ("{}", "EngineCore died", False)],
)
def test_a_grammar_that_a_server_cannot_follow_loses_no_server(
    tmp_path, monkeypatch, stream, grammar, message, refuses
):
    """Another server could not follow it either."""
    make_token(token := tmp_path / "token")
    error = {"error": {"message": message, "type": "InternalServerError", "code": 500}}
    answer = httpx.Response(200, text=f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n")
    answers = httpx.MockTransport(lambda _: answer if stream else httpx.Response(500, json=error))
    transport, request = Transport("http://host:1", token, 9), replace(asked(0, 0), grammar=grammar)

    async def run():
        async with httpx.AsyncClient(transport=answers) as client:
            await collect(transport, client, request, Growing(), "shard", stream=stream, forever=False)

    with refused(EngineError, request.key if refuses or stream else message) as caught:
        asyncio.run(run())
    assert isinstance(caught.value, RequestRefused) == refuses


def test_the_records_of_a_step_are_published_in_parts_that_a_server_takes(tmp_path, monkeypatch):
    """They stay in one shard, which is published with the last part: all were sampled before."""
    make_token(token := tmp_path / "token")
    published = []

    def answered(request):
        answer = None
        match request.url.path:
            case "/moe_rl/recording":
                answer = replace_served(SERVED, updates=1, version=1, digest="d")
            case "/moe_rl/publish":
                body = json.loads(request.content)
                published.append(([*body["sequences"]], body["keep_open"]))
                answer = {key: RouteRef(key, len(tokens), ()) for key, tokens in body["sequences"].items()}
            case path if path == GENERATE:
                choice = {"token_ids": [7, 8], "logprobs": {"content": [{"logprob": -1.0}] * 2}}
                choice |= {"finish_reason": "stop", "weight_versions": [{"start": 0, "end": 2, "version": "1"}]}
                answer = {"choices": [choice]}
        return httpx.Response(200, content=msgspec.json.encode(answer))

    answers = httpx.MockTransport(answered)
    monkeypatch.setattr(Transport, "client", lambda *_: httpx.AsyncClient(transport=answers))
    monkeypatch.setattr("moe_rl.rollout.server._PUBLISH_TOKENS", 10)  # two requests of three tokens that got two
    completions = VllmServer("http://host:1", token).generate(REQUESTS[:5], shard="step1")
    keys = [request.key for request in REQUESTS[:5]]
    assert published == [(keys[:2], True), (keys[2:4], True), (keys[4:], False)]
    assert [(sample.key, sample.routes.rows) for sample in completions] == [(key, 4) for key in keys]
    assert _PUBLISH_TOKENS * len(f"{2**31 - 1},") < Control().routes["/moe_rl/publish"].longest


def test_the_clients_of_all_servers_share_the_limit_on_open_files(tmp_path, monkeypatch):
    """Each call alone is within it. A server that cannot be called for want of files would look unreachable."""
    make_token(token := tmp_path / "token")
    limits = [(300, 1000)]
    monkeypatch.setattr("resource.getrlimit", lambda _: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda _, limit: limits.append(limit))
    first, second = (Transport(f"http://host:{n}", token, 9) for n in range(2))

    async def run():
        async with first.client(500):
            assert limits[1:] == [(1000, 1000)]
            with refused(MoeRLError, got="1000 open files allowed", expected=("1256", "1000 connections")) as caught:
                await VllmServer("http://host:1", token, connections=497).sample([asked(0, 0)], "shard")
            assert not isinstance(caught.value, EngineError), "no server is at fault, so none may be lost"
            async with second.client(244):
                pass
        async with second.client(500):
            pass

    asyncio.run(run())


@pytest.mark.parametrize("paused", ["no", "before", "meanwhile"])
def test_a_server_that_loads_weights_may_be_silent_for_longer_than_any_other(tmp_path, monkeypatch, paused):
    make_token(token := tmp_path / "token")
    server = VllmServer("http://host:1", token, timeout_seconds=0.2)
    server.paused = paused == "before"

    async def silent(*_):
        server.paused = paused != "no"
        await asyncio.sleep(0.1)
        raise EngineError("The vLLM server hangs")

    monkeypatch.setattr(server._transport, "call", silent)
    expected = pytest.raises(EngineError if paused == "no" else TimeoutError)
    with expected:
        asyncio.run(asyncio.wait_for(server._watch(None), 1.0))


def answering(monkeypatch, answer) -> None:
    """Let `answer` answer all requests to servers, after any time. A client waits as long as its time-out says."""

    async def answered(request):
        try:
            async with asyncio.timeout(request.extensions["timeout"]["read"]):
                return httpx.Response(200, content=msgspec.json.encode(await answer(request)))
        except TimeoutError:
            raise httpx.ReadTimeout("silent") from None

    transport = httpx.MockTransport(answered)
    monkeypatch.setattr(Transport, "client", lambda *_: httpx.AsyncClient(transport=transport))


COMPLETION = {
    "token_ids": [7],
    "logprobs": {"content": [{"logprob": -1.0}]},
    "finish_reason": "stop",
    "weight_versions": [{"start": 0, "end": 1, "version": "1"}],
}


@pytest.mark.parametrize("meanwhile", ["loads", "samples", "hangs"])
@pytest.mark.parametrize(
    ("what", "path"),
    [("sample", "recording"), ("sample", "open"), ("sample", "publish"), ("publish", "publish"), ("score", "score")],
)
def test_a_call_waits_as_long_as_the_server_loads_weights_or_samples(tmp_path, monkeypatch, what, path, meanwhile):
    make_token(token := tmp_path / "token")
    server, forwarded = VllmServer("http://host:1", token, timeout_seconds=0.2), 0
    monkeypatch.setattr("moe_rl.rollout.server.PUBLISH_SECONDS", 0.7)

    async def answer(request):
        nonlocal forwarded
        if request.url.path == f"/moe_rl/{path}":
            server.paused = meanwhile == "loads"
            await asyncio.sleep(60 if meanwhile == "hangs" else 0.6)
            server.paused = False
        match request.url.path:
            case "/moe_rl/recording":
                return replace_served(SERVED, updates=1, version=1, digest="d")
            case "/moe_rl/stats":
                forwarded += meanwhile == "samples"
                return [{"forwarded": forwarded}]
            case "/moe_rl/publish":
                sent = json.loads(request.content)["sequences"]
                return {key: RouteRef(key, len(tokens), ()) for key, tokens in sent.items()}
            case "/moe_rl/score":
                return {"logprobs": [[-1.0]], "routes": []}
            case "/inference/v1/generate":
                return {"choices": [COMPLETION]}

    calls = {
        "sample": lambda: server.sample(REQUESTS[:1], "group1", leave=asyncio.Event()),
        "publish": lambda: server.publish("group0"),
        "score": lambda: server.score([[1, 2]]),
    }
    answering(monkeypatch, answer)
    with refused(EngineError, got=("no token",)) if meanwhile == "hangs" else nullcontext():
        asyncio.run(asyncio.wait_for(calls[what](), 30))


def test_a_server_that_is_lost_in_an_update_ends_its_calls(tmp_path, monkeypatch):
    """Until then it is paused, and may be silent."""
    make_token(token := tmp_path / "token")
    server = VllmServer("http://host:1", token, timeout_seconds=0.2)
    fleet = ServerFleet(
        [server, Server("http://host:2")], tmp_path, "0.32.0", workers=[1, 1], max_lost=1, load_seconds=1
    )

    async def answer(request):
        match request.url.path:
            case "/moe_rl/recording":
                return replace_served(SERVED, updates=1, version=1, digest="digest1")
            case "/moe_rl/stats":
                return [{"forwarded": 5}]
            case "/moe_rl/update" if not server.paused:
                return Holding(1, "digest1", True)
            case "/moe_rl/update" | "/inference/v1/generate":
                await asyncio.sleep(60)

    async def run():
        await fleet.take_weights(update(tmp_path, 1))
        call = asyncio.create_task(fleet.sample(0, REQUESTS[:1], shard="g", leave=asyncio.Event()))
        await fleet.pause()
        await fleet.take_weights(update(tmp_path, 2))
        assert list(fleet.places) == [1] and not call.done()
        with refused(ServerLost, server=0, got=("no token",)):
            await asyncio.wait_for(call, 30)

    answering(monkeypatch, answer)
    asyncio.run(run())


def wake(made):
    """Begin a sync as the trainer does. Returns the numbers of workers before and after it."""
    before = len(made.workers)
    made.wake("weights")
    made.wake("kv_cache")
    return before, len(made.workers)


def test_a_server_that_was_started_again_gets_the_next_update_and_is_used(fleet, tmp_path, monkeypatch):
    made, servers = fleet(3, max_lost=1)
    servers[1].fails.append("before")
    made.generate(REQUESTS, shard="step1")
    assert list(made.sampler.places) == [0, 2] and set(made.sampler.lost) == {"http://host:1"}
    servers[1].fails.append("served")  # it is still starting
    assert wake(made) == (2, 2)
    servers[1].served_ = msgspec.structs.replace(SERVED, start="second", gpus=2)
    assert wake(made) == (2, 4) and servers[1].adopted, "a broadcast has ranks for its workers"
    monkeypatch.setattr("moe_rl.rollout.fleet.reached_by_all", sorted)
    assert ("host", 1) in made.address, "and comes from an address that it reaches"
    assert list(made.sampler.places) == [0, 2], "it has no weights yet"
    made.generate(REQUESTS, shard="step2")
    made.update_weights(update(tmp_path, 2))
    assert list(made.sampler.places) == [0, 1, 2] and not made.sampler.lost
    made.generate(REQUESTS, shard="step3")
    assert "step3-server1-again1" in servers[1].shards and servers[1].updates[-1].version == 2
    servers[2].fails.append("before")  # one may be lost again
    made.generate(REQUESTS, shard="step4")
    assert list(made.sampler.places) == [0, 1]


def test_a_server_that_was_started_again_unnoticed_gets_the_next_update(fleet, tmp_path, capsys):
    made, servers = fleet(3, max_lost=1)
    made.update_weights(update(tmp_path, 2))
    before = made.workers
    servers[1].served_ = msgspec.structs.replace(SERVED, start="second", gpus=2)  # while it had nothing to do
    wake(made)
    now = made.workers
    assert [name in before for name in now] == [True, False, False, True], "two of as many begin anew"
    made.update_weights(update(tmp_path, 3))
    wake(made)
    assert made.workers == now
    assert list(made.sampler.places) == [0, 1, 2] and not made.sampler.lost and servers[1].adopted
    told = capsys.readouterr().err
    assert "server 1 is no longer used: A server was started again" in told and "server 1 is used again" in told


def test_a_restart_ends_a_run_that_may_lose_no_server(fleet, tmp_path):
    made, servers = fleet(2, max_lost=0)
    made.update_weights(update(tmp_path, 2))
    servers[1].served_ = msgspec.structs.replace(SERVED, start="second")
    with refused(SamplerGone, server=1, got="1 lost"):
        wake(made)


def test_a_server_that_returns_in_a_pause_is_paused_too(fleet, tmp_path):
    made, servers = fleet(2, max_lost=1)
    sampler = made.sampler

    async def run():
        servers[0].fails.append("pause")
        await sampler.pause()
        await sampler.resume()
        servers[0].served_ = msgspec.structs.replace(SERVED, start="second")
        await sampler.wake("weights")
        await sampler.pause()
        await sampler.take_weights(update(tmp_path, 2))
        assert [server.paused for server in servers] == [True, True]
        await sampler.resume()
        assert [server.paused for server in servers] == [False, False] and list(sampler.places) == [0, 1]

    asyncio.run(run())


@pytest.mark.parametrize("broadcast", [True, False])
def test_a_server_that_returns_and_fails_is_lost_again(fleet, tmp_path, broadcast):
    """A broadcast that counts its workers would wait for them."""
    made, servers = fleet(2, max_lost=1)
    sampler, sent = made.sampler, update(tmp_path, 2)
    if broadcast:
        sent = msgspec.structs.replace(sent, source=Broadcast([SenderAt(0, "10.0.0.1", 29000)], [], 3, 1))

    async def run():
        servers[0].fails.append("pause")
        await sampler.pause()
        servers[0].fails.append("pause")
        await sampler.wake("weights")
        await sampler.take_weights(sent)

    if broadcast:
        with refused(SamplerGone, server=0, got=("1 lost",)):
            asyncio.run(run())
    else:
        asyncio.run(run())
        assert list(sampler.places) == [1] and not servers[0].fails
        assert servers[1].updates[-1].version == 2 and not servers[0].updates[1:]


def test_a_server_that_comes_back_with_another_model_stays_lost(fleet, capsys):
    made, servers = fleet(2, max_lost=1)
    servers[0].fails.append("before")
    made.generate(REQUESTS, shard="step1")
    servers[0].served_ = msgspec.structs.replace(SERVED, start="second", model_fingerprint="other")
    assert wake(made) == (2, 2) and not servers[0].adopted
    assert "server 0 came back as another server" in capsys.readouterr().err


def test_a_server_that_comes_back_with_another_trace_root_stays_lost(fleet, tmp_path, capsys):
    """Its records would be missing in the run's folder."""
    made, servers = fleet(2, max_lost=1)
    servers[0].fails.append("before")
    made.generate(REQUESTS, shard="step1")
    servers[0].served_, servers[0].blind = msgspec.structs.replace(SERVED, start="second"), True
    assert wake(made) == (2, 2) and not servers[0].adopted and list(made.sampler.lost) == ["http://host:0"]
    told = capsys.readouterr().err
    assert "server 0 is not used again" in told and str(tmp_path / "run/trace") in told
    servers[0].blind = False
    assert wake(made) == (2, 3) and servers[0].adopted and not list((tmp_path / "run/trace").iterdir())


@pytest.mark.parametrize("adopt", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_a_server_that_is_gone_when_the_run_takes_it_is_a_loss_and_another_folder_a_mistake(tmp_path, adopt, lost):
    """The scheduler runs a job again after a loss."""
    config, server = load_config("configs/tiny_moe_cpu.yaml"), Server("http://host:0", root=tmp_path)
    server.fails, server.blind = ["served"] if lost else [], not lost
    kind = SamplerGone if lost else EngineError
    with patch("moe_rl.rollout.fleet.servers_of", return_value=[server]), refused(kind, url=server.url) as caught:
        ServerFleet.attach(config, tmp_path / "run/trace", adopt=adopt)
    assert isinstance(caught.value, SamplerGone) == lost and not server.adopted


def test_a_server_that_two_calls_lose_is_lost_once(fleet):
    made, servers = fleet(3, max_lost=1)
    groups, never = made.sampler, asyncio.Event()
    servers[1].fails += ["before", "pause"]

    async def run():
        group = groups.sample(1, REQUESTS, shard="g1", leave=never)
        lost, paused = await asyncio.gather(group, groups.pause(), return_exceptions=True)
        assert isinstance(lost, ServerLost) and paused is None
        assert not servers[1].fails, "both calls were meant to fail"
        assert list(groups.places) == [0, 2]

    asyncio.run(run())
    with refused(EngineError, server=1):
        made.sampler.server(1)


def test_a_broadcast_has_ranks_for_the_workers_of_every_server_that_is_left(fleet, tmp_path):
    made, servers = fleet(3, max_lost=2)
    sent = Broadcast([SenderAt(0, "10.0.0.1", 29000)], [], 1 + len(made.workers), 1)
    made.update_weights(msgspec.structs.replace(update(tmp_path, 2), source=sent))
    assert [server.updates[-1].source.first_rank for server in servers] == [1, 2, 4] and len(made.workers) == 4
    servers[1].fails.append("before")
    made.generate(REQUESTS, shard="step000001")
    assert len(made.workers) == 2
    made.update_weights(msgspec.structs.replace(update(tmp_path, 3), source=sent))
    assert [servers[at].updates[-1].source.first_rank for at in (0, 2)] == [1, 2]
    servers[0].fails.append("update")
    with pytest.raises(SamplerGone, match="none while weights are broadcast"):
        made.update_weights(msgspec.structs.replace(update(tmp_path, 4), source=sent))
    with pytest.raises(WeightSyncError, match="share no memory"):
        made.update_weights(msgspec.structs.replace(update(tmp_path, 4), source=SharedMemory([])))


def test_the_trainer_is_reached_by_an_outer_address_if_any_server_is_elsewhere():
    assert own_address("127.0.0.1", 80) == "127.0.0.1" == reached_by_all([("127.0.0.1", 80), ("localhost", 81)])
    own = {name: address for name, address in hosts().items() if name != "lo"}
    for address in own.values():
        assert reached_by_all([("127.0.0.1", 80), (address, 80)]) == address


def hosts() -> dict[str, str]:
    """Return the IPv4 addresses of this host, by interface."""
    found = psutil.net_if_addrs().items()
    return {name: one.address for name, addresses in found for one in addresses if one.family == socket.AF_INET}


def test_a_server_may_be_lost_in_an_update(fleet, tmp_path):
    made, servers = fleet(max_lost=1)
    servers[0].fails.append("update")
    made.update_weights(update(tmp_path, 2))
    assert list(made.sampler.lost) == ["http://host:0"]
    made.generate(REQUESTS, shard="step000001")
    assert len(servers[1].shards["step000001-server1"]) == len(REQUESTS)


def fails_at(server: Server, moment: asyncio.Event) -> None:
    """Let the calls that sample on a server fail at a moment."""

    async def sample(*_, **__):
        await moment.wait()
        raise EngineError("planted: dead")

    server.sample = sample


def test_a_server_that_confirmed_an_update_may_be_lost_before_the_others_did(fleet, tmp_path):
    made, servers = fleet(max_lost=1)
    groups, loaded, load = made.sampler, asyncio.Event(), servers[1].update

    async def late(update, seconds=None):
        await loaded.wait()
        return await load(update)

    async def run():
        dies, servers[1].update = asyncio.Event(), late
        fails_at(servers[0], dies)
        call = asyncio.create_task(groups.sample(0, REQUESTS, shard="g", leave=asyncio.Event()))
        await groups.pause()
        updating = asyncio.create_task(groups.take_weights(update(tmp_path, 2)))
        while servers[0].served_.weight_version < 2:
            await asyncio.sleep(0)
        dies.set()
        with pytest.raises(ServerLost):
            await call
        loaded.set()
        await updating
        assert list(groups.places) == [1] and list(groups.confirmed()) == [1]

    asyncio.run(run())


def test_a_call_from_before_a_server_was_lost_does_not_lose_it_again(fleet, tmp_path):
    made, servers = fleet(max_lost=1)
    groups = made.sampler

    async def run():
        dies = asyncio.Event()
        fails_at(servers[0], dies)
        call = asyncio.create_task(groups.sample(0, REQUESTS, shard="g", leave=asyncio.Event()))
        await asyncio.sleep(0)
        servers[0].fails.append("served")  # one other call gets no answer
        await groups.each(lambda number: groups.server(number).served())
        assert list(groups.places) == [1]
        await groups.wake("weights")
        await groups.pause()
        await groups.take_weights(update(tmp_path, 2))
        dies.set()
        with pytest.raises(ServerLost):
            await call
        assert list(groups.places) == [0, 1]

    asyncio.run(run())


@pytest.mark.parametrize("reads", [False, True])
def test_servers_of_a_run_with_an_environment_must_read_text(tmp_path, reads):
    """An episode may send texts that end a turn. A server that finds none would refuse them, and be lost for that."""
    plays = "task.environment={run: moe_rl.tasks.environments.examples.calculator.run}"
    config = load_config("configs/tiny_moe_cpu.yaml", [plays, "task.rewards={}", "task.pass_reward=null"])
    server = Server("http://a:1", served_=msgspec.structs.replace(SERVED, reads_text=reads))
    with patch("moe_rl.rollout.attach.servers_of", return_value=[server]):
        found = attach_problems(config, read_model(config.model.path), tmp_path)
    told = [one for one in found if "task.environment" in one]
    assert [("got no tokenizer" in one, server.url in one) for one in told] == ([] if reads else [(True, True)])
