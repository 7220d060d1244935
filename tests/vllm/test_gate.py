"""Tests the gate in front of a stub of vLLM.

For any call of any route, either the answer says what is wrong, or vLLM is asked for something it can do. Afterwards
the server answers the next call as before. tests/rollout/test_server.py sends the worst calls to a real server.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from moe_rl.errors import MoeRLError
from moe_rl.trace.record import TraceSpec
from moe_rl.vllm import gate, server_control
from moe_rl.vllm.recording import Recording
from moe_rl.vllm.route_source import claims
from moe_rl.vllm.sinks import Sinks
from moe_rl.weights.update import Holding, decode

TOKEN = "fuzz-" + "t" * 40
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
VOCABULARY, LONGEST = 50, 24
SPEC = TraceSpec("model", 8, 2, "m")
DOCUMENTED = {200, 400, 401, 403, 404, 405, 408, 409, 413, 415}

GENERATION = {
    "token_ids": [1, 2, 3],
    "stream": False,
    "priority": 0,
    "name": "0123456789abcdef",
    "sampling_params": {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "max_tokens": 4, "stop_token_ids": [5],
        "ignore_eos": True, "logprobs": 0, "detokenize": True, "stop": ["##", "\n"], "skip_special_tokens": False,
        "structured_outputs": None,
        "extra_args": {
            "moe_rl_key": "a", "moe_rl_sink": "shard", "moe_rl_parent": ["b", 3, "0" * 16, "older", "0" * 16]
        },
    },
}  # fmt: skip
TENSOR = ["model.norm.weight", "float32", [4], "0" * 32]
UPDATE = {"version": 1, "replaces": 0, "number": 0, "final": True, "changed": True, "tensors": [TENSOR]}
BODIES = {
    "/inference/v1/generate": GENERATION,
    "/moe_rl/open": {"sink": "shard", "folder": "run1/trace"},
    "/moe_rl/publish": {"sink": "shard", "sequences": {"a": [1, 2]}, "aborted": ["a"]},
    "/moe_rl/abandon": {"sink": "shard"},
    "/moe_rl/hold": None,
    "/moe_rl/release": {"requests": 0},
    "/moe_rl/pause": None,
    "/moe_rl/resume": None,
    "/moe_rl/leave": {"names": ["0123456789abcdef"]},
    "/moe_rl/adopt": None,
    "/moe_rl/update": UPDATE | {"source": {"type": "files", "paths": ["run1/sync/v1.safetensors"]}},
    "/moe_rl/score": {"runs": [[1, 2, 3]]},
    "/moe_rl/challenge": {"folder": "run1", "name": ".challenge-" + "0" * 16},
    "/moe_rl/stats": None,
    "/moe_rl/recording": None,
}
OTHERS = [
    "/", "/health", "/metrics", "/v1/models", "/version", "/openapi.json", "/v1/completions", "/v1/chat/completions",
    "/start_profile", "/stop_profile",
    "/inference/v1/abort_requests", "/scale_elastic_ep", "/tokenize", "/invocations", "/moe_rl", "/moe_rl/", "//health",
    "/moe_rl/open/", "/moe_rl/../health", "/inference/v1/generate/",
]  # fmt: skip


class Engine:
    """Stands in for vLLM's engine behind the gate; it dies of whatever a real engine dies of."""

    errored, dead_error = False, RuntimeError("dead")

    def __init__(self, root: Path):
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=LONGEST,
                get_vocab_size=lambda: VOCABULARY,
                dtype="torch.float32",
                skip_tokenizer_init=False,
            ),
            load_config=SimpleNamespace(load_format="auto"),
            additional_config={"moe_rl": msgspec.to_builtins(Recording(str(root), "fake"))},
            parallel_config=SimpleNamespace(worker_cls="Worker", world_size_across_dp=1, data_parallel_size=1),
        )
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0)
        self.sinks = Sinks(root, SPEC, layers=(0,), suffix="")
        self.publications = {}
        self.held = False

    async def collective_rpc(self, name: str, args: tuple) -> list:
        method, *rest = args
        try:
            return [{"value": getattr(self, method)(*rest)}]
        except MoeRLError as error:
            return [{"refused": str(error)}]
        except Exception as error:
            return [{"failed": f"{type(error).__name__}: {error}"}]

    def moe_rl_open(self, sink: str, folder: str) -> None:
        self.sinks.open(sink, folder)

    def moe_rl_publish(self, call: str, sink: str, sequences: dict, aborted: list, keep_open: bool, cut: bool) -> None:
        self.publications[call] = self.sinks.publish(sink, sequences, aborted, keep_open, cut)

    def moe_rl_published(self, call: str) -> bool:
        return self.publications[call].done()

    def moe_rl_claims(self, call: str) -> dict:
        return claims(self.publications.pop(call).result())

    def moe_rl_abandon(self, sink: str) -> None:
        self.sinks.abandon(sink)

    def moe_rl_unfinished(self, sink: str) -> list[str]:
        return []

    def moe_rl_abandon_all(self) -> None:
        self.sinks.abandon_all()

    def moe_rl_forget_weights(self) -> dict:
        return msgspec.to_builtins(Holding(0, "", whole=False))

    def moe_rl_update_weights(self, update: bytes) -> dict:
        return msgspec.to_builtins(Holding(decode(update).version, "d" * 32, whole=True))

    def moe_rl_stats(self) -> dict:
        return {"steps": 1}

    def moe_rl_spec(self) -> dict:
        names = ("model_fingerprint", "num_experts", "top_k", "layer_map")
        return {name: getattr(SPEC, name) for name in names}

    async def pause_generation(self, **how) -> None:
        self.held = how

    async def abort(self, names: list[str]) -> None:
        self.left = names

    async def resume_generation(self) -> None:
        self.publications = {}
        self.held = False

    async def reset_prefix_cache(self) -> bool:
        return True

    async def update_weight_version(self, version: str) -> None:
        assert 0 <= int(version) < 2**63

    async def get_weight_version(self) -> str:
        return "0"

    async def generate(self, prompt: dict, params: object, request_id: str):
        tokens = prompt["prompt_token_ids"]
        self.forward(tokens, 1)
        yield SimpleNamespace(prompt_logprobs=[None, *({token: SimpleNamespace(logprob=-1.0)} for token in tokens[1:])])

    def forward(self, tokens: list[int], more: int) -> None:
        good = all(type(token) is int and 0 <= token < VOCABULARY for token in tokens)
        self.errored |= not (good and tokens and more > 0 and len(tokens) + more <= LONGEST)


