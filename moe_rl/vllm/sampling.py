"""Converts requests to vLLM's parameters and vLLM's outputs to completions, in process or over HTTP."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import msgspec
import numpy as np

from moe_rl.errors import About, EngineError, RequestRefused
from moe_rl.types import Completion, GenerateRequest, RouteRef, VersionSpan
from moe_rl.vllm.recording import RecordingRequest

# vLLM's HTTP answer for a log-probability that is unknown or -inf.
_NO_LOGPROB = -9999.0
# vLLM raises any lower temperature, except 0, to this value.
_COLDEST = 0.01
LONGEST_GRAMMAR = 1 << 16
"""Characters of the longest grammar. vLLM's grammar of a longer one may take seconds to make."""


class ReportedSpan(msgspec.Struct, frozen=True):
    """vLLM's report that sampled tokens [start, end) come from the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Growing:
    """Collects a completion piece by piece.

    Attributes:
        versions: the weight versions that vLLM reported last.
        stop_reason: vLLM's reason for the end: a stop token, a stop string, or None.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    finish_reason: str = ""
    versions: Sequence[ReportedSpan] | None = None
    stop_reason: int | str | None = None

    @property
    def aborted(self) -> bool:
        return self.finish_reason == "abort"

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[float],
        finish_reason: str | None,
        versions: Sequence[ReportedSpan] | None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Add the tokens since the last call."""
        self.token_ids += token_ids
        self.logprobs.extend(logprobs)
        self.finish_reason = finish_reason or ""
        self.versions = versions
        self.stop_reason = stop_reason

    def completion(self, request: GenerateRequest, refs: Mapping[str, RouteRef]) -> Completion:
        """Return the completion.

        Args:
            request: what was sampled.
            refs: references to routes by key.

        Raises:
            RequestRefused: see `ended_in_error`.
            EngineError: as there, or vLLM did not report which weights sampled each token, or a log-probability is not
                finite.
        """
        if self.finish_reason == "error":
            raise ended_in_error(request)
        return Completion(
            key=request.key,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            logprobs=sampled_logprobs(self.logprobs, request.key),
            finish_reason=self.finish_reason,
            versions=self._spans(request.key),
            routes=refs.get(request.key),
            stop_token_id=self._stop_token(request),
            stop_string=self.stop_reason if isinstance(self.stop_reason, str) else None,
            drawing=request.drawing,
        )

    def _stop_token(self, request: GenerateRequest) -> int | None:
        by_token = self.token_ids and self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        last = self.token_ids[-1] if by_token else None
        return last if last in request.stop_token_ids else None

    def _spans(self, key: str) -> tuple[VersionSpan, ...]:
        reported = self.versions or ()
        spans = tuple(VersionSpan(span.end - span.start, int(span.version)) for span in reported)
        bounds = [0, *(span.end for span in reported)]
        rising = all(span.weight_version < next_.weight_version for span, next_ in pairwise(spans))
        rising = rising and all(span.tokens > 0 for span in spans)
        if [span.start for span in reported] != bounds[:-1] or bounds[-1] != len(self.token_ids) or not rising:
            raise EngineError(
                "vLLM did not report which weights sampled each token of a completion",
                where={"request": key},
                got=[(span.version, span.start, span.end) for span in reported] or "no version",
                expected=f"rising versions for tokens 0 to {len(self.token_ids)}",
                fault="versions",
            )
        return spans


def ended_in_error(request: GenerateRequest) -> EngineError:
    """Return the error for a request that vLLM ended with an error.

    With a grammar the request is at fault: vLLM cannot make the grammar, or the grammar needs a stop token early.
    """
    where: About = {"request": request.key}
    if request.grammar:
        do = "simplify the grammar, or leave out stop tokens that it may need"
        return RequestRefused("vLLM could not follow the grammar of a completion", where=where, do=do)
    return EngineError("vLLM could not sample a completion", where=where, do="read its log")


def sampled_logprobs(values: array[float] | Sequence[float], key: str) -> np.ndarray:
    """Return a copy of the log-probabilities of a completion's tokens as float32 [T].

    Raises EngineError if one is not finite: a token with that probability cannot have been sampled.
    """
    logprobs = np.array(values, np.float32)
    wrong = np.flatnonzero(~((logprobs > _NO_LOGPROB) & (logprobs < np.inf)))
    if len(wrong):
        raise EngineError(
            "vLLM returned a log-probability that is not finite for a sampled token",
            where={"request": key, "token": wrong[0]},
            got=f"{logprobs[wrong[0]]:g}",
            expected="a finite number",
            do="look for NaN in the sampler's weights, or set rollout.dtype=float32 if its numbers overflow",
        )
    return logprobs


def check(
    requests: Sequence[GenerateRequest], *, max_model_len: int, vocabulary: int, reads_text: bool, keeps_support: bool
) -> None:
    """Raise RequestRefused for requests that vLLM would truncate or change silently, or that would crash it.

    vLLM checks neither token ids against its embeddings nor whether it has a tokenizer to find stop strings.

    Args:
        vocabulary: number of rows of the embeddings, which may exceed the tokenizer's number of ids.
        reads_text: whether vLLM has a tokenizer.
        keeps_support: whether the recorder keeps the ids that a token could be drawn from.
    """
    keys = set()
    for request in requests:
        fault = _fault(request, max_model_len, vocabulary)
        if fault is None and request.stop and not reads_text:
            do = "start the sampler with rollout.stop, so that it reads text"
            fault = "stop", "stop strings", "stop tokens only", do
        if fault is None and request.grammar:
            fault = _grammar_fault(request, keeps_support=keeps_support, reads_text=reads_text)
        if fault is None and request.key in keys:
            fault = "key", "a key used twice", "another one", ""
        if fault is not None:
            name, got, expected, do = fault
            where: About = {"request": request.key}
            text = "A request cannot be sampled"
            raise RequestRefused(text, where=where, got=got, expected=expected, do=do, fault=name)
        keys.add(request.key)


def check_scored(token_ids: Sequence[int], *, max_model_len: int, vocabulary: int) -> None:
    """Raise RequestRefused for tokens that vLLM cannot score. They must leave room for one sampled token."""
    if not 2 <= len(token_ids) < max_model_len:
        within = f"2 to {max_model_len - 1}"
        raise RequestRefused("The number of tokens to score is out of range", got=len(token_ids), expected=within)
    if unknown := _unknown(token_ids, vocabulary):
        _, got, expected, do = unknown
        raise RequestRefused("Tokens cannot be scored", got=got, expected=expected, do=do)


def _fault(request: GenerateRequest, max_model_len: int, vocabulary: int) -> tuple[str, str, str | None, str] | None:
    """Return the faulty part of a request, what it is, the expected value and what to do; None without a fault. NaN is
    always a fault."""
    tokens, length = request.prompt_token_ids, len(request.prompt_token_ids) + request.max_tokens
    if not tokens:
        return "prompt", "an empty prompt", None, ""
    if request.max_tokens < 1:
        return "max_tokens", f"max_tokens {request.max_tokens}", "at least 1", ""
    if length > max_model_len:
        return "prompt", f"{length} tokens, more than max_model_len {max_model_len}", None, ""
    if len(request.grammar) > LONGEST_GRAMMAR:
        return "grammar", f"{len(request.grammar)} characters of grammar", f"at most {LONGEST_GRAMMAR}", ""
    for name, inside, expected in (
        ("temperature", request.temperature == 0 or _COLDEST <= request.temperature <= 2, f"0, or {_COLDEST} to 2"),
        ("top_k", 0 <= request.top_k <= vocabulary, f"0 to {vocabulary}"),
        ("top_p", 0 < request.top_p <= 1, "above 0, at most 1"),
        ("min_p", 0 <= request.min_p <= 1, "0 to 1"),
        ("seed", request.seed is None or 0 <= request.seed < 1 << 63, "0 to 2**63 - 1"),
    ):
        if not inside:
            return name, f"{name} {getattr(request, name)}", expected, ""
    return _unknown(tokens, vocabulary) or _unknown(request.stop_token_ids, vocabulary, "stop_token_ids", "stop ")


def _grammar_fault(
    request: GenerateRequest, *, keeps_support: bool, reads_text: bool
) -> tuple[str, str, str, str] | None:
    """Return the fault, as `_fault` does, if the sampler cannot follow any grammar for this request."""
    if not reads_text:
        return "grammar", "a grammar, and no tokenizer", "free text", "start the sampler so that it reads text"
    if not keeps_support:
        do = "the trainer must know which tokens the grammar left"
        return "grammar", "a grammar, and no sampling masks", "rollout.keep_sampling_mask=true", do
    if not request.stop_token_ids:  # vLLM would let tokens of its own end the grammar, and sample on without it
        return "grammar", "a grammar, and no stop tokens", "stop tokens", ""
    return None


def check_grammars(requests: Sequence[GenerateRequest]) -> None:
    """Raise RequestRefused for a grammar that vLLM cannot follow to the letter. Imports vLLM.

    vLLM would end such a request with an error, or leave out the keywords of a JSON schema that it does not know.
    """
    for text in {request.grammar for request in requests} - {""}:
        _check_grammar(text)


@lru_cache(maxsize=64)  # an agent sends the same tools in every turn
def _check_grammar(text: str) -> None:
    from vllm import SamplingParams
    from vllm.v1.structured_output.backend_xgrammar import (
        has_xgrammar_unsupported_json_features,
        validate_xgrammar_grammar,
    )

    try:
        if any(map(has_xgrammar_unsupported_json_features, _schemas(json.loads(text)))):
            raise ValueError("a JSON schema has keywords that xgrammar does not enforce")
        validate_xgrammar_grammar(SamplingParams(structured_outputs=structured_outputs(text)))
    except Exception as error:  # vLLM raises many kinds for a schema whose keywords have values of a wrong type
        got = " ".join(str(error.__cause__ or error).split())[:300]
        raise RequestRefused("A grammar cannot be followed", got=got, do="simplify the JSON schema") from error


def structured_outputs(grammar: str):
    """Return vLLM's parameter for a grammar; None for none. Imports vLLM."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(structural_tag=grammar) if grammar else None


