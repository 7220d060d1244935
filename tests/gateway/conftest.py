"""Provides a tiny Qwen3-MoE that has learnt a few dialogues by heart, an engine that runs it, and the gateway over it.

The dialogues make its tool calls, its thinking and its answers known, so that tests can ask for each of them.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from moe_rl.gateway.agent_gateway import AgentGateway
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.listening import GatewayListener
from moe_rl.gateway.rendering import ChatRenderer
from moe_rl.gateway.session_journal import SessionJournals
from moe_rl.gateway.session_keys import SessionBook
from moe_rl.gateway.shared_shard import SharedShard
from moe_rl.gateway.turn_sampler import SamplerBounds, TurnSampler
from moe_rl.gateway.web import GatewayApp
from moe_rl.models.hf import read_model
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import Blocking
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.trace import TraceStore
from moe_rl.types import Completion
from moe_rl.vllm.api_server import bound_socket
from moe_rl.vllm.wire import EngineSettings
from tests.gateway.played_environments import ADD
from tests.gateway.session_turns import WIDE
from tests.rollout.serving import agree
from tests.support.independent import Independent

VOCAB, LONGEST = 384, 4096
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
OWNER = "o" * 43

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
BROKEN = "<tool_call>\n{name: add}\n</tool_call>"
# What is asked, whether there is the tool, and what the model says.
SCRIPT = [
    ([{"role": "user", "content": "2+3?"}], True, ["<think>\nadd\n</think>\n\n" + CALL, "<think>\nok\n</think>\n\n5."]),
    ([{"role": "user", "content": "break"}], True, [BROKEN]),
    (
        [{"role": "user", "content": "hi"}],
        False,
        ["<think>\nhm\n</think>\n\nhello you", "<think>\nhm\n</think>\n\nbye"],
    ),
]
NEXT = [{"role": "tool", "tool_call_id": "x", "content": "5"}, {"role": "user", "content": "more"}]


def chat_tokenizer(folder: Path) -> None:
    """Write the small tokenizer of the assets with the special tokens of Qwen3."""
    tokenizer = Tokenizer.from_file("assets/tiny_moe/policy/tokenizer.json")
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"clean_up_tokenization_spaces": False}))


def lessons(renderer: ChatRenderer, codec: TextCodec) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the prompts and completions of the script, each turn as the gateway would ask it."""
    found = []
    for messages, has_tool, sayings in SCRIPT:
        tools = [ADD] if has_tool else []
        prompt = renderer.render(messages, tools)
        for at, saying in enumerate(sayings):
            said = codec.encode(saying + "<|im_end|>")
            found.append((prompt, said))
            following = NEXT[:1] if has_tool else NEXT[1:]
            bridged = renderer.extend(prompt, said, following, tools)
            # Without the tool the template drops the thinking of the earlier turn, and the gateway renders anew.
            dropped = [*messages, {"role": "assistant", "content": saying.partition("\n\n")[2]}, *following]
            prompt = bridged or renderer.render(dropped, tools)
            assert at or (bridged is not None) == has_tool
    return found


