"""Start vLLM's own API server with a recorder, behind a gate that wants the run's token (gate.py).

    moe-rl serve --config FILE [a.b=c ...] [--host ADDRESS] [--port N] [-- further arguments of vLLM's]
    moe-rl serve --model DIR --trace-root DIR ... [-- ...]

With --config it serves what that run wants of its servers (rollout.servers): its model, precision, lengths, capture and
token, and any store below run.runs_dir. One server is one replica of the weights, on as many GPUs as they take.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

import moe_rl
from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.errors import EngineError, MoeRLError, describe
from moe_rl.models.hf import read_model
from moe_rl.vllm import arguments
from moe_rl.vllm.control import read_token
from moe_rl.vllm.gate import GATE, TOKEN_FILE
from moe_rl.vllm.process import Scratch, model_runner
from moe_rl.vllm.recording import Recording

# For answers under way when the server is ended. vLLM stops its engine first: some of them never come.
_LEAVE_SECONDS = 3


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0 then, 2 for what cannot be served.

    options: as parsed, and `further`, what stood behind "--".
    """
    with contextlib.ExitStack() as cleanup:
        _leave_on_signals(cleanup)
        if options.json is not None:
            options.json.unlink(missing_ok=True)  # of a server that is gone
        try:
            sizes = _take_config(options)
            scratch = Scratch()
            cleanup.callback(scratch.cleanup)
            _use_temporary(scratch.name, cleanup)
            options.token_file = options.token_file or Path(scratch.name) / "token"
            _make_token(options.token_file)
            read_token(options.token_file)
            listener = cleanup.enter_context(_listener(options.host, options.port))
            _serve(options, sizes, options.further, listener)
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


def _use_temporary(folder: str, cleanup: contextlib.ExitStack) -> None:
    """vLLM leaves sockets and files in the temporary folder. In one of their own they go with the server; those of a
    killed one are removed by the next. What torch compiles stays where it is found again."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    cleanup.callback(setattr, tempfile, "tempdir", None)
    os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.tempdir = folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe-rl serve`. What stands behind "--" is for vLLM, and not read here."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", type=Path, metavar="FILE", help="of the run: all but the address follows from it")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="replace single values of the config")
    parser.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint")
    parser.add_argument("--trace-root", type=Path, metavar="DIR", help="trace store, or a folder of some")
    parser.add_argument("--model-fingerprint", metavar="TEXT", help="in the trace (default: the one a run has)")
    parser.add_argument("--capture", choices=("patch", "worker"), help="who attaches the recorder (default: patch)")
    parser.add_argument("--support", action="store_true", help="keep sampling masks (rollout.keep_sampling_mask)")
    parser.add_argument(
        "--router-logits-fraction", type=float, default=0.0, metavar="X", help="of tokens whose router logits are kept"
    )
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="made, mode 600, if missing (default: a temporary one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="written when the server listens: its url, pid, ...")


def _take_config(options: argparse.Namespace) -> dict[str, object]:
    """Fill in the options that a run's config decides; vLLM's arguments that it does, without one none."""
    own = {name: getattr(options, name) for name in ("model", "trace_root", "capture", "model_fingerprint")}
    if options.config is None:
        if options.overrides or options.model is None or options.trace_root is None:
            got = " ".join(options.overrides) or "neither --config nor both --model and --trace-root"
            raise EngineError(describe("It is not said what to serve", got=got, do="give --config FILE"))
        options.capture = options.capture or "patch"
        return {}
    if given := [f"--{name.replace('_', '-')}" for name, value in own.items() if value is not None]:
        raise EngineError(describe("--config says this already", got=", ".join(given), do="leave it out"))
    config = load_config(options.config, options.overrides)
    if config.rollout.capture == "native":
        raise EngineError(describe("A server cannot record by vLLM's own capture", got="rollout.capture native"))
    options.model, options.trace_root, options.capture = config.model.path, config.run.runs_dir, config.rollout.capture
    options.token_file = options.token_file or config.rollout.token_file
    options.support = config.rollout.keep_sampling_mask
    options.router_logits_fraction = config.rollout.router_logits_fraction
    return engine_arguments(config)


def engine_arguments(config: Config) -> dict[str, object]:
    """vLLM's arguments that this run's config decides for its servers."""
    rollout = config.rollout
    return arguments.sized(
        dtype=rollout.dtype,
        seed=config.run.seed,
        max_model_len=rollout.max_prompt_tokens + rollout.max_completion_tokens,
        max_concurrent=rollout.max_concurrent,
        kv_cache_mib=rollout.kv_cache_mib,
        gpus=config.cluster.gpus_per_engine if config.cluster is not None else 1,
    )


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


def _serve(
    options: argparse.Namespace, sizes: Mapping[str, object], further: Sequence[str], listener: socket.socket
) -> None:
    arguments.refuse_wrong_vllm(options.capture)
    os.environ |= model_runner(options.capture) | {TOKEN_FILE: str(options.token_file.absolute())}
    # Else torch.distributed listens where the host's name leads. Who serves with several machines sets it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address, port = listener.getsockname()[:2]
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    fingerprint = options.model_fingerprint or read_model(options.model).fingerprint
    recording = Recording(
        str(options.trace_root.absolute()),
        fingerprint,
        support=options.support,
        router_logits_fraction=options.router_logits_fraction,
    )
    # Imported here: who mistyped should not wait for it.
    import uvloop

    ours = arguments.fixed(options.model, capture=options.capture, recording=recording) | {
        "host": address,
        "port": port,
        # vLLM's routes that take and give token ids.
        "enable_scale_out": True,
        # Requests come over many connections: those that wait begin in the order of their numbers, not as they came.
        "scheduling_policy": "priority",
        # The last one is the outermost.
        "middleware": [GATE],
    }
    uvloop.run(_run(_vllm_arguments(ours, sizes, further), options, listener, url))


def _vllm_arguments(ours: Mapping[str, object], sizes: Mapping[str, object], further: Sequence[str]):
    """The arguments of vLLM's server. sizes: of the config, which what was given behind "--" (further) may replace.
    ours: which it may not."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vLLM"))
    parser.set_defaults(**sizes)
    given = parser.parse_args(list(further))
    # Other listeners and other doors would be beside the gate.
    for name in (*ours, "uds", "api_key", "ssl_keyfile", "ssl_certfile", "grpc", "grpc_port", "headless", "root_path"):
        if (value := getattr(given, name)) != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise EngineError(describe("An argument of vLLM is not free here", where=option, got=value))
    if given.data_parallel_size > 1:
        raise EngineError(
            describe(
                "A server is one replica of the weights: data-parallel engines see each other's tokens",
                where="--data-parallel-size",
                got=given.data_parallel_size,
                expected=1,
                do="start so many servers, and name each in rollout.servers",
            )
        )
    if given.enable_eplb:
        raise EngineError(
            describe(
                "A server takes new weights, and vLLM loads them as if its load balancer had moved no expert",
                where="--enable-eplb",
                do="leave it out",
            )
        )
    vars(given).update(ours)
    validate_parsed_serve_args(given)
    return given


async def _run(given, options: argparse.Namespace, listener: socket.socket, url: str) -> None:
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client

    async with build_async_engine_client(given) as engine:
        if not any(await engine.collective_rpc("moe_rl_records")):
            raise EngineError(describe("vLLM did not attach the recorder", got=f"capture {options.capture}"))
        await engine.update_weight_version("0")
        announcement = asyncio.create_task(_announce(options, listener, url))
        try:
            end = await build_and_serve(engine, url, listener, given, timeout_graceful_shutdown=_LEAVE_SECONDS)
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