def _schemas(tag: object) -> Iterator[dict]:
    """Yield the JSON schemas in a structural tag."""
    parts: Iterable[object] = tag if isinstance(tag, list) else tag.values() if isinstance(tag, dict) else ()
    if isinstance(tag, dict) and tag.get("type") == "json_schema":
        yield tag["json_schema"]
        parts = ()
    for part in parts:
        yield from _schemas(part)


def _unknown(
    tokens: Sequence[int], vocabulary: int, name: str = "prompt", what: str = ""
) -> tuple[str, str, str, str] | None:
    """Return the fault, as `_fault` does, if the model lacks one of these token ids."""
    least, most = min(tokens, default=0), max(tokens, default=0)
    if least >= 0 and most < vocabulary:
        return None
    return name, f"{what}token ids {least} to {most}", f"0 to {vocabulary - 1}", "use the tokenizer of the model"


def scoring(runs: Sequence[Sequence[int]], *, record: bool) -> list[GenerateRequest]:
    """Return requests that make an engine forward these token sequences as prompts; their samples are ignored."""
    return [
        GenerateRequest(f"scored/{index}", tuple(run), 0, 1, 0.0, (), record=record) for index, run in enumerate(runs)
    ]


def prompt_logprobs(result, token_ids: Sequence[int]) -> np.ndarray:
    """Return float32 [n - 1], the log-probabilities of a prompt's tokens but the first, from vLLM's output."""
    scored = zip(result.prompt_logprobs[1:], token_ids[1:], strict=True)
    return np.asarray([by_token[token].logprob for by_token, token in scored], np.float32)


