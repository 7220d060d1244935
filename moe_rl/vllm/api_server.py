"""Starts vLLM's own API server with a recorder, behind a gate that checks the run's token (gate.py).

One server is one replica of the weights, on as many GPUs as they need, of one node or several (nodes.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import psutil

import moe_rl
from moe_rl.disk import write_json
from moe_rl.errors import EngineError, SamplerGone
from moe_rl.parent import take_along
from moe_rl.trace.model_spec import routed_fingerprint
from moe_rl.vllm import arguments, nodes
from moe_rl.vllm.control import read_token
from moe_rl.vllm.gate import GATE, TOKEN_FILE
from moe_rl.vllm.nodes import Nodes
from moe_rl.vllm.process import Scratch, model_runner
from moe_rl.vllm.recording import Recording

# Time for answers in flight at shutdown. vLLM stops its engine first, so some of them are lost.
_LEAVE_SECONDS = 3
# vLLM's methods of speculative decoding whose drafts come from no model.
_NO_WEIGHTS = {"ngram", "[ngram]", "ngram_gpu", "suffix"}
# Arguments of vLLM that nobody may set: other listeners and authentication settings would bypass the gate, nodes have
# options of moe-rl serve, and a data-parallel rank belongs to its server.
_LISTENERS = ("host", "port", "uds", "api_key", "ssl_keyfile", "ssl_certfile", "grpc", "grpc_port", "root_path")
_NODES = ("headless", "nnodes", "node_rank", "master_addr", "master_port")
_RANKS = ("data_parallel_rank", "data_parallel_external_lb", "data_parallel_hybrid_lb")
_RESERVED = (*_LISTENERS, *_NODES, *_RANKS)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Describes how to start a server.

    Attributes:
        model: checkpoint folder; its weights are version 0.
        trace_root: folder of one or several trace stores.
        sizes: vLLM's arguments from a run's config; None without a config.
        further: command line for vLLM, which may override `sizes`.
        capture: as rollout.capture.
        model_fingerprint: "" accepts the fingerprint of any run.
        support, router_logits_fraction, head: as in recording.Recording.
        reads_text: load the tokenizer, for stop strings.
        host: None listens on this machine only.
        port: 0 for a free one.
        token_file: created if missing; None for a temporary file.
        ready_file: written when the server listens.
        nodes: the nodes of an engine that spans several, as this one sees them; only node 0 listens.
    """

    model: Path
    trace_root: Path
    sizes: Mapping[str, object] | None
    further: Sequence[str]
    capture: str
    model_fingerprint: str
    support: bool
    router_logits_fraction: float
    head: int
    reads_text: bool
    host: str | None
    port: int
    token_file: Path | None
    ready_file: Path | None
    nodes: Nodes | None = None


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        MoeRLError: the settings cannot be served.
        SamplerGone: the engine died. If another node of it did, the process ends with status 3.
    """
    with contextlib.ExitStack() as cleanup:
        _leave_on_signals(cleanup)
        scratch = Scratch()
        cleanup.callback(scratch.cleanup)
        _use_temporary(scratch.name, cleanup)
        if settings.nodes is not None and settings.nodes.rank > 0:
            _work(settings, settings.nodes, cleanup)
        token_file = (settings.token_file or Path(scratch.name) / "token").absolute()
        make_token(token_file)
        read_token(token_file)
        listener = cleanup.enter_context(bound_socket(settings.host, settings.port))
        _serve(settings, token_file, listener, cleanup)


def _leave_on_signals(cleanup: contextlib.ExitStack) -> None:
    """Make SIGTERM and SIGINT end this process and its children at once, until vLLM listens and handles both itself.

    An exception would be lost if the signal handler raised it while pyzmq polls, as during most of the start.
    """

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _leave(cleanup, 0))


def _leave(cleanup: contextlib.ExitStack, status: int, message: str = "") -> None:
    """End this process and its children at once."""
    if message:
        print(message, file=sys.stderr, flush=True)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    cleanup.close()
    os._exit(status)


def _use_temporary(folder: str, cleanup: contextlib.ExitStack) -> None:
    """Give vLLM its own temporary folder for sockets and files, removed with the server.

    The next server removes the folder of a killed one. torch's compile cache stays outside it, so that it is reused.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    cleanup.callback(setattr, tempfile, "tempdir", None)
    os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.tempdir = folder


def make_token(path: Path) -> None:
    """Write a new token to `path` unless the file exists. Readers see the whole token or no file."""
    if os.path.lexists(path):
        return
    try:
        with tempfile.NamedTemporaryFile("w", encoding="ascii", dir=path.parent, prefix=f".{path.name}-") as aside:
            aside.write(secrets.token_urlsafe(32) + "\n")
            aside.flush()
            with contextlib.suppress(FileExistsError):
                os.link(aside.name, path)
    except OSError as error:
        raise EngineError("The token cannot be written", where={"file": path}, got=error.strerror) from None


