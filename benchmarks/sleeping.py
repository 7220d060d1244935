"""Measures what a sampler that sleeps gives back: `python benchmarks/sleeping.py [--mib 4000] [--json FILE]`.

One vLLM engine in a child process, as rank 0 starts it, scores, sleeps, wakes and scores again, first at level 1, which
keeps the weights on the host. Then it sleeps at level 2, which drops them. The benchmark prints the free memory of the
GPU as its driver reports it, the seconds of every call, and whether the engine scored the same tokens alike before and
after level 1. On a CPU vLLM keeps its memory, so only the calls and their order are shown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from output import tell
from weight_sync import make_checkpoint, settings

from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import Blocking
from moe_rl.vllm.wire import SLEEPING_PARTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=4000, help="size of the weights")
    parser.add_argument("--kv-cache-mib", type=int, default=4096)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moe_rl-sleep-") as folder:
        tell(measure(options, Path(folder)), options.json)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    model = make_checkpoint(folder / "model", options.mib)
    engine = Blocking(VllmEngine(replace(settings(model, folder), kv_cache_mib=options.kv_cache_mib, sleeps=True)))
    result: dict[str, object] = {"weights MiB": options.mib, "KV cache MiB": options.kv_cache_mib}

    def timed(what: str, call: Callable[[], object]) -> object:
        start = time.perf_counter()
        answer = call()
        result[f"{what}, seconds"] = time.perf_counter() - start
        if torch.cuda.is_available():
            result[f"{what}, GPU memory free MiB"] = torch.cuda.mem_get_info()[0] / 2**20
        return answer

    tokens = list(range(1, 100))
    with engine:
        before = timed("first scores", lambda: engine.score([tokens])[0].logprobs[0])
        for level in (1, 2):
            result[f"level {level} gives memory back"] = timed(f"sleep {level}", partial(engine.sleep, level))
            for part in SLEEPING_PARTS:
                timed(f"wake {part} after {level}", partial(engine.wake, part))
            if level == 1:
                after = timed("scores after level 1", lambda: engine.score([tokens])[0].logprobs[0])
                result["same scores after level 1"] = bool(np.array_equal(before, after))
    return result


if __name__ == "__main__":
    sys.exit(main())