class Vllm:
    """Stands in for vLLM's own routes; its answer says what reached them."""

    def __init__(self, engine: Engine):
        self.engine, self.asked = engine, []

    async def __call__(self, scope, receive, send) -> None:
        body = (await receive())["body"]
        headers = dict(scope["headers"])
        passed = (scope["method"], scope["path"]) in gate._PASSED
        assert b"authorization" not in headers or passed
        if scope["path"] == gate.GENERATE:
            assert headers == {b"content-type": b"application/json", b"content-length": str(len(body)).encode()}
            given = json.loads(body)
            self.asked.append(given)
            params = given["sampling_params"]
            self.engine.forward(given["token_ids"] + params["stop_token_ids"][:0], params["max_tokens"])
            assert params["temperature"] == 0 or 0.01 <= params["temperature"] <= 2
            assert all(0 <= token < VOCABULARY for token in params["stop_token_ids"])
            assert {"request_id", *given} == set(GENERATION) - {"name"} | {"request_id", "cache_salt"}
            assert set(params) == set(GENERATION["sampling_params"])
        else:
            assert passed
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class Server:
    """Runs gate and stub as one ASGI application."""

    def __init__(self, folder: Path):
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        self.engine = Engine(folder / "trace")
        self.vllm = Vllm(self.engine)
        app = Starlette()
        app.state.engine_client = self.engine
        self.gate = gate.Gate(self.vllm)
        self.app = lambda scope, receive, send: self.gate(scope | {"app": app}, receive, send)

    def ask(self, method: str, path: str, content: bytes = b"", headers: dict | None = None) -> httpx.Response:
        """Return the answer to a call with the token."""
        return asyncio.run(self._ask(method, path, content, AUTHORIZED | (headers or {})))

    async def _ask(self, method: str, path: str, content: bytes, headers: dict) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await asyncio.wait_for(client.request(method, path, content=content, headers=headers), 20)

    def answers(self, method: str, path: str, content: bytes = b"", headers: dict | None = None) -> httpx.Response:
        """Call as `ask` does, and check what must hold for every answer and for the server afterwards."""
        began = time.monotonic()
        answer = self.ask(method, path, content, headers)
        assert answer.status_code in DOCUMENTED, answer.text
        assert time.monotonic() - began < 10
        if answer.status_code != 200 and method != "HEAD":
            assert list(answer.json()) == ["error"] and 5 < len(answer.json()["error"]) <= 2000
        assert "Traceback" not in answer.text and 'File "' not in answer.text and TOKEN not in answer.text
        assert not self.engine.errored, "the engine is dead"
        return answer

    def alive(self) -> None:
        """Check that the server samples and scores, once it is released and has weights."""
        self.answers("POST", "/moe_rl/release", b'{"requests": 0}')
        self.answers("POST", "/moe_rl/resume")
        whole = UPDATE | {"source": {"type": "files", "paths": ["v1"]}}
        assert self.answers("POST", "/moe_rl/update", json.dumps(whole).encode()).status_code == 200
        self.answers("POST", "/moe_rl/resume")
        assert not self.engine.held
        scores = self.answers("POST", "/moe_rl/score", b'{"runs": [[1, 49], [2, 3]]}').json()
        assert scores == {"logprobs": [[-1.0], [-1.0]], "routes": []}
        asked = len(self.vllm.asked)
        body = json.dumps(GENERATION).encode()
        assert self.answers("POST", gate.GENERATE, body).status_code == 200 and len(self.vllm.asked) == asked + 1


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    stub, inputs = ModuleType("vllm"), ModuleType("vllm.inputs")
    stub.SamplingParams, stub.__version__ = SimpleNamespace, "0"
    inputs.TokensPrompt = dict
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", stub)
        patch.setitem(sys.modules, "vllm.inputs", inputs)
        patch.setenv(gate.TOKEN_FILE, str(folder / "token"))
        patch.setattr(server_control, "_ARRIVE_SECONDS", 0.05)
        patch.setattr(gate, "_BODY_SECONDS", 0.2)
        yield Server(folder)


