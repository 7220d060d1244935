"""Serves the gateway over HTTP: access, bodies, clients that go away, and errors in each dialect's form.

    /v1/chat/completions, completions, responses          the session's key as API key
    /v1/messages, models                                  likewise
    /v1/messages/count_tokens                             likewise
    /s/KEY/v1/...                                         the key in the address, for clients that take a base URL only
    POST /sessions, GET /sessions                         open one; list them: with the owner's token
    POST /sessions/NAME/finish                            check and keep one: with the owner's token
    GET /health                                           for everybody

A reply, even a streamed one, is sent once its turn is complete and recorded: losing a server in the middle of a turn
costs time, but never leaves a client with half an answer that is then replaced.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from moe_rl.errors import MoeRLError, SessionError, TraceError
from moe_rl.gateway import anthropic_dialect as anthropic
from moe_rl.gateway import openai_dialect as openai
from moe_rl.gateway import responses_dialect as responses
from moe_rl.gateway.agent_gateway import AgentGateway
from moe_rl.gateway.asking import AgentReply, BadRequest
from moe_rl.gateway.exchanges import ClientCall
from moe_rl.gateway.fields import checked
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.sessions import Session
from moe_rl.rollout.sampler import nobody
from moe_rl.vllm.api_server import url_of
from moe_rl.vllm.gate import read_body
from moe_rl.vllm.server_control import RefusedCall

_CLIENT_GONE = 499
_SMALL_BODY = 1 << 16
_ANTHROPIC_PATH = re.compile(r"(/s/[^/]*)?/v1/messages(/|$)")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Describes one route of a client's API.

    Attributes:
        read: makes the wish from the body.
        body, events: make the reply, whole or as a stream, from the reply's name, the model's name, the wish and the
            replies.
    """

    read: Callable[[bytes], Any]
    body: Callable[[str, str, Any, Sequence[AgentReply]], dict[str, Any]]
    events: Callable[[str, str, Any, Sequence[AgentReply]], Iterator[bytes]]


_Limit = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class _OpenBody(msgspec.Struct, forbid_unknown_fields=True):
    group: str = ""
    tokens: _Limit | None = None
    turns: _Limit | None = None
    seconds: Annotated[float, msgspec.Meta(gt=0, le=2e6)] | None = None


