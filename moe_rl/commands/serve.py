"""Starts vLLM's own API server with a recorder, behind a gate that requires the run's token, or a gateway for agents.

    moe-rl serve --config FILE [a.b=c ...] [--host ADDRESS] [--port N] [-- more vLLM arguments]
    moe-rl serve --model DIR --trace-root DIR ... [-- ...]
    moe-rl serve ... --nnodes N --node-rank R --master-addr A
    moe-rl serve --gateway --config FILE [a.b=c ...] [--host ADDRESS] [--port N]
    moe-rl serve --gateway --resume DIR [a.b=c ...] [--host ADDRESS] [--port N]

With --config the server follows the run (rollout.servers): its model, precision, lengths, capture and token, and any
trace store below run.runs_dir. One server holds all weights, on as many GPUs as they need. If a node has too few, the
same command on each of N nodes, with its own --node-rank, makes them one engine. Node 0 serves, at address A.

With --gateway it speaks OpenAI's and Anthropic's APIs to agents, over the config's servers, or its own engine if there
are none. It keeps sessions and routes in a new folder below run.runs_dir. With --resume it continues in the folder of
an earlier gateway, with the sessions that were open when that gateway was killed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from moe_rl.config.check import refuse
from moe_rl.config.load import load_config
from moe_rl.config.passed_on import passed_problems
from moe_rl.config.schema import Config
from moe_rl.errors import ConfigError, EngineError, MoeRLError, SamplerGone
from moe_rl.vllm.api_server import ServerSettings, serve
from moe_rl.vllm.arguments import sized
from moe_rl.vllm.nodes import PORT, Nodes

# Options whose values follow from --config.
_OF_THE_RUN = ("model", "trace_root", "capture", "model_fingerprint")
_OF_NODES = ("nnodes", "node_rank", "master_addr", "master_port")
_RECORDED = ("support", "router_logits_fraction", "head", "reads_text")
_OF_A_SERVER = (*_RECORDED, *_OF_NODES)
# Options of the process that listens.
_OF_NODE_0 = ("host", "port", "token_file", "json")
# Keys that a resumed gateway may change. A change to any other key would change its sessions.
_MAY_CHANGE = (
    "rollout.servers",
    "rollout.token_file",
    "rollout.max_lost_servers",
    "rollout.max_concurrent",
    "rollout.kv_cache_mib",
    "gateway.max_sessions",
    "gateway.session_tokens",
    "gateway.session_turns",
    "gateway.session_seconds",
    "gateway.max_body_mib",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe-rl serve`. Arguments after "--" are passed to vLLM and not parsed here."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="config of the run; everything except the address follows from it")
    add("--gateway", action="store_true", help="serve agents (needs --config or --resume)")
    add("--resume", type=Path, metavar="DIR", help="folder of an earlier gateway to continue (with --gateway)")
    add("overrides", nargs="*", metavar="a.b=c", help="replace single values of the config")
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="checkpoint; on a CPU the KV cache is 1 GiB unless you add -- --kv-cache-memory-bytes N",
    )
    add("--trace-root", type=Path, metavar="DIR", help="trace store, or a folder of stores")
    add(
        "--model-fingerprint", metavar="TEXT", help="name of the model in the trace (default: the name that a run uses)"
    )
    add("--capture", choices=("patch", "worker", "native"), help="what records routes (default: patch)")
    add("--support", action="store_true", help="keep sampling masks (rollout.keep_sampling_mask)")
    add(
        "--router-logits-fraction",
        type=float,
        default=0.0,
        metavar="X",
        help="fraction of the tokens whose router logits are kept",
    )
    add(
        "--head",
        type=int,
        default=0,
        metavar="N",
        help="number of the likeliest tokens kept per sampled token (objective.score_centering)",
    )
    add("--reads-text", action="store_true", help="load the tokenizer, for requests with stop strings (rollout.stop)")
    add("--host", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=_port, default=0, help="port (default: a free one)")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="token file, created with mode 600 if missing (default: a temporary file)",
    )
    add("--nnodes", type=int, metavar="N", help="number of nodes that this engine spans, with equally many GPUs each")
    add("--node-rank", type=int, metavar="R", help="which of them this is, from 0; only node 0 listens (--nnodes)")
    add("--master-addr", metavar="A", help="address of node 0, as the others reach it (--nnodes)")
    add(
        "--master-port",
        type=_port,
        metavar="P",
        help=f"port of node 0 for its nodes, which also need the next one (default with --nnodes: {PORT})",
    )
    add("--json", type=Path, metavar="FILE", help="file written when the server listens, with its url, pid, ...")


def _port(value: str) -> int:
    if not value.isdecimal() or int(value) > 65535:
        raise argparse.ArgumentTypeError(f"got {value}, expected a port from 0 to 65535")
    return int(value)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Return 0 then, 2 if serving is impossible, and 3 if the engine dies.

    options: the parsed options, and `further`, the arguments after "--".
    """
    try:
        if options.json is not None and options.json.is_file():
            options.json.unlink()  # an earlier server may have left it
        if options.gateway:
            _run_gateway(options)
        else:
            serve(_settings(options))
    except MoeRLError as error:
        print(error, file=sys.stderr)
        return 3 if isinstance(error, SamplerGone) else 2
    return 0


