"""Requests one completion from a vLLM server, and collects its tokens as they arrive."""

from __future__ import annotations

import httpx
import msgspec

from moe_rl.errors import EngineError
from moe_rl.rollout.transport import Transport
from moe_rl.types import GenerateRequest
from moe_rl.vllm import sampling
from moe_rl.vllm.control import GENERATE
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.sampling import Growing, ReportedSpan


class _TokenLogprob(msgspec.Struct, frozen=True):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_TokenLogprob]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str | None = None
    weight_versions: list[ReportedSpan] | None = None
    stop_reason: int | str | None = None


class _Answer(msgspec.Struct, frozen=True):
    """Holds a completion, or the next piece of one in a stream. `error` is set when the stream cannot continue."""

    choices: list[_Choice] = []
    error: msgspec.Raw | None = None


# Created at import time, by one thread: msgspec crashes when two threads are the first to decode a type.
_ANSWER = msgspec.json.Decoder(_Answer)


async def collect(
    transport: Transport,
    client: httpx.AsyncClient,
    request: GenerateRequest,
    sample: Growing,
    shard: str,
    *,
    stream: bool,
    priority: int = 0,
    name: str | None = None,
    forever: bool,
) -> None:
    """Sample one request, and add the result to `sample`.

    Args:
        shard: the trace shard that records it.
        stream: whether tokens arrive as they are sampled rather than all at the end.
        priority: requests with lower numbers go first.
        name: the request's name for /moe_rl/leave; None if it is never aborted.
        forever: whether the server may be silent indefinitely.

    Raises:
        EngineError: the server is silent for too long, refuses the request, or cannot sample it.
    """
    # The fields are those of control.Generation.
    asked = msgspec.json.encode(
        {
            "token_ids": request.prompt_token_ids,
            "stream": stream,
            "priority": priority,
            "name": name,
            "sampling_params": sampling.parameters(request, RecordingRequest.of(request, shard)),
        }
    )
    seconds = None if forever else transport.timeout
    async with transport.ask(client, "POST", GENERATE, asked, seconds) as response:
        async for line in response.aiter_lines():
            if (text := line.removeprefix("data: ")) and text != "[DONE]":
                _add(sample, transport.decode(text, _ANSWER), request.key)


def _add(sample: Growing, answer: _Answer, key: str) -> None:
    if answer.error is not None or len(answer.choices) != 1:
        got = bytes(answer.error)[:500].decode("utf-8", "replace") if answer.error else "no completion"
        raise EngineError("The vLLM server could not sample", where={"request": key}, got=got)
    (choice,) = answer.choices
    logprobs = [at.logprob for at in choice.logprobs.content]
    if len(logprobs) != len(choice.token_ids):
        raise EngineError("The vLLM server returned too few log-probabilities", where={"request": key})
    sample.add(choice.token_ids, logprobs, choice.finish_reason, choice.weight_versions, choice.stop_reason)
