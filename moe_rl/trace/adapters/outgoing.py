"""Hands routes over to other trainers: the reverse of the importers, one function for each.

Each takes the routes [T, L, K] of one sequence: of the T forwarded tokens and the L layers with experts, as a record of
the store or a recording LLM holds them.

to_megatron  the tensors for `RouterReplay.set_replay_data` of megatron-core 0.19.2, cut to a rank's rows and layers.
to_nemo      The "nrlre1" envelope, with a filler row for the last sampled token. Read at NVIDIA-NeMo/RL 0cbe0ac1:
             `nemo_rl/utils/routed_experts_codec.py`.
to_prime_rl  The shaped object of envelopes.py, and at which token it starts. Read at PrimeIntellect-ai/prime-rl
             559b4477: `src/prime_rl/inference/vllm/routed_experts.py`, `trainer/batch.py`.
to_skyrl     The shaped object. Read at NovaSky-AI/SkyRL a9564572: `backends/skyrl_train/utils/routed_experts.py` wants
             the narrowest of uint8, int16 and int32 that holds the largest id.
to_slime     Bare int32 in base64. Read at THUDM/slime 624b824a: `slime/utils/types.py` wants one row for each token but
             the last, and `backends/megatron_utils/actor.py` looks up a layer by its global number.
to_verl      A padded batch: prompts on the left, completions on the right, zeros elsewhere. Read at
             verl-project/verl 1dda039b: `verl/experimental/agent_loop/agent_loop.py`, `_agent_loop_postprocess`;
             `verl/utils/megatron/router_replay_utils.py` takes all layers, or those with experts.

Legend for shapes: T forwarded tokens, L layers, K top-k, R rows of a microbatch on a rank, B sequences, S tokens with
padding.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from moe_rl.errors import TraceError

__all__ = ["to_megatron", "to_nemo", "to_prime_rl", "to_skyrl", "to_slime", "to_verl"]


def to_megatron(
    routes: Sequence[np.ndarray],
    sequence: np.ndarray,
    position: np.ndarray,
    *,
    columns: Sequence[int],
    num_experts: int,
) -> list[np.ndarray]:
    """Return the targets of one forward of a rank, one int64 [R, K] for each router, in the order of `columns`.

    `row_places` says whose row each row is, under packing, padding, and context parallelism; sequence parallelism takes
    a contiguous part of these rows. Padding gets different experts, evenly. Convert each with `torch.from_numpy`.

    Args:
        routes: Of every sequence of the batch.
        sequence, position: [R], whose row each row is; a sequence of -1 is padding.
        columns: The columns of the routes that the routers of this stage, or virtual stage, take, in the order in which
            these routers were made. A router that predicts further tokens (MTP) is not served.
    """
    sequence, position = np.asarray(sequence), np.asarray(position)
    top_k = routes[0].shape[2]
    spread = (np.arange(len(sequence))[:, None] * top_k + np.arange(top_k)) % num_experts
    starts, real = np.cumsum([0, *map(len, routes)]), sequence >= 0
    if real.any() and (position[real] >= np.diff(starts)[sequence[real]]).any():
        row = int(np.flatnonzero(real)[(position[real] >= np.diff(starts)[sequence[real]]).argmax()])
        raise TraceError(
            "a row has no routes",
            where={"row": row, "sequence": sequence[row], "position": position[row]},
            expected=f"positions below {len(routes[sequence[row]])}, the rows of its routes",
            do="feed the forwarded tokens only: prompt + completion without the last token",
        )
    targets = []
    for column in columns:
        flat = np.concatenate([sequence_routes[:, column] for sequence_routes in routes]).astype(np.int64)
        rows = spread.copy()
        rows[real] = flat[starts[sequence[real]] + position[real]]
        targets.append(rows)
    return targets


def to_nemo(routes: np.ndarray, num_experts: int) -> str:
    """Return the envelope of T + 1 tokens: the last sampled token gets the filler 0, 1, ..., K - 1."""
    dtype = np.dtype("int8" if num_experts <= 128 else "int16")
    filler = np.broadcast_to(np.arange(routes.shape[2]), (1, *routes.shape[1:]))
    whole = np.ascontiguousarray(np.concatenate([routes, filler]), dtype)
    return f"nrlre1:{dtype.name}:{'x'.join(map(str, whole.shape))}:{_base64(whole)}"


def to_skyrl(routes: np.ndarray) -> dict[str, object]:
    """Return the shaped object, uint8 or int16 by its largest id. From 5dccdc0d on, SkyRL looks for
    `"routed_experts":{"data":"` in the reply: write it without spaces."""
    return _shaped(routes.astype(np.uint8 if routes.max(initial=0) < 256 else np.int16))


def to_prime_rl(routes: np.ndarray, start: int = 0) -> dict[str, object]:
    """Return the shaped object, in the type of the routes. start: position of the first row."""
    return _shaped(routes) | {"start": start}


def to_slime(routes: np.ndarray, layer_map: str) -> str:
    """Return the int32 of all decoder layers in base64. layer_map: letters as in TraceSpec; layers without a record are
    zeros."""
    layers = [layer for layer, letter in enumerate(letter for letter in layer_map if letter != "t") if letter in "mr"]
    whole = np.zeros((len(routes), sum(letter != "t" for letter in layer_map), routes.shape[2]), "<i4")
    whole[:, layers] = routes
    return _base64(whole)


def to_verl(
    routes: Sequence[np.ndarray], prompts: Sequence[int], *, prompt_length: int, response_length: int
) -> np.ndarray:
    """Return the batch int16 [B, S, L, K] with S = prompt_length + response_length.

    A sequence's rows begin where its left-padded prompt does; the row of its last token, and padding, are zeros.

    Args:
        prompts: Tokens of each prompt.
    """
    whole = np.zeros((len(routes), prompt_length + response_length, *routes[0].shape[1:]), np.int16)
    for sequence, (sequence_routes, prompt) in enumerate(zip(routes, prompts, strict=True)):
        start = prompt_length - prompt
        if start < 0 or start + len(sequence_routes) > whole.shape[1]:
            raise TraceError(
                "a sequence is longer than the padded batch",
                where={"sequence": sequence},
                got=f"{prompt} prompt tokens, {len(sequence_routes)} rows",
                expected=f"{prompt_length} prompt tokens, {response_length} more",
            )
        whole[sequence, start : start + len(sequence_routes)] = sequence_routes
    return whole


def _shaped(routes: np.ndarray) -> dict[str, object]:
    whole = np.ascontiguousarray(routes)
    return {"data": _base64(whole), "shape": list(whole.shape), "dtype": whole.dtype.name}


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(memoryview(array)).decode("ascii")
