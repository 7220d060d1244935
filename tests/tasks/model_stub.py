"""Stands in for a gateway in tests that need no model: one session, and messages that a function makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moe_rl.tasks.environments.agent_session import SessionAccess

Says = Callable[[dict[str, Any]], dict[str, Any] | tuple[int, dict[str, Any]]]
"""Returns the assistant's message for the body of a request, or a status and a body."""


class ModelStub:
    """Listens while it is open.

    Attributes:
        bodies: of the chats, in their order.
        keys: the API keys that came with them.
        finishes: status and body of each answer to the owner who finishes the session; the last one stays.
    """

    def __init__(self, says: Says):
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.finishes: list[tuple[int, dict[str, Any]]] = [(200, {})]
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/s/key/v1/chat/completions":
                    stub.bodies.append(body)
                    stub.keys.append(self.headers["Authorization"])
                    found = says(body)
                elif self.path == "/sessions":
                    found = 200, {"session": "s0", "key": "key", "url": url, "base_url": f"{url}/v1"}
                else:
                    assert self.path == "/sessions/s0/finish"
                    found = stub.finishes.pop(0) if len(stub.finishes) > 1 else stub.finishes[0]
                status, reply = found if isinstance(found, tuple) else (200, _reply(found))
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        url = f"{self.url}/s/key"
        self.access = SessionAccess("s0", url, f"{url}/v1", "key", turns=5, tokens=100)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _reply(message: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": None} | message, "finish_reason": "stop"}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