def planted(body: object, path: tuple, value: object) -> object:
    """Return a copy of `body` with another value at `path`."""
    if not path:
        return value
    body = copy.deepcopy(body)
    at = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return body


def places(body: object, path: tuple = ()) -> list[tuple]:
    """Return the paths of everything in a JSON value, itself included."""
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return [path, *(place for step, value in inner for place in places(value, (*path, step)))]


def test_requests_are_kept_over_a_pause(server):
    """Weights go in without an abort; what would end the pause or wait for its end is refused."""

    def post(path, body=None):
        return server.answers("POST", path, b"" if body is None else json.dumps(body).encode())

    update = UPDATE | {"source": {"type": "files", "paths": ["v1"]}}
    server.alive()
    assert post("/moe_rl/pause").status_code == 200
    kept = {"mode": "keep", "clear_cache": False}
    assert server.engine.held == kept
    for path, body in (("hold", None), ("release", {"requests": 0}), ("score", {"runs": [[1, 2]]})):
        assert post(f"/moe_rl/{path}", body).status_code == 409
    assert post("/moe_rl/update", update | {"version": 7, "replaces": 1}).status_code == 200
    assert server.engine.held == kept, "vLLM was not told to abort anything, nor to go on"

    async def late():
        """A request that comes in the pause begins with the next weights, and with cached prefixes of these."""
        waiting = asyncio.ensure_future(server._ask("POST", gate.GENERATE, json.dumps(GENERATION).encode(), AUTHORIZED))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert (await server._ask("POST", "/moe_rl/resume", b"", AUTHORIZED)).status_code == 200
        assert (await waiting).status_code == 200

    asyncio.run(late())
    assert not server.engine.held
    assert [server.vllm.asked[-1][name] for name in ("cache_salt", "request_id")] == ["7", "0123456789abcdef"]
    assert post("/moe_rl/leave", {"names": ["0123456789abcdef"]}).status_code == 200
    assert server.engine.left == ["generate-tokens-0123456789abcdef"]
    post("/moe_rl/pause")
    server.gate._control._holding = Holding(7, "", whole=False)
    assert post("/moe_rl/resume").status_code == 409 and server.engine.held == kept
    server.alive()