class GatewayApp:
    """Makes the ASGI app of a gateway.

    Args:
        token: the secret of the owner, who opens and finishes sessions.
        longest: body size limit in bytes.
        failed: called with each error of the sampler.
    """

    def __init__(
        self,
        gateway: AgentGateway,
        keeper: SessionKeeper,
        token: str,
        *,
        longest: int,
        failed: Callable[[MoeRLError], None] = nobody,
    ):
        self._gateway, self._keeper, self._token, self._longest = gateway, keeper, token.encode(), longest
        self._finishing: set[str] = set()  # sessions that make room for others
        self._failed = failed
        chat = Dialect(openai.read_chat, openai.chat_body, openai.chat_events)
        text = Dialect(openai.read_text, openai.text_body, openai.text_events)
        response = Dialect(responses.read_responses, responses.responses_body, responses.responses_events)
        messages = Dialect(anthropic.read_messages, anthropic.messages_body, anthropic.messages_events)
        routes = [
            Route("/health", _health),
            Route("/sessions", self._owned(self._open), methods=["POST"]),
            Route("/sessions", self._owned(self._list), methods=["GET"]),
            Route("/sessions/{name}/finish", self._owned(self._finish), methods=["POST"]),
        ]
        for before in ("", "/s/{key}"):
            routes += [
                Route(f"{before}/v1/chat/completions", self._serving(chat), methods=["POST"]),
                Route(f"{before}/v1/completions", self._serving(text), methods=["POST"]),
                Route(f"{before}/v1/responses", self._serving(response), methods=["POST"]),
                Route(f"{before}/v1/messages", self._serving(messages), methods=["POST"]),
                Route(f"{before}/v1/messages/count_tokens", self._count, methods=["POST"]),
                Route(f"{before}/v1/models", self._models),
            ]
        handlers = {HTTPException: _unknown, BadRequest: _refused, ClientDisconnect: _left, Exception: _broken}
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)
        self.asgi.router.redirect_slashes = False  # its address would be the client's Host header

    def _serving(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            try:
                session = self._session(request)
                body = bytes(await _body(request, self._longest))
                wish = await self._gateway.off_loop(len(body), dialect.read, body)
                call = _call(request, body)
                exchange = await self._gateway.answer(session, wish, call)
                if call.gone:
                    self._gateway.sent(session, exchange, call)
                    return Response(status_code=_CLIENT_GONE)
                assert exchange.replies is not None  # they are kept while a client waits
                if not (replies := exchange.replies.result()):
                    raise BadRequest("the sampler aborted the request: send it again", status=503, code="aborted")
            except MoeRLError as error:
                self._failed(error)
                raise BadRequest(str(error), status=503, code="sampler_failed") from None
            content = secrets.token_hex(12), self._gateway.model, wish, replies

            def reply() -> Response:
                if wish.stream:
                    return Response(b"".join(dialect.events(*content)), media_type="text/event-stream")
                return Response(msgspec.json.encode(dialect.body(*content)), media_type="application/json")

            return _SentReply(reply, call, lambda: self._gateway.sent(session, exchange, call))

        return serve

    def _session(self, request: Request) -> Session:
        """Return the session of the key in a request. Raises BadRequest without one."""
        key = request.path_params.get("key") or request.headers.get("x-api-key") or _bearer(request)
        if (session := self._gateway.book.find(key)) is None:
            raise BadRequest(
                "no open session has this key: open one with POST /sessions, and give its key as API key",
                status=401,
                code="invalid_api_key",
            )
        try:
            session.refuse_old(asyncio.get_running_loop().time())
        except SessionError as error:
            raise BadRequest(str(error), code="session_limit") from None
        return session

    async def _count(self, request: Request) -> Response:
        session = self._session(request)
        body = bytes(await _body(request, self._longest))
        wish = await self._gateway.off_loop(len(body), anthropic.read_counted, body)
        return JSONResponse({"input_tokens": await self._gateway.count(session, wish, len(body))})

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = {"id": self._gateway.model, "object": "model", "created": 0, "owned_by": "moe_rl"}
        return JSONResponse({"object": "list", "data": [model]})

    def _owned(
        self, answer: Callable[[Request], Awaitable[dict[str, Any]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Answer a call of the owner."""

        async def serve(request: Request) -> Response:
            if not hmac.compare_digest(_bearer(request).encode("utf-8", "surrogateescape"), self._token):
                raise BadRequest("this call needs the owner's token", status=401, code="invalid_token")
            try:
                return Response(msgspec.json.encode(await answer(request)), media_type="application/json")
            except SessionError as error:
                code = "busy" if error.message.fault == "busy" else "session"
                return JSONResponse({"error": str(error), "code": code}, 409)
            except MoeRLError as error:
                self._failed(error)
                return JSONResponse({"error": str(error), "code": type(error).__name__}, 500)

        return serve

    async def _open(self, request: Request) -> dict[str, Any]:
        body = bytes(await _body(request, _SMALL_BODY)) or b"{}"
        fields = checked(body, _OpenBody, {})
        asked = {name: most for name in ("tokens", "turns", "seconds") if (most := getattr(fields, name)) is not None}
        await self._make_room()
        opened = self._gateway.open(fields.group, replace(self._gateway.book.limits, **asked))
        # The address that this request reached. The Host header is set by the client and not trusted.
        url = f"{url_of(*request.scope['server'])}/s/{opened.key}"
        return {"session": opened.session.name, "key": opened.key, "base_url": f"{url}/v1", "url": url}

    async def _list(self, request: Request) -> dict[str, Any]:
        counts = {**self._gateway.counts, **self._gateway.turns.counts}
        return {"sessions": [self._summary(session) for session in self._gateway.book.all()], "counts": counts}

    async def _finish(self, request: Request) -> dict[str, Any]:
        session = self._gateway.book.named(request.path_params["name"])
        if session is None:
            raise BadRequest("no open session has this name", status=404, code="not_found")
        return await self._finished(session)

    async def _make_room(self) -> None:
        """Finish the sessions whose time is over, if no other can be opened: their agents may be gone."""
        book, now = self._gateway.book, asyncio.get_running_loop().time()
        for session in book.all() if book.full else []:
            if session.is_old(now) and not session.busy and session.name not in self._finishing:
                self._finishing.add(session.name)
                try:
                    if session.turns:
                        await self._finished(session)
                    else:
                        self._gateway.forget(session)
                except MoeRLError as error:
                    print(f"moe_rl: session {session.name} is not kept: {error}", file=sys.stderr, flush=True)
                finally:
                    self._finishing.discard(session.name)

    async def _finished(self, session: Session) -> dict[str, Any]:
        finished = self._gateway.end(session)
        summary = self._summary(session)
        if self._gateway.shard is not None:
            await self._gateway.shard.publish()
        try:
            file = await asyncio.to_thread(self._keeper.keep, finished)
        except SessionError as error:  # after any other error, such as a full disk, it can be finished again
            shard = self._gateway.shard
            if error.message.fault == "no record" and shard is not None and shard.unrecovered:
                raise TraceError(
                    f"The records of a lost server are not recovered yet: {error}",
                    where={"shard": ", ".join(sorted(shard.unrecovered))},
                    do="end the server's process, see that the disk has room, and finish the session again",
                ) from error
            self._gateway.forget(session)
            raise
        self._gateway.forget(session)
        return summary | {"file": str(file), "digest": finished.digest}

    def _summary(self, session: Session) -> dict[str, Any]:
        received = session.received
        return {
            "session": session.name,
            "group": session.group,
            "turns": len(received),
            "undelivered": len(session.turns) - len(received),
            "branches": len(session.branches()),
            "kinds": session.kinds,
            "tokens": sum(len(turn.ids) for turn in received),
            "sampled_tokens": sum(len(turn.token_ids) for turn in received),
            "other_system": session.parting,
        }


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)  # the app registers this handler only for these
    owned = request.url.path.startswith("/sessions")
    body = {"error": error.told, "code": error.code} if owned else _error_body(request, error)
    # Otherwise the unread rest of a body would be taken for the next request.
    headers = {"Connection": "close"} if error.status in (401, 408, 413, 415) else None
    return JSONResponse(body, error.status, headers)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # the app registers this handler only for these
    path = re.sub(r"(?i)(?<=/s/)/*[^/]+|[^/]{32,}", "KEY", request.url.path)[:200]  # no message repeats a session's key
    bad = BadRequest(f"no such route: {request.method} {path}", status=error.status_code, code="not_found")
    return JSONResponse(_error_body(request, bad), bad.status, error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    # The server logs the traceback, and closes the connection.
    bad = BadRequest(f"a fault of the gateway: {type(error).__name__}", status=500, code="internal")
    return JSONResponse(_error_body(request, bad), bad.status, {"Connection": "close"})


def _error_body(request: Request, error: BadRequest) -> dict[str, Any]:
    """Return the body of an error in the form that the client reads."""
    of_anthropic = _ANTHROPIC_PATH.match(request.url.path) or "anthropic-version" in request.headers
    return (anthropic if of_anthropic else openai).error_body(error)


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


async def _body(request: Request, longest: int) -> bytearray:
    try:
        return await read_body(request, longest)
    except RefusedCall as refusal:
        raise BadRequest(str(refusal), status=refusal.status, code="body") from None


def _call(request: Request, body: bytes) -> ClientCall:
    """Return the ClientCall of a request whose body has been read."""
    call, connection = ClientCall(request.url.path, request.headers, body), request.scope["connection"]
    connection.on_hang_up = call.leave
    if connection.hung_up:
        call.leave()
    return call


class _SentReply(Response):
    """Sends a reply, and calls `ended` after that. A client that leaves earlier has left its call by then."""

    def __init__(self, reply: Callable[[], Response], call: ClientCall, ended: Callable[[], None]):
        self.background = None
        self._reply, self._call, self._ended = reply, call, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = self._reply()
            if scope["connection"].hung_up:
                self._call.leave()
            await reply(scope, receive, send)
        except BaseException:
            self._call.leave()
            raise
        finally:
            self._ended()
