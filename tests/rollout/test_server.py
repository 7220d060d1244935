"""Tests a recording server over HTTP: right routes, nothing without the token, and no call that breaks the server.

One server runs for all of the module; the last test ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import msgspec
import psutil
import pytest

from moe_rl.config.load import load_config
from moe_rl.errors import EngineError, SamplerGone
from moe_rl.models.hf import read_model
from moe_rl.rollout.attach import attach_problems, folder_problem
from moe_rl.rollout.fleet import ServerFleet
from moe_rl.rollout.sampler import Blocking, nobody
from moe_rl.rollout.server import VllmServer
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.trace import TraceStore, validate
from moe_rl.types import GenerateRequest, RoutePart, RouteRef
from moe_rl.vllm import api_server
from moe_rl.vllm.control import GENERATE
from moe_rl.vllm.sampling import Growing
from moe_rl.weights.update import Files
from tests.rollout.conftest import check_stopped, two_stop_strings
from tests.rollout.in_flight import ENDLESS
from tests.rollout.serving import MAX_LEN, ROOT, START_SECONDS, agree, alive, serving, whole_update
from tests.support.ports import free_port
from tests.support.refusals import refused, tells
from tests.vllm.test_gate import CHANGES, DOCUMENTED, asked

# The first test waits for the server, which on a busy machine takes long.
pytestmark = pytest.mark.timeout(700)

_CONTROLS = ("open", "publish", "abandon", "hold", "release", "adopt", "update", "score", "challenge", "nothing")
STOP_SECONDS = 60
UPDATE = {"version": 1, "replaces": 0, "number": 0, "final": True, "changed": True, "tensors": []}


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    with serving(checkpoint, tmp_path_factory.mktemp("server")) as running:
        yield running


def streamed(client: VllmServer, requests, shard: str, *, leave=None, ended=nobody):
    """Sample while other calls may, as a run in mode async does."""
    started, samples = client.recording().start, [Growing() for _ in requests]

    async def run():
        left = asyncio.Event() if leave is None else leave
        return await client.sample(requests, shard, leave=left, ended=ended, started=started, samples=samples)

    return asyncio.run(run())


def grow(requests, max_tokens: int) -> list[GenerateRequest]:
    return [replace(request, max_tokens=max_tokens) for request in requests]


@pytest.mark.seeds(3)
def test_groups_of_eight_clients_agree_with_transformers(server, reference, requests_of):
    """Each client samples its own groups, all at once; groups share prompts within and between clients."""
    requests = requests_of(2, 4, max_tokens=16)
    before = server.client().stats()[0]
    with ThreadPoolExecutor(8) as clients:
        results = list(
            clients.map(lambda at: server.client(connections=4).generate(requests, shard=f"client{at}"), range(8))
        )
    for completions in results:
        assert [one.key for one in completions] == [request.key for request in requests]
        assert all(one.finish_reason == "length" and one.newest_version == 0 for one in completions)
    # A client's result depends on the other clients only through the sampler's ties; compared where that is cheap.
    agree(server.store, reference, results[0] + results[7])
    assert {tuple(one.token_ids for one in completions) for completions in results} == {
        tuple(one.token_ids for one in results[0])
    }
    for completions in results[1:7]:
        for one in completions:
            record = server.store.read(one.routes)
            tokens = [*one.prompt_token_ids, *one.token_ids][:-1]
            validate(record, token_ids=tokens, spec=record.spec, weight_version=0, ref=one.routes)
    stats = server.client().stats()[0]
    rows = sum(one.routes.rows for completions in results for one in completions)
    assert stats["forwarded"] - before.get("forwarded", 0) < rows / 2, "no prefix was shared"
    assert stats["recorded"] - before.get("recorded", 0) == 64


def test_what_a_request_asks_for(server, reference, requests_of):
    """Stop tokens, one that is not recorded, and a next turn that continues a record."""
    first, second = requests_of(1, 2, max_tokens=60)
    stops = replace(first, stop_token_ids=tuple(range(0, 512, 20)), seed=5)
    silent = replace(second, record=False)
    one, two = server.client().generate([stops, silent], shard="asked")
    assert one.finish_reason == "stop" and one.token_ids[-1] in stops.stop_token_ids
    assert two.routes is None and len(two.token_ids) == 60
    dialogue = one.prompt_token_ids + one.token_ids + (7, 8, 9)
    turn = GenerateRequest("turn2", dialogue, 3, 10, 1.0, (), parent=one.routes)
    (three,) = server.client().generate([turn], shard="turn2")
    agree(server.store, reference, [one, three])
    info = server.store.info(three.routes)
    assert info.own_rows == three.routes.rows - one.routes.rows


def test_stop_strings_across_tokens(server, reference, checkpoint, requests_of):
    """Once as whole answers, once as streams."""
    requests, codec = requests_of(4, 5, max_tokens=60), TextCodec(checkpoint, ())
    free = server.client().generate(requests, shard="text-0")
    stops = two_stop_strings(codec, free)
    asked = [replace(request, stop=("never sampled", *stops)) for request in requests]
    for stopped in (server.client().generate(asked, shard="text-1"), streamed(server.client(), asked, "text-2")):
        check_stopped(codec, free, stopped, stops)
        agree(server.store, reference, stopped)


def test_rows_from_a_position_on(server, reference, requests_of):
    """While the prompt's rows are not stored, the reference says so; with a parent its rows are there."""
    (request,) = requests_of(1, 1, max_tokens=6)
    late = replace(request, record_from=len(request.prompt_token_ids))
    (one,) = server.client().generate([late], shard="late-rows")
    assert (one.routes.start, one.routes.rows) == (late.record_from, 5)
    record = server.store.read(one.routes)
    assert record.token_ids.tolist() == list(one.token_ids[:-1])
    computed = reference(one.prompt_token_ids + one.token_ids)
    computed.check(one.key, record.routes, one.logprobs, first=late.record_from, atol=1e-5)

    (whole,) = server.client().generate([request], shard="whole-rows")
    turn = replace(late, prompt_token_ids=whole.prompt_token_ids + whole.token_ids, parent=whole.routes)
    (two,) = server.client().generate([turn], shard="turn-rows")
    assert two.routes.start == 0 and len(server.store.read(two.routes).token_ids) == two.routes.rows


