"""Checks recorded routes against the routers' input logits, for a few tokens of every step.

The recorder takes the experts after the routers. This module takes the logits before them, and derives which experts a
top-k must choose and which it may choose. When a request is finished, the rows read back from its KV slots must fit.
That proves that no step in between (buffer columns, row order, copies, slots) has mixed up the rows.

Legend for shapes: W rows, L MoE layers, E experts, K top-k experts per token.
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
from moe_rl.vllm.slots import Recorded, Rows

# Maximum rows per step, and per request: about 3 KiB each for a model of 94 layers and 128 experts.
_ROWS, _ROWS_OF_REQUEST = 16, 64


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Describes how a router chooses: the K best scores, which are softmax or sigmoid of the logits, plus a bias.

    Attributes:
        bias: [E] float32, or None.
        groups, kept: experts are chosen only from the `kept` best of `groups` groups. A group's score is its best
            expert's score or, with a bias, the sum of its best two.
        exactness: relative error of a score, since the router may compute it in the precision of its logits.
    """

    top_k: int
    sigmoid: bool
    bias: np.ndarray | None
    groups: int
    kept: int
    exactness: float

    @classmethod
    def of(cls, router: Any, exactness: float) -> Ranking | None:
        """Return the ranking of a vLLM router; None if it chooses differently."""
        if type(router).__name__ not in ("CPURouter", "FusedTopKRouter", "FusedTopKBiasRouter", "GroupedTopKRouter"):
            return None
        strange = ("custom_routing_function", "hash_indices_table", "_hash_indices_table", "bias_vl")
        if any(getattr(router, name, None) is not None for name in strange):
            return None
        function = router.scoring_func
        if function not in ("softmax", "sigmoid"):
            return None
        bias = getattr(router, "e_score_correction_bias", None)
        grouped = getattr(router, "use_grouped_topk", type(router).__name__ == "GroupedTopKRouter")
        groups, kept = (router.num_expert_group, router.topk_group) if grouped else (1, 1)
        experts = router.global_num_experts
        if experts <= groups or experts % groups:
            groups = kept = 1
        bias = None if bias is None else bias.detach().float().cpu().numpy()
        return cls(router.top_k, function == "sigmoid", bias, groups, kept, exactness)

    def bounds(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two masks bool [W, E] for logits [W, E]: experts that must be chosen, and experts that may be.

        They differ in experts whose score, or whose group's score, ties for last place within the router's rounding.
        """
        logits = logits.astype(np.float64)
        if self.sigmoid:
            scores = 1 / (1 + np.exp(-np.clip(logits, -700, 700)))
        else:
            scores = np.exp(logits - logits.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
        slack = self.exactness * np.abs(scores) + 1e-30
        if self.bias is not None:
            scores = scores + self.bias
            slack = slack + self.exactness * np.abs(scores)
        low, high = scores - slack, scores + slack
        certain = possible = np.ones(scores.shape, bool)
        if self.kept < self.groups:
            best = 1 if self.bias is None else 2
            by_group = [
                np.sort(side.reshape(len(side), self.groups, -1), -1)[..., -best:].sum(-1) for side in (low, high)
            ]
            least, most = by_group
            # The last kept group scores at least `inside`, the first one left out at most `outside`.
            inside, outside = np.sort(least, -1)[:, -self.kept, None], np.sort(most, -1)[:, -self.kept - 1, None]
            size = scores.shape[1] // self.groups
            certain, possible = (np.repeat(mask, size, 1) for mask in (least > outside, most >= inside))
        last = np.sort(np.where(certain, low, -np.inf), -1)[:, -self.top_k, None]
        if scores.shape[1] == self.top_k:
            return certain, possible
        first_out = np.sort(np.where(possible, high, -np.inf), -1)[:, -self.top_k - 1, None]
        return certain & (low > first_out), possible & (high >= last)


class RouterWitness:
    """Hooks into the routers of one worker, and keeps their choices for each request."""

    def __init__(self, worker, routers: Mapping[int, Any]):
        """Hook into `routers`: by global layer number, ascending, all of a known kind."""
        self._routers = dict(routers)
        self._experts = worker.model_config.get_num_experts()
        shape = (_ROWS, len(self._routers), self._experts)
        self._buffer = torch.zeros(shape, dtype=torch.float32, device=worker.device)
        self._rows = slice(0, 0)
        self._tokens = 0
        self._rankings: tuple[int, list[Ranking | None]] = (-1, [])
        self._exactness = 0.0
        self._seen: dict[int, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
        for column, router in enumerate(self._routers.values()):
            self._watch(router, column)

    @classmethod
    def of(cls, worker, modules: Mapping[int, torch.nn.Module], *, pipeline_stages: int) -> Self | None:
        """Make the witness, or return None if that is not possible.

        A compiled forward pass does not call the hooks. With pipeline stages or speculative decoding the rows of a step
        are not those of one pass. Every router must also be of a known kind.
        """
        config = worker.vllm_config
        if not modules:
            return None
        if pipeline_stages > 1 or config.speculative_config is not None or not config.model_config.enforce_eager:
            return None
        routers = {layer: getattr(module, "router", None) for layer, module in modules.items()}
        known = all(
            hasattr(router, "_compute_routing") and Ranking.of(router, 0.0) is not None for router in routers.values()
        )
        return cls(worker, routers) if known else None

    def begin_step(self, tokens: int, seed: str) -> None:
        """Choose the rows of the coming step: spread over it, and the same in every run of the same requests."""
        self._tokens = tokens
        stride = max(1, -(-tokens // _ROWS))
        first = xxhash.xxh3_64_intdigest(seed.encode()) % stride
        self._rows = slice(first, min(tokens, first + stride * _ROWS), stride)
        self._buffer.fill_(torch.nan)

    def logits(self) -> Tensor:
        """Return the logits [W, L, E] of the step's rows on the device, NaN where a router was not called."""
        return self._buffer[: len(range(*self._rows.indices(self._tokens)))]

    def whose(self, in_step: Sequence[tuple[Recorded, int]]) -> list[tuple[Recorded, int]]:
        """Return the request and position of each chosen row.

        in_step lists the step's requests in row order, with their numbers of tokens.
        """
        chosen, first, wanted = [], 0, iter(range(*self._rows.indices(self._tokens)))
        row = next(wanted, None)
        for request, count in in_step:
            while row is not None and row < first + count:
                chosen.append((request, request.forwarded - count + row - first))
                row = next(wanted, None)
            first += count
        return chosen

    def take(self, weight_version: int, logits: np.ndarray, whose: Sequence[tuple[Recorded, int]]) -> None:
        """Store which experts the logits [W, L, E] of these rows allow, for this weight version."""
        if self._rankings[0] != weight_version:
            made = [Ranking.of(router, self._exactness) for router in self._routers.values()]
            self._rankings = (weight_version, made)
        kept = [
            index
            for index, (request, position) in enumerate(whose)
            if request.ask is not None
            and len(self._seen.get(request.number, ())) < _ROWS_OF_REQUEST
            # A row computed again after a preemption, perhaps with newer weights, is not the recorded row.
            and (request.kept is None or position >= len(request.kept))
        ]
        kept = [index for index in kept if np.isfinite(logits[index]).all()]
        if not kept:
            return
        bounds = [
            ranking.bounds(logits[kept, column])
            for column, ranking in enumerate(self._rankings[1])
            if ranking is not None
        ]
        must, may = (np.packbits(np.stack([pair[side] for pair in bounds], 1), -1) for side in (0, 1))
        for row, index in enumerate(kept):
            request, position = whose[index]
            self._seen.setdefault(request.number, {})[position] = must[row], may[row]

    def check(self, request: Recorded, rows: Rows) -> int:
        """Compare a finished request with its witnessed rows, forget them, and return how many were compared.

        Raises EngineError with request, position and layer if a row does not fit.
        """
        witnessed = self._seen.pop(request.number, {})
        positions = sorted(position for position in witnessed if position < len(rows))
        if not positions:
            return 0
        routes = rows.routes[positions].astype(np.int64)  # [W, L, K]
        must, may = (
            np.unpackbits(np.stack([witnessed[p][side] for p in positions]), -1, count=self._experts).astype(bool)
            for side in (0, 1)
        )
        chosen = np.zeros(must.shape, bool)
        np.put_along_axis(chosen, routes, True, -1)
        wrong = ((must & ~chosen) | (chosen & ~may)).any(-1)
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            layer = list(self._routers)[column]
            among = np.flatnonzero(may[row, column]).tolist()
            got = (
                f"experts {sorted(routes[row, column].tolist())}, and {int(wrong.sum())} of {wrong.size} sets are wrong"
            )
            raise EngineError(
                "A row is not what the router chose by its logits",
                where={"request": request.ask.key if request.ask else "?", "position": positions[row], "layer": layer},
                got=got,
                expected=f"{routes.shape[2]} of {among}",
                do="look at the recorder: rows of another token or another layer, or that were not written; "
                "moe-rl patch --check",
            )
        return len(positions)

    def drop(self, request: Recorded) -> None:
        """Forget a request that is not stored."""
        self._seen.pop(request.number, None)

    def _watch(self, router: Any, column: int) -> None:
        compute = router._compute_routing

        def watched(hidden_states, router_logits, *args, **kwargs):
            # A call with fewer rows than the step has tokens covers an unknown part of the step, so it is ignored.
            if router_logits.shape[0] >= self._tokens:
                rows = router_logits[: self._tokens][self._rows]
                self._buffer[: rows.shape[0], column] = rows
                self._exactness = 4 * torch.finfo(router_logits.dtype).eps
            return compute(hidden_states, router_logits, *args, **kwargs)

        router._compute_routing = watched