def test_a_publication_waits_for_no_request_whose_record_nobody_awaits(server, monkeypatch):
    """Its client left before its first token. If its end comes late, as in a pause, a client must not lose the
    server."""
    server.alive()
    monkeypatch.setattr(server_control, "_SETTLE_POLLS", 9)
    monkeypatch.setattr(server.engine, "moe_rl_unfinished", lambda sink: ["left"], raising=False)
    assert server.answers("POST", "/moe_rl/open", b'{"sink": "late"}').status_code == 200
    for ids, status in (([], 200), ([1], 409)):
        body = {"sink": "late", "sequences": {"left": ids}, "keep_open": True}
        assert server.answers("POST", "/moe_rl/publish", json.dumps(body).encode()).status_code == status


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_an_agent_is_sent_to_the_gateway(server, path):
    answer = server.answers("POST", path, b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')
    assert answer.status_code == 404 and "moe-rl serve --gateway" in answer.json()["error"]
    assert "--gateway" not in server.answers("POST", f"{path}/x").json()["error"]


NASTY = [
    None, True, False, -1, 0, 1, VOCABULARY - 1, VOCABULARY, LONGEST, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64,
    2**200, -(2**31), -(2**63), -(2**64), 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), "", "1", "\x00",
    "a\x00b", "../x", "/etc/passwd", "x" * 300, "x/" * 3000, "\ud800", "\N{SNOWMAN}" * 90, [], [[]], [[1]], [1.0],
    ["1"], {}, {"a": 1}, [1] * 100, [VOCABULARY], [-1],
]  # fmt: skip
CHANGES = [
    (path, place, value)
    for path, body in BODIES.items()
    if body is not None
    for place in places(body)
    for value in NASTY
]


def asked(path: str, place: tuple, value: object) -> bytes:
    """Return the body of a call of `path` with another value at `place`."""
    return json.dumps(planted(BODIES[path], place, value)).encode()


def test_a_healthy_call_of_every_route_is_answered(server):
    """Witness for the other tests: unchanged calls succeed, or are refused only for what the stub lacks."""
    for path, body in BODIES.items():
        method = "GET" if path in ("/moe_rl/stats", "/moe_rl/recording") else "POST"
        answer = server.answers(method, path, b"" if body is None else json.dumps(body).encode())
        refused = {"/moe_rl/publish": "not recorded", "/moe_rl/challenge": "No such file"}.get(path, "")
        assert (answer.status_code == 200) is not bool(refused) and refused in answer.text
        if path in ("/moe_rl/hold", "/moe_rl/adopt"):
            assert bool(server.engine.held) is (path == "/moe_rl/hold")
    server.alive()
    reached = server.vllm.asked[-1]
    given = {name: value for name, value in GENERATION.items() if name != "name"}
    assert reached == given | {"request_id": GENERATION["name"], "cache_salt": "1"}


