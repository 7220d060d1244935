"""Tries in 20 seconds what would spoil a day on a GPU: `python benchmarks/gpu_smoke.py [--json FILE]`.

One replayed update, in whose layers torch refuses every wait of the host. The difference of two passes on equal
weights. Copies to the host that are read behind heavy work. A CUDA graph of the recorder's capture, replayed for fewer
rows. Without a GPU the same runs on the pretend device of the tests, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from models import make_model
from output import tell
from updates import ReplayedUpdates, random_microbatches

sys.path.insert(0, str(Path(__file__).parents[1]))  # to import `tests`

_COPIES, _ROWS = 50, 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    pretends = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="moe_rl-smoke-") as folder:
        model = make_model("tiny", Path(folder) / "model")
        (model / "tokenizer.json").write_text("{}")
        with _pretended() if pretends else nullcontext():
            result = measure(Path(folder), size=64 if pretends else 4096)
    tell({"pretended": pretends} | result, options.json)
    return 0 if result["copies right"] and result["graph right"] else 1


@contextmanager
def _pretended() -> Iterator[None]:
    from tests.support import pretend_cuda

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with pretend_cuda.installed():
        pretend_cuda.fit_megatron()
        yield


def measure(folder: Path, *, size: int) -> dict[str, Any]:
    """Return what was found. size: rows and columns of the matrices whose products keep the device busy."""
    sizes = argparse.Namespace(tokens=128, microbatches=2)
    bench = ReplayedUpdates(folder, 1, lambda rank, vocab: random_microbatches(sizes, rank, vocab), "bfloat16")
    result: dict[str, Any] = {}
    for number in ("first", "second"):
        plans, begin = bench.plans(), time.perf_counter()
        # In the first update kernels are compiled and libraries begin, for which the host may wait.
        with no_layer_waits(bench.policy.chunks) if number == "second" else nullcontext():
            bench.update(plans)
        torch.cuda.synchronize()
        result[f"{number} update, seconds"] = time.perf_counter() - begin
    passes = [torch.cat(bench.logprobs(plans)) for plans in (bench.plans(), bench.plans())]
    result["largest difference of two passes"] = float((passes[0] - passes[1]).abs().max())
    return result | copies_under_load(size) | graph_of_fewer_rows()


@contextmanager
def no_layer_waits(chunks: list[torch.nn.Module]) -> Iterator[None]:
    """Let torch raise an error where the host waits for the device in a layer, forward or backward."""
    from moe_rl.megatron.model import unwrap

    def refuse(*_: object) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def allow(*_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def before(module: torch.nn.Module, given: tuple, named: dict[str, Any]) -> None:
        hidden = named["hidden_states"] if "hidden_states" in named else given[0]
        if hidden.requires_grad:
            hidden.register_hook(allow)  # the end of the layers' backward
        refuse()

    def after(module: torch.nn.Module, given: tuple, hidden: torch.Tensor) -> None:
        allow()
        if hidden.requires_grad:
            hidden.register_hook(refuse)

    hooks = []
    for chunk in chunks:
        decoder = unwrap(chunk).decoder
        hooks += [decoder.register_forward_pre_hook(before, with_kwargs=True), decoder.register_forward_hook(after)]
    try:
        yield
    finally:
        allow()
        for hook in hooks:
            hook.remove()


def copies_under_load(size: int) -> dict[str, Any]:
    """Read copies to the host after their events, while the device is busy and the sources are written anew."""
    from moe_rl.vllm.capture import to_host

    matrix, rows = torch.full((size, size), 1 / size, device="cuda"), torch.arange(_ROWS, device="cuda")
    right, early = True, 0
    for number in range(_COPIES):
        matrix = matrix @ matrix
        rows.add_(1)
        (copy,), arrived = to_host((rows,))
        rows.add_(1)
        early += arrived.query()
        arrived.synchronize()
        right &= torch.equal(copy, torch.arange(_ROWS) + 2 * number + 1)
    return {"copies right": right, "copies that had arrived at once": early}


def graph_of_fewer_rows() -> dict[str, Any]:
    """Capture the writes of the recorder for a padded batch, and replay them where fewer rows are real."""
    from moe_rl.vllm.capture import NOT_REPORTED, Capture

    capture = object.__new__(Capture)  # without a model to bind it to
    capture.buffer = torch.full((16, 2, 2), NOT_REPORTED, dtype=torch.int32, device="cuda")
    capture._column = {3: 0, 5: 1}
    chosen = torch.zeros(16, 2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        capture.capture(3, chosen)
        capture.capture(5, chosen + 1)
    right = True
    for real in (11, 16, 5):
        capture.clear(16)
        ids = torch.arange(2 * real).view(real, 2)
        chosen[:real].copy_(ids)
        graph.replay()
        right &= capture.buffer[:real].cpu().tolist() == torch.stack([ids, ids + 1], 1).tolist()
    return {"graph right": right}


if __name__ == "__main__":
    sys.exit(main())
