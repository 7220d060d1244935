"""Reads the routes that megatron-core's router tracer writes, `router_trace_rankN.jsonl`.

A line is one layer of one forward pass: {"step", "stage", "block", "layer", "rank", "num_tokens", "topk",
"top_indices": [num_tokens][topk]}. Read in megatron-core 0.19.2, `transformer/moe/router_trace.py`. The lines of a
layer are in the order of the passes, so their rows together are those of the sequence, if it ran alone.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import msgspec
import numpy as np

from moe_rl.errors import About, TraceError
from moe_rl.trace.adapters.bounded_lines import decoded_lines
from moe_rl.trace.adapters.envelopes import decode_lists
from moe_rl.trace.record import TraceSpec

_MAX_LINE = 48 << 20


class _LayerLine(msgspec.Struct):
    step: int
    block: str
    layer: int
    rank: int
    top_indices: list[list[int]]


_DECODER = msgspec.json.Decoder(_LayerLine)


def decode_megatron(path: Path, spec: TraceSpec) -> np.ndarray:
    """Return the routes of the decoder's MoE layers, int64 [T, L, K].

    The file numbers layers either as the model does, or from 0 without gaps, as the tracer does by default when it is
    given recorded indices. Lines of a multi-token prediction block are left out if the layer map leaves it out.

    Raises:
        TraceError: A line has another form, layers are missing or are not the model's, they have different numbers of
            rows, or the file has rows of several ranks.
    """
    rows: dict[int, list[list[int]]] = {}
    passes: dict[int, list[tuple[int, int]]] = {}
    ranks = set()
    for where, line in decoded_lines(
        path,
        _DECODER,
        limit=_MAX_LINE,
        wrong="line is not one of megatron-core's router trace",
        expected="step, block, layer, rank and top_indices",
    ):
        if line.block != "decoder":
            if line.block == "mtp" and "r" not in spec.layer_map:
                continue
            raise TraceError("lines of this block are not read", where=where, got=line.block, expected="decoder")
        ranks.add(line.rank)
        rows.setdefault(line.layer, []).extend(line.top_indices)
        passes.setdefault(line.layer, []).append((line.step, len(line.top_indices)))
    about: About = {"file": path}
    if len(ranks) > 1:
        raise TraceError("the file has rows of several ranks", where=about, got=sorted(ranks), expected="one rank")
    layers = sorted(rows)
    if layers not in (list(spec.moe_layers), list(range(len(spec.moe_layers)))):
        raise TraceError(
            "the file does not have the model's layers",
            where=about,
            got=f"{len(layers)}: {str(layers)[:80]}",
            expected=f"{len(spec.moe_layers)}: {str(list(spec.moe_layers))[:80]}",
            do="give the layer map of the model, and a trace of all its pipeline stages",
        )
    for layer in layers:
        for number, (forward, first) in enumerate(zip_longest(passes[layer], passes[layers[0]])):
            if forward != first:
                raise TraceError(
                    "a layer has other passes than the first one",
                    where={**about, "layer": layer},
                    got=f"pass {number}: {'none' if forward is None else f'step {forward[0]} with {forward[1]} rows'}",
                    expected="none" if first is None else f"step {first[0]} with {first[1]} rows",
                    do="trace one request alone, without recomputation",
                )
    steps = [step for step, _ in passes[layers[0]]]
    if steps != sorted(steps):
        raise TraceError(
            "the passes are not in the order of their steps",
            where=about,
            got=str(steps)[:80],
            do="sort the lines by step",
        )
    return np.stack([decode_lists([[ids] for ids in rows[layer]])[:, 0] for layer in layers], 1)
