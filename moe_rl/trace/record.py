"""Defines what a store holds: the model of a trace, one sequence's routes, and its metadata.

Legend for shapes: T tokens, L MoE layers recorded, K top-k experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moe_rl.errors import About, RouteValidationError, TraceError
from moe_rl.models.facts import ModelFacts
from moe_rl.types import RouteRef, Span

MAX_LAYERS = 1024
MAX_FINGERPRINT = 256
MAX_NAME = 200
MAX_KEY = 512
MAX_ROWS = 1 << 24

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9._/:-]+", re.ASCII)
_FINGERPRINT = re.compile(r"[ -~]+", re.ASCII)
_LAYER_MAP = re.compile(r"[dmhtr]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """Describes the model that a store's records come from.

    Attributes:
        model_fingerprint: printable ASCII; it differs between models whose routes must not be mixed.
        num_experts: logical experts per MoE layer.
        top_k: experts per token.
        layer_map: one letter per decoder layer in order: d dense, m routed MoE, h hash-routed (not recorded), t
            multi-token-prediction layer that is not recorded, r multi-token-prediction layer that is recorded.

    Raises:
        TraceError: a field is impossible.
    """

    model_fingerprint: str
    num_experts: int
    top_k: int
    layer_map: str

    def __post_init__(self) -> None:
        if not isinstance(self.model_fingerprint, str) or not (
            _FINGERPRINT.fullmatch(self.model_fingerprint) and len(self.model_fingerprint) <= MAX_FINGERPRINT
        ):
            raise TraceError(
                "cannot be stored",
                where={"field": "model_fingerprint"},
                got=repr(self.model_fingerprint)[:80],
                expected=f"1 to {MAX_FINGERPRINT} printable ASCII characters",
                do="pass a digest of the model's config and weights",
            )
        if not (is_int(self.num_experts) and 1 <= self.num_experts <= 65536):
            raise TraceError("impossible", where={"field": "num_experts"}, got=self.num_experts, expected="1 to 65536")
        if not (is_int(self.top_k) and 1 <= self.top_k <= self.num_experts):
            raise TraceError(
                "impossible", where={"field": "top_k"}, got=self.top_k, expected=f"1 to {self.num_experts}"
            )
        letters = self.layer_map
        if not (
            isinstance(letters, str)
            and len(letters) <= MAX_LAYERS
            and _LAYER_MAP.fullmatch(letters)
            and ("m" in letters or "r" in letters)
        ):
            raise TraceError(
                "not a layer map",
                where={"field": "layer_map"},
                got=repr(letters)[:80],
                expected=f"1 to {MAX_LAYERS} of the letters d, m, h, t and r, with at least one m or r",
                do="pass one letter per decoder layer of the model",
            )

    @classmethod
    def from_layers(
        cls, fingerprint: str, num_experts: int, top_k: int, moe_layers: Sequence[int], num_layers: int
    ) -> TraceSpec:
        """Make the spec of a model that has only dense layers and routed MoE layers.

        moe_layers [L] are the 0-based global numbers of the MoE layers. Raises TraceError for a repeated number, or
        for one that is not below num_layers.
        """
        moe = set(moe_layers)
        if len(moe) != len(moe_layers) or not moe <= set(range(num_layers)):
            raise TraceError(
                "not layers of the model",
                where={"field": "moe_layers"},
                got=str(list(moe_layers))[:80],
                expected=f"different numbers from 0 to {num_layers - 1}",
            )
        return cls(fingerprint, num_experts, top_k, "".join("m" if i in moe else "d" for i in range(num_layers)))

    @classmethod
    def of(cls, facts: ModelFacts) -> TraceSpec:
        """Make the spec of a model from the facts that `read_model` reads from its checkpoint folder."""
        return cls.from_layers(facts.fingerprint, facts.num_experts, facts.top_k, facts.moe_layers, facts.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Return the global numbers [L] of the layers whose routes are recorded, increasing."""
        return _recorded(self.layer_map)

    @property
    def dtype(self) -> np.dtype:
        """Return the type of one expert id: uint8 if every id fits, else little-endian uint16."""
        return np.dtype("<u1") if self.num_experts <= 256 else np.dtype("<u2")

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token's routes before encoding."""
        return len(self.moe_layers) * self.top_k * self.dtype.itemsize


