"""Reads arrays of routed experts, as other systems send them, into numpy. replies.py knows what their rows mean.

vLLM     base64 of a .npy file. Read in vLLM 0.32.0: `utils/serial_utils.py` (numpy2base64), the `routed_experts` field
         of `entrypoints/scale_out/token_in_token_out/protocol.py`, `v1/engine/output_processor.py`.
         [tokens - 1 - start, all decoder layers, K], uint8, uint16 or int32; layers without a router are zero.
shaped   {"data": base64 of the ids, C order, "shape": [T, C, K], "dtype": "uint8"} in the same place, as SkyRL a9564572
         and prime-rl 559b4477 send it; prime-rl's also has "start", the position of the first row. Other senders may
         use this form too, or nested lists.
SGLang   base64 of bare little-endian int32. Read at sgl-project/sglang 024911f2 and 0564b521 (after 0.5.16):
         `srt/state_capturer/routed_experts.py` and `base.py`, `srt/managers/detokenizer_manager.py`.
         [tokens - 1 - start, all decoder layers, K] flattened, without its shape; layers without a router are zero.
NeMo-RL  text "nrlre1:<int8|int16|int32>:<S>x<L>x<K>:<base64 of the ids, C order>". Read at NVIDIA-NeMo/RL 0cbe0ac1:
         `nemo_rl/utils/routed_experts_codec.py` (PR 3292), `models/generation/vllm/utils.py`.
         Older versions send nested lists. One row for every token. The last sampled token's row is a filler
         (0, 1, ..., K - 1). A set of -1 means that no route was captured.
plain    a .npy file, or nested lists of integers, [T, layers, K].

Payloads may be hostile. An array is allocated only if the payload has enough bytes for it. Nothing is unpickled.
At most MAX_BYTES of a payload are read, and memory use stays within a few times the payload.

Legend for shapes: T tokens, C layers as sent, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping

import numpy as np

from moe_rl.errors import About, RouteValidationError, TraceError
from moe_rl.trace.record import TraceSpec
from moe_rl.trace.validator import check_routes

MAX_BYTES = 1 << 30

_NEMO = re.compile(r"nrlre1:(int8|int16|int32):([0-9]{1,12})x([0-9]{1,12})x([0-9]{1,12}):", re.ASCII)
_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

_SHAPED_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")

_NPY_FILE: About = {"field": ".npy file"}


def decode_vllm(payload: object) -> np.ndarray:
    """Decode the `routed_experts` of a vLLM choice, text, a shaped object or nested lists, to [T, C, K]. Raises
    TraceError."""
    where: About = {"field": "vLLM routed_experts"}
    if isinstance(payload, list | Mapping):
        return _decode_plain(payload, where)
    return decode_npy(_base64(payload, where), where=where)


def _decode_plain(payload: Mapping | list, where: About) -> np.ndarray:
    """Decode nested lists or a shaped object."""
    if isinstance(payload, list):
        return decode_lists(payload)
    shape, dtype = payload.get("shape"), str(payload.get("dtype")).removeprefix("torch.")
    if re.fullmatch("[<|=][iu][1248]", dtype):  # as dtype.str has it
        dtype = np.dtype(dtype).name
    if not (isinstance(shape, list) and len(shape) == 3 and all(type(n) is int for n in shape)):
        raise TraceError(
            "routed_experts have no shape", where=where, got=repr(shape)[:80], expected="[tokens, layers, k]"
        )
    if dtype not in _SHAPED_TYPES:
        raise TraceError(
            "routed_experts have another type",
            where=where,
            got=repr(dtype)[:80],
            expected=f"one of {', '.join(_SHAPED_TYPES)}",
        )
    data, kind = _base64(payload.get("data"), where), np.dtype(dtype).newbyteorder("<")
    _check_size(math.prod(shape) * kind.itemsize, len(data), tuple(shape), where)
    return np.frombuffer(data, kind).reshape(shape)


def decode_sglang(payload: object, *, layers: int, top_k: int) -> np.ndarray:
    """Decode the `routed_experts` of an SGLang meta_info to int32 [T, layers, top_k]. Raises TraceError.

    `layers` counts all decoder layers of the model, dense ones included, which the payload does not say.
    """
    where: About = {"field": "SGLang routed_experts"}
    if isinstance(payload, list | Mapping):
        return _decode_plain(payload, where)
    data = _base64(payload, where)
    row = 4 * layers * top_k
    if row <= 0 or len(data) % row:
        raise TraceError(
            "routed_experts end within a row",
            where=where,
            got=f"{len(data)} bytes",
            expected=f"a multiple of {row}: int32 x {layers} layers x {top_k} experts",
            do="give the layer map and top_k of the model that was served",
        )
    return np.frombuffer(data, "<i4").reshape(-1, layers, top_k)


def decode_nemo(payload: object) -> np.ndarray:
    """Decode an `nrlre1` envelope, or nested lists, to [S, C, K], including the last row and -1 entries. Raises
    TraceError."""
    where: About = {"field": "NeMo-RL routed_experts"}
    if isinstance(payload, list | Mapping):
        return _decode_plain(payload, where)
    match = _NEMO.match(payload) if isinstance(payload, str) else None
    if not isinstance(payload, str) or match is None:
        raise TraceError(
            "not an nrlre1 envelope",
            where=where,
            got=repr(payload)[:60],
            expected="nrlre1:<int8|int16|int32>:<tokens>x<layers>x<top-k>:<base64>",
        )
    shape = tuple(int(number) for number in match.groups()[1:])
    dtype = np.dtype(match[1]).newbyteorder("<")
    # Checked before decoding: base64 has four characters for three bytes.
    _check_size(math.prod(shape) * dtype.itemsize, 3 * (len(payload) - match.end()) // 4, shape, where, slack=2)
    data = _base64(payload[match.end() :], where)
    _check_size(math.prod(shape) * dtype.itemsize, len(data), shape, where)
    return np.frombuffer(data, dtype).reshape(shape)


def decode_npy(data: bytes, *, where: About = _NPY_FILE) -> np.ndarray:
    """Read the integer array in a .npy file. `where` names it in the message. Raises TraceError."""
    file = io.BytesIO(data)
    try:
        shape, fortran, dtype = _NPY_HEADERS[np.lib.format.read_magic(file)](file)
    except Exception as error:  # numpy reads the header with Python's own parser, which raises a dozen kinds of errors
        raise TraceError(
            "not a .npy file", where=where, got=repr(error)[:120], expected="format version 1.0 or 2.0"
        ) from error
    if dtype.kind not in "iu":
        raise TraceError(
            "expert ids are not integers",
            where=where,
            got=f"dtype {dtype}",
            expected="uint8, uint16, int16 or int32",
            do="save the ids with numpy.save(file, array, allow_pickle=False)",
        )
    _check_size(math.prod(shape) * dtype.itemsize, len(data) - file.tell(), shape, where)
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def decode_lists(nested: list) -> np.ndarray:
    """Convert nested lists of integers, as in plain JSON, to int64 [T, C, K]. Raises TraceError."""
    try:
        array = np.asarray(nested)
    except (ValueError, OverflowError, TypeError) as error:
        raise TraceError(
            "nested lists are ragged",
            where={"field": "routed_experts"},
            got=str(error)[:120],
            expected="[T][layers][K]",
        ) from error
    if not array.size:  # numpy takes empty lists for floats
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TraceError(
            "expert ids are not integers",
            where={"field": "routed_experts"},
            got=f"{array.dtype} of shape {array.shape}",
            expected="nested lists [T][layers][K] of integers",
        )
    return array


def take_routes(array: np.ndarray, spec: TraceSpec, *, rows: int, where: About) -> np.ndarray:
    """Return the routes [T, L, K] of the spec's MoE layers, uint8 or uint16, keeping the order of ids within a set.

    Args:
        array: integers [T, C, K]; C is either the recorded layers or all decoder layers of the spec's layer map.
        spec: the model.
        rows: number of forwarded tokens.
        where: names the sequence in messages.

    Raises:
        RouteValidationError: a set does not have K distinct ids below num_experts; names token and layer.
        TraceError: the array has the wrong shape or type.
    """
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise RouteValidationError(
            "routed experts have the wrong shape",
            where=where,
            got=f"{array.dtype} of shape {array.shape}",
            expected=f"integers of shape [{rows}, {len(spec.moe_layers)} or {len(spec.layer_map)}, {spec.top_k}]",
            fault="shape",
        )
    columns = moe_columns(array.shape[1], spec)
    if columns is None:
        raise RouteValidationError(
            "routed experts do not have the layers of the layer map",
            where=where,
            got=f"{array.shape[1]} layers",
            expected=f"{len(spec.moe_layers)} MoE layers, or all {len(spec.layer_map)} of {spec.layer_map[:40]}",
            do="give the layer map of the model that was served",
            fault="layers",
        )
    picked = array if len(columns) == array.shape[1] else array[:, columns]
    if picked.size:
        _check_ids(picked, spec, where)
    narrow = np.uint8 if spec.num_experts <= 256 and (not picked.size or int(picked.max()) < 256) else np.uint16
    # uint8 for more than 256 experts is kept, so that the validator refuses it.
    routes = np.ascontiguousarray(picked, np.uint8 if array.dtype == np.uint8 else narrow)
    check_routes(routes, spec, rows=rows, where=where)
    return routes


def moe_columns(columns: int, spec: TraceSpec) -> tuple[int, ...] | None:
    """Return which columns of an array with this many layers are the spec's MoE layers; None if the number does not
    fit."""
    if columns == len(spec.moe_layers):
        return tuple(range(columns))
    if columns == len(spec.layer_map):
        return spec.moe_layers
    if columns == decoder_layers(spec):
        sent = [letter for letter in spec.layer_map if letter != "t"]
        return tuple(column for column, letter in enumerate(sent) if letter in "mr")
    return None


def decoder_layers(spec: TraceSpec) -> int:
    """Return the number of layers that an engine sends when it sends all. An MTP head that is not recorded is
    excluded."""
    return sum(letter != "t" for letter in spec.layer_map)


def _check_ids(picked: np.ndarray, spec: TraceSpec, where: About) -> None:
    """Refuse ids that would be lost in the conversion to the dtype of routes."""
    limits = np.iinfo(picked.dtype)
    if limits.max < min(spec.num_experts - 1, 255):
        raise RouteValidationError(
            "expert ids may have wrapped",
            where=where,
            got=f"{picked.dtype}, which holds ids to {limits.max}",
            expected=f"a type for ids to {spec.num_experts - 1}",
            fault="wrapped ids",
        )
    for bad in (picked.min(), picked.max()):
        if not 0 <= int(bad) < 65536:
            token, layer, _ = (int(i) for i in np.argwhere(picked == bad)[0])
            raise RouteValidationError(
                "a token has no route" if bad == -1 else "an expert does not exist",
                where={**where, "token": token, "layer": spec.moe_layers[layer], "expert": bad},
                got=picked[token, layer].tolist(),
                expected=f"ids from 0 to {spec.num_experts - 1}",
                do="drop the sequence: its sampler did not record the routes of every token"
                if bad == -1
                else "look at the sampler: ids must be logical, and of the type that the payload is read as",
            )


def _base64(payload: object, where: About) -> bytes:
    if not isinstance(payload, str) or len(payload) > MAX_BYTES:
        got = f"{len(payload)} characters" if isinstance(payload, str) else type(payload).__name__
        raise TraceError("payload cannot be read", where=where, got=got, expected=f"base64 text of at most {MAX_BYTES}")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError as error:
        raise TraceError("payload is not base64", where=where, got=str(error)) from error


def _check_size(size: int, got: int, shape: tuple[int, ...], where: About, *, slack: int = 0) -> None:
    if min(shape, default=0) < 0 or not got - slack <= size <= got:
        raise TraceError(
            "payload does not have the size of its shape",
            where=where,
            got=f"{got} bytes",
            expected=f"{size if size < 1 << 63 else 'an impossible number of'} bytes for shape {str(shape)[:80]}",
        )
