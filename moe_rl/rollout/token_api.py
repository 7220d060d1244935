"""One request to vLLM's /inference/v1/generate, token ids in and out, and the completion that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from moe_rl.errors import EngineError, describe
from moe_rl.types import GenerateRequest
from moe_rl.vllm.control import Served
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.weight_versions import one_version

GENERATE = "/inference/v1/generate"

# What vLLM answers for the logprob of a token that it does not know one of.
_NO_LOGPROB = -9999.0


class _TokenLogprob(msgspec.Struct, frozen=True):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_TokenLogprob]


class _Version(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by one version of the weights."""

    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str | None = None
    weight_versions: list[_Version] | None = None


class _Answer(msgspec.Struct, frozen=True):
    """All of a completion, or what came of it since the last one. error: of a stream that cannot go on."""

    choices: list[_Choice] = []
    error: msgspec.Raw | None = None


# Made while the module is imported, by one thread: msgspec dies when two threads are the first to decode into a type.
ANSWER = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class Sample:
    """A completion as it grows."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    versions: list[_Version] = field(default_factory=list)

    def add(self, answer: _Answer, key: str) -> None:
        if answer.error is not None or len(answer.choices) != 1:
            got = bytes(answer.error)[:500].decode("utf-8", "replace") if answer.error else "no completion"
            raise EngineError(describe("The vLLM server could not sample", where=f"request {key}", got=got))
        (choice,) = answer.choices
        logprobs = [at.logprob for at in choice.logprobs.content]
        if len(logprobs) != len(choice.token_ids) or any(logprob <= _NO_LOGPROB for logprob in logprobs):
            raise EngineError(describe("The vLLM server left a logprob out", where=f"request {key}"))
        self.token_ids += choice.token_ids
        self.logprobs += logprobs
        self.finish_reason = choice.finish_reason or ""
        self.versions = choice.weight_versions or []

    def weight_version(self, key: str, now: int) -> int:
        """Of the weights that sampled every token. now: the server's; of an aborted request vLLM tells none."""
        aborted = self.finish_reason == "abort"
        return now if aborted else one_version(self.versions, tokens=len(self.token_ids), key=key)


def body(request: GenerateRequest, shard: str, *, stream: bool, priority: int) -> bytes:
    """JSON of one request to /inference/v1/generate."""
    ask = RecordingRequest.of(request, shard)
    return msgspec.json.encode(
        {
            "token_ids": request.prompt_token_ids,
            "stream": stream,
            "priority": priority,
            "sampling_params": {
                "temperature": request.temperature,
                "top_k": request.top_k,
                "top_p": request.top_p,
                "min_p": request.min_p,
                "seed": request.seed,
                "max_tokens": request.max_tokens,
                "stop_token_ids": request.stop_token_ids,
                # The stop tokens of the request are all there are.
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                "extra_args": ask.extra_args() if ask is not None else None,
            },
        }
    )


def check(requests: Sequence[GenerateRequest], served: Served) -> None:
    """Raises EngineError for what vLLM would cut short without a word, or die of."""
    seen = set()
    for request in requests:
        tokens = request.prompt_token_ids
        length = len(tokens) + request.max_tokens
        if length > served.max_model_len:
            got, expected = f"{length} tokens", f"at most {served.max_model_len}, the server's max_model_len"
        elif not tokens or not 0 <= min(tokens) <= max(tokens) < served.vocab_size:
            got = f"token ids from {min(tokens)} to {max(tokens)}" if tokens else "an empty prompt"
            expected = f"0 to {served.vocab_size - 1}"
        elif request.key in seen:
            got, expected = "a key used twice", "another one"
        else:
            seen.add(request.key)
            continue
        raise EngineError(
            describe("A request cannot be sampled", where=f"request {request.key}", got=got, expected=expected)
        )
