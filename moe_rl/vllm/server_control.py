"""Answers the control calls of a recording vLLM server, and checks requests for vLLM. Both come through its gate."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import moe_rl
from moe_rl.errors import describe
from moe_rl.trace.record import check_name
from moe_rl.types import GenerateRequest
from moe_rl.vllm import control, sampling
from moe_rl.vllm.recording import RecordingRequest, parse
from moe_rl.vllm.route_source import join_parts
from moe_rl.weights.update import Broadcast, Files, Holding, Received, WeightUpdate, agreement, encode

# Longest bodies, in bytes.
_SMALL_BODY = 1 << 16
_TOKENS_BODY = 1 << 24
_PUBLISH_BODY = 1 << 28
# How often publishing or abandoning a shard asks for requests that may still add to it. Workers learn of a finished
# request one step later, and requests of clients that are gone are aborted meanwhile. A limit on the time would not do:
# while weights are loaded, an answer takes as long as that.
_SETTLE_POLLS = 2000
_SETTLE_POLL_SECONDS = 0.005
# How long a release waits for the next expected request.
_ARRIVE_SECONDS = 30.0
# vLLM's prefix of the id of a request to GENERATE.
_VLLM_PREFIX = "generate-tokens-"
# A challenge is a few bytes; the server must not give away any other file.
_CHALLENGE_BYTES = 64


class RefusedCall(Exception):
    """Answers a control call with an error. `status` is the HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ControlRoute:
    """Describes a route of the gate. message: type of the body, None for no body. longest: body size limit in bytes.
    answer: the handler; gets the engine and the message."""

    method: str
    message: type[msgspec.Struct] | None
    longest: int
    answer: Callable[[Any, Any], Awaitable[Any]]


