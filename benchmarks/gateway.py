"""Measures what the gateway costs and saves:
`python benchmarks/gateway.py [--model mid] [--sessions 32] [--turns 8] [--rounds 5] [--json FILE]`.

Agents talk over several turns, all at once, in two ways by turns: through the gateway over HTTP, and straight to the
engine with token ids, each turn as soon as the one before has come. Both sample as many tokens and record them. The
agents run in a process of their own, and share the cores with the rest. Prints

- sampled tokens per second, gateway : engine, as median and quartiles over the rounds;
- turns per second through the gateway, and the shards of 100 turns;
- the tokens that were prefilled, against those of all prompts: what an engine without a prefix cache computes when a
  client sends the whole history in each turn;
- bytes of trace for each token of a session, where records continue each other and where each has its whole prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from models import SHAPES, make_model
from output import quartiles, tell
from tokenizers import AddedToken, Tokenizer

from moe_rl.gateway.agent_gateway import AgentGateway
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.listening import GatewayListener
from moe_rl.gateway.rendering import ChatRenderer
from moe_rl.gateway.session_journal import SessionJournals
from moe_rl.gateway.session_keys import OpenedSession, SessionBook
from moe_rl.gateway.sessions import Session, SessionLimits
from moe_rl.gateway.shared_shard import SharedShard
from moe_rl.gateway.turn_sampler import SamplerBounds, TurnSampler
from moe_rl.gateway.web import GatewayApp
from moe_rl.models.hf import read_model
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import Blocking
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.trace import TraceStore
from moe_rl.types import GenerateRequest
from moe_rl.vllm.api_server import bound_socket
from moe_rl.vllm.wire import EngineSettings

ROOT = Path(__file__).resolve().parents[1]
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
WIDE = SessionLimits(tokens=1 << 30, turns=1 << 20, seconds=1e9)
LONGEST = 2048

# What the agents' process runs: it prints how many seconds its sessions took.
AGENTS = """
import asyncio, json, sys, time
import httpx

async def agent(client, url, key, first, result, turns, tokens):
    messages = [{"role": "user", "content": first}]
    for _ in range(turns):
        body = {"messages": messages, "max_tokens": tokens, "temperature": 1.0}
        answer = await client.post(url, json=body, headers={"Authorization": f"Bearer {key}"})
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        messages += [message, {"role": "tool", "tool_call_id": "x", "content": result}]

async def together(asked):
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None), trust_env=False) as client:
        start = time.perf_counter()
        await asyncio.gather(*(agent(client, asked["url"], **one) for one in asked["agents"]))
        return time.perf_counter() - start