def bound_socket(host: str | None, port: int) -> socket.socket:
    """Return a bound socket; without a host it is reachable from this machine only."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or "127.0.0.1", port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise EngineError("The server cannot listen", where={"host": f"{host}:{port}"}, got=error) from None
    reached = str(address[0])
    if not ipaddress.ip_address(reached.partition("%")[0]).is_loopback:
        print(
            f"warning: {reached} can be reached from other machines, and the token and all tokens travel unencrypted",
            file=sys.stderr,
        )
    return listener


def url_of(address: str, port: int) -> str:
    """Return the URL of a numeric address."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _serve(settings: ServerSettings, token_file: Path, listener: socket.socket, cleanup: contextlib.ExitStack) -> None:
    os.environ[TOKEN_FILE] = str(token_file)
    # vLLM closes a connection after 5 s without a request. If its event loop stood still that long, a request may be on
    # its way, and the run would take the server for lost.
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "650")
    address, port = listener.getsockname()[:2]
    document = {
        "url": url_of(address, port),
        "pid": os.getpid(),
        "token_file": str(token_file),
        "trace_root": str(settings.trace_root.absolute()),
        "capture": settings.capture,
        "moe_rl": moe_rl.__version__,
    }
    parsed = _arguments(settings, {"host": address, "port": port})
    if settings.nodes is not None:
        link = nodes.gather(settings.nodes, vars(parsed), functools.partial(_leave, cleanup))
        cleanup.push(link.close)
    import uvloop

    uvloop.run(_run(parsed, listener, document, settings.ready_file))


def _work(settings: ServerSettings, node: Nodes, cleanup: contextlib.ExitStack) -> NoReturn:
    """Run the workers of a node other than node 0, until node 0 ends or a worker dies."""
    parsed = _arguments(settings, {})
    link = nodes.join(node, vars(parsed), functools.partial(_leave, cleanup))
    cleanup.push(link.close)
    print(f"node {node.rank} of {node.count} works for {node.address}:{node.port}", flush=True)
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER, headless=True
    )
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
    raise SamplerGone("a worker of this node died", got=f"the end of node {node.rank}")


def _arguments(settings: ServerSettings, address: Mapping[str, object]):
    """Prepare this process for vLLM, and return vLLM's arguments. address: host and port of its server."""
    arguments.refuse_wrong_vllm(settings.capture)
    take_along()
    os.environ |= model_runner(settings.capture)
    if settings.nodes is None:  # by default torch.distributed listens at the host name's address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    recording = Recording(
        str(settings.trace_root.absolute()),
        settings.model_fingerprint or routed_fingerprint(settings.model),
        support=settings.support,
        router_logits_fraction=settings.router_logits_fraction,
        head=settings.head,
    )
    fixed = arguments.fixed(
        settings.model, capture=settings.capture, recording=recording, reads_text=settings.reads_text
    ) | {
        **address,
        **(settings.nodes.arguments() if settings.nodes is not None else {}),
        # vLLM's routes with token ids in and out.
        "enable_scale_out": True,
        # Requests arrive over many connections; waiting ones start in the order of their numbers, not of arrival.
        "scheduling_policy": "priority",
        # The last middleware is the outermost.
        "middleware": [GATE],
    }
    share_given = any(
        argument.replace("_", "-").startswith("--gpu-memory-utilization") for argument in settings.further
    )
    sizes = (
        arguments.unsized(share_given=share_given) if settings.sizes is None else arguments.completed(settings.sizes)
    )
    return _vllm_arguments(fixed, sizes, settings.further)


