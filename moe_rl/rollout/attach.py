"""Checks, before anything starts, whether the servers suit a run. Every finding names its server."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import moe_rl
from moe_rl.config.schema import Config
from moe_rl.errors import About, EngineError, Problem, SamplerGone, describe
from moe_rl.models.facts import ModelFacts
from moe_rl.rollout.server import VllmServer
from moe_rl.trace import TraceSpec
from moe_rl.vllm.control import Served


def attach_problems(config: Config, facts: ModelFacts, runs_dir: Path, *, resumed: bool = False) -> list[Problem]:
    """Return why the config's servers cannot sample for a run below `runs_dir`, one message each.

    Writes and removes a small file there, to prove that both sides see the same folder.

    Args:
        resumed: The run is resumed: a scheduler that began it again may have done so before its servers answer.

    Raises:
        SamplerGone: It is, and the only problem is that some do not answer.
    """
    try:
        servers = servers_of(config)
    except EngineError as error:
        return error.problems
    problems, silent = asyncio.run(_problems(config, facts, runs_dir, servers))
    if resumed and silent and len(silent) == len(problems):
        raise SamplerGone(
            "servers do not answer",
            where={"key": "rollout.servers"},
            got=", ".join(silent),
            do="read their logs, start them again, and resume the run again",
        )
    return problems


def servers_of(config: Config, folder: str = "") -> list[VllmServer]:
    """Make clients of the config's servers.

    Args:
        config: the run's config.
        folder: the run's trace store folder, relative to the servers' trace root.

    Raises:
        EngineError: the token is not secret.
    """
    token_file = config.rollout.token_file
    if not config.rollout.servers:
        return []
    assert token_file is not None  # the config's checks require it when servers are set
    return [
        VllmServer(url, token_file, timeout_seconds=config.run.peer_timeout_seconds, folder=folder, alone=True)
        for url in config.rollout.servers
    ]


async def _problems(
    config: Config, facts: ModelFacts, runs_dir: Path, servers: Sequence[VllmServer]
) -> tuple[list[Problem], list[str]]:
    """Return the problems, and the addresses of the servers that do not answer."""
    answers = await asyncio.gather(*(server.served() for server in servers), return_exceptions=True)
    problems, silent, served = list[Problem](), list[str](), dict[VllmServer, Served]()
    for server, answer in zip(servers, answers, strict=True):
        if isinstance(answer, Served):
            served[server] = answer
            problems += _differences(config, facts, server.url, answer)
        elif isinstance(answer, EngineError):
            problems.append(answer.message)
            silent += [server.url] if answer.message.fault == "silent" else []
        else:
            problems.append(describe("no answer", where={"url": server.url}, got=repr(answer)))
    problems += _among_each_other({server.url: answer for server, answer in served.items()})
    if not problems:
        problems += [text for server in servers if (text := await folder_problem(server, runs_dir, ""))]
    return problems, silent


def _differences(config: Config, facts: ModelFacts, url: str, served: Served) -> Iterator[Problem]:
    """Yield the settings in which this server differs from what the run needs."""
    rollout = config.rollout
    spec = TraceSpec.of(facts)
    needed: dict[str, tuple[object, object]] = {
        "moe_rl": (served.moe_rl, moe_rl.__version__),
        "the model (fingerprint)": (served.model_fingerprint, spec.model_fingerprint),
        "experts": (served.num_experts, spec.num_experts),
        "experts of a token": (served.top_k, spec.top_k),
        "layers with experts": (served.layer_map, spec.layer_map),
        "vocabulary": (served.vocab_size, facts.vocab),
        "rollout.dtype": (served.dtype, rollout.dtype),
        "rollout.capture": (served.capture, rollout.capture),
        "rollout.keep_sampling_mask": (served.support, rollout.keep_sampling_mask),
        "rollout.router_logits_fraction": (served.router_logits_fraction, rollout.router_logits_fraction),
        "objective.score_centering": (served.head, config.objective.score_centering or 0),
    }
    if config.reads_text:
        what = "rollout.stop" if rollout.stop else "task.environment"
        needed[what] = ("a tokenizer" if served.reads_text else "no tokenizer", "a tokenizer")
    if config.cluster is not None:
        needed["cluster.gpus_per_engine"] = (served.gpus, config.cluster.gpus_per_engine)
    for what, (got, expected) in needed.items():
        if got != expected:
            yield describe(
                f"a server differs from the config in {what}",
                where={"key": "rollout.servers", "url": url},
                got=got,
                expected=expected,
                do="start it with moe-rl serve --config and this run's config",
            )
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    if served.max_model_len < longest:
        yield describe(
            "a server's longest sequence is too short",
            where={"key": "rollout.servers", "url": url},
            got=f"max_model_len {served.max_model_len}",
            expected=f"at least rollout.max_prompt_tokens + rollout.max_completion_tokens = {longest}",
        )


def _among_each_other(served: dict[str, Served]) -> Iterator[Problem]:
    starts: dict[str, str] = {}
    for url, answer in served.items():
        if (other := starts.setdefault(answer.start, url)) != url:
            yield describe(
                "two addresses lead to the same server", where={"key": "rollout.servers"}, got=f"{other} and {url}"
            )
    versions = {answer.vllm for answer in served.values()}
    if len(versions) > 1:
        got = ", ".join(f"{url} {answer.vllm}" for url, answer in served.items())
        yield describe(
            "the servers run different versions of vLLM",
            where={"key": "rollout.servers"},
            got=got,
            expected="the same on all",
        )


async def folder_problem(server: VllmServer, root: Path, folder: str) -> Problem | None:
    """Check that the server, below its trace root, sees the same `folder` as this process below `root`. None: it does.

    Each side writes a file that the other must read.
    """
    local_folder = root / folder
    name, text = f".challenge-{secrets.token_hex(8)}", secrets.token_hex(16)
    challenge, reply = local_folder / name, local_folder / f"{name}.answer"
    where: About = {"key": "rollout.servers", "url": server.url, "folder": local_folder.absolute()}
    do = "start it with this run's run.runs_dir as its trace root, on a filesystem that both share"
    what = "a server does not see the folder of this run"
    try:
        local_folder.mkdir(parents=True, exist_ok=True)
        with open(challenge, "x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            answer = await server.challenge(folder, name)
        except EngineError as error:
            return describe(what, where=where, got=str(error), do=do)
        if answer != text:
            return describe(what, where=where, got="another file of that name", do=do)
        if not reply.is_file() or reply.read_text(encoding="ascii") != text:
            return describe(what, where=where, got="a file written there is not seen here", do=do)
        return None
    except OSError as error:
        return describe("cannot be written", where={"key": "run.runs_dir", "folder": local_folder}, got=error.strerror)
    finally:
        with suppress(OSError):
            for path in (challenge, reply):
                path.unlink(missing_ok=True)
