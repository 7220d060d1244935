"""Watches the routers of a live trainer, of any make, and says what they really used: `audit(model)`.

    watch = moe_rl.audit(model)
    with watch.step(token_ids, routes, microbatches, layers="d,m*60") as step:
        for number in range(len(microbatches)):
            step.forward(number)  # the model runs this microbatch next
            ...                   # the trainer's own code
    print(step.report)

Forward hooks read what each router returned, in each pass and each recomputation, and compare it with the record. They
change nothing, and no trainer has to be changed for them. Megatron-core's TopKRouter, also with its own RouterReplay,
and the routers of transformers are found by what they return; others are named, with a function that reads them.

A recomputation is told from a forward by the router's input, which is nearly that of the forward. So no order of the
schedule is assumed. Comparing inputs makes the host wait for the device in each router: an audit is for a few steps,
not for a run.

The record itself is checked by `check_batch`, with the scores of the routers as the witness.

Legend for shapes: R rows of a microbatch in the order in which this rank's routers see them, T tokens of a sequence,
C layers as recorded, K top-k, E experts. layer: global decoder layer, 0-based.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from moe_rl.errors import ReplayError
from moe_rl.replay.audit_report import Audited, AuditReport, Expected, RouterRun
from moe_rl.replay.batch_check import BatchReport, check_batch, spec_of
from moe_rl.replay.choice import own_choice
from moe_rl.trace.adapters.envelopes import moe_columns

Reading = Callable[[nn.Module, tuple, Any], tuple[Tensor, Tensor]]
"""Reads a router after its forward(module, arguments, result): the chosen experts, integers [R, K] or a bool map
[R, E], and the scores [R, E] that it ranks by."""

_NEAR = 0.3
"""Inputs of two runs of a router are of the same microbatch below this relative distance. Those of others are near 1;
passes with and without gradients differ by rounding."""

Places = tuple[Seq[int] | np.ndarray, Seq[int] | np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class _Router:
    module: nn.Module
    layer: int
    mtp: bool
    top_k: int
    groups: tuple[int, int]  # all, and how many are chosen first

    @classmethod
    def of(cls, module: nn.Module, layer: int, top_k: int) -> _Router:
        config = getattr(module, "config", None)
        groups = getattr(module, "num_group", None) or getattr(config, "moe_router_num_groups", None) or 1
        chosen = getattr(module, "topk_group", None) or getattr(config, "moe_router_group_topk", None) or 0
        return cls(module, layer, bool(getattr(module, "is_mtp_layer", False)), top_k, (groups, chosen))


def audit(
    model: nn.Module | Seq[nn.Module], routers: Mapping[int, nn.Module] | None = None, *, read: Reading | None = None
) -> Audit:
    """Attach to the routers of a model, or of the chunks of a pipeline stage, until `close`.

    Args:
        routers: {layer: module}, for routers that are not found. None: all modules whose class is called a router and
            that say their top-k; a layer is Megatron's `layer_number`, else the last number in the module's name.
        read: Reads other routers than those of Megatron and transformers.

    Raises:
        ReplayError: No router was found, or two have the same layer.
    """
    return Audit([model] if isinstance(model, nn.Module) else list(model), routers, read or read_router)


def read_router(module: nn.Module, arguments: tuple, result: Any) -> tuple[Tensor, Tensor]:
    """Read a router of Megatron, which returns (probs, map [R, E]), or of transformers, which returns (logits, weights,
    experts [R, K])."""
    if len(result) == 2:
        logits = module.gating(arguments[0]).detach()  # type: ignore[operator]
        logits = logits.reshape(-1, logits.shape[-1]).float()
        kind, bias = getattr(module, "score_function", "softmax"), getattr(module, "expert_bias", None)
        chosen = result[1]
    else:
        logits, _, chosen = result
        bias = getattr(module, "e_score_correction_bias", None)
        kind, logits = "softmax" if bias is None else "sigmoid", logits.detach().float()
    if kind == "sigmoid":
        logits = logits.sigmoid()
    elif kind == "sqrtsoftplus":
        logits = nn.functional.softplus(logits).sqrt()
    return chosen, logits if bias is None else logits + bias


class Audit:
    """Holds the hooks on a model's routers. See `audit`."""

    def __init__(self, models: Seq[nn.Module], routers: Mapping[int, nn.Module] | None, read: Reading):
        self._read = read
        named = routers or {}
        self._routers = [_Router.of(module, layer, _top_k(module)) for layer, module in named.items()] or _find(models)
        keys = [(router.layer, router.mtp) for router in self._routers]
        if not keys or len(set(keys)) < len(keys):
            raise ReplayError(
                "a model has no routers to watch" if not keys else "two routers have the same layer",
                where={"argument": "routers"},
                got=keys,
                expected="a router for each layer with experts",
                do="name them: audit(model, {layer: module})",
                fault="routers",
            )
        self._step: AuditStep | None = None
        self._hooks = [router.module.register_forward_hook(self._hook(router)) for router in self._routers]
        self._hooks += [
            module.register_forward_pre_hook(self._fed)
            for model in models
            for module in model.modules()
            if type(module).__name__ in ("Embedding", "VocabParallelEmbedding")
        ]

    @property
    def layers(self) -> list[int]:
        """Return the layers of the watched routers, without those that predict further tokens (MTP)."""
        return sorted(router.layer for router in self._routers if not router.mtp)

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()

    def step(
        self,
        token_ids: Seq[np.ndarray],
        routes: Seq[np.ndarray],
        microbatches: Seq[Places],
        *,
        layers: str | None = None,
        prompts: Seq[int] | None = None,
        versions: Seq[np.ndarray] | None = None,
        version: int | None = None,
        recomputed: bool | None = None,
    ) -> AuditStep:
        """Return a context that audits what the routers do inside it.

        Args:
            token_ids, routes, layers, prompts: The record of the whole batch, as in `check_batch`.
            microbatches: For each forward of this rank (sequence [R], position [R]): whose row each row is. A sequence
                of -1 is padding. `row_places` computes them for the usual layouts; under sequence parallelism give the
                contiguous part of a rank.
            versions: For each sequence [T], of the weights that routed a row; for the report.
            version: Of the trainer's weights.
            recomputed: Whether routers run again in the backward pass; None: as seen.

        Raises:
            ReplayError: The record does not have the layers of the watched routers.
        """
        step = AuditStep(self, _Batch(token_ids, routes, layers, prompts, versions, version), microbatches, recomputed)
        step._columns()  # raises before the step if the record lacks a layer
        return step

    def _hook(self, router: _Router) -> Callable[[nn.Module, tuple, Any], None]:
        def hook(module: nn.Module, arguments: tuple, result: Any) -> None:
            grad = torch.is_grad_enabled()
            if self._step is not None:
                with torch.no_grad():
                    chosen, scores = self._read(module, arguments, result)
                    self._step._seen(router, arguments[0].detach(), chosen.detach(), scores.detach(), grad=grad)

        return hook

    def _fed(self, module: nn.Module, arguments: tuple) -> None:
        ids = arguments[0] if arguments else None
        if self._step is not None and isinstance(ids, Tensor) and not ids.is_floating_point():
            self._step._fed(ids, sequence_first=hasattr(self._routers[0].module, "layer_number"))