def _vllm_arguments(fixed: Mapping[str, Any], sizes: Mapping[str, object], further: Sequence[str]):
    """Return the arguments of vLLM's server.

    Args:
        fixed: arguments that the command line may not change.
        sizes: arguments of the config, which the command line may override.
        further: the command line after "--".
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vLLM"))
    # With expert parallelism workers need only their own experts of an update, and keep no others until a layer is
    # complete. An event of a stream has 16 tokens, since each event costs the trainer 40 us.
    parser.set_defaults(**{"enable_expert_parallel": True, "stream_interval": 16, **sizes})
    parsed = parser.parse_args(list(further))
    if parsed.load_format == "dummy":  # nothing is read, and a run sends all weights before the server samples
        fixed = {name: value for name, value in fixed.items() if name != "load_format"}
        draft = parsed.speculative_config
        if draft and not _NO_WEIGHTS & {draft.get("method"), draft.get("model")}:
            raise EngineError(
                "A run sends weights to the model, and none to its draft",
                where={"option": "--load-format"},
                got=f"dummy, with the draft {draft}",
                do="leave it out: the draft is then read from its checkpoint",
            )
    for name in (*fixed, *_RESERVED):
        if (value := getattr(parsed, name)) != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise EngineError("An argument of vLLM is reserved", where={"option": option}, got=value)
    native = "enable_return_routed_experts" in fixed
    synchronous = arguments.synchronous(vars(parsed), native=native)
    workers = parsed.tensor_parallel_size * parsed.pipeline_parallel_size
    if workers % fixed.get("nnodes", 1):
        raise EngineError(
            "Nodes of an engine have equally many workers",
            where={"option": "--nnodes"},
            got=f"{fixed['nnodes']} nodes for {workers} workers",
            do="change it or --tensor-parallel-size, with a config cluster.gpus_per_engine",
        )
    overwrites = "A micro-batch would overwrite the routes of the one before it"
    for wrong, name, what, do in (
        (
            parsed.data_parallel_size > 1 and not native,
            "data_parallel_size",
            "Data-parallel ranks see each other's tokens, and only vLLM's own capture tells them apart",
            "add --capture native, or start that many servers and name each in rollout.servers",
        ),
        (
            parsed.pipeline_parallel_size > 1 and native,
            "pipeline_parallel_size",
            "vLLM's own capture records no pipeline stages",
            "leave it out, or choose --capture patch",
        ),
        (
            parsed.enable_prefix_caching is False and native,
            "enable_prefix_caching",
            "vLLM's own capture needs the prefix cache",
            "leave --no-enable-prefix-caching out, or choose --capture patch",
        ),
        (
            bool(parsed.async_scheduling and synchronous),
            "async_scheduling",
            "With speculative decoding an asynchronous scheduler counts drafts before it knows which are accepted",
            "leave it out",
        ),
        (parsed.enable_dbo, "enable_dbo", overwrites, "leave it out"),
        (parsed.ubatch_size > 1, "ubatch_size", overwrites, "leave it out"),
        (
            parsed.enable_eplb,
            "enable_eplb",
            "vLLM loads weight updates without considering experts that its load balancer has moved",
            "leave it out",
        ),
    ):
        if wrong:
            option = f"--{name.replace('_', '-')}"
            raise EngineError(what, where={"option": option}, got=getattr(parsed, name), do=do)
    vars(parsed).update({**fixed, **synchronous})
    validate_parsed_serve_args(parsed)
    return parsed


async def _run(parsed, listener: socket.socket, document: dict[str, object], ready_file: Path | None) -> None:
    import vllm
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client

    # Without a tokenizer vLLM tries a chat template in vain, and would log a traceback.
    logging.getLogger("vllm.renderers.base").addFilter(lambda line: "warmup failed" not in str(line.msg))

    def listens() -> bool:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    dead: list[bool] = []
    line = "serving on {url}, token in {token_file}, routes in {trace_root}"
    async with announced(listens, line, document | {"vllm": vllm.__version__}, ready_file):
        async with build_async_engine_client(parsed) as engine:
            if document["capture"] == "native":
                from moe_rl.vllm.native_source import attach

                await attach(engine, msgspec.convert(parsed.additional_config["moe_rl"], Recording))
            elif not any(await engine.collective_rpc("moe_rl_records")):
                raise EngineError("vLLM did not attach the recorder", got=f"capture {document['capture']}")
            await engine.update_weight_version("0")
            # A signal makes vLLM shut its engine down; otherwise that happens only after the engine's death.
            shutdown = engine.shutdown

            def end_engine(**given: Any) -> None:
                dead.append(engine.errored)
                shutdown(**given)

            engine.shutdown = end_engine
            url = document["url"]
            end = await build_and_serve(engine, url, listener, parsed, timeout_graceful_shutdown=_LEAVE_SECONDS)
        await end
    if dead[0]:
        raise SamplerGone("vLLM's engine died", where={"url": document["url"]})


@contextlib.asynccontextmanager
async def announced(
    listens: Callable[[], bool], line: str, document: Mapping[str, object], ready_file: Path | None
) -> AsyncIterator[None]:
    """Serve in the body. Once the server listens, write `document` as JSON to `ready_file`, and print `line` with its
    values. If that fails, the server ends as SIGTERM ends it, and the error is raised."""

    async def announce() -> None:
        while not listens():
            await asyncio.sleep(0.02)
        try:
            if ready_file is not None:
                write_json(ready_file, document)
            print(line.format_map(document), flush=True)
        except Exception:
            signal.raise_signal(signal.SIGTERM)  # whoever waits for the announcement would wait for ever
            raise

    announcement = asyncio.create_task(announce())
    try:
        yield
    finally:
        announcement.cancel()
    if announcement.done():
        announcement.result()
