"""Says from the evidence of a run who was right when a check ended it: the third engine, `transformers`, decides.

The third engine takes the experts that one of the two engines took, row by row. Its own scores say whether each choice
was the best one. A choice within a near tie is not a difference. How far rounding alone moves scores is measured: the
third engine runs the same weights in float32 and in the engine's precision. Log-probabilities are compared in the same
way.

| the record fits | the sampler's scores fit | the trainer fits | who |
|---|---|---|---|
| yes | yes | yes | the check was wrong |
| no | yes | yes | recorder |
| | no | yes | weights: the sampler computes with others |
| yes | yes | no | trainer |
| no, or its scores | | no | weights: neither engine computes with those that were kept |

Before that: a trainer that was given routes other than the record's is wrong. So is a recorder whose record contradicts
the router logits of its own engine, or has a checksum that differs from that of the engine's output. If a checksum was
refused, and the record in the trace has it, the trainer changed what it read. If a run collapsed with both engines
right, its training is at fault. Alignment, canary, lag 0 and the rules of variety judge by statistics. All other checks
compare bits and cannot be wrong: if both engines are right, the trace has another record than the sampler made, or the
step did something else with its batch than it was given.

Legend: T rows of a sequence, L MoE layers, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from moe_rl.proof.choices import choice_scores, regret
from moe_rl.proof.reference import IndependentModel
from moe_rl.report.evidence_folder import ABSENT, Evidence

Verdict = Literal["check", "recorder", "weights", "trainer", "training", "undecided"]
Rows = Mapping[str, np.ndarray]
# Scores of the routers [T, L, E], and the log-probability [T] of each row's next token.
_Ran = tuple[torch.Tensor, torch.Tensor]

# Engines differ by this share of the largest score where both compute in float32: 64 units in its last place.
_EXACT = 64 * float(np.finfo(np.float32).eps)
# Multiples of the measured rounding up to which choices are near ties and log-probabilities agree. A sampler that
# stores weights with 3 bits instead of 7 rounds 16 times as much.
_TIES, _SCORES, _COARSE, _LEAST_NATS = 4.0, 3.0, 16.0, 1e-4
# What ends a run by statistics. These checks may be wrong where both engines are right; all others compare bits.
_JUDGED = ("collapse", "alignment", "canary", "lag 0", "equal tokens", "equal layers", "equal pair", "equal scores")
# An engine fits up to these shares of choices beyond near ties: of all choices, of a layer's, and of a sequence's.
_SHARES = (0.005, 0.02, 0.1)


@dataclass(frozen=True, slots=True)
class Side:
    """Says how one engine compares with the third one.

    Attributes:
        version: that of the third engine's weights.
        choices: number of (row, layer) compared. near: those that differ from the third engine's within a near tie.
            differ: those beyond a near tie.
        worst: the largest margin by which the third engine prefers another choice, in units of scores; None if there is
            an impossible one. where: (sequence, row, layer). tie: the largest near tie of that layer.
        by_layer: share of `differ` in each layer, by its global number.
        nats: mean |difference of log-probabilities|; allowed: what rounding explains. None where there are none.
        fits, scores_fit: the verdict on choices and on log-probabilities; None where there is nothing to compare.
    """

    version: int
    choices: int = 0
    near: int = 0
    differ: int = 0
    worst: float | None = 0.0
    where: tuple[str, int, int] | None = None
    tie: float = 0.0
    by_layer: dict[int, float] = field(default_factory=dict)
    nats: float | None = None
    allowed: float | None = None
    fits: bool | None = None
    scores_fit: bool | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Says who was right, and why.

    Attributes:
        sampler, trainer: The two engines; several sides of the sampler if several versions made its rows.
        moved: Share of the record's choices of older weights that the trainer's weights would not have made.
        replayed_others: Number of (row, layer) at which the routes given to the trainer differ from the record.
        damaged: Keys of the sequences whose record in the trace has another checksum than what left the engine.
        own_logits: Share of the record's choices that the router logits of the sampler itself contradict; None where it
            recorded none.
        missing: Versions whose weights were needed and are missing.
    """

    verdict: Verdict
    why: str
    sampler: list[Side]
    trainer: Side | None
    moved: float | None
    replayed_others: int
    damaged: list[str]
    own_logits: float | None
    missing: list[int]


