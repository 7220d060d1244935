"""vLLM's own API server, recording: with a gate in front that wants the run's token, and the recorder's control routes.

    python tools/serve_vllm.py --model DIR --trace-root DIR [--port N] ... [-- any further argument of vLLM's server]

    client -- Bearer token --> Gate -- /moe_rl/* --> RecorderControl in the workers ----> trace store
                                    -- the rest ---> vLLM's routes: /inference/v1/generate takes and gives token ids

vLLM's --api-key leaves many of its control routes open; the gate lets nothing through but GET /health.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocketClose

import moe_rl
from moe_rl.config.hf import read_model
from moe_rl.errors import EngineError, MoeRLError, describe
from moe_rl.rollout import patches
from moe_rl.rollout.recording import Recording
from moe_rl.rollout.server import Publish, Served, Sink, WeightVersion, read_token

GATE = f"{__name__}.Gate"
TOKEN_FILE = "MOE_RL_TOKEN_FILE"

_SMALL_BODY = 1 << 16
_PUBLISH_BODY = 1 << 28
# How long a shard that is published or abandoned waits for the requests that may still add to it: those that ended are
# told to the workers one step later, those whose client is gone are aborted then.
_SETTLE_SECONDS = 10.0
_SETTLE_POLL_SECONDS = 0.005
# For answers under way when the server is ended. vLLM stops its engine first: some of them never come.
_LEAVE_SECONDS = 3


class Refused(Exception):
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

    async def __call__(self, scope, receive, send) -> None:
        kind = scope["type"]
        free = kind == "lifespan" or (kind == "http" and (scope["method"], scope["path"]) == ("GET", "/health"))
        if not free and not self._admits(scope["headers"]):
            refusal = WebSocketClose(1008) if kind == "websocket" else _error(401, "this server wants the run's token")
            await refusal(scope, receive, send)
        elif kind == "http" and scope["path"].startswith("/moe_rl/"):
            await (await _control(Request(scope, receive)))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admits(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token, self._token)


async def _control(request: Request) -> Response:
    """Answer one call of the recorder's own routes."""
    route = _ROUTES.get(request.url.path)
    engine = request.app.state.engine_client
    try:
        if route is None:
            raise Refused(404, f"no such route: {request.url.path}")
        method, kind, longest, answer = route
        if request.method != method:
            raise Refused(405, f"{request.url.path} wants {method}")
        message = None
        if kind is not None:
            message = msgspec.json.decode(await _body(request, longest), type=kind)
        return Response(msgspec.json.encode(await answer(engine, message)), media_type="application/json")
    except Refused as refusal:
        return _error(refusal.status, str(refusal))
    except msgspec.DecodeError as error:
        return _error(400, f"{request.url.path}: {error}")
    except ClientDisconnect:
        return _error(400, "the client is gone")
    except Exception as error:
        # Of the engine: it may be dead, which vLLM notices and logs itself.
        return _error(503 if engine.errored else 500, f"{type(error).__name__}: {error}")