def test_every_field_of_every_route_may_hold_anything(server):
    """Tries each commonly forgotten value in each place of each body: some 4000 calls."""
    counts = {}
    for path, place, value in CHANGES:
        status = server.answers("POST", path, asked(path, place, value)).status_code
        counts[path, status] = counts.get((path, status), 0) + 1
    server.alive()
    assert all(counts[path, 400] > 20 for path in (gate.GENERATE, "/moe_rl/update", "/moe_rl/score", "/moe_rl/open"))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_routes = st.sampled_from([*BODIES, *OTHERS])
_contents = (
    st.binary(max_size=200)
    | _json.map(lambda value: json.dumps(value).encode())
    | st.tuples(st.sampled_from(CHANGES), _json).map(lambda one: asked(*one[0][:2], one[1]))
    | st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b'{"sink":"\xff"}', b'{"sink":"\\ud800"}', b"\xef\xbb\xbf{}"])
)
_headers = st.fixed_dictionaries(
    {},
    optional={
        "Content-Type": st.sampled_from(
            ["application/json", "text/plain", "multipart/form-data", "application/json; charset=x", ""]
        ),
        "X-Request-Id": st.text("abc\t ", max_size=9),
        "X-data-parallel-rank": st.sampled_from(["-1", "9" * 30, "x"]),
        "Authorization": st.sampled_from(["", "Bearer", "Bearer x", f"Bearer {TOKEN}x", f"Basic {TOKEN}"]),
    },
)


@settings(max_examples=300)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "X"]),
    path=_routes,
    content=_contents,
    headers=_headers,
)
@example(method="POST", path=gate.GENERATE, content=b'{"token_ids":[1],"token_ids":[2147483648]}', headers={})
@example(method="POST", path="/moe_rl/score", content=b'{"runs":[[1,50]]}', headers={})
@example(method="POST", path="/moe_rl/open", content=b'{"sink":"\xff"}', headers={})
def test_any_call_is_answered(server, method, path, content, headers):
    server.answers(method, path, content, headers)
    server.alive()


@pytest.mark.parametrize("ends", [True, False])
def test_a_shard_waits_for_the_step_after_a_load_and_not_for_ever(server, monkeypatch, ends):
    """Workers learn of an ended request one step later. Each answer here takes a minute, as during a load."""
    asked = []

    def unfinished(sink):
        asked.append(sink)
        return ["key"] if len(asked) < 3 or not ends else []

    monkeypatch.setattr(server.engine, "moe_rl_unfinished", unfinished)
    monkeypatch.setattr(server_control, "time", SimpleNamespace(monotonic=lambda: 60.0 * len(asked)))
    monkeypatch.setattr(server_control, "_SETTLE_POLLS", 9)
    answer = server.answers("POST", "/moe_rl/abandon", b'{"sink": "step1"}')
    assert (answer.status_code, len(asked)) == ((200, 3) if ends else (409, 9))


