"""The door of a recording vLLM server: the token's check in front of vLLM's routes, and the recorder's own routes.

    client -- Bearer token --> Gate -- /moe_rl/* --> RecorderControl in the workers ----> trace store
                                    -- the rest ---> vLLM's routes: /inference/v1/generate takes and gives token ids

vLLM's --api-key leaves many of its control routes open; the gate lets nothing through but GET /health.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocketClose

import moe_rl
from moe_rl.errors import describe
from moe_rl.vllm.control import Challenge, Open, Publish, Release, Scoring, Served, Sink, read_token
from moe_rl.vllm.route_source import join_parts
from moe_rl.weights.update import Broadcast, Files, Holding, Received, WeightUpdate, agreement, encode

GATE = f"{__name__}.Gate"
TOKEN_FILE = "MOE_RL_TOKEN_FILE"

_SMALL_BODY = 1 << 16
_PUBLISH_BODY = 1 << 28
# How long a shard that is published or abandoned waits for the requests that may still add to it: those that ended are
# told to the workers one step later, those whose client is gone are aborted then.
_SETTLE_SECONDS = 10.0
_SETTLE_POLL_SECONDS = 0.005
# How long a release waits for one more of the requests that it was promised.
_ARRIVE_SECONDS = 30.0
# A challenge is a few bytes; whatever else lies there is none of ours to give away.
_CHALLENGE_BYTES = 64


class RefusedCall(Exception):
    """A control call that is answered with an error. status: of HTTP."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Gate:
    """ASGI middleware, for vLLM's argument `--middleware`: checks the token and answers /moe_rl/*.

    The environment names the token's file. Raises EngineError when that is no secret.
    """

    def __init__(self, app):
        self._app = app
        self._token = read_token(Path(os.environ[TOKEN_FILE])).encode()
        self._control = Control()

    async def __call__(self, scope, receive, send) -> None:
        kind = scope["type"]
        free = kind == "lifespan" or (kind == "http" and (scope["method"], scope["path"]) == ("GET", "/health"))
        if not free and not self._admits(scope["headers"]):
            refusal = WebSocketClose(1008) if kind == "websocket" else _error(401, "this server wants the run's token")
            await refusal(scope, receive, send)
        elif kind == "http" and scope["path"].startswith("/moe_rl/"):
            await (await self._control.answer(Request(scope, receive)))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admits(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token, self._token)