@lru_cache(maxsize=64)
def _recorded(layer_map: str) -> tuple[int, ...]:
    return tuple(number for number, letter in enumerate(layer_map) if letter in "mr")


@dataclass(frozen=True, slots=True, eq=False)
class RouteRecord:
    """Holds the recorded routes of one sequence, or of a slice of it.

    Attributes:
        routes: [T, L, K] logical expert ids, uint8 when num_experts <= 256 else uint16, read-only; every set is
            ascending unless its shard keeps order.
        token_ids: [T] int32, the forwarded tokens, read-only.
        spans: cover the T rows.
        aborted: whether the sampler aborted the sequence.
        first_row: position in the sequence of row 0.
        layers: [L] global numbers, increasing.
    """

    key: str
    routes: np.ndarray
    token_ids: np.ndarray
    spans: tuple[Span, ...]
    aborted: bool
    spec: TraceSpec
    first_row: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """Holds what is known of a record without decoding a chunk.

    Attributes:
        rows: rows of the whole sequence.
        held_rows: rows of this record and of the records that it continues. A reference may name fewer.
        own_rows: rows stored in this record; the earlier ones are in the records that it continues.
        parent: the record that this one continues; None without one, or if the parts continue different records.
        spans: cover all rows.
        stored_bytes: size of this record's frames, over all parts.
        aux: names of its arrays.
        layers: global numbers, over all parts.
    """

    key: str
    rows: int
    held_rows: int
    own_rows: int
    spans: tuple[Span, ...]
    aborted: bool
    stored_bytes: int
    parent: RouteRef | None
    aux: tuple[str, ...]
    layers: tuple[int, ...]
    spec: TraceSpec


def as_token_ids(token_ids: Sequence[int] | np.ndarray, *, where: About) -> np.ndarray:
    """Return token ids as int32 [T]. `where` names the sequence in messages.

    Raises:
        RouteValidationError: the ids are not a one-dimensional list of integers in [0, 2**31).
    """
    try:
        ids = np.asarray(token_ids)
    except ValueError:  # lists among the numbers
        ids = np.asarray(token_ids, object)
    if ids.ndim == 1 and ids.size == 0:
        ids = ids.astype("<i4")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RouteValidationError(
            "token ids are not a list of integers",
            where=where,
            got=f"{ids.dtype} of shape {ids.shape}",
            expected="integers of shape [T]",
            do="pass the forwarded tokens of one sequence",
        )
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 2**31 - 1):
        position = int(np.flatnonzero((ids < 0) | (ids > 2**31 - 1))[0])
        raise RouteValidationError(
            "token id out of range",
            where={**where, "token": position},
            got=int(ids[position]),
            expected="0 to 2147483647",
            do="pass the forwarded tokens only, no padding",
            fault="token id",
        )
    return np.ascontiguousarray(ids, dtype="<i4")


def check_name(name: str, what: str = "shard name") -> str:
    """Return a shard name that is safe as a file name, or raise TraceError."""
    # Names with a leading dot are unfinished files, which readers skip.
    return _check(name, what, _NAME, "letters, digits, '.', '_' and '-', not starting with '.'", MAX_NAME)


def check_key(key: str, what: str = "record key") -> str:
    """Return a record key with allowed characters only, or raise TraceError."""
    return _check(key, what, _KEY, "letters, digits, '.', '_', '-', '/' and ':'", MAX_KEY)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(text: str, what: str, allowed: re.Pattern, words: str, limit: int) -> str:
    if not isinstance(text, str) or len(text) > limit or not allowed.fullmatch(text):
        raise TraceError(
            "not allowed",
            where={"field": what},
            got=repr(text)[:80],
            expected=f"1 to {limit} of {words}",
            do="choose another one",
        )
    return text
