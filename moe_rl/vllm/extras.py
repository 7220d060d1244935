"""Records more than routes, each kind with its own switch: sampling support, log-normaliser, router logits, head.

support         the token ids that could have been drawn under grammar, top-k, top-p and min-p, per sampled token
log_normalizer  log of the support's total probability before truncation, per sampled token. Add it to the token's
                log-probability to get the log-probability without top-k, top-p and min-p.
router_logits   logits of every router, for a fraction of the tokens that this request computed itself
head            the K likeliest tokens with their log-probabilities in the sampling distribution, per sampled token

Each costs copies to the host in every step, so each is off by default. A trainer with `rollout.keep_sampling_mask`
needs the support of every token, a trainer with `objective.score_centering` needs the head; the others are diagnostics
for some requests.

Arrays as they are stored with a record and read back by `TraceStore.aux`:

support_sets [N] uint32, support_counts [S] int32, support_ids int32 (each token's set; the S different sets, with
ascending ids: n > 0 ids that could be drawn, or, if those are fewer, -n ids that could not), log_normalizer [N]
float32, head_ids [N, K] int32 and head_logprobs [N, K] float32 (the likeliest first, -inf for a token that could not be
drawn), for the N sampled tokens in order; router_logits [M, L, E] float32 of rows router_logits_rows [M] uint32,
ascending.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from moe_rl.errors import EngineError
from moe_rl.vllm.recording import Recording
from moe_rl.vllm.slots import Recorded


class Extras:
    """Hooks into the sampler and the routers of one worker, and collects their data for each request."""

    def __init__(self, worker, recording: Recording, moe_modules: Mapping[int, torch.nn.Module]):
        self._runner = worker.model_runner
        self._fraction = recording.router_logits_fraction
        self._support, self._log_normalizer = recording.support, recording.log_normalizer
        self._head = recording.head
        self._samples = recording.distributions
        self._sampled: dict[int, dict[int, _Drawn]] = {}
        self._supports: dict[int, dict[_Support, _Support]] = {}  # the different ones of each request
        self._logits: dict[int, dict[int, np.ndarray]] = {}
        self._in_step: list[tuple[Recorded, int]] = []
        self._log_mass_before: Tensor | None = None
        if self._fraction:
            self._buffer = _watch_routers(worker, moe_modules)
        if self._samples:
            self._watch_sampler(self._runner.sampler)

    @classmethod
    def of(cls, worker, recording: Recording, moe_modules, *, pipeline_stages: int) -> Self | None:
        """Make the hooks, or return None if only routes are recorded. Raises EngineError if the engine cannot provide
        the rest."""
        if not recording.more_than_routes:
            return None
        config = worker.vllm_config
        for wrong, why, do in (
            (pipeline_stages > 1, "no pipeline stage sees both the sampler and all routers", "one stage"),
            (config.speculative_config is not None, "speculative decoding draws several tokens a step", "turn it off"),
            (
                recording.distributions and config.model_config.logprobs_mode != "processed_logprobs",
                f"logprobs_mode is {config.model_config.logprobs_mode}, which does not show what was removed",
                "set logprobs_mode to processed_logprobs",
            ),
            (
                not config.model_config.enforce_eager and recording.router_logits_fraction > 0,
                "a compiled forward pass does not call the routers' hooks",
                "set enforce_eager",
            ),
        ):
            if wrong:
                raise EngineError(
                    "Sampling support, log-normaliser, router logits or head cannot be recorded", got=why, do=do
                )
        return cls(worker, recording, moe_modules)

    def after_forward(self, in_step: Sequence[tuple[Recorded, int]]) -> None:
        """Take one step's data. `in_step` lists the step's requests in row order, with their numbers of tokens."""
        self._in_step = list(in_step)
        if not self._fraction:
            return
        first, wanted = 0, []
        for request, count in self._in_step:
            if request.ask is not None:
                positions = range(request.forwarded - count, request.forwarded)
                key = request.ask.key
                wanted += [(request, p, first + i) for i, p in enumerate(positions) if self._is_chosen(key, p)]
            first += count
        if wanted:
            logits = self._buffer[[row for *_, row in wanted]].cpu().numpy()
            for (request, position, _), row_logits in zip(wanted, logits, strict=True):
                # A token may be computed again after a preemption: the first pass counts, as for routes.
                self._logits.setdefault(request.number, {}).setdefault(position, row_logits)

    def drop(self, request: Recorded) -> None:
        """Forget a request that is not stored."""
        self._sampled.pop(request.number, None)
        self._supports.pop(request.number, None)
        self._logits.pop(request.number, None)

    def of_request(self, request: Recorded, rows: int) -> dict[str, np.ndarray]:
        """Return the arrays of a finished request and forget them. `rows` is the number of its forwarded tokens."""
        assert request.ask is not None  # the recorder calls this only for requests that are stored
        aux: dict[str, np.ndarray] = {}
        sampled, logits = self._sampled.get(request.number, {}), self._logits.get(request.number, {})
        self.drop(request)
        # The row of position p - 1 gave the token at position p; the last token drawn has no row.
        positions = range(len(request.prompt), rows + 1) if self._samples and not request.greedy else range(0)
        if unseen := [p for p in positions if p not in sampled]:
            # A missing support would be taken for the whole vocabulary.
            raise EngineError(
                "the recorder did not see the distribution that a token was drawn from",
                where={"request": request.ask.key, "position": unseen[0]},
                got=f"nothing for {len(unseen)} of {len(positions)} tokens",
            )
        drawn = [sampled[p] for p in positions]
        if self._support and not request.greedy:
            sets = {support: number for number, support in enumerate(dict.fromkeys(d.support for d in drawn))}
            ids = [np.frombuffer(listed, np.int32) for _, listed in sets]
            signs = [-1 if excluded else 1 for excluded, _ in sets]
            aux["support_sets"] = np.asarray([sets[distribution.support] for distribution in drawn], np.uint32)
            aux["support_counts"] = np.asarray([s * len(i) for s, i in zip(signs, ids, strict=True)], np.int32)
            aux["support_ids"] = np.concatenate([_NOTHING, *ids])
        if self._log_normalizer and not request.greedy:
            aux["log_normalizer"] = np.asarray([distribution.mass for distribution in drawn], np.float32)
        if self._head and not request.greedy:
            aux["head_ids"] = np.stack([distribution.head_ids for distribution in drawn])
            aux["head_logprobs"] = np.stack([distribution.head_logprobs for distribution in drawn])
        if self._fraction:
            kept = sorted(p for p in logits if p < rows)
            layers, experts = self._buffer.shape[1:]
            aux["router_logits_rows"] = np.asarray(kept, np.uint32)
            aux["router_logits"] = np.asarray([logits[p] for p in kept], np.float32).reshape(-1, layers, experts)
        return aux

    def _is_chosen(self, key: str, position: int) -> bool:
        """Choose the same tokens in every run of the same requests, whatever the batches."""
        return xxhash.xxh3_64_intdigest(f"{key} {position}".encode()) < self._fraction * 2.0**64

    def _watch_sampler(self, sampler) -> None:
        scale = sampler.apply_temperature

        def apply_temperature(logits: Tensor, *args, **kwargs) -> Tensor:
            scaled = scale(logits, *args, **kwargs)
            if self._log_normalizer:
                self._log_mass_before = scaled.logsumexp(-1)  # before min-p, top-k and top-p remove anything
            return scaled

        sampler.apply_temperature = apply_temperature
        sampler.topk_topp_sampler.register_forward_hook(self._after_sampling)

    def _after_sampling(self, module, inputs: tuple, output: tuple[Tensor, Tensor | None]) -> None:
        """Store the requested data about the distributions that the tokens were drawn from.

        inputs[0] holds the logits [R, V], masked unless the sampler masks them itself. output[1] holds
        the log-probabilities [R, V] of the sampling distribution, -inf for removed tokens.
        """
        logprobs = output[1]
        if logprobs is None:
            raise EngineError("vLLM's sampler gave no processed log-probabilities", do="ask for logprobs=0")
        mass = None
        if self._log_normalizer:
            # For any token of the support: its logit minus its log-probability is the log-sum-exp over the support.
            best = logprobs.argmax(-1, keepdim=True)
            logits = inputs[0].gather(-1, best) - logprobs.gather(-1, best)
            mass = (logits.squeeze(-1) - self._log_mass_before).clamp(max=0.0).cpu().numpy()
        # A prefill chunk that does not reach the end of its prompt draws a token too, which is discarded.
        wanted = [
            (row, request)
            for row, (request, _) in enumerate(self._in_step)
            if request.ask is not None and not request.greedy and request.forwarded >= len(request.prompt)
        ]
        rows = [row for row, _ in wanted]
        supports = _supports(torch.isfinite(logprobs), rows) if self._support else {}
        heads = _heads(logprobs, rows, self._head) if self._head else {}
        for row, request in wanted:
            value = float(mass[row]) if mass is not None else 0.0
            support = supports.get(row, _ALL)
            # A grammar allows the same tokens again and again, and one set may have tens of thousands.
            support = self._supports.setdefault(request.number, {}).setdefault(support, support)
            distribution = _Drawn(support, value, *heads.get(row, _NO_HEAD))
            self._sampled.setdefault(request.number, {}).setdefault(request.forwarded, distribution)


# Whether ids that could not be drawn are listed rather than those that could, and the ids as int32.
_Support = tuple[bool, bytes]
_ALL: _Support = (True, b"")
_NOTHING = np.zeros(0, np.int32)
_NO_HEAD = _NOTHING, _NOTHING.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """Holds the stored data about the distribution that one token was drawn from."""

    support: _Support
    mass: float
    head_ids: np.ndarray
    head_logprobs: np.ndarray


def _heads(logprobs: Tensor, rows: list[int], size: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return ids int32 [K] and logprobs float32 [K] of the likeliest tokens of these rows of logprobs [R, V]."""
    best, ids = logprobs[rows].topk(min(size, logprobs.shape[1]), dim=-1)
    kept = zip(ids.to(torch.int32).cpu().numpy(), best.float().cpu().numpy(), strict=True)
    return dict(zip(rows, kept, strict=True))


