"""Checks the routes of any batch, from arrays alone: `check_batch` needs no session, store or sampler of moe_rl.

Two kinds of claims are made. Those of FORM look at tokens and ids, with the rules of the linter; they need no model.
The others are the claims of the alignment test: with the trainer's own choice as a witness it tests whether the routes
belong to their rows. Without a witness, or without torch, these are weak.

Legend for shapes: T tokens, C layers as sent, L MoE layers, K top-k experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_rl.errors import RouteValidationError, first_of, with_extra
from moe_rl.trace import TraceSpec
from moe_rl.trace.adapters.envelopes import moe_columns
from moe_rl.trace.adapters.lint import lint
from moe_rl.trace.model_spec import read_layer_map

FORM = ("ids", "rows", "layers", "unwritten", "repeated", "constant", "copied")
"""Claims about the form: ids are distinct and exist; one row for each forwarded token; the layers are those of the
layer map; no row or layer is a buffer that nobody wrote; no row is the row before again; no layer is constant or
another's copy; no sequence has the routes of other tokens of another sequence."""

_CLAIM_OF = {
    **dict.fromkeys(("dtype", "dtype wrap", "negative ids", "out of range", "duplicate ids"), "ids"),
    **dict.fromkeys(("missing last row", "one row too many", "rows", "rows shifted"), "rows"),
    **dict.fromkeys(("shape", "layers", "top-k", "layer map", "layers in reverse"), "layers"),
    **dict.fromkeys(("empty rows", "all-zero sets", "all-zero layers"), "unwritten"),
    "repeated rows": "repeated",
    **dict.fromkeys(("constant layers", "repeated layers"), "constant"),
}
# A witness of bare ids has no near ties: every disagreement looks deep. These claims need scores.
_OF_SCORES = ("single ids", "some rows", "labels")
_FEW_ROWS = 8
_MOST = 0.75