@pytest.mark.parametrize("path", [path for path, body in BODIES.items() if body is not None])
def test_a_body_that_does_not_come_is_refused_in_time(server, path):
    """Half a body and then silence; half a body and then a disconnect."""

    async def ask(rest: dict | None) -> list[dict]:
        come = [{"type": "http.request", "body": b'{"sink":', "more_body": True}]
        come += [rest] if rest is not None else []

        async def receive():
            if come:
                return come.pop(0)
            await asyncio.sleep(100)

        said = []

        async def send(message):
            said.append(message)

        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await asyncio.wait_for(server.app(scope, receive, send), 10)
        return said

    late, gone = asyncio.run(ask(None)), asyncio.run(ask({"type": "http.disconnect"}))
    assert (late[0]["status"], gone[0]["status"]) == (408, 400)
    assert (
        b"only 8 bytes of the body arrived in 0.2 s" in late[1]["body"]
        and (b"connection", b"close") in late[0]["headers"]
    )
    server.alive()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1, VOCABULARY], "token ids 1 to 50, expected 0 to 49. Use the tokenizer of the model"),
        ([1, 2**31 - 1], "token ids 1 to 2147483647, expected 0 to 49"),
        ([1, 2**31], "<= 2147483647"),
        ([1, 2**63], "<= 2147483647"),
        ([1, -1], ">= 0"),
        ([1, True], "got `bool`"),
        ([1, 1.0], "got `float`"),
        ([1, "1"], "got `str`"),
        ([1, [1]], "got `array`"),
        ([1] * LONGEST, ""),
    ],
)  # fmt: skip
def test_a_token_that_the_model_does_not_have_is_named(server, tokens, said):
    for path, body in (
        (gate.GENERATE, GENERATION | {"token_ids": tokens}),
        ("/moe_rl/score", {"runs": [[1, 2], tokens]}),
    ):
        answer = server.answers("POST", path, json.dumps(body).encode())
        assert answer.status_code == 400 and said in answer.json()["error"]
    stops = planted(GENERATION, ("sampling_params", "stop_token_ids"), tokens)
    if len(tokens) == 2:
        answer = server.answers("POST", gate.GENERATE, json.dumps(stops).encode())
        assert answer.status_code == 400 and said in answer.json()["error"]
    server.alive()


@pytest.mark.parametrize(
    ("stop", "said"),
    [([""], "length >= 1"), (["a" * 201], "length <= 200"), (["a"] * 17, "length <= 16"), ("a", "got `str`")],
)
def test_stop_strings_that_would_slow_every_token_are_refused(server, stop, said):
    body = planted(GENERATION, ("sampling_params", "stop"), stop)
    answer = server.answers("POST", gate.GENERATE, json.dumps(body).encode())
    assert answer.status_code == 400 and said in answer.json()["error"]
    server.alive()


def test_a_server_that_loaded_no_weights_samples_after_an_update(tmp_path, monkeypatch):
    monkeypatch.setenv(gate.TOKEN_FILE, str(tmp_path / "token"))
    server = Server(tmp_path)
    server.engine.vllm_config.load_config.load_format = "dummy"
    for path, body in ((gate.GENERATE, GENERATION), ("/moe_rl/score", {"runs": [[1, 2]]})):
        answer = server.answers("POST", path, json.dumps(body).encode())
        assert answer.status_code == 409 and "a run must send an update first" in answer.json()["error"]
    assert not server.answers("GET", "/moe_rl/recording").json()["weights_whole"]


def test_with_vllms_own_capture_the_server_records_and_the_workers_only_load_weights(server, monkeypatch):
    asked: dict[str, list[str]] = {"here": [], "workers": []}

    def answer(who, args):
        asked[who].append(args[0])
        return [{"value": getattr(server.engine, args[0])(*args[1:])}]

    async def of_workers(name, args):
        return answer("workers", args)

    here = SimpleNamespace(collective_rpc=lambda name, args: answer("here", args))
    monkeypatch.setitem(server.engine.vllm_config.additional_config["moe_rl"], "native", True)
    monkeypatch.setattr(server.engine, "moe_rl_native", here, raising=False)
    monkeypatch.setattr(server.engine, "collective_rpc", of_workers)
    assert server.answers("GET", "/moe_rl/recording").json()["capture"] == "native"
    assert server.answers("GET", "/moe_rl/stats").json() == [{"steps": 1}]
    for call, body in ("open", '{"sink": "own"}'), ("publish", '{"sink": "own", "sequences": {}}'), ("adopt", ""):
        assert server.answers("POST", f"/moe_rl/{call}", body.encode()).is_success
    assert asked["workers"] == ["moe_rl_forget_weights"] and asked["here"][-1] == "moe_rl_abandon_all"
    paused = server.answers("POST", "/moe_rl/pause")
    assert paused.status_code == 409 and "which weights made which row" in paused.text
    server.alive()