def _supports(possible: Tensor, rows: list[int]) -> dict[int, _Support]:
    """Return the supports of these rows of possible [R, V]: the ids that are possible or those that are not, whichever
    are fewer. Waits for the device twice."""
    excluded = possible[rows].sum(-1) * 2 > possible.shape[1]
    listed = possible[rows] ^ excluded[:, None]
    signs, pairs = excluded.tolist(), listed.nonzero().cpu().numpy()
    ends = np.searchsorted(pairs[:, 0], np.arange(1, len(rows)))
    ids = np.split(pairs[:, 1].astype(np.int32), ends)
    return {row: (sign, some.tobytes()) for row, sign, some in zip(rows, signs, ids, strict=False)}


def _watch_routers(worker, moe_modules: Mapping[int, torch.nn.Module]) -> Tensor:
    """Return a buffer [max_tokens, L, E] float32 into which every router writes its logits."""
    experts = worker.model_config.get_num_experts()
    shape = (worker.model_runner.max_num_tokens, len(moe_modules), experts)
    buffer = torch.zeros(shape, dtype=torch.float32, device=worker.device)
    for column, (layer, module) in enumerate(moe_modules.items()):
        router: Any = getattr(module, "router", None)
        if not hasattr(router, "_compute_routing"):
            raise EngineError("Router logits cannot be recorded", where={"layer": layer}, got=type(router).__name__)

        def compute(hidden_states, router_logits, *args, _column=column, _compute=router._compute_routing, **kwargs):
            buffer[: router_logits.shape[0], _column] = router_logits
            return _compute(hidden_states, router_logits, *args, **kwargs)

        router._compute_routing = compute
    return buffer
