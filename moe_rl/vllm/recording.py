"""Defines what to record: settings of the engine at its start, and arguments of each request.

A request passes them in `SamplingParams.extra_args` (over HTTP: `sampling_params.extra_args`):

moe_rl_key      name of the sequence in the trace; without it the request is sampled and not recorded
moe_rl_sink     name of the trace shard
moe_rl_samples  n of the request, when n > 1: the samples are recorded as key/0 ... key/n-1
moe_rl_parent   [key, rows, source_sum, shard, digest, shard, digest ...] of an earlier record whose rows begin this
                sequence, as in the next turn of a dialogue: only later rows are stored
moe_rl_start    without a parent: rows before this position are not stored, e.g. to keep completions only
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from moe_rl.errors import TraceError
from moe_rl.trace.record import TraceSpec, check_key, check_name
from moe_rl.trace.source_sum import sum_of
from moe_rl.types import GenerateRequest, RoutePart, RouteRef

PREFIX = "moe_rl_"
_NAMES = frozenset(PREFIX + name for name in ("key", "sink", "samples", "parent", "start"))
_SAMPLE = re.compile(r"(\d+)_")


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defines what an engine records; the value of `additional_config["moe_rl"]`.

    Attributes:
        trace_root: folder of the trace store.
        model_fingerprint: the model's fingerprint, for the trace.
        support: also record which token ids could have been drawn under top-k, top-p and min-p.
        log_normalizer: also record the log of the support's total probability before truncation.
        router_logits_fraction: fraction of the tokens whose router logits are recorded.
        head: number of likeliest tokens also recorded per sampled token, with their log-probabilities.
        native: vLLM's own capture gives the routes, and its workers get no recorder. `arguments.fixed` sets it.
    """

    trace_root: str
    model_fingerprint: str
    support: bool = False
    log_normalizer: bool = False
    router_logits_fraction: float = 0.0
    head: int = 0
    native: bool = False

    @property
    def distributions(self) -> bool:
        """Return whether it records anything about the distributions that tokens are drawn from."""
        return bool(self.support or self.log_normalizer or self.head)

    @property
    def more_than_routes(self) -> bool:
        return self.distributions or self.router_logits_fraction > 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.router_logits_fraction <= 1.0:
            raise ValueError(f"router_logits_fraction is {self.router_logits_fraction}, it must be in [0, 1]")

    def spec(self, model_config, moe_layers: Sequence[int]) -> TraceSpec:
        """Return the spec of the trace from vLLM's ModelConfig and the global numbers of the model's MoE layers."""
        return TraceSpec.from_layers(
            self.model_fingerprint,
            model_config.get_num_experts(),
            model_config.get_num_experts_per_tok(),
            moe_layers,
            model_config.get_total_num_hidden_layers(),
        )


@dataclass(frozen=True, slots=True)
class RecordingRequest:
    """Holds a checked request to record. `start` is the first row to store when there is no parent."""

    key: str
    sink: str
    start: int = 0
    parent: RouteRef | None = None

    @classmethod
    def of(cls, request: GenerateRequest, sink: str) -> RecordingRequest | None:
        """Return the recording that a sampling request needs, or None."""
        if not request.record:
            return None
        start = request.record_from if request.parent is None else 0
        return cls(request.key, sink, start, request.parent)

    def extra_args(self, samples: int = 1) -> dict[str, object]:
        """Return the flat form that travels with a request; `parse` is the inverse."""
        args: dict[str, object] = {"moe_rl_key": self.key, "moe_rl_sink": self.sink}
        if samples > 1:
            args["moe_rl_samples"] = samples
        if self.parent is not None:
            parts = [text for part in self.parent.parts for text in (part.shard, part.digest)]
            args["moe_rl_parent"] = [self.parent.key, self.parent.rows, self.parent.source_sum, *parts]
        elif self.start:
            args["moe_rl_start"] = self.start
        return args


def parse(extra_args: dict | None, request_id: str) -> RecordingRequest | None:
    """Return the recording that a request needs, or None. vLLM's `request_id` numbers the samples of one request.

    Raises TraceError if the request cannot be recorded that way.
    """
    args = {name: value for name, value in (extra_args or {}).items() if str(name).startswith(PREFIX)}
    if not args:
        return None
    unknown = sorted(args.keys() - _NAMES)
    if unknown or not {"moe_rl_key", "moe_rl_sink"} <= args.keys():
        raise TraceError(
            "a request cannot be recorded",
            where={"request": request_id, "field": "extra_args"},
            got=sorted(args),
            expected="moe_rl_key and moe_rl_sink, and optionally " + ", ".join(sorted(_NAMES))[:120],
        )
    key, sink = check_key(args["moe_rl_key"]), check_name(args["moe_rl_sink"])
    samples = _count(args.get("moe_rl_samples", 1), "moe_rl_samples", request_id)
    if samples > 1:
        numbered = _SAMPLE.match(request_id)
        if numbered is None or int(numbered[1]) >= samples:
            raise TraceError(
                "the request id does not name one of the samples",
                where={"request": request_id},
                got=f"{samples} samples",
            )
        key = check_key(f"{key}/{numbered[1]}")
    parent = _parent(args.get("moe_rl_parent"), request_id)
    start = _count(args.get("moe_rl_start", 0), "moe_rl_start", request_id)
    if parent is not None and start:
        raise TraceError(
            "a request has both a parent and a first row",
            where={"request": request_id},
            do="give moe_rl_parent or moe_rl_start, not both",
        )
    return RecordingRequest(key, sink, start, parent)


def _parent(value: object, request_id: str) -> RouteRef | None:
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) < 5
        or not len(value) % 2
        or not all(isinstance(text, str) for text in (value[0], *value[2:]))
    ):
        raise TraceError(
            "the parent of a request is not a valid reference to a record",
            where={"request": request_id, "field": "moe_rl_parent"},
            got=str(value)[:80],
            expected="[key, rows, source_sum, shard, digest, ...]",
        )
    parts = tuple(RoutePart(check_name(value[i]), value[i + 1]) for i in range(3, len(value), 2))
    parent = RouteRef(check_key(value[0]), _count(value[1], "rows of moe_rl_parent", request_id), parts, 0, value[2])
    sum_of(parent)  # raises if it is missing: the trainer would refuse the routes
    return parent


def _count(value: object, name: str, request_id: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TraceError(
            "a request cannot be recorded",
            where={"request": request_id, "field": name},
            got=repr(value)[:40],
            expected="an integer from 0",
        )
    return value
