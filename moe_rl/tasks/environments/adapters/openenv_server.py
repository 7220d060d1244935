"""Plays an environment on an OpenEnv server, over its client protocol.

    GET  /schema   the fields of an action
    WS   /ws       one episode: {"type": "reset" | "step" | "close", "data": {...}} there, {"type": "observation",
                   "data": {"observation", "reward", "done"}} or {"type": "error", "data": {"message", "code"}} back

The server's routes POST /reset and /step are not used: each call gets its own environment, so they cannot run an
episode of several steps.

A row has

    url         URL of the server, such as http://127.0.0.1:8000
    reset       arguments of reset, such as {"seed": 3} (default none)
    prompt      first message to the model (default: the fields of an action, and to answer with one as JSON)
    sampling    fields of each request, such as max_tokens (default none)
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from moe_rl.errors import EngineError
from moe_rl.tasks.environments.adapters import missing
from moe_rl.tasks.environments.agent_session import AgentSession, ChatError

try:
    import httpx
    from websockets.asyncio.client import ClientConnection, connect
except ImportError as error:
    raise missing("openenv", error) from error

_SCHEMA_SECONDS = 30.0
_LONGEST_ANSWER = 100 << 20
# Action types of environments whose steps are calls of MCP tools.
_OF_TOOLS = {"Action", "CallToolAction", "ListToolsAction"}


class _RefusedAction(Exception):
    """An action that the environment does not accept. The text is for the model."""


async def run(session: AgentSession, row: dict[str, Any]) -> list[float]:
    """Return the reward of each step, one for each turn of the model; 0 for an action that was refused."""
    url = row["url"].rstrip("/")
    schema = await _action_schema(url)
    messages = [{"role": "system", "content": row.get("prompt") or _prompt(schema)}]
    rewards: list[float] = []
    address = urlsplit(url)._replace(scheme="wss" if url.startswith("https") else "ws").geturl()
    # The time limit of the episode is the only one. No proxy is used.
    async with connect(f"{address}/ws", max_size=_LONGEST_ANSWER, open_timeout=None, proxy=None) as server:
        result = await _asked(server, url, "reset", row.get("reset", {}))
        while not result.get("done"):
            messages.append({"role": "user", "content": json.dumps(result["observation"], ensure_ascii=False)})
            try:
                reply = await session.chat(messages, **row.get("sampling", {}))
            except ChatError as error:
                if error.code in ("session_limit", "context_length_exceeded"):
                    break
                raise
            messages.append(reply)
            try:
                result = await _asked(server, url, "step", _action(reply["content"] or "", schema))
            except _RefusedAction as error:
                result = {"observation": {"error": str(error)}, "reward": 0.0}
            rewards.append(float(result.get("reward") or 0.0))
        await server.send(json.dumps({"type": "close"}))
    return rewards


async def _action_schema(url: str) -> dict[str, Any]:
    """Return the JSON schema of the server's actions."""
    async with httpx.AsyncClient(timeout=_SCHEMA_SECONDS, trust_env=False) as client:
        answer = await client.get(f"{url}/schema")
    if answer.status_code != 200:
        raise EngineError(
            "this is not an OpenEnv server",
            where={"url": f"{url}/schema"},
            got=f"status {answer.status_code}: {answer.text[:200]}",
            expected="the schema of its actions",
        )
    schema: dict[str, Any] = answer.json()["action"]
    if schema.get("title") in _OF_TOOLS:
        raise EngineError(
            "environments whose actions are calls of MCP tools are not supported",
            where={"url": url},
            got=schema["title"],
            expected="actions with their own fields",
        )
    return schema


def _prompt(schema: dict[str, Any]) -> str:
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    wanted = {"properties": fields, "required": schema.get("required", [])}
    return f"Answer each observation with one action, a JSON object of this schema: {json.dumps(wanted)}"


def _action(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the model's action: a JSON object, or the value of the only required field of an action.

    Raises:
        _RefusedAction: it is neither.
    """
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text.strip("`").removeprefix("json").strip()
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if isinstance(value, dict):
        return value
    required = schema.get("required", [])
    if len(required) != 1:
        raise _RefusedAction("this is no JSON object")
    return {required[0]: value}


async def _asked(server: ClientConnection, url: str, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a message.

    Raises:
        _RefusedAction: the environment does not accept the action.
        EngineError: the server failed.
    """
    await server.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(await server.recv())
    payload: dict[str, Any] = answer["data"]
    if answer["type"] == "observation":
        return payload
    if kind == "step" and payload.get("code") == "VALIDATION_ERROR":
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in payload.get("errors", [])]
        raise _RefusedAction("; ".join(faults) or payload["message"])
    raise EngineError(f"an OpenEnv server failed at {kind}", where={"url": url}, got=json.dumps(payload)[:500])
