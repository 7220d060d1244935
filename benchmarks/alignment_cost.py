"""Measures what the alignment test costs: `python benchmarks/alignment_cost.py [--rounds 20] [--json FILE]`.

It judges synthetic passes of three shapes: 48 layers, and a rank's rows of the demo and of configs/tool_use_cpu.yaml.
The first version of the test, which counted shared experts, judges them in turns; its code is read from git. Keys:
`alignment_cost_ratio`, processor time / that of the first version, and `alignment_milliseconds`, medians by shape.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from alarm_parts.zoo import NAMED, Pass, healthy
from output import tell

from moe_rl.replay import alignment, row_places

ROOT = Path(__file__).resolve().parents[1]
FIRST = "5fbb901465679cf15e09ef997dca0ebca3bb8e2b"
_ALL = {"cells": 1 << 40}
SHAPES = {
    "48 layers": replace(NAMED["qwen3_30b_a3b"], prompts=16, siblings=8, prompt_tokens=60, completion_tokens=100,
                         microbatches=5, **_ALL),
    "demo": replace(NAMED["tiny_moe_cpu"], prompt_tokens=5, completion_tokens=5, **_ALL),
    "tool use": replace(NAMED["tool_use_cpu"], prompt_tokens=140, microbatches=4, **_ALL),
}  # fmt: skip


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    first = {name: _module(name) for name in ("row_places", "alignment")}
    ratios, milliseconds = {}, {}
    for name, shape in SHAPES.items():
        one = healthy(shape, 0)
        judges = (_now(one), _first(one, first["alignment"], first["row_places"]))
        seconds = [[_seconds(judge) for judge in judges] for _ in range(given.rounds + 1)][1:]
        now, before = (statistics.median(of) for of in zip(*seconds, strict=True))
        ratios[name], milliseconds[name] = round(now / before, 2), round(1000 * now, 1)
    tell({"alignment_cost_ratio": ratios, "alignment_milliseconds": milliseconds}, given.json)


def _module(name: str) -> ModuleType:
    """Return a module of the first version, which takes the place of today's in `sys.modules` while it is read."""
    command = ["git", "-C", str(ROOT), "show", f"{FIRST}:moe_rl/replay/{name}.py"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"the first version cannot be read: {found.stderr.strip()}. Expected a clone with its history")
    module = ModuleType(f"first_{name}")
    sys.modules[module.__name__] = module
    text = found.stdout.replace("moe_rl.replay.row_places", "first_row_places")
    exec(compile(text, module.__name__, "exec"), vars(module))
    return module


def _seconds(judge: Callable[[], object]) -> float:
    began = time.process_time()
    judge()
    return time.process_time() - began


def _cuts(one: Pass) -> list[tuple[np.ndarray, slice]]:
    """Return the sequences and rows of each microbatch."""
    cuts = np.array_split(np.arange(len(one.tokens)), one.shape.microbatches)
    return [(cut, slice(one.starts[cut[0]], one.starts[cut[-1] + 1])) for cut in cuts]


def _places(one: Pass, kind: Any) -> list[Any]:
    return [
        kind.of(
            [one.tokens[i] for i in cut],
            [one.prompts[i] for i in cut],
            np.ones(rows.stop - rows.start, bool),
            slice(None),
        )
        for cut, rows in _cuts(one)
    ]


def _tensors(one: Pass) -> list[list[tuple[torch.Tensor, ...]]]:
    """Return for each microbatch and layer its record, choice and scores."""
    parts = (one.record.astype(np.int64), one.witness, one.scores)
    return [
        [tuple(torch.from_numpy(of[layer, rows].copy()) for of in parts) for layer in range(len(one.record))]
        for _, rows in _cuts(one)
    ]


def _now(one: Pass) -> Callable[[], object]:
    seen = _tensors(one)

    def judge() -> object:
        test = alignment.AlignmentTest(
            range(len(one.record)), _places(one, row_places.RowPlaces), torch.device("cpu"), groups=one.shape.groups
        )
        for number, layers in enumerate(seen):
            for layer, tensors in enumerate(layers):
                test.observe(number, layer, *tensors)
            test.compared(number, [str(i) for i in _cuts(one)[number][0]])
        return test.verdict()

    return judge


def _first(one: Pass, first: ModuleType, places: ModuleType) -> Callable[[], object]:
    seen = _tensors(one)
    # The pass counts shared experts anyway, so they are no cost of the test.
    shared = [
        torch.stack([(record[:, :, None] == choice[:, None]).sum((1, 2)) for record, choice, _ in layers])
        for layers in seen
    ]

    def judge() -> object:
        test = first.AlignmentTest(range(len(one.record)), _places(one, places.RowPlaces), torch.device("cpu"))
        for number, layers in enumerate(seen):
            for layer, (record, choice, _) in enumerate(layers):
                test.observe(number, layer, record, choice)
            test.compared(number, shared[number], [str(i) for i in _cuts(one)[number][0]])
        return test.verdict(one.scores.shape[2])

    return judge


if __name__ == "__main__":
    main()