def _run_gateway(options: argparse.Namespace) -> None:
    """Serve agents.

    Raises:
        EngineError: an option that a gateway does not have.
        ConfigError: the folder to resume is not a gateway's, is in use, or a key that must not change is changed.
    """
    others = [f"--{name.replace('_', '-')}" for name in (*_OF_THE_RUN, *_OF_A_SERVER) if getattr(options, name)]
    named = [name for name in ("config", "resume") if getattr(options, name) is not None]
    if others or options.further or len(named) != 1:
        raise EngineError(
            "everything about a gateway but its address is in the config",
            where={"option": "--gateway"},
            got=", ".join([*others, *options.further]) or " and ".join(f"--{name}" for name in named) or "no --config",
            do="give --config FILE, or --resume DIR to continue, and change single values with a.b=c",
        )
    # Imported late: a vLLM server does not need these.
    from moe_rl.gateway.standalone import SESSIONS, run_gateway
    from moe_rl.train import run_folder

    if options.resume is None:
        config = load_config(options.config, options.overrides)
        folder = run_folder.create(config)
    else:
        folder, config = run_folder.reopen(options.resume, options.overrides, _MAY_CHANGE)
        if not (folder.path / SESSIONS).is_dir():
            raise ConfigError(
                "no gateway has run in this folder",
                where={"option": "--resume", "folder": folder.path},
                got=f"no {SESSIONS} in it",
                do="give the folder that the gateway named when it started",
            )
    with run_folder.held(folder, first=True):
        if options.resume is not None:
            run_folder.take_over(folder, config)
        run_gateway(config, folder.path, options.host, options.port, options.token_file, options.json)


def _nodes(options: argparse.Namespace) -> Nodes | None:
    """Return the nodes of an engine that spans several. Raises EngineError for options that do not fit together."""
    given = {f"--{name.replace('_', '-')}": getattr(options, name) for name in _OF_NODES}
    if all(value is None for value in given.values()):
        return None
    count, rank, address, port = given.values()
    port, wrong = PORT if port is None else port, ""
    if None in (count, rank, address):
        wrong = "all three are needed: --nnodes, --node-rank and --master-addr"
    elif count < 2 or not 0 <= rank < count:
        wrong = "at least 2 nodes, with ranks from 0"
    elif not 0 < port < (1 << 16) - 1:
        wrong = "two ports, the second one above --master-port"
    elif rank and (unused := [f"--{name.replace('_', '-')}" for name in _OF_NODE_0 if getattr(options, name)]):
        wrong = f"only node 0 has {', '.join(unused)}"
    if wrong:
        got = " ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise EngineError("cannot be combined", where={"option": "--nnodes"}, got=got, expected=wrong)
    return Nodes(count, rank, address, port)


def _settings(options: argparse.Namespace) -> ServerSettings:
    if options.resume is not None:
        raise EngineError(
            "only works for a gateway", where={"option": "--resume"}, got="no --gateway", do="add --gateway"
        )
    address: dict[str, Any] = {
        "host": options.host,
        "port": options.port,
        "ready_file": options.json,
        "further": options.further,
        "nodes": _nodes(options),
    }
    if options.config is None:
        if options.overrides or options.model is None or options.trace_root is None:
            got = " ".join(options.overrides) or "neither --config nor both --model and --trace-root"
            raise EngineError(
                "nothing says which model to serve", where={"option": "--config"}, got=got, do="give --config FILE"
            )
        return ServerSettings(
            model=options.model,
            trace_root=options.trace_root,
            sizes=None,
            capture=options.capture or "patch",
            model_fingerprint=options.model_fingerprint or "",
            support=options.support,
            router_logits_fraction=options.router_logits_fraction,
            head=options.head,
            reads_text=options.reads_text,
            token_file=options.token_file,
            **address,
        )
    repeated = [name for name in _OF_THE_RUN if getattr(options, name) is not None]
    repeated += [name for name in _RECORDED if getattr(options, name)]
    if repeated:
        got = ", ".join(f"--{name.replace('_', '-')}" for name in repeated)
        raise EngineError("says this already", where={"option": "--config"}, got=got, do="leave it out")
    config = load_config(options.config, options.overrides)
    refuse(list(passed_problems(config)))
    needed = config.cluster.nodes_per_engine if config.cluster is not None else 1
    if needed > 1 and needed != options.nnodes:
        raise EngineError(
            "the config's engine spans several nodes (cluster.gpus_per_engine)",
            where={"option": "--nnodes"},
            got=options.nnodes or 1,
            expected=needed,
            do="start it on each of them, with --node-rank and --master-addr",
        )
    return ServerSettings(
        model=config.model.path,
        trace_root=config.run.runs_dir,
        sizes=engine_arguments(config),
        capture=config.rollout.capture,
        model_fingerprint="",
        support=config.rollout.keep_sampling_mask,
        router_logits_fraction=config.rollout.router_logits_fraction,
        head=config.objective.score_centering or 0,
        reads_text=config.reads_text,
        token_file=options.token_file or config.rollout.token_file,
        **address,
    )


def engine_arguments(config: Config) -> dict[str, object]:
    """Return the vLLM arguments that the run's config sets for its servers."""
    rollout = config.rollout
    return sized(
        dtype=rollout.dtype,
        seed=config.run.seed,
        max_model_len=rollout.max_prompt_tokens + rollout.max_completion_tokens,
        max_concurrent=rollout.max_concurrent,
        kv_cache_mib=rollout.kv_cache_mib,
        gpus=config.cluster.gpus_per_engine if config.cluster is not None else 1,
        # The recorder sees router logits only if the routers run.
        cuda_graphs=False if rollout.router_logits_fraction else rollout.cuda_graphs,
        passed=rollout.vllm,
    )
