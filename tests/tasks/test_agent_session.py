"""Tests what an environment sees of the model: its answers, refusals, and a gateway that is away."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from moe_rl.tasks.environments.agent_session import AgentSession, ChatError, SessionAccess


@pytest.mark.parametrize(
    ("sent", "error", "said"),
    [
        (b"", ConnectionError, "0 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", ConnectionError, "2 bytes"),
        (b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\nno", ChatError, "status 400, unknown: no"),
        (
            b'HTTP/1.1 429 X\r\nContent-Length: 40\r\n\r\n{"error": {"code": "c", "message": "m"}}',
            ChatError,
            "429, c: m",
        ),
    ],
)
def test_an_answer_that_is_no_message_is_told_by_what_came(sent, error, said):
    async def asked() -> None:
        async def answer(reader, writer) -> None:
            await reader.readuntil(b"}")
            writer.write(sent)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            session = AgentSession(SessionAccess("s0", url, f"{url}/v1", "k"), 5)
            with pytest.raises(error, match=said):
                await session.chat([], temperature=0)

    asyncio.run(asked())


def test_a_gateway_that_is_away_is_an_error_of_the_system():
    nowhere = SessionAccess("s0", "http://127.0.0.1:9/s/k", "http://127.0.0.1:9/s/k/v1", "k")
    with pytest.raises(OSError):
        asyncio.run(AgentSession(nowhere, 5).chat([]))


def test_a_session_is_cheap_to_import():
    """Each episode pays for it: a library for HTTP took most of the time of a short one."""
    asked = "import sys; import moe_rl.tasks.environments.episode_worker; print('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout == "False\n"