class Control:
    """Answers the gate's own routes, checks requests for vLLM, and tracks the server's weights.

    Attributes:
        routes: what the gate offers, by path.
    """

    def __init__(self):
        self._start = secrets.token_hex(8)
        self._updates = 0
        # The run that adopted the server last.
        self._run: str | None = None
        self._holding = Holding(0, "", whole=True)
        self._updating = asyncio.Lock()
        self._goes_on = asyncio.Event()  # cleared during a pause
        self._goes_on.set()
        self.routes = {
            "/moe_rl/open": ControlRoute("POST", control.Open, _SMALL_BODY, self._open),
            "/moe_rl/publish": ControlRoute("POST", control.Publish, _PUBLISH_BODY, self._publish),
            "/moe_rl/abandon": ControlRoute("POST", control.Sink, _SMALL_BODY, self._abandon),
            "/moe_rl/hold": ControlRoute("POST", None, 0, self._hold),
            "/moe_rl/release": ControlRoute("POST", control.Release, _SMALL_BODY, self._release),
            "/moe_rl/pause": ControlRoute("POST", None, 0, self._pause),
            "/moe_rl/resume": ControlRoute("POST", None, 0, self._resume),
            "/moe_rl/leave": ControlRoute("POST", control.LeaveRequests, _TOKENS_BODY, self._leave),
            "/moe_rl/adopt": ControlRoute("POST", None, 0, self._adopt),
            "/moe_rl/update": ControlRoute("POST", WeightUpdate, _PUBLISH_BODY, self._update),
            "/moe_rl/score": ControlRoute("POST", control.Scoring, _TOKENS_BODY, self._score),
            "/moe_rl/challenge": ControlRoute("POST", control.Challenge, _SMALL_BODY, self._challenge),
            "/moe_rl/stats": ControlRoute("GET", None, 0, self._stats),
            "/moe_rl/recording": ControlRoute("GET", None, 0, self._recording),
            control.GENERATE: ControlRoute("POST", control.Generation, _TOKENS_BODY, self._generate),
        }

    def refuse_former_run(self, method: str, path: str, run: str | None) -> None:
        """Refuse a run that has lost the server to another: its calls could pause or abandon the current run's
        samples."""
        if path == "/moe_rl/adopt":
            self._run = run
        elif method == "POST" and path != "/moe_rl/challenge" and None not in (run, self._run) and run != self._run:
            raise RefusedCall(409, "another run has taken this server since: give every run servers of its own")

    async def _open(self, engine, message: control.Open) -> None:
        folder = _inside(_trace_root(engine), message.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RefusedCall(409, f"{folder}: {error.strerror}") from None
        await _call(engine, "moe_rl_open", message.sink, message.folder)

    async def _publish(self, engine, message: control.Publish) -> dict:
        awaited = {key for key, ids in message.sequences.items() if ids}
        if unknown := set(message.aborted) - awaited:
            raise RefusedCall(400, f"aborted: {min(unknown)!r} is none of the sequences with tokens")
        await _settle(engine, message.sink, awaited if message.keep_open else None)
        call = secrets.token_hex(8)
        publication = message.sink, message.sequences, message.aborted, message.keep_open, message.cut
        await _call(engine, "moe_rl_publish", call, *publication)
        while not all(await _call(engine, "moe_rl_published", call)):
            await asyncio.sleep(_SETTLE_POLL_SECONDS)
        return join_parts(await _call(engine, "moe_rl_claims", call))

    async def _abandon(self, engine, message: control.Sink) -> None:
        await _settle(engine, message.sink)
        await _call(engine, "moe_rl_abandon", message.sink)

    async def _hold(self, engine, _) -> None:
        """Abort running requests, empty the prefix cache, and make new requests wait."""
        self._refuse_pause()
        await _stop(engine)

    async def _release(self, engine, message: control.Release) -> None:
        """Start the waiting requests once all have arrived, so that batches do not depend on arrival times."""
        self._refuse_pause()
        there, deadline = -1, 0.0
        while (now := engine.output_processor.get_num_unfinished_requests()) < message.requests:
            if engine.errored:
                raise engine.dead_error
            if now != there:
                there, deadline = now, time.monotonic() + _ARRIVE_SECONDS
            elif time.monotonic() > deadline:
                raise RefusedCall(409, f"{message.requests - now} of {message.requests} requests never came")
            await asyncio.sleep(_SETTLE_POLL_SECONDS)
        await engine.resume_generation()

    async def _pause(self, engine, _) -> None:
        """Stop the forward passes. Requests keep their place and their KV cache."""
        if _recording(engine)["native"]:
            raise RefusedCall(409, "vLLM's own capture does not say which weights made which row: it records no pauses")
        self._goes_on.clear()
        await engine.pause_generation(mode="keep", clear_cache=False)

    async def _resume(self, engine, _) -> None:
        """End a pause, unless the weights are incomplete."""
        self._refuse_torn_weights(engine)
        await engine.resume_generation()
        self._goes_on.set()

    async def _leave(self, engine, message: control.LeaveRequests) -> None:
        await engine.abort([f"{_VLLM_PREFIX}{name}" for name in message.names])

    async def _adopt(self, engine, _) -> Holding:
        """Give the server to a new run. Nothing is sampled before the run's weights have arrived."""
        async with self._updating:
            await _stop(engine)
            try:
                await _call(engine, "moe_rl_abandon_all")
                return await self._hear(engine, "moe_rl_forget_weights")
            finally:
                await engine.resume_generation()
                self._goes_on.set()

    async def _update(self, engine, message: WeightUpdate) -> Holding:
        if isinstance(message.source, Files):
            paths = [str(_inside(_trace_root(engine), path)) for path in message.source.paths]
            message = msgspec.structs.replace(message, source=Files(paths))
        elif not isinstance(message.source, Broadcast | Received):
            raise RefusedCall(400, f"a server shares no memory with a trainer, got {type(message.source).__name__}")
        async with self._updating:
            if not self._goes_on.is_set():  # requests keep their KV cache
                return await self._load(engine, message)
            await _stop(engine)
            try:
                holding = await self._load(engine, message)
                # Prefixes cached between the pause and the update belong to the old weights.
                if not await engine.reset_prefix_cache():
                    raise RefusedCall(500, "vLLM kept its prefix cache though no request runs")
                return holding
            finally:
                await engine.resume_generation()

    async def _load(self, engine, message: WeightUpdate) -> Holding:
        holding = await self._hear(engine, "moe_rl_update_weights", encode(message))
        if message.final and not holding.refused:
            await engine.update_weight_version(str(message.version))
        return holding

    async def _hear(self, engine, method: str, *args) -> Holding:
        """Make a call that may change the weights, and return the workers' new weights.

        If the call fails, the weights count as incomplete.
        """
        self._updates += 1
        self._holding = msgspec.structs.replace(self._holding, whole=False)
        answers = _values(await _workers(engine, method, *args))
        self._holding = agreement([msgspec.convert(answer, Holding) for answer in answers])
        return self._holding

    def _whole(self, engine) -> bool:
        """Return whether the server holds complete weights: with `--load-format dummy` not before an update."""
        loaded = self._updates > 0 or engine.vllm_config.load_config.load_format != "dummy"
        return loaded and self._holding.whole

    def _refuse_torn_weights(self, engine) -> None:
        if not self._whole(engine):
            raise RefusedCall(409, "the weights are incomplete: a run must send an update first")

    def _refuse_pause(self) -> None:
        if not self._goes_on.is_set():
            raise RefusedCall(409, "the server is paused: resume it first")

    async def _generate(self, engine, message: control.Generation) -> control.SaltedGeneration:
        # In a pause vLLM would give it cached prefixes from the weights before the update.
        await self._goes_on.wait()
        self._refuse_torn_weights(engine)
        params, asked = message.sampling_params, message.sampling_params.extra_args
        if asked is not None:
            parse(msgspec.to_builtins(asked), asked.moe_rl_key)
        request = GenerateRequest(
            asked.moe_rl_key if asked is not None else "",
            tuple(message.token_ids),
            params.seed,
            params.max_tokens,
            params.temperature,
            tuple(params.stop_token_ids),
            params.top_k,
            params.top_p,
            params.min_p,
            stop=tuple(params.stop),
            grammar=params.structured_outputs.structural_tag if params.structured_outputs is not None else "",
        )
        keeps_support = _recording(engine)["support"]
        sampling.check([request], **_limits(engine), reads_text=_reads_text(engine), keeps_support=keeps_support)
        sampling.check_grammars([request])
        salt = str(self._holding.version)
        return control.SaltedGeneration(message.token_ids, params, message.stream, message.priority, salt, message.name)

    async def _score(self, engine, message: control.Scoring) -> control.Scores:
        self._refuse_torn_weights(engine)
        self._refuse_pause()
        for run in message.runs:
            sampling.check_scored(run, **_limits(engine))
        requests = sampling.scoring(message.runs, record=message.sink is not None)
        asks = [RecordingRequest.of(request, check_name(message.sink or "none")) for request in requests]
        if message.sink is None:
            return control.Scores(await _scored(engine, requests, asks), [])
        await self._open(engine, control.Open(message.sink, message.folder))
        try:
            logprobs = await _scored(engine, requests, asks)
            wanted = {request.key: run[:-1] for request, run in zip(requests, message.runs, strict=True)}
            refs = await self._publish(engine, control.Publish(message.sink, wanted))
        except BaseException:
            await _call(engine, "moe_rl_abandon", message.sink)
            raise
        return control.Scores(logprobs, [refs[request.key] for request in requests])

    async def _challenge(self, engine, message: control.Challenge) -> str:
        path = _inside(_trace_root(engine), message.folder) / message.name
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
                text = file.read(_CHALLENGE_BYTES)
            path.with_name(f"{message.name}.answer").write_bytes(text)
        except OSError as error:
            raise RefusedCall(409, f"{path}: {error.strerror}") from None
        return text.decode("ascii", "replace")

    async def _stats(self, engine, _) -> list[dict[str, int]]:
        return await _call(engine, "moe_rl_stats")

    async def _recording(self, engine, _) -> control.Served:
        import vllm

        spec = (await _call(engine, "moe_rl_spec"))[0]
        config = engine.vllm_config
        recording = _recording(engine)
        return control.Served(
            moe_rl=moe_rl.__version__,
            vllm=vllm.__version__,
            trace_root=recording["trace_root"],
            vocab_size=config.model_config.get_vocab_size(),
            max_model_len=config.model_config.max_model_len,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            capture="native"
            if recording["native"]
            else "worker"
            if config.parallel_config.worker_cls.endswith("RecordingWorker")
            else "patch",
            support=recording["support"],
            router_logits_fraction=recording["router_logits_fraction"],
            head=recording["head"],
            reads_text=_reads_text(engine),
            gpus=config.parallel_config.world_size_across_dp,
            start=self._start,
            updates=self._updates,
            weight_version=int(await engine.get_weight_version()),
            weight_digest=self._holding.digest,
            weights_whole=self._whole(engine),
            **spec,
        )


def _limits(engine) -> dict[str, int]:
    """Return the engine's limits, for `sampling.check`."""
    model = engine.vllm_config.model_config
    return {"max_model_len": model.max_model_len, "vocabulary": model.get_vocab_size()}


def _reads_text(engine) -> bool:
    return not engine.vllm_config.model_config.skip_tokenizer_init


async def _call(engine, method: str, *args) -> list:
    """Call a method of RecorderControl where the server records; return the recorders' answers. Raises RefusedCall if
    one refuses."""
    if _recording(engine)["native"]:
        return _values(engine.moe_rl_native.collective_rpc("moe_rl_answer", (method, *args)))
    return _values(await _workers(engine, method, *args))


async def _workers(engine, method: str, *args) -> list:
    """Return the answers of all workers. vLLM itself gives only those of the first data-parallel rank."""
    name, given = "moe_rl_answer", (method, *args)
    if engine.vllm_config.parallel_config.data_parallel_size == 1:
        return await engine.collective_rpc(name, args=given)
    ranks = await engine.engine_core.call_utility_all_async("collective_rpc", name, None, given, None)
    return [answer for answers in ranks for answer in answers]


def _values(answers: list) -> list:
    for status, name in ((400, "refused"), (500, "failed")):
        if errors := [answer[name] for answer in answers if name in answer]:
            raise RefusedCall(status, errors[0])
    return [answer["value"] for answer in answers if answer["value"] is not None]


async def _scored(
    engine, requests: Sequence[GenerateRequest], asks: Sequence[RecordingRequest | None]
) -> list[list[float]]:
    """Return the log-probabilities of all tokens but the first of each prompt. vLLM then computes the whole prompt
    again."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    async def score(request: GenerateRequest, ask: RecordingRequest | None) -> list[float]:
        tokens = list(request.prompt_token_ids)
        params = SamplingParams(**sampling.parameters(request, ask), prompt_logprobs=0)
        name = f"score-{secrets.token_hex(8)}"
        async for output in engine.generate(TokensPrompt(prompt_token_ids=tokens), params, name):
            last = output
        return sampling.prompt_logprobs(last, tokens).tolist()

    return await asyncio.gather(*map(score, requests, asks))


async def _stop(engine) -> None:
    await engine.pause_generation(mode="abort", clear_cache=True)


async def _settle(engine, sink: str, only: Container[str] | None = None) -> None:
    """Wait until no request, or none with these keys, can add to a shard."""
    for _ in range(_SETTLE_POLLS):
        keys = [key for keys in await _call(engine, "moe_rl_unfinished", sink) for key in keys]
        unfinished = [key for key in keys if only is None or key in only]
        if not unfinished:
            return
        await asyncio.sleep(_SETTLE_POLL_SECONDS)
    got = f"{len(unfinished)} requests still being sampled, such as {unfinished[0]}"
    raise RefusedCall(409, describe("A shard is not finished", where={"shard": sink}, got=got, do="abort them"))


def _recording(engine) -> dict[str, Any]:
    """Return the fields of the server's recording.Recording."""
    return engine.vllm_config.additional_config["moe_rl"]


def _trace_root(engine) -> Path:
    return Path(_recording(engine)["trace_root"])


def _inside(root: Path, path: str) -> Path:
    """Return a path below the trace root. Raises RefusedCall if links lead out of the root, or the path is
    impossible."""
    try:
        resolved = (root / path).resolve()
        resolved.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        raise RefusedCall(400, f"{path[:200]!r} is not a valid path: {error}") from None
    if not resolved.is_relative_to(root.resolve()):
        raise RefusedCall(403, f"{path!r} is not below the trace root {root}")
    return resolved