@dataclass(frozen=True, slots=True)
class Checked:
    """Holds one claim about a batch.

    Attributes:
        status: "refused": its fault is in the batch. "proven": the fault would have been found, and was not. "weak":
            the batch, or the witness, is too small to tell.
        power: Share of such faults that would be found, 0 to 1.
        found: What is wrong, or suspected. A suspicion makes a claim weak.
    """

    name: str
    status: Literal["proven", "weak", "refused"]
    power: float
    found: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Holds the claims about a batch, those of FORM first. As text it is a table."""

    claims: tuple[Checked, ...]

    @property
    def faults(self) -> list[str]:
        """Return what is wrong, as "claim: text"."""
        return [f"{claim.name}: {text}" for claim in self.claims if claim.status == "refused" for text in claim.found]

    def refuse(self) -> None:
        """Raise RouteValidationError if a claim is refused."""
        if self.faults:
            raise RouteValidationError(
                "routes of the batch may not be trained on",
                got=first_of(self.faults),
                expected="the routes of these tokens, as their sampler computed them",
                do="look at the recorder and at what brings the routes to the trainer",
            )

    def __str__(self) -> str:
        return "\n".join(
            f"{claim.name:20} {claim.status:8} power {claim.power:4.2f}  {first_of(claim.found)}".rstrip()
            for claim in self.claims
        )


def check_batch(
    token_ids: Seq[Seq[int] | np.ndarray],
    routes: Seq[np.ndarray],
    native_topk: Seq[np.ndarray] | None = None,
    layers: str | None = None,
    *,
    num_experts: int,
    top_k: int | None = None,
    scores: Seq[np.ndarray] | None = None,
    prompts: Seq[int] | None = None,
    lags: Seq[np.ndarray] | None = None,
    seen: Seq[np.ndarray] | None = None,
    groups: int = 1,
    names: Seq[str] | None = None,
) -> BatchReport:
    """Check the routes of a batch of sequences. Never raises for what is wrong in the routes.

    Args:
        token_ids: For each sequence its forwarded tokens [T]: prompt + completion without the last token.
        routes: For each sequence integers [T, C, K], as they were recorded; C is all decoder layers, or those with
            experts.
        native_topk: For each sequence the experts [T, L, K] that the trainer's routers choose by themselves, with the
            weights that sampled the tokens.
        layers: A letter for each decoder layer: d dense, m with experts, h hash-routed and not recorded. "d,m*60" is
            short for d and 60 m. None: every recorded layer has experts.
        num_experts: Experts of a layer.
        top_k: Experts of a token; None: as many as native_topk or the routes have.
        scores: For each sequence floats [T, L, E], what these routers rank by. They show single wrong ids too, and near
            ties.
        prompts: Number of prompt tokens of each sequence; None: each sequence is one text.
        lags: For each sequence integers [T]: how many updates ago the oldest weights behind a row were the trainer's:
            those that routed it, or made keys that the sampler kept over an update.
        seen: For each sequence bool [T], the rows that the witness has, such as those of one rank; None: all.
        groups: Groups of experts among which the routers choose first; with scores they need native_topk too.
        names: Of the sequences, for messages.

    Raises:
        RouteValidationError: The arguments do not belong together, whatever the routes hold.
        NonFiniteError: A score of a row that the witness has is NaN or infinite.
    """
    names = [str(number) for number in range(len(routes))] if names is None else names
    for argument, value in {
        "token_ids": token_ids, "native_topk": native_topk, "scores": scores, "prompts": prompts, "lags": lags,
        "seen": seen, "names": names,
    }.items():  # fmt: skip
        if value is not None and len(value) != len(routes):
            raise RouteValidationError(
                "not one for each sequence",
                where={"argument": argument},
                got=len(value),
                expected=f"{len(routes)}, the sequences of routes",
            )
    arrays = [np.asarray(array) for array in routes]
    tokens = [np.asarray(ids, np.int64) for ids in token_ids]
    if top_k is None and native_topk:
        top_k = np.asarray(native_topk[0]).shape[-1]
    spec = spec_of(arrays, layers, num_experts, top_k)
    shapes = {"native_topk": (len(spec.moe_layers), spec.top_k), "scores": (len(spec.moe_layers), num_experts)}
    for argument, values in {"native_topk": native_topk, "scores": scores, "lags": lags, "seen": seen}.items():
        for name, ids, array in zip(names, tokens, values or (), strict=False):
            if np.shape(array) != (len(ids), *shapes.get(argument, ())):
                raise RouteValidationError(
                    "an array has another shape than its sequence",
                    where={"argument": argument, "sequence": name},
                    got=np.shape(array),
                    expected=(len(ids), *shapes.get(argument, ())),
                )
    for number, chosen in enumerate(native_topk or ()):
        ids = np.asarray(chosen)[slice(None) if seen is None else np.asarray(seen[number], bool)]
        if ((ids < 0) | (ids >= num_experts)).any():
            raise RouteValidationError(
                "the witness chooses experts that a layer does not have",
                where={"argument": "native_topk", "sequence": names[number]},
                got=f"{ids.min()} to {ids.max()}",
                expected=f"0 to {num_experts - 1} in the rows of `seen`",
            )
    claims = _form(tokens, arrays, native_topk, seen, spec, names)
    sound = not any(claim.status == "refused" and claim.name in FORM[:4] for claim in claims)
    why = ""
    if not sound:
        why = "form is wrong"
    elif native_topk is None and scores is None:
        why = "no witness: native_topk and scores are missing"
    elif not any(map(len, tokens)):
        why = "the batch has no rows"
    if why:
        claims += [Checked("alignment", "weak", 0.0, (why,))]
    else:
        claims += _alignment(tokens, arrays, native_topk, scores, prompts, lags, seen, spec, groups, names)
    return BatchReport(tuple(claims))


def spec_of(arrays: Seq[np.ndarray], layers: str | None, num_experts: int, top_k: int | None = None) -> TraceSpec:
    """Return the spec of a batch. layers: as in `check_batch`."""
    shape = next((array.shape for array in arrays if array.ndim == 3), (0, 1, 1))
    letters = "m" * max(1, shape[1]) if layers is None else read_layer_map(layers)
    return TraceSpec("batch", num_experts, min(max(1, top_k or shape[2]), num_experts), letters)


def _form(
    tokens: Seq[np.ndarray],
    arrays: Seq[np.ndarray],
    native: Seq[np.ndarray] | None,
    seen: Seq[np.ndarray] | None,
    spec: TraceSpec,
    names: Seq[str],
) -> list[Checked]:
    """Make the claims of FORM."""
    certain: dict[str, list[str]] = {name: [] for name in FORM}
    suspected: dict[str, list[str]] = {name: [] for name in FORM}
    for number, (name, ids, array) in enumerate(zip(names, tokens, arrays, strict=True)):
        for finding in lint(array, spec, ids):
            is_fault = finding.rule in _CLAIM_OF  # layers without experts, which engines send too, are no fault
            if finding.rule == "repeated rows" and native is not None:
                has = None if seen is None else seen[number]
                is_fault = not _repeats_too(array, np.asarray(native[number]), has, spec)
            if is_fault:
                kind = certain if finding.certain else suspected
                kind[_CLAIM_OF[finding.rule]].append(
                    f"sequence {name}: {finding.rule} ({finding.where}): {finding.text}"
                )
    certain["copied"] = list(_copies(tokens, arrays, names))
    long = sum(len(array) >= _FEW_ROWS for array in arrays) / max(1, len(arrays))
    power = dict.fromkeys(FORM, 1.0) | {"repeated": long, "constant": long, "copied": long if len(arrays) > 1 else 0.0}
    return [
        Checked(
            name,
            "refused" if certain[name] else "weak" if suspected[name] or power[name] < 0.95 else "proven",
            power[name],
            tuple(certain[name] + suspected[name]),
        )
        for name in FORM
    ]


def _repeats_too(array: np.ndarray, native: np.ndarray, seen: np.ndarray | None, spec: TraceSpec) -> bool:
    """Return whether the witness chooses most experts of each row that equals the row before it. Only rows that the
    witness has count."""
    columns = moe_columns(array.shape[1], spec)
    if columns is None or len(array) != len(native):
        return False
    same = np.append(False, (array[1:] == array[:-1]).all((1, 2))) & (True if seen is None else np.asarray(seen))
    record = array[same][:, columns]
    shared = (record[..., None] == native[same][..., None, :]).any(-1).mean((1, 2))
    return bool((shared >= _MOST).all())


def _copies(tokens: Seq[np.ndarray], arrays: Seq[np.ndarray], names: Seq[str]) -> Iterator[str]:
    """Name pairs of sequences with equal routes after the first token in which they differ."""
    numbers: dict[bytes, int] = {}
    for number, array in enumerate(arrays):
        if len(array) < _FEW_ROWS or array.ndim != 3:
            continue
        other = numbers.setdefault(array[-_FEW_ROWS:].tobytes(), number)
        ids, other_ids = tokens[number][: len(array)], tokens[other][: len(array)]  # a record may lack rows
        if other == number or len(arrays[other]) != len(array) or (array[1:] == array[:-1]).all():
            continue
        apart = np.flatnonzero(ids[: len(other_ids)] != other_ids[: len(ids)])
        if len(apart) >= _FEW_ROWS and (array[apart] == arrays[other][apart]).all():
            yield f"sequences {names[other]} and {names[number]} have other tokens and the same routes"


def _alignment(
    tokens: Seq[np.ndarray],
    arrays: Seq[np.ndarray],
    native: Seq[np.ndarray] | None,
    scores: Seq[np.ndarray] | None,
    prompts: Seq[int] | None,
    lags: Seq[np.ndarray] | None,
    seen: Seq[np.ndarray] | None,
    spec: TraceSpec,
    groups: int,
    names: Seq[str],
) -> list[Checked]:
    """Make the claims of the alignment test."""
    try:
        import torch
    except ImportError:
        return [Checked("alignment", "weak", 0.0, (f"torch is not installed: {with_extra('objectives')}",))]

    from moe_rl.replay.alignment import AlignmentTest
    from moe_rl.replay.choice import own_choice
    from moe_rl.replay.row_places import RowPlaces

    record = np.concatenate([array[:, moe_columns(array.shape[1], spec)] for array in arrays]).astype(np.int64)
    prompts = [len(ids) for ids in tokens] if prompts is None else prompts
    lag = None if lags is None else np.concatenate(lags)
    recorded = np.ones(len(record), bool) if seen is None else np.concatenate(seen).astype(bool)
    places = RowPlaces.of(tokens, prompts, recorded, slice(None), lag)
    test = AlignmentTest(spec.moe_layers, [places], torch.device("cpu"), groups=groups)
    all_scores = None if scores is None else np.concatenate(scores)
    # Rows that the witness does not have may hold anything.
    choice = None if native is None else np.where(recorded[:, None, None], np.concatenate(native), record)

    def tensor(values: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype))

    for index, layer in enumerate(spec.moe_layers):
        ranked = None if all_scores is None else tensor(all_scores[:, index], np.float32)
        chosen = None if choice is None else tensor(choice[:, index], np.int64)
        if ranked is None:
            assert chosen is not None
            ranked = torch.zeros(len(record), spec.num_experts).scatter_(1, chosen, 1.0)
        chosen = own_choice(ranked, spec.top_k) if chosen is None else chosen
        test.observe(0, layer, tensor(record[:, index], np.int64), chosen, ranked)
    test.compared(0, [f"sequence {name}" for name in names])
    verdict = test.verdict()
    assert verdict is not None
    claims = [
        Checked(claim.name, "weak", 0.0, ("needs scores",))
        if scores is None and claim.name in _OF_SCORES
        else Checked(claim.name, claim.status, claim.power, claim.found)
        for claim in verdict.claims
    ]
    return claims