def explain(evidence: Evidence, rows: Seq[Rows], weights: Mapping[int, Path], trained: Path | None) -> Explanation:
    """Compare both engines with the third one.

    Args:
        rows: Arrays of the sequences of the evidence.
        weights: Hugging Face folders of the versions that made its rows, as far as they exist.
        trained: Folder of the weights that the trainer had.
    """
    names = [sequence.key for sequence in evidence.sequences]
    sides, missing, moved = [], [], None
    # Rows of a later version attend to keys of the first version or to new keys, so only the first version's are clear.
    cut = [sequence.versions[0] if sequence.versions else (0, 0) for sequence in evidence.sequences]
    for version in sorted({version for version, _ in cut}):
        mine: list[tuple[str, Rows]] = [
            (name, _rows(part, count))
            for name, part, (made, count) in zip(names, rows, cut, strict=True)
            if made == version and count
        ]
        if (path := weights.get(version)) is None:
            missing.append(version)
            continue
        coarse = _COARSE if evidence.sampler_weights != "exact" else 1.0
        engine = _Engine(path, evidence.sampler_dtype, coarse, evidence.temperature)
        sides.append(engine.side(version, mine, "record", None if evidence.truncated else "sampler_logprobs"))
        if trained is not None and version < evidence.version:
            newer = _Engine(trained, evidence.sampler_dtype, coarse, evidence.temperature)
            side = newer.side(evidence.version, mine, "record", None)
            moved = max(moved or 0.0, side.differ / max(side.choices, 1))
    trainer = None
    if trained is not None and rows:
        engine = _Engine(trained, evidence.trainer_dtype, 1.0, 1.0, chose_freely=True)
        trainer = engine.side(evidence.version, list(zip(names, rows, strict=True)), "chosen", "trainer_logprobs")
    explanation = Explanation(
        "undecided",
        "",
        sides,
        trainer,
        moved,
        _replayed_others(rows),
        [sequence.key for sequence in evidence.sequences if sequence.intact is False],
        _own_logits(rows, trained),
        missing,
    )
    verdict, why = _judge(explanation)
    failed = trainer is not None and trainer.fits is trainer.scores_fit is None  # it could not run the tokens again
    right = _all(fit for side in sides for fit in (side.fits, side.scores_fit)) and not missing
    if verdict == "check" or (verdict == "undecided" and failed and right):
        verdict, why = _where_engines_are_right(evidence, verdict, why)
    return replace(explanation, verdict=verdict, why=why)


def _where_engines_are_right(evidence: Evidence, verdict: Verdict, why: str) -> tuple[Verdict, str]:
    """Return who was right where no engine is wrong: a check that judges scores may err, one that compares bits cannot.

    verdict, why: what the engines alone say.
    """
    if evidence.what == "collapse" and verdict == "check":
        return "training", "both engines compute what the third one does: look at the objective and its rate"
    if evidence.what in _JUDGED:
        return verdict, why
    if evidence.error in ("TraceError", "RouteValidationError"):
        return "recorder", "no engine computes wrongly, and the record is not one that the sampler can have made"
    return (
        "trainer",
        "no engine computes wrongly, and the check compares bits: the step changed its batch",
    )


def _judge(explanation: Explanation) -> tuple[Verdict, str]:
    """Return who was right, and why, see the table above."""
    record = _all(side.fits for side in explanation.sampler)
    scores = _all(side.scores_fit for side in explanation.sampler)
    trainer = None if explanation.trainer is None else _all([explanation.trainer.fits, explanation.trainer.scores_fit])
    if explanation.replayed_others:
        return "trainer", f"it was given routes that differ from the record at {explanation.replayed_others} places"
    if explanation.damaged:
        return "recorder", f"the trace has another record of {explanation.damaged[0]} than what left the engine"
    if explanation.own_logits:
        return "recorder", f"the sampler's own router logits contradict {explanation.own_logits:.1%} of the record"
    if explanation.missing:
        versions = ", ".join(map(str, explanation.missing))
        return "undecided", f"the record was made by weights that are not kept: version {versions}"
    if record is None and scores is None:
        return "undecided", "the sampler's routes and log-probabilities are not kept"
    if trainer is None:
        return "undecided", f"the trainer's {'weights' if explanation.trainer is None else 'own results'} are not kept"
    if not trainer:
        if record is not False and scores is not False:
            return "trainer", "the sampler computes what the third engine does, and the trainer something else"
        return "weights", "neither engine computes what the third one does with the weights that were kept"
    if scores is False:
        return "weights", "the trainer computes what the third engine does, and the sampler something else"
    if record is False:
        if scores is None:
            return (
                "undecided",
                "the record is wrong for these weights, and no log-probabilities tell which the sampler has",
            )
        return "recorder", "the sampler scores its tokens as the third engine does, but did not take these experts"
    return "check", "both engines compute what the third one does, up to near ties"