@pytest.mark.parametrize("second", [{}, {"digest": "e" * 32}])
def test_the_weights_of_all_data_parallel_ranks_count(server, monkeypatch, second):
    """vLLM's collective_rpc would return the answers of the first rank only."""
    first = {"value": msgspec.to_builtins(Holding(1, "d" * 32, whole=True))}

    async def of_all(call, name, seconds, args, options):
        assert (call, name, args[0]) == ("collective_rpc", "moe_rl_answer", "moe_rl_update_weights")
        return [[first], [{"value": first["value"] | second}]]

    ranks = SimpleNamespace(call_utility_all_async=of_all)
    monkeypatch.setattr(server.engine.vllm_config.parallel_config, "data_parallel_size", 2)
    monkeypatch.setattr(server.engine, "engine_core", ranks, raising=False)
    whole = json.dumps(UPDATE | {"source": {"type": "files", "paths": ["v1"]}}).encode()
    assert server.answers("POST", "/moe_rl/update", whole).json()["whole"] is (not second)
    monkeypatch.undo()
    server.alive()


def test_a_server_without_a_tokenizer_refuses_stop_strings(server, monkeypatch):
    monkeypatch.setattr(server.engine.vllm_config.model_config, "skip_tokenizer_init", True)
    answer = server.answers("POST", gate.GENERATE, json.dumps(GENERATION).encode())
    assert answer.status_code == 400 and "stop strings" in answer.json()["error"]
    body = planted(GENERATION, ("sampling_params", "stop"), [])
    assert server.answers("POST", gate.GENERATE, json.dumps(body).encode()).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/abort_requests", "/scale_elastic_ep", "/docs"])
def test_routes_of_vllm_that_the_gate_does_not_know_are_not_reached(server, path):
    for method in ("GET", "POST"):
        answer = server.answers(method, path, b"{}")
        assert answer.status_code == 404 and "/inference/v1/generate" in answer.text


def test_only_the_run_that_took_the_server_last_is_answered(server):
    """An earlier run's calls could hold, abandon or publish the later run's samples. Calls without a run still work."""
    former, now = {"moe-rl-run": "a"}, {"moe-rl-run": "b"}
    for run in (former, now):
        assert server.answers("POST", "/moe_rl/adopt", headers=run).status_code == 200
    server.alive()
    for path, body in BODIES.items():
        content = b"" if body is None else json.dumps(body).encode()
        for run in ({}, now):
            assert "another run" not in server.answers("GET" if body is None else "POST", path, content, run).text
        if path not in ("/moe_rl/adopt", "/moe_rl/challenge", "/moe_rl/stats", "/moe_rl/recording"):
            answer = server.answers("POST", path, content, former)
            assert answer.status_code == 409 and "another run has taken this server since" in answer.text
    server.answers("POST", "/moe_rl/adopt")
    server.alive()


def test_nothing_is_sampled_from_weights_that_are_not_whole(server):
    assert server.answers("POST", "/moe_rl/adopt").status_code == 200
    for path in (gate.GENERATE, "/moe_rl/score"):
        answer = server.answers("POST", path, json.dumps(BODIES[path]).encode())
        assert answer.status_code == 409 and "incomplete" in answer.text
    server.alive()


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN[0]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}"],
)
def test_only_the_whole_token_is_admitted(server, given):
    assert server.ask("GET", "/moe_rl/stats").status_code == 200
    assert server.ask("GET", "/moe_rl/stats", headers={"Authorization": given}).status_code == 401


def test_nothing_is_sampled_after_an_update_that_broke_off(server, monkeypatch):
    """What the workers hold then, nobody knows."""

    def dies(update: bytes) -> dict:
        raise RuntimeError("a worker died")

    with monkeypatch.context() as patched:
        patched.setattr(server.engine, "moe_rl_update_weights", dies)
        update = json.dumps(BODIES["/moe_rl/update"]).encode()
        assert server.ask("POST", "/moe_rl/update", update).status_code == 500
    for path in (gate.GENERATE, "/moe_rl/score"):
        assert server.ask("POST", path, json.dumps(BODIES[path]).encode()).status_code == 409
    server.alive()
