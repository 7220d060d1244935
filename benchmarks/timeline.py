"""Records on one rank when an MoE layer computes and when it exchanges rows, without changes to the layer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from moe_rl.replay.plans import LayerPlan


@dataclass(slots=True)
class Interval:
    """Describes one interval, in seconds of time.perf_counter.

    Attributes:
        name: "router", "shared experts", "experts 0", "rows 0", "weights 0" or "back 0", with the number of the chunk.
        backward: whether it belongs to the gradient.
        end: when the host was finished with it. The host only starts an all-to-all; its end is when the host continued
            after waiting for it.
        waiting: when the host began to wait.
        arrived: when the rows were there.
    """

    name: str
    backward: bool
    begin: float
    end: float | None = None
    waiting: float | None = None
    arrived: float | None = None

    @property
    def exchange(self) -> bool:
        return self.waiting is not None


@dataclass(slots=True, eq=False)
class Timeline:
    """Records one layer in one training pass of one microbatch with the given plan, without recomputation.

    On a GPU the host runs ahead of the device, so the times would be those of the host.
    """

    moe: torch.nn.Module
    microbatch: int
    plan: LayerPlan
    spans: list[Interval] = field(default_factory=list)
    _forward: bool = False
    _open: dict[tuple[str, bool], Interval] = field(default_factory=dict)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return the pass to record runs inside this context."""
        moe, computed = self.moe, 0
        parts = {"router": moe.router, "shared experts": moe.shared_experts, "experts": moe.experts}
        parts = {name: part for name, part in parts.items() if part is not None}
        whole, exchange = moe.forward, dist.all_to_all_single
        before = {name: part.forward for name, part in parts.items()}

        def forward(*args, **kwargs):
            self._forward = moe.router.handle.microbatch == self.microbatch
            try:
                return whole(*args, **kwargs)
            finally:
                self._forward = False

        def of(name):
            def run(rows, *args):
                nonlocal computed
                if not self._forward:
                    return before[name](rows, *args)
                span = name
                if name == "experts":
                    span, computed = f"experts {computed}", computed + 1
                (rows,) = _Mark.apply(self, span, True, rows)
                made = before[name](rows, *args)
                if torch.is_tensor(made):
                    return _Mark.apply(self, span, False, made)[0]
                return _Mark.apply(self, span, False, *made)

            return run

        moe.forward, dist.all_to_all_single = forward, self._exchange(exchange)
        for name, part in parts.items():
            part.forward = of(name)
        try:
            yield
        finally:
            moe.forward, dist.all_to_all_single = whole, exchange
            for name, part in parts.items():
                part.forward = before[name]

    def under_way(self) -> float:
        """Return the seconds in which rows, weights or their gradients of the layer were in transit."""
        return _length([(span.begin, span.arrived) for span in self.spans if span.exchange])

    def waited(self) -> float:
        """Return the part of these seconds in which the host only waited."""
        return _length([(span.waiting, span.arrived) for span in self.spans if span.exchange])

    def mark(self, name: str, backward: bool, begins: bool) -> None:
        now = time.perf_counter()
        if begins:
            self._open[name, backward] = Interval(name, backward, now)
            self.spans.append(self._open[name, backward])
        else:
            self._open.pop((name, backward)).end = now

    def _exchange(self, exchange):
        def recorded(output, rows, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
            span = self._span(rows, input_split_sizes)
            work = exchange(output, rows, output_split_sizes, input_split_sizes, group, async_op=True)
            if span is not None:
                self.spans.append(span)
                work = _Work(work, span)
            return work if async_op else work.wait()

        return recorded

    def _span(self, rows: torch.Tensor, sent: list[int]) -> Interval | None:
        """Identify an exchange of the layer by the list object of the plan that starts it."""
        for number, chunk in enumerate(self.plan.chunks):
            if sent is chunk.sent or sent is chunk.got:
                away = (sent is chunk.sent) == self._forward
                what = ("weights" if rows.dim() == 1 else "rows") if away else "back"
                return Interval(f"{what} {number}", not self._forward, time.perf_counter(), waiting=float("inf"))
        return None


class _Work:
    """Wraps a started exchange and times the wait for it."""

    def __init__(self, work: dist.Work, span: Interval):
        self.work, self.span = work, span
        self.told = work.get_future().then(self._arrived)

    def _arrived(self, _) -> None:
        self.span.arrived = time.perf_counter()

    def wait(self) -> None:
        start = time.perf_counter()
        self.work.wait()
        if self.span.end is None:  # a second wait takes no time
            self.span.waiting, self.span.end = start, time.perf_counter()
        self.told.wait()


class _Mark(torch.autograd.Function):
    """Does nothing but record the time. It marks where a computation, or its gradient, starts or ends."""

    @staticmethod
    def forward(ctx, timeline: Timeline, name: str, begins: bool, *tensors):
        ctx.timeline, ctx.name, ctx.begins = timeline, name, begins
        timeline.mark(name, False, begins)
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        ctx.timeline.mark(ctx.name, True, not ctx.begins)
        return None, None, None, *gradients


def _length(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals. Intervals that end before they begin are empty."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
