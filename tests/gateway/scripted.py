"""Serves a gateway in the event loop of a test, over a sampler that says what the test wants, when it wants it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
from pathlib import Path

from moe_rl.gateway.agent_gateway import AgentGateway
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.listening import GatewayListener
from moe_rl.gateway.rendering import ChatRenderer
from moe_rl.gateway.session_journal import SessionJournals
from moe_rl.gateway.session_keys import OpenedSession, SessionBook
from moe_rl.gateway.turn_sampler import SamplerBounds, TurnSampler
from moe_rl.gateway.web import GatewayApp
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.trace import TraceStore
from moe_rl.vllm.api_server import bound_socket
from tests.gateway.session_turns import WIDE, said

OWNER = "o" * 43
LONGEST, VOCAB = 1 << 16, 384


class Scripted:
    """Is a sampler of one place. It says `texts` in turn, the last one again and again, each when `goes` is set.

    A request whose client leaves before comes back with its first `left` tokens. A text that a request's stop string
    ends must end with it.
    """

    places = (0,)

    def __init__(self, codec: TextCodec, *texts: str, left: int = 1):
        self.texts, self.left, self.asked = list(texts), left, []
        self.goes = asyncio.Event()
        self.goes.set()
        self.codec = codec

    async def sample(self, place, requests, *, shard, leave, keep_open=False):
        self.asked.append(requests)
        said_now = [self.texts.pop(0) if len(self.texts) > 1 else self.texts[0] for _ in requests]
        waits = [asyncio.ensure_future(one.wait()) for one in (self.goes, leave)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        found = []
        for one, text in zip(requests, said_now, strict=True):
            ids = self.codec.encode(text)
            if not self.goes.is_set():
                found.append(said(one.prompt_token_ids, ids[: self.left], key=one.key, finish_reason="abort"))
            else:
                stop = ids[-1] if ids[-1] in one.stop_token_ids else None
                string = next((string for string in one.stop if text.endswith(string)), None)
                found.append(said(one.prompt_token_ids, ids, key=one.key, stop_token_id=stop, stop_string=string))
        return found


class Served:
    """Holds a gateway that listens in this event loop."""

    def __init__(self, url: str, gateway: AgentGateway, sampler: Scripted, listener: GatewayListener):
        self.url, self.gateway, self.sampler, self.listener = url, gateway, sampler, listener

    def open(self, limits=None, *, name: str | None = None) -> OpenedSession:
        """Open a session."""
        return self.gateway.open("g", limits, name=name)


@functools.cache
def _renderer(folder: Path) -> tuple[ChatRenderer, TextCodec]:
    return ChatRenderer(folder, {"name": "qwen3"}), TextCodec(folder, ())


@contextlib.asynccontextmanager
async def served(folder: Path, *texts: str, kept: Path | None = None, longest: int = 1 << 20, **more):
    """Serve the renderer of Qwen3. kept: a folder for journals. longest: most bytes of a body."""
    renderer, codec = _renderer(folder)
    sampler = Scripted(codec, *texts, **more)
    turns = TurnSampler(sampler, SamplerBounds(LONGEST, VOCAB, True, True, 48), seed=1)
    journals = None if kept is None else SessionJournals(kept)
    gateway = AgentGateway("talker", renderer, codec, turns, SessionBook(99, WIDE), journals, ())
    with tempfile.TemporaryDirectory() as nothing:
        keeper = SessionKeeper(Path(nothing), TraceStore(Path(nothing)))
        app = GatewayApp(gateway, keeper, OWNER, longest=longest)
        socket = bound_socket(None, 0)
        listener = GatewayListener(app.asgi, socket)
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        serving = asyncio.create_task(listener.serve())
        try:
            while not listener.listens:
                await asyncio.sleep(0.01)
            yield Served(url, gateway, sampler, listener)
        finally:
            listener.stop()
            await serving