@dataclass(slots=True, eq=False)
class _Forward:
    mark: Tensor
    microbatch: int
    grad: bool
    recomputed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    token_ids: Seq[np.ndarray]
    routes: Seq[np.ndarray]
    layers: str | None
    prompts: Seq[int] | None
    versions: Seq[np.ndarray] | None
    version: int | None


@dataclass(slots=True, eq=False)
class AuditStep:
    """Audits one step: a context manager. `report` is set at its end. See `Audit.step`."""

    audit: Audit
    batch: _Batch
    microbatches: Seq[Places]
    recomputed: bool | None
    report: AuditReport | None = None
    _number: int = -1
    _fresh: bool = False  # announced, and no token was embedded yet
    _calls: list[RouterRun] = field(default_factory=list)
    _inputs: dict[tuple[int, bool], list[_Forward]] = field(default_factory=dict)
    _scores: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _strangers: list[int] = field(default_factory=list)
    _left: list[int] = field(default_factory=list)

    def __enter__(self) -> AuditStep:
        self.audit._step = self
        self._left = [len(getattr(_replay(router), "replay_backward_list", ())) for router in self.audit._routers]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        self.audit._step = None
        if error is None:
            self.report = self._audited().report(self._record_claims())

    def forward(self, number: int) -> None:
        """Announce that the next forward of the model runs this microbatch."""
        self._number, self._fresh = number, True

    def _fed(self, ids: Tensor, *, sequence_first: bool) -> None:
        if not self._fresh:  # layers that predict further tokens embed them shifted
            return
        self._fresh = False
        fed = (ids.t() if sequence_first and ids.ndim == 2 else ids).reshape(-1).cpu().numpy()
        sequence, position = map(np.asarray, self.microbatches[self._number])
        real = sequence >= 0
        places = zip(sequence[real], position[real], strict=True)
        rows, wanted = len(sequence), np.array([self.batch.token_ids[s][p] for s, p in places], np.int64)
        parts = [fed] if len(fed) == rows else [fed[row : row + rows] for row in range(0, len(fed) - rows + 1, rows)]
        if not any((part[real] == wanted).all() for part in parts):
            self._strangers.append(self._number)

    def _seen(self, router: _Router, hidden: Tensor, chosen: Tensor, scores: Tensor, *, grad: bool) -> None:
        """Keep what a router returned, and find out which pass of which microbatch it was."""
        key = router.layer, router.mtp
        known, mark = self._inputs.setdefault(key, []), _mark(hidden)
        near = [
            (float((mark - forward.mark).norm() / forward.mark.norm().clamp(min=1e-30)), index)
            for index, forward in enumerate(known)
            if not forward.recomputed and forward.mark.shape == mark.shape
        ]
        near = [(apart, index) for apart, index in near if apart < _NEAR]
        graph_free = [candidate for candidate in near if not known[candidate[1]].grad]
        forwarded = any(forward.microbatch == self._number for forward in known)
        recomputation = bool(near) and grad and bool(graph_free or forwarded)
        if recomputation:
            whose = known[min(graph_free or near)[1]]
            whose.recomputed, number = True, whose.microbatch
        else:
            number = self._number
            known.append(_Forward(mark, number, grad))
        ids = _as_ids(chosen, router.top_k)
        native = own_choice(scores, router.top_k, *router.groups)
        self._calls.append(
            RouterRun(
                number, router.layer, router.mtp, recomputation, ids.cpu().numpy(), native.sort(1)[0].cpu().numpy()
            )
        )
        if not (recomputation or router.mtp):
            self._scores[number, router.layer] = scores

    def _audited(self) -> Audited:
        batch, spec_layers = self.batch, self._columns()
        expected = [
            Expected.of(batch.routes, np.asarray(sequence), np.asarray(position), spec_layers)
            for sequence, position in self.microbatches
        ]
        routers = self.audit._routers
        replays = [_replay(router) for router in routers]
        known = next(
            (getattr(type(replay), "global_router_replay_instances", None) for replay in replays if replay), None
        )
        return Audited(
            layers=tuple(self.audit.layers),
            calls=self._calls,
            expected=expected,
            routes=batch.routes,
            versions=batch.versions,
            columns=spec_layers,
            experts=max((scores.shape[1] for scores in self._scores.values()), default=0),
            recomputed=self.recomputed,
            strangers=sorted(set(self._strangers)),
            orphans=0 if known is None else sum(all(replay is not mine for mine in replays) for replay in known),
            fused=any(
                getattr(getattr(router.module, "config", None), "moe_router_fusion", False) for router in routers
            ),
            capacity=any(
                getattr(getattr(router.module, "config", None), "moe_expert_capacity_factor", None) is not None
                for router in routers
            ),
            left_before=max(self._left, default=0),
        )

    def _columns(self) -> dict[int, int]:
        """Return which column of the routes each watched layer has."""
        spec = spec_of([np.asarray(array) for array in self.batch.routes], self.batch.layers, 1 << 16)
        columns = moe_columns(self.batch.routes[0].shape[1], spec)
        if columns is None:
            raise ReplayError(
                "routes do not have the layers of the layer map",
                where={"argument": "layers"},
                got=f"{self.batch.routes[0].shape[1]} layers",
                expected=f"{len(spec.moe_layers)} layers with experts, or all {len(spec.layer_map)}",
                fault="layers",
            )
        by_layer = dict(zip(spec.moe_layers, columns, strict=True))
        if missing := [layer for layer in self.audit.layers if layer not in by_layer]:
            raise ReplayError(
                "a watched router has no routes in the record",
                where={"layer": missing[0]},
                got=f"layers {sorted(by_layer)}",
                expected=f"layers {self.audit.layers}",
                do="give the layer map of the model, with a letter for each decoder layer",
                fault="layers",
            )
        return by_layer

    def _record_claims(self) -> BatchReport:
        """Check the record of the rows that ran here, with the routers' scores as the witness."""
        batch, layers, columns = self.batch, self.audit.layers, self._columns()
        routes = [np.asarray(array) for array in batch.routes]
        experts, router = self._experts(), self.audit._routers[0]
        seen = [np.zeros(len(ids), bool) for ids in batch.token_ids]  # a record may lack rows
        scores = [np.zeros((len(ids), len(layers), experts), np.float32) for ids in batch.token_ids]
        for number, (sequence, position) in enumerate(self.microbatches):
            ran = [self._scores.get((number, layer)) for layer in layers]
            if any(layer_scores is None or len(layer_scores) != len(sequence) for layer_scores in ran):
                continue
            row_scores = np.stack([self._scores[number, layer].float().cpu().numpy() for layer in layers], 1)
            sequence, position = np.asarray(sequence), np.asarray(position)
            for owner in np.unique(sequence[sequence >= 0]).tolist():
                rows = np.flatnonzero(sequence == owner)
                seen[owner][position[rows]] = True
                scores[owner][position[rows]] = row_scores[rows]
        chosen = [number for number, mask in enumerate(seen) if mask.any()]
        if not chosen:
            return check_batch(batch.token_ids, routes, None, batch.layers, num_experts=experts)

        def choose(ranked: np.ndarray) -> np.ndarray:
            flat = torch.from_numpy(ranked.reshape(-1, experts))
            return own_choice(flat, router.top_k, *router.groups).numpy().reshape(*ranked.shape[:2], router.top_k)

        lags = None
        if batch.versions is not None:
            newest = batch.version if batch.version is not None else max(int(array.max()) for array in batch.versions)
            lags = [newest - np.asarray(batch.versions[number]) for number in chosen]
        return check_batch(
            [batch.token_ids[number] for number in chosen],
            [routes[number][:, [columns[layer] for layer in layers]] for number in chosen],
            [choose(scores[number]) for number in chosen],
            num_experts=experts,
            scores=[scores[number] for number in chosen],
            prompts=None if batch.prompts is None else [batch.prompts[number] for number in chosen],
            lags=lags,
            seen=[seen[number] for number in chosen],
            groups=router.groups[0],
            names=[str(number) for number in chosen],
        )

    def _experts(self) -> int:
        """Return the number of a layer's experts; as many as the record names if no router has run."""
        named = max((int(np.max(array, initial=0)) for array in self.batch.routes), default=0) + 1
        return max((scores.shape[1] for scores in self._scores.values()), default=named)