@torch.no_grad()
def teach(model, pairs) -> None:
    """Solve for the output layer with which a random model says each completion, if it takes the likeliest token."""
    states, wanted = [], []
    for prompt, said in pairs:
        hidden = model.model(torch.tensor([[*prompt, *said]])).last_hidden_state[0]
        states.append(hidden[len(prompt) - 1 : -1])
        wanted += said
    inputs = torch.cat(states).double()
    targets = torch.zeros(len(wanted), VOCAB, dtype=torch.float64)
    targets[range(len(wanted)), wanted] = 2.0
    gram = inputs @ inputs.T
    solved = torch.linalg.solve(gram + 3e-4 * gram.diagonal().mean() * torch.eye(len(gram)), targets)
    model.lm_head.weight.copy_((inputs.T @ solved).T)
    said_now = (inputs @ model.lm_head.weight.double().T).argmax(-1)
    assert said_now.tolist() == wanted, "the model has not learnt its dialogues"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny Qwen3-MoE that says what SCRIPT tells."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("talker")
    chat_tokenizer(folder)
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        eos_token_id=1,
        initializer_range=0.15,
    )
    model = Qwen3MoeForCausalLM(config).float()
    renderer = ChatRenderer(folder, {"name": "qwen3"})
    teach(model, lessons(renderer, TextCodec(folder, ())))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def settings(checkpoint, tmp_path_factory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("engine")
    return EngineSettings(
        model_path=checkpoint,
        dtype="float32",
        max_model_len=LONGEST,
        max_concurrent=128,
        kv_cache_mib=64,
        trace_root=folder / "trace",
        model_fingerprint=read_model(checkpoint).fingerprint,
        log_path=folder / "engine.log",
        startup_timeout_seconds=600.0,
        seed=0,
        reads_text=True,
    )


@pytest.fixture(scope="session")
def engine(settings):
    with Blocking(VllmEngine(settings)) as running:
        yield running


@pytest.fixture(scope="session")
def router(checkpoint) -> Independent:
    return Independent(checkpoint)


@dataclass
class RunningGateway:
    """Holds a gateway that listens, and what is behind it."""

    url: str
    gateway: AgentGateway
    store: TraceStore
    folder: Path
    loop: asyncio.AbstractEventLoop
    problems: list[str]

    def owner(self, method: str, path: str, **more) -> httpx.Response:
        """Make a call with the owner's token."""
        headers = {"Authorization": f"Bearer {OWNER}"}
        return httpx.request(method, self.url + path, headers=headers, timeout=60, trust_env=False, **more)

    def open(self, **limits) -> dict:
        """Open a session and return what the owner gets."""
        answer = self.owner("POST", "/sessions", json={"group": "g"} | limits)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self, opened: dict):
        """Return the session itself, as the gateway's own next task would find it: a turn is noted as received in the
        task that has sent its reply, which a client's thread may overtake. Its records are published."""

        async def named():
            await self.gateway.shard.publish()
            return self.gateway.book.named(opened["session"])

        return asyncio.run_coroutine_threadsafe(named(), self.loop).result()

    def agrees(self, session, router: Independent) -> None:
        """Compare every row and log-probability of a session with `transformers`."""
        (version,) = {span.weight_version for turn in session.turns for span in turn.versions}
        # The solved output weights are large, and so is their rounding.
        agree(self.store, router, self.completions(session), version=version, atol=5e-5)

    def completions(self, session) -> list[Completion]:
        """Return the turns of a session as completions with their whole prompts."""
        return [
            Completion(
                key=turn.routes.key,
                prompt_token_ids=session.prompt(turn.number),
                token_ids=turn.token_ids,
                logprobs=turn.logprobs,
                finish_reason=turn.finish_reason,
                versions=turn.versions,
                routes=turn.routes,
            )
            for turn in session.turns
        ]


def start_gateway(sampler, settings: EngineSettings, folder: Path, *, renderer=None, at_once=48, limits=WIDE, most=256):
    """Start a gateway in a thread of its own. Returns it and a function that stops it as a kill does.

    Sessions that were open in the folder are opened again.
    """
    codec = TextCodec(settings.model_path, ())
    turns = TurnSampler(sampler, SamplerBounds(settings.max_model_len, VOCAB, True, settings.support, at_once), seed=1)
    rendering = ChatRenderer(settings.model_path, renderer or {"name": "qwen3"})
    journals = SessionJournals(folder / "sessions")
    shard = SharedShard(sampler, settings.trace_root)
    gateway = AgentGateway("talker", rendering, codec, turns, SessionBook(most, limits), journals, (), shard)
    store = TraceStore(settings.trace_root)
    keeper = SessionKeeper(folder / "sessions", store)
    app = GatewayApp(gateway, keeper, OWNER, longest=1 << 20)
    socket = bound_socket(None, 0)
    listener, loop = GatewayListener(app.asgi, socket), asyncio.new_event_loop()
    problems: list[str] = []

    async def serve() -> None:
        problems.extend(gateway.reopen(keeper))
        await listener.serve()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    while not listener.listens:
        assert thread.is_alive()
        time.sleep(0.01)

    def stop() -> None:
        listener.stop()
        thread.join()
        loop.run_until_complete(shard.publish(last=True))  # as the next gateway does with what a killed one left

    url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    return RunningGateway(url, gateway, store, folder, loop, problems), stop


@pytest.fixture(scope="session")
def running(engine, settings, tmp_path_factory):
    """The gateway over the shared engine, with the renderer of Qwen3."""
    gateway, stop = start_gateway(engine.sampler, settings, tmp_path_factory.mktemp("gateway"))
    yield gateway
    stop()