for line in sys.stdin:
    print(asyncio.run(together(json.loads(line))), flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid", choices=sorted(SHAPES), help="shape of the random model")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="tokens sampled in a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    tell(result, options.json)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    model = make_model(options.model, folder / "model")
    chat_tokenizer(model)
    facts = read_model(model)
    settings = EngineSettings(
        model_path=model,
        dtype="bfloat16",
        max_model_len=LONGEST,
        max_concurrent=options.sessions,
        kv_cache_mib=512,
        trace_root=folder / "trace",
        model_fingerprint=options.model,
        log_path=folder / "engine.log",
        startup_timeout_seconds=600.0,
        seed=0,
    )
    with (
        Blocking(VllmEngine(settings)) as engine,
        Gateway(engine.sampler, model, facts.vocab, folder, options) as gateway,
    ):
        gateway.talk(0)  # warms up
        straight = Straight(engine.sampler, gateway.sessions[0], folder / "trace", options)
        straight.talk("warm", parents=True)
        ratios: list[float] = []
        rates: dict[str, list[float]] = {"gateway": [], "engine": []}
        forwarded = 0
        for number in range(1, options.rounds + 1):
            ways: list[tuple[str, Callable[[], float]]] = [
                ("gateway", lambda number=number: gateway.talk(number)),
                ("engine", lambda number=number: straight.talk(f"round{number}", parents=True)),
            ]
            took = {}
            for name, talk in ways if number % 2 else ways[::-1]:
                before = engine.counts()["forwarded"]
                took[name] = talk()
                if name == "gateway":
                    forwarded += engine.counts()["forwarded"] - before
            ratios.append(took["engine"] / took["gateway"])
            for name, seconds in took.items():
                rates[name].append(options.sessions * options.turns * options.tokens / seconds)
        straight.talk("whole", parents=False)
        sessions = gateway.sessions[options.sessions :]
        whole = sum(len(session.prompt(turn.number)) for session in sessions for turn in session.turns)
        sampled = sum(len(turn.token_ids) for session in sessions for turn in session.turns)
        kept = sum(len(turn.ids) for session in sessions for turn in session.turns)
        # All but the last sampled token of a turn are forwarded after they were sampled.
        prefilled = forwarded - (sampled - options.turns * options.rounds * options.sessions)
        asyncio.run(gateway.shard.publish())
        low, middle, high = quartiles(ratios)
        _, gateway_rate, _ = quartiles(rates["gateway"])
        _, engine_rate, _ = quartiles(rates["engine"])
        return {
            "ratio_gateway_to_engine": middle,
            "  lower quartile": low,
            "  upper quartile": high,
            "sampled tokens/s through the gateway": gateway_rate,
            "sampled tokens/s of the engine alone": engine_rate,
            "turns/s through the gateway": gateway_rate / options.tokens,
            "shards of 100 turns": 100 * len(shards(folder, "gateway-")) / len(sessions) / options.turns,
            "tokens of all prompts": whole // options.rounds,
            "tokens prefilled": prefilled // options.rounds,
            "share of prefill saved": 1 - prefilled / whole,
            "trace bytes per token, records that continue": stored(folder, "gateway-")
            / kept
            / (1 + 1 / options.rounds),
            "trace bytes per token, whole records": stored(folder, "whole-") / (kept / options.rounds),
            "journal bytes per turn": journaled(folder) / (len(sessions) + options.sessions) / options.turns,
            "branches of a session": max(len(session.branches()) for session in sessions),
            "sessions": options.sessions,
            "turns": options.turns,
            "tokens sampled in a turn": options.tokens,
            "rounds": options.rounds,
            "model": options.model,
            "cpus": len(os.sched_getaffinity(0)),
        }


def chat_tokenizer(model: Path) -> None:
    """Give a model a small tokenizer with the special tokens of Qwen3."""
    tokenizer = Tokenizer.from_file(str(ROOT / "assets/tiny_moe/policy/tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


def stored(folder: Path, start: str) -> int:
    """Return the bytes of the shards whose names begin so."""
    return sum(path.stat().st_size for path in shards(folder, start))


def shards(folder: Path, start: str) -> list[Path]:
    """Return the shards whose names begin so."""
    return list((folder / "trace").glob(f"{start}*.safetensors"))


def journaled(folder: Path) -> int:
    """Return the bytes of the journals of all sessions."""
    return sum(path.stat().st_size for path in (folder / "sessions").glob("*.journal"))


class Gateway:
    """Runs the gateway in a thread, and the agents in a process."""

    def __init__(self, engine: VllmEngine, model: Path, vocabulary: int, folder: Path, options: argparse.Namespace):
        self._options = options
        turns = TurnSampler(engine, SamplerBounds(LONGEST, vocabulary, False, False, 192), seed=1)
        renderer, codec = ChatRenderer(model, {"name": "qwen3"}), TextCodec(model, ())
        journals = SessionJournals(folder / "sessions")
        self.shard = SharedShard(engine, folder / "trace")
        book = SessionBook(1 << 16, WIDE)
        self.gateway = AgentGateway("model", renderer, codec, turns, book, journals, (), self.shard)
        self.sessions: list[Session] = []
        keeper = SessionKeeper(folder / "sessions", TraceStore(folder / "trace"))
        socket = bound_socket(None, 0)
        self._listener = GatewayListener(GatewayApp(self.gateway, keeper, "o" * 43, longest=1 << 24).asgi, socket)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listener.serve()))
        self._url = f"http://127.0.0.1:{socket.getsockname()[1]}/v1/chat/completions"

    def __enter__(self) -> Gateway:
        self._thread.start()
        while not self._listener.listens:
            time.sleep(0.01)
        self._agents = subprocess.Popen(
            [sys.executable, "-c", AGENTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._agents.kill()
        self._agents.wait()
        self._listener.stop()
        self._thread.join()

    def talk(self, number: int) -> float:
        """Let all agents have a dialogue. Returns its seconds."""

        async def open_all() -> list[OpenedSession]:
            return [self.gateway.open("g") for _ in range(self._options.sessions)]

        opened = asyncio.run(open_all())
        self.sessions += [one.session for one in opened]
        agents = [
            {"key": one.key, "first": first(number, at), "result": "the result of a tool is 123456789",
             "turns": self._options.turns, "tokens": self._options.tokens}
            for at, one in enumerate(opened)
        ]  # fmt: skip
        self._agents.stdin.write(json.dumps({"url": self._url, "agents": agents}) + "\n")
        self._agents.stdin.flush()
        return float(self._agents.stdout.readline())


class Straight:
    """Sends the same dialogues to the engine as token ids, from this process."""

    def __init__(self, engine: VllmEngine, example: Session, trace: Path, options: argparse.Namespace):
        self._engine, self._options = engine, options
        self._inputs = [turn.input_ids for turn in example.turns]
        self._seeds = itertools.count(1)

    def talk(self, name: str, *, parents: bool) -> float:
        """Let all agents have a dialogue. Returns its seconds. parents: whether records continue each other."""

        async def together() -> float:
            start = time.perf_counter()
            await asyncio.gather(*(self._agent(f"{name}-{at}", parents) for at in range(self._options.sessions)))
            return time.perf_counter() - start

        return asyncio.run(together())

    async def _agent(self, name: str, parents: bool) -> None:
        # No two dialogues begin alike, so none finds another's prefix in the cache.
        seed = next(self._seeds)
        ids: tuple[int, ...] = tuple(4 + (seed >> (8 * n)) % 256 for n in range(3))
        parent = None
        for turn, new in enumerate(self._inputs):
            request = GenerateRequest(
                f"{name}/{turn}", ids + new, seed, self._options.tokens, 1.0, (), parent=parent if parents else None
            )
            (one,) = await self._engine.sample(0, [request], shard=f"{name}-{turn}", leave=asyncio.Event())
            ids, parent = one.prompt_token_ids + one.token_ids, one.routes


def first(number: int, at: int) -> str:
    """Return how a dialogue begins, unlike any other."""
    return f"{number} {at} " + "tell me what you see and what you would do about it " * 8


if __name__ == "__main__":
    sys.exit(main())
