"""Runs the gateway by itself: with its own engine, or with the servers of a config.

    agents --- HTTP ---> gateway (this process) --- token ids ---> engine child, or servers in rollout.servers
                                                                   routes ----> trace store

Nobody sends new weights here: the sampler keeps those of the checkpoint, or those that the servers hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import moe_rl
from moe_rl.config.schema import Config
from moe_rl.disk import writing
from moe_rl.errors import EngineError, MoeRLError, RequestRefused, SamplerGone
from moe_rl.gateway.agent_gateway import AgentGateway
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.listening import GatewayListener
from moe_rl.gateway.rendering import ChatRenderer
from moe_rl.gateway.session_journal import SessionJournals
from moe_rl.gateway.session_keys import SessionBook
from moe_rl.gateway.sessions import SessionLimits
from moe_rl.gateway.shared_shard import DYING_SECONDS, SharedShard
from moe_rl.gateway.turn_sampler import SamplerBounds, TurnSampler
from moe_rl.gateway.web import GatewayApp
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import read_model
from moe_rl.rollout.attach import attach_problems
from moe_rl.rollout.colocated import start_engines
from moe_rl.rollout.fleet import ServerFleet
from moe_rl.rollout.rollouts import engine_settings
from moe_rl.rollout.sampler import Sampler
from moe_rl.tasks.tokenizer import TextCodec, stop_tokens
from moe_rl.trace import TraceStore
from moe_rl.trace.recovery import recover_shard, unsealed
from moe_rl.vllm.api_server import announced, bound_socket, make_token, url_of
from moe_rl.vllm.control import read_token

# Each sample holds a connection to its server, and each call three more: 895 at most, with a last call of 128 samples.
_MOST_SAMPLES = 192
_SETTLE_SECONDS = 2.0
# Folder of the sessions, in that of the gateway.
SESSIONS = "sessions"


def run_gateway(
    config: Config, folder: Path, host: str | None, port: int, token_file: Path | None, ready_file: Path | None
) -> None:
    """Serve agents until SIGTERM or SIGINT. Sessions still open then are finished and kept.

    Args:
        folder: this gateway's folder, below run.runs_dir: trace store, sessions, the engine's log. Sessions that a
            killed gateway left open there are reopened.
        host: None listens on this machine only.
        port: 0 for a free one.
        token_file: holds the owner's token, made if missing; None: `token` in the folder.
        ready_file: written when the gateway listens.

    Raises:
        SamplerGone: the sampler died.
        MoeRLError: the settings cannot be served.
    """
    sessions = folder / SESSIONS
    with writing("the folder for sessions could not be created", sessions):
        sessions.mkdir(exist_ok=True)
    facts = read_model(config.model.path)
    renderer = ChatRenderer(config.model.path, config.gateway.renderer, config.gateway.differs_in, config.run.date)
    token_file = (token_file or folder / "token").absolute()
    make_token(token_file)
    token = read_token(token_file)
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(bound_socket(host, port))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        print(f"starting the sampler and the gateway; vLLM's log is in {folder} ...", flush=True)
        trace = folder / "trace"
        sampler, version, reads_text = _sampler(config, facts, folder, stack)
        for name in set(unsealed(trace).values()):
            recover_shard(trace, name, DYING_SECONDS)
        journals, store, shard = SessionJournals(sessions), TraceStore(trace), SharedShard(sampler, trace)
        store.collect_garbage()
        gateway = gateway_over(
            sampler, config, facts, renderer, journals, shard, version=version, reads_text=reads_text
        )
        document: dict[str, str | int] = {
            "url": url_of(*bound.getsockname()[:2]),
            "pid": os.getpid(),
            "token_file": str(token_file),
            "folder": str(folder.absolute()),
            "moe_rl": moe_rl.__version__,
        }
        lost: list[MoeRLError] = []

        def failed(error: MoeRLError) -> None:
            if isinstance(error, SamplerGone):
                lost.append(error)
                listener.stop()

        keeper, longest = SessionKeeper(sessions, store), config.gateway.max_body_mib << 20
        listener = GatewayListener(GatewayApp(gateway, keeper, token, longest=longest, failed=failed).asgi, bound)
        asyncio.run(_serve(listener, gateway, shard, keeper, document, ready_file, failed))
        if lost:
            raise lost[0]


def gateway_over(
    sampler: Sampler,
    config: Config,
    facts: ModelFacts,
    renderer: ChatRenderer,
    journals: SessionJournals | None,
    shard: SharedShard | None,
    *,
    version: int,
    reads_text: bool,
) -> AgentGateway:
    """Make the gateway of a config over a sampler.

    Args:
        journals, shard: see AgentGateway.
        version: the sampler's weight version.
        reads_text: whether it finds stop strings.

    Raises:
        ConfigError: no token of the model's chats ends a completion.
    """
    stops, limits = stop_tokens(config, facts), config.gateway
    codec = TextCodec(config.model.path, stops)
    renderer.refuse_endless(codec, facts, config.rollout)
    most = _MOST_SAMPLES if config.rollout.servers else config.rollout.max_concurrent
    bounds = SamplerBounds(
        max_model_len=config.rollout.max_prompt_tokens + config.rollout.max_completion_tokens,
        vocabulary=facts.vocab,
        reads_text=reads_text,
        keeps_support=config.rollout.keep_sampling_mask,
        at_once=min(config.rollout.max_concurrent, most),
    )
    usual = SessionLimits(limits.session_tokens, limits.session_turns, limits.session_seconds)
    return AgentGateway(
        config.model.path.name,
        renderer,
        codec,
        TurnSampler(sampler, bounds, seed=config.run.seed if config.rollout.request_seeds else None, version=version),
        SessionBook(limits.max_sessions, usual),
        journals,
        stops,
        shard,
    )


def _leave(*_: object) -> None:
    raise SystemExit(0)


def _sampler(config: Config, facts: ModelFacts, folder: Path, stack: contextlib.ExitStack) -> tuple[Sampler, int, bool]:
    """Return the sampler, the version of its weights, and whether it finds stop strings."""
    if not config.rollout.servers:
        # Clients send stop strings.
        settings = replace(engine_settings(config, facts, folder), reads_text=True)
        engines = start_engines(settings, config.rollout.engines)
        stack.callback(engines.close)
        return engines, 0, True
    if problems := attach_problems(config, facts, config.run.runs_dir):
        raise EngineError(problems)
    fleet = ServerFleet.attach(config, folder / "trace", adopt=False)
    stack.callback(fleet.close)
    asyncio.run(_publish_left(fleet, folder / "trace"))
    served = [server.recording() for server in fleet.servers.values()]
    return fleet, served[0].weight_version, all(server.reads_text for server in served)


async def _publish_left(fleet: ServerFleet, trace: Path) -> None:
    """Have the servers publish the shards that a killed gateway left open there."""
    names = {name.partition(".")[0] for name in unsealed(trace).values()}
    for server, name in product(fleet.servers.values(), sorted(names)):
        with contextlib.suppress(RequestRefused):  # it does not fill this one
            await server.publish(name)


async def _serve(
    listener: GatewayListener,
    gateway: AgentGateway,
    shard: SharedShard,
    keeper: SessionKeeper,
    document: dict[str, str | int],
    ready_file: Path | None,
    failed: Callable[[MoeRLError], None],
) -> None:
    for problem in gateway.reopen(keeper):
        print(f"moe_rl: {problem}", file=sys.stderr, flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, listener.stop)
    tending = asyncio.create_task(shard.tend(failed))
    line = "gateway on {url}, owner's token in {token_file}, sessions in {folder}"
    try:
        async with announced(lambda: listener.listens, line, document, ready_file):
            await listener.serve()
    finally:
        with contextlib.suppress(TimeoutError):  # requests that were cancelled at the end need a moment
            async with asyncio.timeout(_SETTLE_SECONDS):
                while any(session.busy for session in gateway.book.all()):
                    await asyncio.sleep(0.01)
        tending.cancel()
        try:
            await shard.publish(last=True)
        except MoeRLError as error:
            print(f"moe_rl: {error}", file=sys.stderr, flush=True)
        for session in gateway.book.all():
            try:
                finished = gateway.end(session)
                if session.turns:
                    keeper.keep(finished)
                gateway.forget(session)
            except MoeRLError as error:
                print(f"moe_rl: session {session.name} is not kept: {error}", file=sys.stderr, flush=True)