def parameters(request: GenerateRequest, ask: RecordingRequest | None) -> dict[str, object]:
    """Return vLLM's sampling parameters for a request, but its grammar. `ask` says what to record."""
    return {
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "stop_token_ids": list(request.stop_token_ids),
        # Only the request's stop tokens end a completion.
        "ignore_eos": True,
        "logprobs": 0,
        "stop": list(request.stop),
        # vLLM turns tokens into text only to find stop strings, which may be special tokens.
        "detokenize": bool(request.stop),
        "skip_special_tokens": False,
        "extra_args": ask.extra_args() if ask is not None else None,
    }


def forwarded(
    requests: Sequence[GenerateRequest], asks: Sequence[RecordingRequest | None], samples: Sequence[Growing]
) -> tuple[dict[str, list[int]], list[str]]:
    """Return what to publish: key -> token ids that must have been forwarded, and the keys of aborted requests.

    A request that ended before its first sampled token is not published. It has no token ids here, so that its record
    is not awaited.
    """
    sequences, aborted = {}, []
    for request, ask, sample in zip(requests, asks, samples, strict=True):
        if ask is not None:
            sequences[ask.key] = [*request.prompt_token_ids, *sample.token_ids[:-1]] if sample.token_ids else []
            aborted += [ask.key] if sample.aborted and sample.token_ids else []
    return sequences, aborted