def test_a_call_that_is_left_aborts_the_rest_and_keeps_their_rows(server, reference, requests_of):
    requests = [replace(one, max_tokens=ENDLESS if at % 2 else 10) for at, one in enumerate(requests_of(4, 2))]
    leave, short = asyncio.Event(), []

    def ended(at, completion):
        short.append(at)
        if len(short) == 4:
            leave.set()

    completions = streamed(server.client(), requests, "left", leave=leave, ended=ended)
    cut = [one for one in completions if one.finish_reason == "abort"]
    assert sum(one.finish_reason == "length" for one in completions) == 4
    assert all(one.token_ids for one in cut)
    agree(server.store, reference, completions)
    for one in completions:
        assert server.store.info(one.routes).aborted == (one.finish_reason == "abort")


def test_a_client_that_goes_away_leaves_the_rows_of_the_tokens_it_saw(server, reference):
    """A stream is dropped midway; whoever knows its tokens can publish them, and the engine is freed."""
    prompt, headers = list(range(100, 160)), {"Authorization": f"Bearer {server.token}"}
    assert server.control("open", {"sink": "gone"}).status_code == 200
    asked = {"moe_rl_key": "left", "moe_rl_sink": "gone"}
    params = {"max_tokens": 190, "seed": 1, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    body = {"token_ids": prompt, "stream": True, "sampling_params": params | {"extra_args": asked}}
    tokens = []
    with server.web.stream("POST", "/inference/v1/generate", json=body, headers=headers) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
            if len(tokens) >= 12:
                break
    forwarded = prompt + tokens[:-1]
    answer = server.control("publish", {"sink": "gone", "sequences": {"left": forwarded}, "aborted": ["left"]})
    assert answer.status_code == 200, answer.text
    ref = msgspec.convert(answer.json()["left"], RouteRef)
    assert ref.rows == len(forwarded) and len(ref.source_sum) == 16
    record = server.store.read(ref)
    assert record.aborted and record.token_ids.tolist() == forwarded
    reference(prompt + tokens).check_routes("left", record.routes)
    metrics = server.http("GET", "/metrics", token=server.token).text
    running = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
    assert running and all(float(line.split()[-1]) == 0 for line in running)


def test_new_weights_are_sampled_scored_and_remembered(
    server, checkpoint, other_checkpoint, other_reference, requests_of
):
    """After adoption the server samples nothing; after an update it uses the new model; a refusal changes nothing."""
    client, requests = server.client(), requests_of(1, 3, max_tokens=8)
    first = client.generate(requests, shard="before-update")
    started = client.recording()
    assert (started.weight_version, started.weight_digest, started.weights_whole) == (0, "", True)
    try:
        asyncio.run(client.adopt())
        with pytest.raises(EngineError, match="weights are incomplete"):
            client.generate(requests, shard="adopted")
        with pytest.raises(EngineError, match="incomplete"):
            asyncio.run(client.score([[1, 2, 3]]))
        update = whole_update(server, other_checkpoint, 5, replaces=0)
        torn = [msgspec.structs.replace(update.tensors[0], digest="0" * 32), *update.tensors[1:]]
        refused = client.update_weights(msgspec.structs.replace(update, tensors=torn)).refused
        assert "other weights than were sent" in refused
        assert not client.recording().weights_whole
        held = client.update_weights(update)
        assert held.whole and held.version == 5 and not held.refused
        now = client.recording()
        assert (now.start, now.weight_version, now.weight_digest) == (started.start, 5, held.digest)
        assert now.updates == started.updates + 3
        completions = client.generate(requests, shard="version5")
        agree(server.store, other_reference, completions, version=5)
        assert all(one.newest_version == 5 for one in completions)
        # Nothing comes from the old weights' prefix cache, although the prompts are the same.
        for one in completions:
            assert {span.weight_version for span in server.store.read(one.routes).spans} == {5}
        assert [one.token_ids for one in completions] != [one.token_ids for one in first]
        tokens = completions[0].prompt_token_ids + completions[0].token_ids
        other_reference(tokens).check_logprobs("score", asyncio.run(client.score([tokens])).logprobs[0], atol=1e-5)
        stale = client.update_weights(whole_update(server, checkpoint, 4, replaces=5))
        assert "stale" in stale.refused and (stale.version, stale.whole) == (5, True)
        assert client.recording().weight_digest == held.digest
    finally:
        asyncio.run(client.adopt())
        client.update_weights(whole_update(server, checkpoint, 0, replaces=0))
    again = client.generate(requests, shard="after-update")
    assert [one.token_ids for one in again] == [one.token_ids for one in first]


def test_calls_that_leave_a_shard_open_share_it_and_continue_its_records(server, reference, checkpoint, requests_of):
    """Neither an aborted turn nor a refused one beside them harms it. Whoever adopts the server drops such shards."""
    client, (first, second, endless, *_) = server.client(), requests_of(2, 2)
    later = replace(endless, max_tokens=ENDLESS)
    wrong = replace(second, key="wrong", parent=RouteRef("a", 3, (RoutePart("absent", "0" * 16),), 0, "0" * 16))

    async def run():
        started, gone = (await client.served()).start, asyncio.Event()

        async def turn(request, leave=None, shard="turns"):
            left, samples = leave or asyncio.Event(), [Growing()]
            how = {"started": started, "samples": samples, "keep_open": True}
            return (await client.sample([request], shard, leave=left, **how))[0]

        aborted = asyncio.create_task(turn(later, gone))
        a, b = await asyncio.gather(turn(first), turn(second))
        with refused(EngineError, url=server.url):
            await turn(wrong)
        prompt = (*a.prompt_token_ids, *a.token_ids, 7)
        c = await turn(replace(first, key="c", prompt_token_ids=prompt, parent=a.routes))
        gone.set()
        await aborted
        assert "turns" not in server.store.shards()
        await client.publish("turns")
        await turn(first, shard="dropped")
        return [a, b, c]

    completions = asyncio.run(run())
    agree(server.store, reference, completions)
    assert server.store.info(completions[2].routes).parent is not None
    assert {part.shard for one in completions for part in one.routes.parts} == {"turns"}
    try:
        asyncio.run(client.adopt())
        assert not list(Path(server.ready["trace_root"]).glob(".dropped.*"))
    finally:
        client.update_weights(whole_update(server, checkpoint, 0, replaces=0))


def test_alone_the_same_requests_give_the_same_bytes(server, requests_of):
    """Tokens, log-probabilities and shards do not depend on the connections; leftover requests are aborted first."""
    requests = requests_of(3, 4, max_tokens=12)
    client = server.client(alone=True, timeout_seconds=60)
    seen = []
    told = {}
    for at in range(3):
        completions = asyncio.run(client.sample(requests, f"same{at}", ended=told.__setitem__))
        assert [told.pop(n).token_ids for n in range(len(requests))] == [one.token_ids for one in completions]
        shard = Path(server.ready["trace_root"]) / f"same{at}.safetensors"
        body = shard.read_bytes()[8 + int.from_bytes(shard.read_bytes()[:8], "little") :]
        seen.append(([(one.token_ids, one.logprobs.tobytes()) for one in completions], body))
    assert seen[0] == seen[1] == seen[2]
    stray = GenerateRequest("stray", tuple(range(40)), 1, 200, 1.0, ())
    with ThreadPoolExecutor(1) as other:
        under_way = other.submit(server.client().generate, [stray], shard="stray")
        deadline = time.monotonic() + 60
        while "num_requests_running{" not in (text := server.http("GET", "/metrics", token=server.token).text) or all(
            float(line.split()[-1]) == 0 for line in text.splitlines() if line.startswith("vllm:num_requests_running{")
        ):
            assert time.monotonic() < deadline and not under_way.done(), "the witness never ran"
        completions = client.generate(requests, shard="same3")
        with pytest.raises(EngineError, match="Another client made the vLLM server abort"):
            under_way.result()
    assert [(one.token_ids, one.logprobs.tobytes()) for one in completions] == seen[0][0]


def test_a_second_run_takes_the_server_and_the_first_is_told(server, reference, checkpoint, requests_of):
    """While the first run trains and while it samples; the second gets its own results, in a store of its own."""
    root, requests = Path(server.ready["trace_root"]), requests_of(2, 4, max_tokens=100)

    def begun(name: str) -> Blocking:
        client = server.client(folder=f"{name}/trace", alone=True, timeout_seconds=60)
        asyncio.run(client.adopt())
        fleet = ServerFleet([client], root, "0.32.0", workers=[1], max_lost=0, load_seconds=60)
        return updated(Blocking(fleet), 1)

    def updated(fleet: Blocking, version: int) -> Blocking:
        update = whole_update(server, checkpoint, version, replaces=version - 1)
        paths = [str(root / path) for path in update.source.paths]
        fleet.update_weights(msgspec.structs.replace(update, source=Files(paths)))
        return fleet

    def sampled(fleet: Blocking, name: str) -> None:
        agree(TraceStore(root / f"{name}/trace"), reference, fleet.generate(requests, shard="step000001"), version=1)

    def forwarded() -> int:
        return server.client().stats()[0]["forwarded"]

    taken = "another run has taken this server since: give every run servers of its own"
    try:
        first, idle = begun("run-a"), begun("run-b")
        with pytest.raises(SamplerGone, match=f"{server.url}.*See that no other run uses it"):
            first.generate(requests, shard="step000001")
        sampled(idle, "run-b")
        later = begun("run-c")
        with pytest.raises(SamplerGone, match=f"{server.url}.*HTTP 409: {taken}"):
            updated(idle, 2)
        before = forwarded()
        with ThreadPoolExecutor(1) as other:
            under_way = other.submit(later.generate, requests, shard="step000001-x")
            while forwarded() < before + 100:
                assert not under_way.done(), under_way.result()
            later = begun("run-d")
            with pytest.raises(SamplerGone, match=f"(Another client|{taken}).*server 0, {server.url}"):
                under_way.result()
        sampled(later, "run-d")
    finally:
        asyncio.run(server.client().adopt())
        server.client().update_weights(whole_update(server, checkpoint, 0, replaces=0))
    alive(server)


def test_a_request_that_is_refused_leaves_nothing_waiting(server, requests_of):
    """With `alone`, requests wait for each other: if one never comes, the call fails and the server goes on."""
    requests, odd = requests_of(2, 2), RouteRef("a", 3, (RoutePart("../x", "0" * 16),))
    with refused(EngineError, url=server.url, got=("HTTP 400", "shard name")):
        server.client(alone=True).generate([*requests[:3], replace(requests[3], parent=odd)], shard="one-bad")
    assert "one-bad" not in server.store.shards()
    alive(server)


@pytest.mark.long
def test_a_server_that_loads_no_weights_samples_those_of_a_run(checkpoint, reference, requests_of, tmp_path):
    """And its profiler takes the run's token."""
    requests, profiles = requests_of(2, 2), tmp_path / "profiles"
    profiler = json.dumps({"profiler": "torch", "torch_profiler_dir": str(profiles)})
    with serving(checkpoint, tmp_path, "--load-format", "dummy", "--profiler-config", profiler) as server:
        client = server.client()
        assert not client.recording().weights_whole
        with refused(EngineError, url=server.url, got="no update since it started without weights"):
            client.generate(requests, shard="none")
        with refused(EngineError, url=server.url, got=("HTTP 409", "a run must send an update first")):
            asyncio.run(client.score([range(5)]))
        client.update_weights(whole_update(server, checkpoint, 1, replaces=0))
        assert server.http("POST", "/start_profile").status_code == 401
        assert server.http("POST", "/start_profile", token=server.token).status_code == 200
        agree(server.store, reference, client.generate(requests, shard="sent"), version=1)
        assert server.http("POST", "/stop_profile", token=server.token, timeout=300).status_code == 200
        assert list(profiles.glob("*.json.gz"))


def test_a_store_below_the_trace_root(server, requests_of, tmp_path):
    root = Path(server.ready["trace_root"])
    (one,) = server.client(folder="run7/trace").generate(requests_of(1, 1), shard="below")
    assert TraceStore(root / "run7/trace").read(one.routes) and "below" not in server.store.shards()
    (root / "out").symlink_to(tmp_path)
    for folder in ("out", "../x", "run7/../../x"):
        answer = server.control("open", {"sink": "elsewhere", "folder": folder})
        assert (answer.status_code, "not below the trace root" in answer.text) == (403, True), folder
    assert server.control("open", {"sink": "elsewhere", "folder": "/tmp"}).status_code == 400
    answer = server.control("challenge", {"folder": "out", "name": ".challenge-" + "0" * 16})
    assert answer.status_code == 403 and not list(tmp_path.iterdir())
    (root / "out").unlink()


def test_both_sides_prove_that_they_see_one_folder(server, tmp_path):
    root, client = Path(server.ready["trace_root"]), server.client()
    assert asyncio.run(folder_problem(client, root, "run8/trace")) is None
    assert list((root / "run8/trace").iterdir()) == []
    problem = asyncio.run(folder_problem(client, tmp_path, "run8"))
    tells(problem, key="rollout.servers", url=server.url, folder=tmp_path / "run8", got=("No such file",))
    # A folder of the same name with a file of the same name in it is not enough.
    with patch("secrets.token_hex", lambda size: "ab" * size):
        (root / "run9").mkdir()
        (root / "run9/.challenge-abababababababab").write_text("cd")
        tells(asyncio.run(folder_problem(client, tmp_path, "run9")), folder=tmp_path / "run9", got=("another file",))


def test_what_a_run_needs_otherwise_is_told_for_each_server(server, checkpoint, tmp_path):
    """Two addresses of the same server, with a config that differs from the server in many ways."""
    named = server.url.replace("127.0.0.1", "localhost")
    settings = {
        "model.path": checkpoint,
        "run.runs_dir": server.ready["trace_root"],
        "rollout.servers": f"[{server.url},{named}]",
        "rollout.token_file": server.ready["token_file"],
        "rollout.dtype": "float32",
    }
    facts = read_model(checkpoint)

    def problems(facts=facts, resumed=False, **more) -> list[str]:
        overrides = [f"{key}={value}" for key, value in (settings | more).items()]
        config = load_config(ROOT / "configs/tiny_moe_cpu.yaml", overrides)
        return attach_problems(config, facts, config.run.runs_dir, resumed=resumed)

    assert problems() == [f"rollout.servers: two addresses lead to the same server: got {server.url} and {named}"]
    one = {"rollout.servers": f"[{server.url}]"}
    assert problems(**one) == []
    for changed, said in (
        ({"rollout.dtype": "bfloat16"}, "rollout.dtype.*got float32, expected bfloat16"),
        ({"rollout.capture": "worker"}, "rollout.capture.*got patch, expected worker"),
        ({"rollout.top_k": 5, "rollout.keep_sampling_mask": "true"}, "keep_sampling_mask.*got False, expected True"),
        ({"rollout.router_logits_fraction": 0.5}, "router_logits_fraction"),
        ({"objective.score_centering": 8}, "score_centering.*got 0, expected 8"),
        ({"rollout.max_completion_tokens": MAX_LEN}, f"too short.*max_model_len {MAX_LEN}"),
        ({"cluster": "{gpus: 2, gpu_memory_gib: 1, gpus_per_engine: 4}"}, "gpus_per_engine.*got 1, expected 4"),
    ):
        (problem,) = problems(**one | changed)
        assert re.search(said, problem) and server.url in problem
    for other, said in (
        (replace(facts, fingerprint="f"), "fingerprint"),
        (replace(facts, num_experts=8), "experts"),
        (replace(facts, layers=5), "layers"),
    ):
        assert any(re.search(f"differs from the config in .*{said}", problem) for problem in problems(other, **one))
    (tmp_path / "token").write_text("x" * 43)
    (tmp_path / "token").chmod(0o644)
    assert "readable by others" in problems(**one | {"rollout.token_file": tmp_path / "token"})[0]
    (tmp_path / "token").chmod(0o600)
    assert "HTTP 401" in problems(**one | {"rollout.token_file": tmp_path / "token"})[0]
    gone = f"http://127.0.0.1:{free_port()}"
    (problem,) = problems(**{"rollout.servers": f"[{server.url},{gone}]"})
    assert "cannot be reached" in problem and gone in problem
    with refused(SamplerGone, "do not answer", key="rollout.servers", got=gone):
        problems(resumed=True, **{"rollout.servers": f"[{server.url},{gone}]"})
    (problem,) = problems(resumed=True, **one | {"rollout.token_file": tmp_path / "token"})
    assert "HTTP 401" in problem
    assert "does not see the folder" in problems(**one | {"run.runs_dir": tmp_path / "runs"})[0]


def test_every_route_wants_the_token(server):
    """Every route, existing or not, needs the token; the same calls with the token are the witness."""
    documented = server.http("GET", "/openapi.json", token=server.token).json()["paths"]
    routes = [(method.upper(), path) for path, methods in documented.items() for method in methods]
    assert len(routes) > 15 and ("POST", "/inference/v1/generate") in routes
    hidden = ["/openapi.json", "/docs", "/redoc", "/metrics", "/moe_rl/stats", "/moe_rl/recording", "/nothing", "/"]
    routes += [("GET", path) for path in hidden]
    routes += [("POST", f"/moe_rl/{name}") for name in _CONTROLS]
    routes += [
        ("OPTIONS", "/v1/models"),
        ("HEAD", "/health"),
        ("POST", "/health"),
        ("GET", "/health/"),
        ("GET", "//health"),
    ]
    wrong = [None, "x" * 43, server.token[:-1], server.token + "x", server.token.swapcase()]
    for method, path in routes:
        if (method, path) == ("GET", "/health"):
            continue
        for token in wrong:
            answer = server.http(method, path, token=token)
            assert answer.status_code == 401, f"{method} {path} with {token}: {answer.status_code}"
    for headers in (
        {"Authorization": server.token},
        {"Authorization": f"Basic {server.token}"},
        {"X-API-Key": server.token},
    ):
        assert server.web.get("/metrics", headers=headers).status_code == 401
    twice = [("Authorization", f"Bearer {server.token}"), ("Authorization", "Bearer x")]
    assert server.web.get("/metrics", headers=twice).status_code == 401
    assert server.http("GET", "/health").status_code == 200
    for path in ("/metrics", "/v1/models", "/moe_rl/stats"):
        assert server.http("GET", path, token=server.token).status_code == 200


def test_a_websocket_wants_the_token(server):
    host, port = server.url.removeprefix("http://").split(":")
    upgrade = f"GET /v1/realtime HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    upgrade += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(upgrade.encode())
        status = int(connection.recv(4096).split()[1])
    assert status in (401, 403)


def test_listeners_are_on_loopback(server):
    found = [
        connection.laddr.ip
        for process in server.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    ]
    assert found, "no listener was found, not even the server's own"
    assert all(ipaddress.ip_address(address).is_loopback for address in found), found


def test_the_token_is_told_to_nobody(server):
    path = Path(server.ready["token_file"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(server.token) >= 43
    assert server.token not in server.log.read_text(errors="replace")
    for process in server.processes():
        assert server.token not in " ".join(process.cmdline())
        assert server.token not in " ".join(process.environ().values())


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("open", {"sink": "../x"}, 400, "not allowed"),
        ("open", {"sink": ""}, 400, "not allowed"),
        ("open", {"sink": 3}, 400, "str"),
        ("open", {}, 400, "sink"),
        ("open", {"sink": "s", "other": 1}, 400, "other"),
        ("open", [1], 400, "object"),
        ("open", {"sink": "x" * 70_000}, 413, "65536"),
        ("publish", {"sink": "unknown", "sequences": {}}, 400, "nothing was recorded"),
        ("publish", {"sink": "unknown", "sequences": {"k": [1, 2]}}, 400, "nothing was recorded"),
        ("publish", {"sink": "s", "sequences": {"k": ["1"]}}, 400, "int"),
        ("publish", {"sink": "s", "sequences": {"k": [-1]}}, 400, "0"),
        ("publish", {"sink": "s", "sequences": {"k": [2**40]}}, 400, "2147483647"),
        ("publish", {"sink": "s", "sequences": {}, "aborted": ["k"]}, 400, "none of the sequences"),
        ("score", {"runs": [[1]]}, 400, "2"),
        ("score", {"runs": [[1, -1]]}, 400, "0"),
        ("release", {"requests": -1}, 400, "0"),
        ("challenge", {"folder": "", "name": "manifest.jsonl"}, 400, "regex"),
        ("challenge", {"folder": "", "name": ".challenge-0123456789abcdef"}, 409, "No such file"),
        ("update", {"version": 1}, 400, "replaces"),
        ("update", {**UPDATE, "source": {"type": "shared_memory", "segments": []}}, 400, "shares no memory"),
        ("update", {**UPDATE, "source": {"type": "files", "paths": ["../x"]}}, 403, "not below the trace root"),
        ("nothing", {}, 404, "no such route"),
        ("stats", {}, 405, "GET"),
    ],
)
def test_a_wrong_control_call_is_refused(server, path, body, status, message):
    answer = server.control(path, body)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert message in answer.json()["error"]


def test_an_agent_that_asks_the_server_is_told_of_the_gateway(server):
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    answer = server.http("POST", "/v1/chat/completions", token=server.token, json=chat)
    assert answer.status_code == 404 and "moe-rl serve --gateway" in answer.json()["error"]


def test_a_wrong_control_call_breaks_nothing(server, requests_of):
    """After all these refusals, and calls that are not JSON or never end, the server samples and records."""
    for content in (b"", b"{", b"\xff\xfe", b"[" * 50_000):
        assert server.http("POST", "/moe_rl/open", token=server.token, content=content).status_code == 400
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /moe_rl/open HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {server.token}\r\n"
        connection.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"sink":'.encode())
        alive(server)
    # A key that was not recorded: its shard is dropped as a whole, and the name is free again.
    client = server.client()
    client.generate(requests_of(1, 1), shard="before")
    assert server.control("open", {"sink": "half"}).status_code == 200
    answer = server.control("publish", {"sink": "half", "sequences": {"nobody": [1, 2, 3]}})
    assert answer.status_code == 400 and "not recorded" in answer.json()["error"]
    assert "half" not in server.store.shards()
    client.generate(requests_of(1, 1), shard="half")
    alive(server)


def test_the_worst_that_can_be_asked_leaves_a_server_that_samples(server, checkpoint, tmp_path):
    """Sends what tests/vllm/test_gate.py sends to a stub, anything in any field, and calls that have no answer."""
    log = server.log.stat().st_size
    for path, place, value in CHANGES + [(GENERATE, ("token_ids", 0), 512), ("/moe_rl/score", ("runs", 0, 2), 512)]:
        if path != "/moe_rl/release":  # which waits for requests to come
            answer = server.http("POST", path, token=server.token, content=asked(path, place, value))
            assert answer.status_code in DOCUMENTED and server.token not in answer.text, (
                path,
                place,
                value,
                answer.text,
            )
            assert answer.status_code == 200 or (answer.json()["error"] and "Traceback" not in answer.text)
    said = server.log.read_bytes()[log:].decode(errors="replace")
    assert "Traceback" not in said, said[said.index("Traceback") :][:3000]
    asyncio.run(server.client().adopt())
    server.client().update_weights(whole_update(server, checkpoint, 0, replaces=0))
    alive(server)


def test_a_shard_waits_for_the_requests_that_still_add_to_it(server):
    """The shard is published while a request runs, whose rows would otherwise be lost."""
    params = {"max_tokens": 80, "ignore_eos": True, "detokenize": False}
    params["extra_args"] = {"moe_rl_key": "slow", "moe_rl_sink": "waits"}
    body = {"token_ids": [5] * 40, "stream": True, "sampling_params": params}
    headers = {"Authorization": f"Bearer {server.token}"}
    with server.web.stream("POST", "/inference/v1/generate", json=body, headers=headers) as response:
        chunks = response.iter_bytes()
        next(chunks)
        answer = server.control("publish", {"sink": "waits", "sequences": {}})
    assert answer.status_code == 200, answer.text
    assert [(ref.key, ref.rows) for ref in server.store.records("waits")] == [("slow", 119)]


def test_clients_say_what_is_wrong(server, requests_of, tmp_path):
    client = server.client()
    (request,) = requests_of(1, 1)
    for wrong, message in (
        ([request, request], "a key used twice"),
        (grow([request], MAX_LEN), "max_model_len"),
        ([replace(request, prompt_token_ids=())], "an empty prompt"),
        ([replace(request, prompt_token_ids=(5, 512))], "token ids 5 to 512.*0 to 511"),
        ([replace(request, temperature=-1.0)], "temperature -1.0, expected 0, or 0.01 to 2"),
    ):
        with pytest.raises(EngineError, match=message):
            client.generate(wrong, shard="wrong")
    assert "wrong" not in server.store.shards()
    client.generate([request], shard="taken")
    with pytest.raises(EngineError, match="exists"):
        client.generate([request], shard="taken")
    with pytest.raises(EngineError, match="hangs.*no sign of life for 0.2 s"):
        server.client(timeout_seconds=0.2).generate(grow([request], 180), shard="late")
    stranger = tmp_path / "token"
    api_server.make_token(stranger)
    with pytest.raises(EngineError, match="HTTP 401"):
        VllmServer(server.url, stranger).stats()
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match="cannot be reached"):
        VllmServer(url, stranger).stats()
    alive(server)