class Control:
    """The routes below /moe_rl, and what the server knows of its weights."""

    def __init__(self):
        self._start = secrets.token_hex(8)
        self._updates = 0
        self._holding = Holding(0, "", whole=True)
        self._updating = asyncio.Lock()
        # Path: method, body, its longest in bytes, who answers.
        self._routes = {
            "/moe_rl/open": ("POST", Open, _SMALL_BODY, self._open),
            "/moe_rl/publish": ("POST", Publish, _PUBLISH_BODY, self._publish),
            "/moe_rl/abandon": ("POST", Sink, _SMALL_BODY, self._abandon),
            "/moe_rl/hold": ("POST", None, 0, self._hold),
            "/moe_rl/release": ("POST", Release, _SMALL_BODY, self._release),
            "/moe_rl/adopt": ("POST", None, 0, self._adopt),
            "/moe_rl/update": ("POST", WeightUpdate, _PUBLISH_BODY, self._update),
            "/moe_rl/score": ("POST", Scoring, _PUBLISH_BODY, self._score),
            "/moe_rl/challenge": ("POST", Challenge, _SMALL_BODY, self._challenge),
            "/moe_rl/stats": ("GET", None, 0, self._stats),
            "/moe_rl/recording": ("GET", None, 0, self._recording),
        }

    async def answer(self, request: Request) -> Response:
        """Answer one call."""
        route = self._routes.get(request.url.path)
        engine = request.app.state.engine_client
        try:
            if route is None:
                raise RefusedCall(404, f"no such route: {request.url.path}")
            method, kind, longest, answer = route
            if request.method != method:
                raise RefusedCall(405, f"{request.url.path} wants {method}")
            message = None
            if kind is not None:
                message = msgspec.json.decode(await _body(request, longest), type=kind)
            return Response(msgspec.json.encode(await answer(engine, message)), media_type="application/json")
        except RefusedCall as refusal:
            return _error(refusal.status, str(refusal))
        except msgspec.DecodeError as error:
            return _error(400, f"{request.url.path}: {error}")
        except ClientDisconnect:
            return _error(400, "the client is gone")
        except Exception as error:
            # The engine may be dead, which vLLM notices and logs itself.
            return _error(503 if engine.errored else 500, f"{type(error).__name__}: {error}")

    async def _open(self, engine, message: Open) -> None:
        _inside(_trace_root(engine), message.folder)
        await _call(engine, "moe_rl_open", message.sink, message.folder)

    async def _publish(self, engine, message: Publish) -> dict:
        if unknown := set(message.aborted) - message.sequences.keys():
            raise RefusedCall(400, f"aborted: {min(unknown)!r} is none of the sequences")
        await _settle(engine, message.sink)
        answers = await _call(engine, "moe_rl_publish", message.sink, message.sequences, message.aborted)
        return join_parts(message.sequences, answers)

    async def _abandon(self, engine, message: Sink) -> None:
        await _settle(engine, message.sink)
        await _call(engine, "moe_rl_abandon", message.sink)

    async def _hold(self, engine, _) -> None:
        """Abort what runs, empty the prefix cache, and keep new requests waiting."""
        await engine.pause_generation(mode="abort", clear_cache=True)

    async def _release(self, engine, message: Release) -> None:
        """Let waiting requests begin once so many are there: who is decoded with whom then depends on nothing else."""
        there, deadline = -1, 0.0
        while (now := engine.output_processor.get_num_unfinished_requests()) < message.requests:
            if engine.errored:
                raise engine.dead_error
            if now != there:
                there, deadline = now, time.monotonic() + _ARRIVE_SECONDS
            elif time.monotonic() > deadline:
                raise RefusedCall(409, f"{message.requests - now} of {message.requests} requests never came")
            await asyncio.sleep(_SETTLE_POLL_SECONDS)
        await engine.resume_generation()

    async def _adopt(self, engine, _) -> Holding:
        """A run begins: what the server held was another's, and nothing is sampled before weights have come."""
        async with self._updating:
            await self._hold(engine, None)
            try:
                return await self._hear(engine, "moe_rl_forget_weights")
            finally:
                await engine.resume_generation()

    async def _update(self, engine, message: WeightUpdate) -> Holding:
        if isinstance(message.source, Files):
            paths = [str(_inside(_trace_root(engine), path)) for path in message.source.paths]
            message = msgspec.structs.replace(message, source=Files(paths))
        elif not isinstance(message.source, Broadcast | Received):
            raise RefusedCall(400, f"a server shares no memory with a trainer, got {type(message.source).__name__}")
        async with self._updating:
            await self._hold(engine, None)
            try:
                holding = await self._hear(engine, "moe_rl_update_weights", encode(message))
                if message.final and not holding.refused:
                    await engine.update_weight_version(str(message.version))
                # What was cached between the pause and the update is of the old weights.
                if not await engine.reset_prefix_cache():
                    raise RefusedCall(500, "vLLM kept its prefix cache though no request runs")
                return holding
            finally:
                await engine.resume_generation()

    async def _hear(self, engine, method: str, *args) -> Holding:
        """What the workers hold after a call that may change it; nothing whole when it does not come to its end."""
        self._updates += 1
        self._holding = msgspec.structs.replace(self._holding, whole=False)
        answers = await _call(engine, method, *args)
        self._holding = agreement([msgspec.convert(answer, Holding) for answer in answers])
        return self._holding

    async def _score(self, engine, message: Scoring) -> list[float]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        if not self._holding.whole:
            raise RefusedCall(409, "the weights are not whole")
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=message.token_ids)
        async for output in engine.generate(prompt, params, f"score-{secrets.token_hex(8)}"):
            last = output
        pairs = zip(last.prompt_logprobs[1:], message.token_ids[1:], strict=True)
        return [at[token].logprob for at, token in pairs]

    async def _challenge(self, engine, message: Challenge) -> str:
        path = _inside(_trace_root(engine), message.folder) / message.name
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
                text = file.read(_CHALLENGE_BYTES)
            path.with_name(f"{message.name}.answer").write_bytes(text)
        except OSError as error:
            raise RefusedCall(409, f"{path}: {error.strerror}") from None
        return text.decode("ascii", "replace")

    async def _stats(self, engine, _) -> list[dict[str, int]]:
        return await _call(engine, "moe_rl_stats")

    async def _recording(self, engine, _) -> Served:
        import vllm

        spec = (await _call(engine, "moe_rl_spec"))[0]
        config = engine.vllm_config
        recording = config.additional_config["moe_rl"]
        return Served(
            moe_rl=moe_rl.__version__,
            vllm=vllm.__version__,
            trace_root=recording["trace_root"],
            vocab_size=config.model_config.get_vocab_size(),
            max_model_len=config.model_config.max_model_len,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            capture="worker" if config.parallel_config.worker_cls.endswith("RecordingWorker") else "patch",
            support=recording["support"],
            router_logits_fraction=recording["router_logits_fraction"],
            gpus=config.parallel_config.world_size,
            start=self._start,
            updates=self._updates,
            weight_version=int(await engine.get_weight_version()),
            weight_digest=self._holding.digest,
            weights_whole=self._holding.whole,
            **spec,
        )


def _error(status: int, message: str) -> JSONResponse:
    # What is left of a body that was not read would be taken for the next request.
    headers = {"Connection": "close"} if status == 413 else {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": message}, status, headers)


async def _body(request: Request, longest: int) -> bytearray:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > longest:
            raise RefusedCall(413, f"a body of more than {longest} bytes")
    return body


async def _call(engine, method: str, *args) -> list:
    """What the recording workers answer to a method of RecorderControl. Raises RefusedCall when one of them does."""
    answers = await engine.collective_rpc("moe_rl_answer", args=(method, *args))
    for status, name in ((400, "refused"), (500, "failed")):
        if errors := [answer[name] for answer in answers if name in answer]:
            raise RefusedCall(status, errors[0])
    return [answer["value"] for answer in answers if answer["value"] is not None]


async def _settle(engine, sink: str) -> None:
    """Wait until no request can add to a shard any more."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while unfinished := [key for keys in await _call(engine, "moe_rl_unfinished", sink) for key in keys]:
        if time.monotonic() > deadline:
            got = f"{len(unfinished)} requests that are still sampled, as {unfinished[0]}"
            raise RefusedCall(409, describe("A shard is not finished", where=f"shard {sink}", got=got, do="abort them"))
        await asyncio.sleep(_SETTLE_POLL_SECONDS)


def _trace_root(engine) -> Path:
    return Path(engine.vllm_config.additional_config["moe_rl"]["trace_root"])


def _inside(root: Path, path: str) -> Path:
    """A path below the trace root. Raises RefusedCall where links lead out of it."""
    resolved = (root / path).resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise RefusedCall(403, f"{path!r} is not below the trace root {root}")
    return resolved