class _Engine:
    """Runs the third engine on one version of the weights, in float32 and in the precision of another engine."""

    def __init__(self, path: Path, dtype: str, coarse: float, temperature: float, *, chose_freely: bool = False):
        """Args: `dtype` and `coarse` describe the other engine: its precision, and how many times more coarsely it
        rounds. `chose_freely`: its reported choices are certainly its own."""
        self.chose_freely = chose_freely
        low = getattr(torch, dtype)
        self.exact, self.temperature, self.coarse = IndependentModel(path, weights=low), temperature, coarse
        self.low = None if low == torch.float32 else IndependentModel(path, dtype=low)
        self.facts = self.exact.facts

    @torch.no_grad()
    def side(self, version: int, rows: Seq[tuple[str, Rows]], routes: str, logprobs: str | None) -> Side:
        """Compare an engine. routes, logprobs: the names of its arrays."""
        seen = [_Seen(self, part, part.get(routes), part.get(logprobs or "")) for _, part in rows]
        choices = [(name, sequence) for (name, _), sequence in zip(rows, seen, strict=True) if sequence.known.any()]
        side = self._choices(Side(version), choices) if choices else Side(version)
        return self._scores(side, [sequence for sequence in seen if sequence.apart.shape[1]])

    def ran(self, tokens: torch.Tensor, routes: np.ndarray | None) -> tuple[_Ran, _Ran]:
        """Return what the third engine gives for tokens [T + 1], in float32 and in the other engine's precision."""
        models = [self.exact] if self.low is None else [self.exact, self.low]
        results: list[_Ran] = []
        for model in models:
            logits = model(tokens[:-1].numpy(), routes).float() / self.temperature
            pairs = zip(model.routers, model.biases, strict=True)
            scores = torch.stack([choice_scores(self.facts, router_logits, bias) for router_logits, bias in pairs], 1)
            results.append((scores, logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]))
        return results[0], results[-1]

    def _choices(self, side: Side, seen: list[tuple[str, _Seen]]) -> Side:
        """Add to a side what the choices of some sequences show."""
        largest, moved = (
            torch.stack([getattr(sequence, what) for _, sequence in seen]).amax(0) for what in ("largest", "moved")
        )
        ties, layers = _EXACT * largest + _TIES * self.coarse * moved, self.facts.moe_layers
        known, regrets = (torch.cat([getattr(sequence, what) for _, sequence in seen]) for what in ("known", "regrets"))
        beyond = known & ~(regrets <= ties)  # NaN is no tie
        of_layers = beyond.sum(0) / known.sum(0).clamp(min=1)
        lengths = [len(sequence.known) for _, sequence in seen]
        shares = [
            float(part.sum() / all_.sum())
            for part, all_ in zip(beyond.split(lengths), known.split(lengths), strict=True)
        ]
        differ, choices = int(beyond.sum()), int(known.sum())
        differing = differ / choices, float(of_layers.amax()), max(shares)
        worst_row, column = divmod(int(torch.where(known, regrets, -1).argmax()), len(layers))
        worst = float(regrets[worst_row, column])
        places = [(name, row) for name, sequence in seen for row in range(len(sequence.known))]
        return replace(
            side,
            choices=choices,
            near=int((known & (regrets > 0)).sum()) - differ,
            differ=differ,
            worst=worst if math.isfinite(worst) else None,
            where=(*places[worst_row], layers[column]),
            tie=float(ties[column]),
            by_layer={layer: float(share) for layer, share in zip(layers, of_layers, strict=True)},
            fits=all(share <= limit for share, limit in zip(differing, _SHARES, strict=True)),
        )

    def _scores(self, side: Side, seen: list[_Seen]) -> Side:
        """Add to a side what the log-probabilities of some sequences show.

        A wrong record changes what the third engine computes when it takes the recorded experts. So an engine also fits
        if it computes what the third one computes with its own choices.
        """
        if not seen:
            return side
        apart, noise = (torch.cat([getattr(sequence, what) for sequence in seen], 1) for what in ("apart", "noise"))
        way = int(apart.mean(1).argmin())
        limits = [
            _LEAST_NATS + _SCORES * self.coarse * float(part)
            for part in (noise.mean(1).amax(), noise.median(1).values.amax())
        ]
        nats, usual = float(apart[way].mean()), float(apart[way].median())
        return replace(side, nats=nats, allowed=limits[0], scores_fit=nats <= limits[0] and usual <= limits[1])