def row_places(
    sequences: Seq[int],
    lengths: Seq[int],
    *,
    order: Literal["packed", "batch first", "sequence first"] = "packed",
    padded_to: int = 0,
    context: tuple[int, int] = (0, 1),
) -> Places:
    """Return (sequence [R], position [R]) of the rows of a microbatch, in the order in which routers see them.

    Args:
        sequences: Numbers of the sequences in the microbatch.
        lengths: Their tokens.
        order: "packed": end to end, and padding at the end. "batch first": each padded on the right, one after the
            other (transformers). "sequence first": the same grid, all first tokens, then all second ones (Megatron
            without packing).
        padded_to: Rows of the packed microbatch, or of each sequence of a grid; 0: as many as are needed.
        context: (rank, ranks) of context parallelism in Megatron's zigzag: each sequence is cut into 2 * ranks equal
            pieces, and a rank has piece `rank` and the last but `rank`.

    Raises:
        ReplayError: There is no such order.
    """
    if order not in ("packed", "batch first", "sequence first"):
        raise ReplayError(
            "rows are laid out in an unknown order",
            where={"argument": "order"},
            got=repr(order),
            expected="packed, batch first or sequence first",
            fault="order",
        )
    (rank, ranks), whole = context, 2 * context[1] if context[1] > 1 else 1
    width = max(padded_to, max(lengths, default=0))
    cut: list[tuple[np.ndarray, np.ndarray]] = []
    if order == "packed":
        cut.append((np.empty(0, np.int64), np.empty(0, np.int64)))
    for number, length in zip(sequences, lengths, strict=True):
        room = -(-(length if order == "packed" else width) // whole) * whole
        position = np.arange(room)
        sequence = np.where(position < length, number, -1)
        if ranks > 1:
            pieces = np.split(position, 2 * ranks)
            position = np.concatenate([pieces[rank], pieces[2 * ranks - 1 - rank]])
            sequence = sequence[position]
        cut.append((sequence, position))
    if order == "packed":
        sequence, position = (np.concatenate(parts) for parts in zip(*cut, strict=True))
        more = max(0, padded_to // ranks - len(sequence))
        return np.r_[sequence, np.full(more, -1)], np.r_[position, np.arange(more)]
    grid = [np.stack(parts) for parts in zip(*cut, strict=True)]
    return tuple((values.T if order == "sequence first" else values).reshape(-1) for values in grid)  # type: ignore[return-value]


def _mark(hidden: Tensor) -> Tensor:
    """Return some 4,096 values of a router's input, which tell it from those of other microbatches."""
    flat = hidden.reshape(-1)
    return flat[:: max(1, len(flat) // 4096)].float()


def _find(models: Seq[nn.Module]) -> list[_Router]:
    routers = []
    for model in models:
        for name, module in model.named_modules():
            named = any("router" in kind.__name__.lower() for kind in type(module).__mro__)
            if named and (top_k := _top_k(module)):
                number = getattr(module, "layer_number", None)
                numbers = re.findall(r"(?:^|\.)(\d+)(?:\.|$)", name)
                routers.append(_Router.of(module, int(numbers[-1]) if number is None else number - 1, top_k))
    return routers


def _top_k(module: nn.Module) -> int:
    return int(getattr(module, "topk", 0) or getattr(module, "top_k", 0) or 0)


def _replay(router: _Router) -> Any:
    """Return Megatron's RouterReplay of a router; None without one."""
    return getattr(router.module, "router_replay", None)


def _as_ids(chosen: Tensor, top_k: int) -> Tensor:
    """Return the chosen experts [R, K] in ascending order. Lost ones are the number of experts, at the end."""
    if chosen.dtype != torch.bool:
        return chosen.long().sort(1)[0]
    numbers = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    return torch.where(chosen, numbers, chosen.shape[1]).sort(1)[0][:, :top_k]