def _error(status: int, message: str) -> JSONResponse:
    # What is left of a body that was not read would be taken for the next request.
    headers = {"Connection": "close"} if status == 413 else {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": message}, status, headers)


async def _body(request: Request, longest: int) -> bytearray:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > longest:
            raise Refused(413, f"a body of more than {longest} bytes")
    return body


async def _call(engine, method: str, *args) -> list:
    """What the recording workers answer to a method of RecorderControl. Raises Refused when one of them does."""
    answers = await engine.collective_rpc("moe_rl_answer", args=(method, *args))
    for status, name in ((400, "refused"), (500, "failed")):
        if errors := [answer[name] for answer in answers if name in answer]:
            raise Refused(status, errors[0])
    return [answer["value"] for answer in answers if answer["value"] is not None]


async def _settle(engine, sink: str) -> None:
    """Wait until no request can add to a shard any more."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while unfinished := [key for keys in await _call(engine, "moe_rl_unfinished", sink) for key in keys]:
        if time.monotonic() > deadline:
            got = f"{len(unfinished)} requests that are still sampled, as {unfinished[0]}"
            raise Refused(409, describe("A shard is not finished", where=f"shard {sink}", got=got, do="abort them"))
        await asyncio.sleep(_SETTLE_POLL_SECONDS)


async def _open(engine, message: Sink) -> None:
    await _call(engine, "moe_rl_open", message.sink)


async def _publish(engine, message: Publish) -> dict:
    from moe_rl.rollout.source import join_parts

    if unknown := set(message.aborted) - message.sequences.keys():
        raise Refused(400, f"aborted: {min(unknown)!r} is none of the sequences")
    await _settle(engine, message.sink)
    answers = await _call(engine, "moe_rl_publish", message.sink, message.sequences, message.aborted)
    return join_parts(message.sequences, answers)


async def _abandon(engine, message: Sink) -> None:
    await _settle(engine, message.sink)
    await _call(engine, "moe_rl_abandon", message.sink)


async def _weight_version(engine, message: WeightVersion) -> None:
    await _call(engine, "moe_rl_set_weight_version", message.version)
    await engine.update_weight_version(str(message.version))


async def _stats(engine, _) -> list[dict[str, int]]:
    return await _call(engine, "moe_rl_stats")


async def _recording(engine, _) -> Served:
    import vllm

    spec = (await _call(engine, "moe_rl_spec"))[0]
    return Served(
        moe_rl=moe_rl.__version__,
        vllm=vllm.__version__,
        trace_root=engine.vllm_config.additional_config["moe_rl"]["trace_root"],
        vocab_size=engine.vllm_config.model_config.get_vocab_size(),
        max_model_len=engine.vllm_config.model_config.max_model_len,
        weight_version=int(await engine.get_weight_version()),
        **spec,
    )


# Path: method, body, its longest in bytes, who answers.
_ROUTES = {
    "/moe_rl/open": ("POST", Sink, _SMALL_BODY, _open),
    "/moe_rl/publish": ("POST", Publish, _PUBLISH_BODY, _publish),
    "/moe_rl/abandon": ("POST", Sink, _SMALL_BODY, _abandon),
    "/moe_rl/weight_version": ("POST", WeightVersion, _SMALL_BODY, _weight_version),
    "/moe_rl/stats": ("GET", None, 0, _stats),
    "/moe_rl/recording": ("GET", None, 0, _recording),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Exit status 0 then, 2 for what cannot be served."""
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:cut])
    with contextlib.ExitStack() as cleanup:
        _leave_on_signals(cleanup)
        if options.json is not None:
            options.json.unlink(missing_ok=True)  # of a server that is gone
        try:
            if options.token_file is None:
                folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="moe_rl-server-"))
                options.token_file = Path(folder) / "token"
            _make_token(options.token_file)
            read_token(options.token_file)
            listener = cleanup.enter_context(_listener(options.host, options.port))
            _serve(options, argv[cut + 1 :], listener)
        except MoeRLError as error:
            print(error, file=sys.stderr)
            return 2
    return 0


def _leave_on_signals(cleanup: contextlib.ExitStack) -> None:
    """Have SIGTERM and SIGINT end this process and all below it at once, until vLLM listens and takes both over.

    Not by an exception: one that a signal raises while pyzmq polls, as it does for most of the start, is lost.
    """

    def leave(*_) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        cleanup.close()
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint")
    parser.add_argument("--trace-root", type=Path, required=True, metavar="DIR", help="trace store that is written")
    parser.add_argument("--model-fingerprint", metavar="TEXT", help="in the trace (default: the one a run has)")
    parser.add_argument("--capture", choices=("patch", "worker"), default="patch", help="who attaches the recorder")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="made, mode 600, if missing (default: a temporary one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="written when the server listens: its url, pid, ...")
    return parser