class _Seen:
    """Holds how one sequence compares with the third engine.

    Attributes:
        known: bool [T, L], where there is a choice. regrets: float32 [T, L], see `choices.regret`; infinite where it is
            not a choice of K experts.
        largest, moved: [L], the largest score, and the largest change of a score by rounding.
        apart, noise: [ways, N], |differences of log-probabilities|: of the engine to the third one, and of the third
            one by rounding. The first row is under the engine's choices, the second, if there is one, under the third
            engine's own.
    """

    def __init__(self, engine: _Engine, rows: Rows, routes: np.ndarray | None, logprobs: np.ndarray | None):
        tokens, facts = torch.from_numpy(rows["tokens"].astype(np.int64)), engine.facts
        ran = [engine.ran(tokens, routes)]
        if not engine.chose_freely:
            ran.append(ran[0] if routes is None or logprobs is None else engine.ran(tokens, None))
        (scores, _), (rounded, _) = ran[0]
        self.largest = scores.abs().amax((0, 2))
        self.moved = (scores - rounded).abs().amax((0, 2))
        shape = scores.shape[:2]
        self.known, self.regrets = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
        if routes is not None:
            choices = torch.from_numpy(routes.astype(np.int64))
            self.known = (choices != ABSENT).all(-1)
            ordered = choices.sort(-1).values
            sound = (ordered[..., -1] < facts.num_experts) & (ordered.diff(dim=-1) > 0).all(-1)
            for column in range(shape[1]):
                chosen = choices[:, column].clamp(max=facts.num_experts - 1)
                self.regrets[:, column] = regret(facts, scores[:, column], chosen)
            self.regrets[~sound] = torch.inf
        self.apart = self.noise = torch.empty(len(ran), 0)
        if logprobs is not None:
            reported = torch.from_numpy(logprobs)
            here = reported.isfinite()
            self.apart = torch.stack([(exact[1] - reported).abs()[here] for exact, _ in ran])
            self.noise = torch.stack([(exact[1] - low[1]).abs()[here] for exact, low in ran])


def _rows(rows: Rows, count: int) -> dict[str, np.ndarray]:
    """Return the arrays of the first rows of a sequence."""
    return {name: array[: count + (name == "tokens")] for name, array in rows.items()}


def _all(values: Iterable[bool | None]) -> bool | None:
    """Return whether all known values are true; None if none is known."""
    known = [value for value in values if value is not None]
    return all(known) if known else None


def _replayed_others(rows: Seq[Rows]) -> int:
    """Count the (row, layer) at which the routes given to the trainer differ from the record."""
    count = 0
    for part in rows:
        if "record" in part and "applied" in part:
            record, applied = part["record"], part["applied"]
            known = (record != ABSENT).all(-1) & (applied != ABSENT).all(-1)
            count += int(((np.sort(record, -1) != np.sort(applied, -1)).any(-1) & known).sum())
    return count


def _own_logits(rows: Seq[Rows], trained: Path | None) -> float | None:
    """Return the share of the record that the sampler's own router logits contradict; None where there are none."""
    logits = [part for part in rows if "record" in part and "sampler_logits" in part]
    if not logits or trained is None:
        return None
    model = IndependentModel(trained)
    wrong = compared = 0
    for part in logits:
        record, own = torch.from_numpy(part["record"].astype(np.int64)), torch.from_numpy(part["sampler_logits"])
        known = own.isfinite().all(-1) & (record < model.facts.num_experts).all(-1)
        for column, bias in enumerate(model.biases):
            positions = known[:, column].nonzero()[:, 0]
            scores = choice_scores(model.facts, own[positions, column], bias)
            near = 4 * torch.finfo(torch.bfloat16).eps * scores.abs().amax(-1)
            wrong += int((regret(model.facts, scores, record[positions, column]) > near).sum())
            compared += len(positions)
    return wrong / compared if compared else None
