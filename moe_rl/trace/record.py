"""One sequence's routes, what they were recorded from, and the checksum that binds the two.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

import json
import operator
import re
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash

from moe_rl.errors import RouteValidationError, TraceError, describe

MAX_LAYERS = 1024
MAX_LAYER_NUMBER = 65535
MAX_FINGERPRINT = 256
MAX_NAME = 200
MAX_KEY = 512
MAX_ROWS = 2**32 - 1

_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9._/:-]+", re.ASCII)
_FINGERPRINT = re.compile(r"[ -~]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """What every record of a shard has in common.

    model_fingerprint: printable ASCII that differs between models whose routes must not be mixed. num_experts: logical
    experts per MoE layer. top_k: experts per token. moe_layers [L]: 0-based global decoder layer numbers, strictly
    increasing.
    Raises TraceError when a field cannot be right.
    """

    model_fingerprint: str
    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.model_fingerprint, str) or not (
            _FINGERPRINT.fullmatch(self.model_fingerprint) and len(self.model_fingerprint) <= MAX_FINGERPRINT
        ):
            raise TraceError(
                describe(
                    "model fingerprint cannot be stored",
                    got=repr(self.model_fingerprint)[:80],
                    expected=f"1 to {MAX_FINGERPRINT} printable ASCII characters",
                    do="pass a digest of the model's config and weights",
                )
            )
        if not (_is_int(self.num_experts) and 1 <= self.num_experts <= 65536):
            raise TraceError(describe("num_experts is impossible", got=self.num_experts, expected="1 to 65536"))
        if not (_is_int(self.top_k) and 1 <= self.top_k <= self.num_experts):
            raise TraceError(describe("top_k is impossible", got=self.top_k, expected=f"1 to {self.num_experts}"))
        layers = self.moe_layers
        if not (
            isinstance(layers, tuple)
            and 1 <= len(layers) <= MAX_LAYERS
            and all(_is_int(layer) and 0 <= layer <= MAX_LAYER_NUMBER for layer in layers)
            and all(a < b for a, b in zip(layers, layers[1:], strict=False))
        ):
            raise TraceError(
                describe(
                    "moe_layers is not a layer map",
                    got=str(layers)[:80],
                    expected=f"a tuple of 1 to {MAX_LAYERS} strictly increasing layer numbers, 0 to {MAX_LAYER_NUMBER}",
                    do="pass the 0-based global numbers of the decoder layers that have experts",
                )
            )

    @property
    def dtype(self) -> np.dtype:
        """Of one expert id: uint8 when every id fits, else little-endian uint16."""
        return np.dtype("<u1") if self.num_experts <= 256 else np.dtype("<u2")

    @property
    def row_shape(self) -> tuple[int, int]:
        return len(self.moe_layers), self.top_k

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's routes."""
        return len(self.moe_layers) * self.top_k * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class RouteRecord:
    """The routes of one sequence as they were recorded.

    routes [T, L, K]: logical expert ids, uint8 when num_experts <= 256 else uint16, read-only, in the order of
    spec.moe_layers. token_digest: token_digest() of the T forwarded tokens. weight_version: of the weights that routed
    them.
    """

    key: str
    routes: np.ndarray
    token_digest: str
    weight_version: int
    spec: TraceSpec


def token_digest(token_ids, *, where: str = "token_ids") -> str:
    """Hex xxh3-64 of the token ids as little-endian int32. token_ids [T]: integers in [0, 2**31).

    Raises RouteValidationError on others; `where` goes into its message.
    """
    ids = np.asarray(token_ids)
    if ids.ndim == 1 and ids.size == 0:
        ids = ids.astype("<i4")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RouteValidationError(
            describe(
                "token ids are not a list of integers",
                where=where,
                got=f"{ids.dtype} of shape {ids.shape}",
                expected="integers of shape [T]",
                do="pass the forwarded tokens of one sequence",
            )
        )
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 2**31 - 1):
        at = int(np.flatnonzero((ids < 0) | (ids > 2**31 - 1))[0])
        raise RouteValidationError(
            describe(
                "token id out of range",
                where=f"{where}, token {at}",
                got=int(ids[at]),
                expected="0 to 2147483647",
                do="pass the forwarded tokens only, no padding",
            )
        )
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(ids, dtype="<i4"))


@lru_cache(maxsize=64)
def spec_digest(spec: TraceSpec) -> bytes:
    """8 bytes that differ between specs, so that a record spliced in from another model's shard fails its checksum."""
    fields = [spec.model_fingerprint, spec.num_experts, spec.top_k, list(spec.moe_layers)]
    return xxhash.xxh3_64_digest(json.dumps(fields, separators=(",", ":")).encode("ascii"))


def record_checksum(spec: bytes, key: bytes, rows: int, tokens: int, weight_version: int, routes) -> int:
    """xxh3-64 that binds a record's routes to its key, token digest, weight version, row count and spec_digest."""
    hasher = xxhash.xxh3_64(spec + struct.pack("<QQqH", rows, tokens, weight_version, len(key)) + key)
    hasher.update(routes)
    return hasher.intdigest()


def check_name(name: str, what: str = "shard name") -> str:
    """Return a shard name that is safe as a file name, or raise TraceError."""
    return _check(name, what, _NAME, "letters, digits, '.', '_' and '-', not starting with '.'", MAX_NAME)


def check_key(key: str, what: str = "record key") -> str:
    """Return a record key of allowed characters, or raise TraceError."""
    return _check(key, what, _KEY, "letters, digits, '.', '_', '-', '/' and ':'", MAX_KEY)


def check_weight_version(version: int, key: str) -> int:
    """Return the version as an int in [0, 2**63), or raise RouteValidationError."""
    try:
        value = operator.index(version)
    except TypeError:
        value = -1
    if isinstance(version, bool) or not 0 <= value < 2**63:
        raise RouteValidationError(
            describe(
                "weight version is unknown",
                where=f"request {key}",
                got=repr(version)[:40],
                expected="an integer from 0",
                do="record the version of the weights that sampled the sequence",
            )
        )
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(text: str, what: str, allowed: re.Pattern, words: str, limit: int) -> str:
    # A leading dot marks unfinished files, which readers do not look at.
    hidden = allowed is _NAME and isinstance(text, str) and text.startswith(".")
    if not isinstance(text, str) or hidden or len(text) > limit or not allowed.fullmatch(text):
        raise TraceError(
            describe(
                f"{what} is not allowed",
                got=repr(text)[:80],
                expected=f"1 to {limit} of {words}",
                do="choose another one",
            )
        )
    return text
