"""Guards a recording vLLM server: checks caller and body, then forwards the call or answers with an error.

    client -- Bearer token --> Gate -- /moe_rl/* --> Control ---> RecorderControl in the workers ----> trace store
                                    -- /inference/v1/generate --> vLLM, if the body is harmless
                                    -- GET /metrics and the like -> vLLM

vLLM's --api-key leaves many of its control routes open; without the token the gate answers GET /health only. The gate
does not offer vLLM's other routes: they need a tokenizer, scale or stop the engine, or accept input that crashes it.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocketClose

from moe_rl.errors import MoeRLError
from moe_rl.vllm.control import GENERATE, RUN_HEADER, SaltedGeneration, read_token
from moe_rl.vllm.server_control import Control, RefusedCall

GATE = f"{__name__}.Gate"
TOKEN_FILE = "MOE_RL_TOKEN_FILE"

# vLLM's routes that only report, and those of its profiler, which are there if the server's arguments ask for one.
_PASSED = {("GET", f"/{path}") for path in ("health", "metrics", "version", "v1/models", "openapi.json")}
_PASSED |= {("POST", "/start_profile"), ("POST", "/stop_profile")}

# vLLM's routes for agents.
_FOR_AGENTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})

# Longest error message in an answer; messages may quote what the client sent.
_LONGEST_ERROR = 2000
# Time limit for receiving a body.
_BODY_SECONDS = 60.0


class Gate:
    """Serves as ASGI middleware for vLLM's argument `--middleware`: checks the token and answers /moe_rl/*.

    An environment variable names the token's file. Raises EngineError if that file is not secret.
    """

    def __init__(self, app):
        self._app = app
        self._token = read_token(Path(os.environ[TOKEN_FILE])).encode()
        self._control = Control()

    async def __call__(self, scope, receive, send) -> None:
        kind = scope["type"]
        free = kind == "lifespan" or (kind == "http" and (scope["method"], scope["path"]) == ("GET", "/health"))
        if not free and not self._admits(scope["headers"]):
            refusal = WebSocketClose(1008) if kind == "websocket" else _error(401, "this server needs the run's token")
            await refusal(scope, receive, send)
        elif kind == "lifespan" or (kind == "http" and (scope["method"], scope["path"]) in _PASSED):
            await self._app(scope, receive, send)
        elif kind != "http":
            await WebSocketClose(1008)(scope, receive, send)
        elif isinstance(answer := await self._answer(Request(scope, receive)), Admitted):
            await self._app(*answer.asked_anew(scope, receive), send)
        else:
            await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response | Admitted:
        """Answer one call, or return the body that vLLM may answer."""
        route = self._control.routes.get(request.url.path)
        engine = request.app.state.engine_client
        try:
            if route is None:
                raise RefusedCall(404, _no_route(request.url.path))
            if request.method != route.method:
                raise RefusedCall(405, f"{request.url.path} wants {route.method}")
            self._control.refuse_former_run(request.method, request.url.path, request.headers.get(RUN_HEADER))
            message = None
            if route.message is not None:
                message = msgspec.json.decode(await read_body(request, route.longest), type=route.message)
            value = await route.answer(engine, message)
            if isinstance(value, SaltedGeneration):
                return Admitted(msgspec.json.encode(value))
            return Response(msgspec.json.encode(value), media_type="application/json")
        except RefusedCall as refusal:
            return _error(refusal.status, str(refusal))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _error(400, f"{request.url.path}: {error}")
        except MoeRLError as error:
            return _error(400, str(error))
        except ClientDisconnect:
            return _error(400, "the client is gone")
        except Exception as error:
            # The engine may be dead; vLLM notices and logs that itself.
            return _error(503 if engine.errored else 500, f"{type(error).__name__}: {error}")

    def _admits(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        credentials = [value for name, value in headers if name == b"authorization"]
        if len(credentials) != 1:
            return False
        scheme, _, token = credentials[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token, self._token)


@dataclass(frozen=True, slots=True)
class Admitted:
    """Holds a checked body for vLLM. vLLM reads this body, and none of the client's headers."""

    body: bytes

    def asked_anew(self, scope, receive):
        """Return `scope` and `receive` of the request for vLLM."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self.body)).encode())]
        left = [{"type": "http.request", "body": self.body}]

        async def receive_body():
            # The client's body was read completely, so its next message can only be a disconnect.
            return left.pop() if left else await receive()

        return scope | {"headers": headers, "query_string": b""}, receive_body


def _no_route(path: str) -> str:
    if path in _FOR_AGENTS:
        return f"{path}: this server takes token ids at {GENERATE}; agents use a gateway: moe-rl serve --gateway"
    return f"{path[:200]!r}: no such route, expected {GENERATE} or /moe_rl/..."


def _error(status: int, message: str) -> JSONResponse:
    # Otherwise the unread rest of a body would be parsed as the next request.
    headers = (
        {"Connection": "close"}
        if status in (408, 413, 415)
        else {"WWW-Authenticate": "Bearer"}
        if status == 401
        else None
    )
    return JSONResponse({"error": message[:_LONGEST_ERROR]}, status, headers)


async def read_body(request: Request, longest: int) -> bytearray:
    """Return the JSON body of a request. Raises RefusedCall for another content type, or a body too long or too
    slow."""
    kind = request.headers.get("content-type", "application/json")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise RefusedCall(415, f"a body of {kind[:100]!r}, expected application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > longest:
                    raise RefusedCall(413, f"a body of more than {longest} bytes")
    except TimeoutError:
        raise RefusedCall(408, f"only {len(body)} bytes of the body arrived in {_BODY_SECONDS:g} s") from None
    return body