@pytest.mark.parametrize("lives", [True, False])
def test_a_shard_may_take_longer_to_publish_than_a_server_may_hang(tmp_path, monkeypatch, lives):
    """Nothing is sampled meanwhile. A server that no longer answers still counts as hung."""
    api_server.make_token(tmp_path / "token")
    client = VllmServer("http://127.0.0.1:1", tmp_path / "token", timeout_seconds=0.2)

    async def call(_, method, path, message, answer, seconds=None, *, forever=False):
        if path == "/moe_rl/publish":
            assert forever
            await asyncio.sleep(1)
            return {}
        if not lives:
            raise EngineError("no sign of life for 0.2 s")
        return [{"forwarded": 7}]

    monkeypatch.setattr(client._transport, "call", call)
    with contextlib.nullcontext() if lives else pytest.raises(EngineError, match="no sign of life"):
        asyncio.run(client.publish("s"))
    monkeypatch.setattr("moe_rl.rollout.server.PUBLISH_SECONDS", 0.3)
    with pytest.raises(EngineError):
        asyncio.run(client.publish("s"))


def test_many_threads_may_be_the_first_to_read_an_answer():
    """msgspec looks a type up on first use, and crashes when two threads do so at once."""
    script = """
import importlib, sys, threading
from moe_rl.rollout import transport
from moe_rl.vllm.sampling import Growing

sys.setswitchinterval(1e-6)
answer = b'{"choices": [{"token_ids": [5], "logprobs": {"content": [{"logprob": -1.5}]}}]}'
read = []
for _ in range(40):
    importlib.reload(transport)  # new types, which nobody has decoded into
    together = threading.Barrier(8)

    def first():
        together.wait()
        sample = Growing()
        transport._add(sample, transport._ANSWER.decode(answer), "a")
        read.append(sample.token_ids)

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
assert read == [[5]] * 320, len(read)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.long
def test_a_run_on_two_nodes_ends_with_its_server(server, checkpoint, tmp_path):
    """Two torchrun agents of one rank each sample from this server, which SIGTERM ends with requests in flight.

    No process is left, and the run says which server is missing. This is the last test of the module.
    """
    processes = server.processes()
    assert len(processes) > 2
    (scratch,) = server.temporary.glob("moe_rl-engine-*")
    assert any(path.is_socket() for path in scratch.iterdir())
    runs, token = Path(server.ready["trace_root"]), server.ready["token_file"]
    endpoint = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    command += ["tools/train_moe_rl.py", "--config", "configs/tiny_moe_cpu.yaml", "run.steps=500"]
    command += [f"model.path={checkpoint}", f"run.runs_dir={runs}", f"rollout.servers=[{server.url}]"]
    command += [f"rollout.token_file={token}", "rollout.dtype=float32", "train.dtype=float32"]
    command += ["rollout.prompts_per_step=4", "rollout.group_size=2", "eval.prompts=2", "checkpoint.every_steps=1000"]
    command += ["rollout.weight_transfer=broadcast"]  # tools/dev/two_hosts.py's are by files
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TORCHELASTIC"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    outputs = [tmp_path / f"node{node}" for node in range(2)]
    nodes = []
    try:
        for output in outputs:
            with output.open("w") as out:
                nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT))
        said = lambda: "\n".join(output.read_text() for output in outputs)  # noqa: E731
        deadline = time.monotonic() + START_SECONDS
        while len(rows := [row for path in runs.glob("tiny-moe-*/metrics.jsonl") for row in steps_of(path)]) < 2:
            assert all(node.poll() is None for node in nodes) and time.monotonic() < deadline, said()[-4000:]
            time.sleep(0.1)
        server.process.terminate()
        assert server.process.wait(STOP_SECONDS) == 0
        codes = [node.wait(STOP_SECONDS) for node in nodes]
        assert all(codes), said()
    finally:
        for node in nodes:
            for one in [*psutil.Process(node.pid).children(recursive=True), node] if node.poll() is None else ():
                one.kill()
    assert "SamplerGone: A server failed and the run cannot do without it" in said() and server.url in said()
    assert "exitcode  : 3" in said()
    _, left = psutil.wait_procs(processes[1:], timeout=5)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
    assert [path for path in server.temporary.rglob("*") if path == scratch or path.is_socket()] == []
    assert [row["step"] for row in rows[:2]] == [1, 2]
    for version, row in enumerate(rows):
        assert (row["routing/applied_mismatch"], row["routing/coverage"]) == (0, 1)
        assert (row["rollout/weight_version"], row["rollout/lost_servers"]) == (version, 0)
        assert row["sync/canary_abs_diff"] < 1e-5 and row["policy_kl/k3"] < 1e-9
    (trace,) = runs.glob("tiny-moe-*/trace")
    assert {"step000001-server0", "step000002-server0"} <= set(TraceStore(trace).shards())
    assert not list(trace.glob(".*.tmp")) or TraceStore(trace).collect_garbage()


def steps_of(path: Path) -> list[dict]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["kind"] == "train"]
