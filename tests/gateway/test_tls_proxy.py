"""Tests clients that reach the gateway through a TLS proxy, with the addresses that docs/howto/gateway.md names."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from contextlib import asynccontextmanager, suppress

import anthropic
import openai
import pytest

from tests.gateway.conftest import chat_tokenizer
from tests.gateway.scripted import served
from tests.gateway.test_delivery import HI, ONE, TWO, quiet

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
NEW = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"


@asynccontextmanager
async def tls_proxy(folder, url: str):
    """Pass each connection on, as stunnel does. Yields the proxy's address, and a context that trusts it."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    more = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *NEW.split(), *more], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def pump(source, target) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def relay(reader, writer) -> None:
        theirs, mine = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        await asyncio.gather(pump(reader, mine), pump(theirs, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"https://localhost:{port}", ssl.create_default_context(cafile=certificate)
    finally:
        server.close()


def test_both_packages_speak_and_stream_and_hang_up_through_a_tls_proxy(tmp_path):
    chat_tokenizer(tmp_path)

    async def run():
        async with served(tmp_path, ONE, TWO) as running, tls_proxy(tmp_path, running.url) as (proxy, trust):
            opened = running.open()
            http = openai.DefaultAsyncHttpxClient(verify=trust, trust_env=False)
            own = openai.AsyncOpenAI(base_url=f"{proxy}/s/{opened.key}/v1", api_key="not needed", http_client=http)
            told = [(await own.chat.completions.create(**HI)).choices[0].message.content]
            parts = [part async for part in await own.chat.completions.create(**HI, stream=True)]
            told.append("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
            http = anthropic.DefaultAsyncHttpxClient(verify=trust, trust_env=False)
            other = anthropic.AsyncAnthropic(base_url=f"{proxy}/s/{opened.key}", api_key="x", http_client=http)
            told.append((await other.messages.create(**HI)).content[0].text)
            async with other.messages.stream(**HI) as stream:
                told.append("".join([text async for text in stream.text_stream]))
            assert told == ["hello", "you", "you", "you"] and len(opened.session.received) == 4
            running.sampler.goes.clear()
            asking = asyncio.create_task(own.chat.completions.create(**HI | {"max_tokens": 8}))
            while len(running.sampler.asked) < 5:
                await asyncio.sleep(0.01)
            asking.cancel()
            await quiet(opened.session)
            assert running.gateway.counts["left"] == 1
            for client in (own, other):
                await client.close()

    asyncio.run(run())