def _make_token(path: Path) -> None:
    """Write a new token to `path` unless the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise EngineError(describe("The token cannot be written", where=str(path), got=error.strerror)) from None
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32) + "\n")


def _listener(host: str | None, port: int) -> socket.socket:
    """A bound socket; whoever did not name an address gets one that only this machine reaches."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or "127.0.0.1", port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise EngineError(describe("The server cannot listen", where=f"host {host}, port {port}", got=error)) from None
    if not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        print(
            f"warning: {address[0]} is reached from other machines, and the token and all tokens travel unencrypted",
            file=sys.stderr,
        )
    return listener


def _serve(options: argparse.Namespace, further: Sequence[str], listener: socket.socket) -> None:
    faults = patches.problems(capture=options.capture)
    if faults:
        raise EngineError("\n".join(faults))
    os.environ |= {
        # The recorder knows the first model runner only.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        TOKEN_FILE: str(options.token_file.absolute()),
    }
    # Else torch.distributed listens where the host's name leads. Who serves with several machines sets it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address, port = listener.getsockname()[:2]
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    fingerprint = options.model_fingerprint or read_model(options.model).fingerprint
    recording = Recording(str(options.trace_root.absolute()), fingerprint)
    # Imported here: who mistyped should not wait for it.
    import uvloop

    arguments = _vllm_arguments(options, recording, further, address, port)
    uvloop.run(_run(arguments, options, listener, url))


def _vllm_arguments(options: argparse.Namespace, recording: Recording, further: Sequence[str], address: str, port: int):
    """The arguments of vLLM's server: what was given behind "--", and ours, which it may not contradict."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from moe_rl.rollout.worker import CONTROL, WORKER

    ours = {
        "model": str(options.model.absolute()),
        "host": address,
        "port": port,
        "skip_tokenizer_init": True,
        # Else vLLM would take stop tokens and sampling parameters from the checkpoint.
        "generation_config": "vllm",
        "enable_scale_out": True,
        # Of the distribution the token was drawn from: after the temperature, not before.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": CONTROL,
        "additional_config": {"moe_rl": msgspec.to_builtins(recording)},
        # The last one is the outermost.
        "middleware": [GATE],
    }
    if options.capture == "worker":
        ours["worker_cls"] = WORKER
    if current_platform.is_cpu() and patches.inspect().summary != "patched":
        # Without patch 0003 a request with a seed that is prefilled in parts kills vLLM on a CPU.
        ours["enable_chunked_prefill"] = False
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vLLM"))
    arguments = parser.parse_args(list(further))
    # Other listeners and other doors would be beside the gate.
    for name in (*ours, "uds", "api_key", "ssl_keyfile", "ssl_certfile", "grpc", "grpc_port", "headless", "root_path"):
        if (given := getattr(arguments, name)) != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise EngineError(describe("An argument of vLLM is not free here", where=option, got=given))
    vars(arguments).update(ours)
    validate_parsed_serve_args(arguments)
    return arguments


async def _run(arguments, options: argparse.Namespace, listener: socket.socket, url: str) -> None:
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client

    async with build_async_engine_client(arguments) as engine:
        if not any(await engine.collective_rpc("moe_rl_records")):
            raise EngineError(describe("vLLM did not attach the recorder", got=f"capture {options.capture}"))
        await engine.update_weight_version("0")
        announcement = asyncio.create_task(_announce(options, listener, url))
        try:
            end = await build_and_serve(engine, url, listener, arguments, timeout_graceful_shutdown=_LEAVE_SECONDS)
        finally:
            announcement.cancel()
    await end


async def _announce(options: argparse.Namespace, listener: socket.socket, url: str) -> None:
    """Say that the server listens, once it does."""
    import vllm

    while not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        await asyncio.sleep(0.05)
    document = {
        "url": url,
        "pid": os.getpid(),
        "token_file": str(options.token_file.absolute()),
        "trace_root": str(options.trace_root.absolute()),
        "capture": options.capture,
        "vllm": vllm.__version__,
        "moe_rl": moe_rl.__version__,
    }
    if options.json is not None:
        unfinished = options.json.with_name(f".{options.json.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(options.json)
    print(f"serving on {url}, token in {options.token_file}, routes in {options.trace_root}", flush=True)
