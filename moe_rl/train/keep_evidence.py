"""Keeps what settles who was right when a check ends a run: weights, tokens, and both engines' routes and scores.

A check raises its error on all ranks. They then run the sequences concerned once more through the trainer, with routers
that choose for themselves, write the trainer's weights, and end with the error. A failure here is added to the error as
a note.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.schema import Config
from moe_rl.errors import CheckpointError, MoeRLError, TraceError
from moe_rl.megatron import world
from moe_rl.megatron.cpu import without_mode
from moe_rl.megatron.microbatch import Work
from moe_rl.megatron.model import DTYPES
from moe_rl.megatron.policy import Policy
from moe_rl.megatron.saving import Exports
from moe_rl.models.hf import expected_tensors
from moe_rl.report import evidence_folder
from moe_rl.report.evidence_folder import ABSENT, Evidence, KeptRows, KeptWeights
from moe_rl.report.format import binary
from moe_rl.trace import TraceSpec, TraceStore, signed
from moe_rl.trace.spans import versions_of_rows
from moe_rl.train.canary import Canary
from moe_rl.train.run_folder import RunFolder
from moe_rl.types import RouteRef, Sequence, VersionSpan

# Limits of the rows that are kept: enough to tell a wrong layer, place or sequence from near ties.
_SEQUENCES, _ROWS = 32, 4096
# Names for faults, and for error types without a fault.
_NAMES = {
    **dict.fromkeys(("read", "dispatched", "misapplied"), "checksum"),
    "CollapseError": "collapse",
    "PipelineError": "lag 0",
    "WeightSyncError": "canary",
}


@dataclass(frozen=True, slots=True)
class Concerned:
    """Holds a sequence that a check may have been about, as the sampler gave it.

    Attributes:
        tokens: ids, at least 2.
        logprobs: the sampler's, float32 [tokens - 1], NaN where it sampled none.
        versions: those of the weights that made its rows, where it has no record.
        ref: its record. record: uint [T, L, K], if it was read before.
        plain: whether the log-probabilities are those at temperature 1, over the whole vocabulary.
    """

    key: str
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    versions: tuple[VersionSpan, ...]
    ref: RouteRef | None = None
    record: np.ndarray | None = None
    plain: bool = False

    @classmethod
    def of(cls, sequence: Sequence) -> Concerned:
        """Take a sequence of a batch."""
        logprobs = np.full(sequence.forwarded, np.nan, np.float32)
        logprobs[sequence.positions - 1] = sequence.rollout_logprobs
        return cls(sequence.key, tuple(sequence.ids), logprobs, sequence.versions, sequence.routes)


def of_canary(canary: Canary, version: int, by: str = "") -> list[Concerned]:
    """Take the canary's runs with one sampler's results. by: its name; "" means the sampler compared last."""
    by = by or next(reversed(canary.records), canary.scored[0].by)
    scored = next(result for result in canary.scored if result.by == by)
    read = canary.records.get(by)
    records = [None] * len(canary.runs) if read is None else [record.routes for record in read]
    return [
        Concerned(f"canary/{index}", run, logprobs, (VersionSpan(len(run) - 1, version),), record=record, plain=True)
        for index, (run, logprobs, record) in enumerate(zip(canary.runs, scored.logprobs, records, strict=True))
    ]


class EvidenceKeeper:
    """Writes evidence into the folder of a run. All ranks call it together."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        policy: Policy,
        store: TraceStore,
        spec: TraceSpec,
        note: Callable[[str], None] = lambda text: None,
    ):
        """Args: `note` tells the user, before anything is written, which takes minutes for a large model."""
        self.note = note
        self.config, self.folder, self.policy, self.store, self.spec = config, folder, policy, store, spec
        self._limit = config.guards.evidence_mib << 20

    @contextmanager
    def of(
        self,
        step: int,
        version: int,
        sequences: Callable[[], Seq[Concerned]],
        work: Callable[[], Seq[Work]] = lambda: (),
        *,
        alike: bool = False,
    ) -> Iterator[None]:
        """Keep evidence if the body ends with an error that all ranks raise.

        Args:
            step: the run's step.
            version: that of the trainer's weights at the beginning of the body.
            sequences: returns on rank 0 the sequences that the body is about.
            work: returns this rank's microbatches with the routes that they should take.
            alike: whether the body does the same on all ranks. Otherwise the error must have `everywhere` set.
        """
        made = self.policy.updates
        try:
            yield
        except MoeRLError as error:
            if error.everywhere or alike:
                self.keep(error, step, version, self.policy.updates - made, sequences, work)
            raise

    def keep(
        self,
        error: MoeRLError,
        step: int,
        version: int,
        updates: int,
        sequences: Callable[[], Seq[Concerned]],
        work: Callable[[], Seq[Work]] = lambda: (),
    ) -> None:
        """Keep evidence of an error that all ranks raise, and note on it where. updates: number made since
        `version`."""
        if not self._limit:
            return
        try:
            self.note(f"step {step}: a check ends the run, which keeps evidence first. {error}")
            with without_mode():
                note = _Keeping(self, error, step, version, updates, list(work())).run(sequences)
        except Exception as failure:  # it must not hide the error
            note = f"evidence of this could not be kept: {type(failure).__name__}: {failure}"
        error.add_note(note)


class _Keeping:
    """Keeps the evidence of one error."""

    def __init__(
        self, keeper: EvidenceKeeper, error: MoeRLError, step: int, version: int, updates: int, work: list[Work]
    ):
        self.config, self.folder, self.policy = keeper.config, keeper.folder, keeper.policy
        self.store, self.spec, self.limit = keeper.store, keeper.spec, keeper._limit
        self.error, self.work = error, work
        about, config, fault = error.about, self.config, error.message.fault or type(error).__name__
        self.evidence = Evidence(
            step=step,
            what=_NAMES.get(fault, fault),
            time=time.time(),
            error=error.kind,
            message=str(error),
            version=version,
            updates=updates,
            lr=self.policy.lr,
            staleness=0,
            power=float(about["power"]) if "power" in about else None,
            temperature=config.rollout.temperature,
            truncated=config.rollout.keep_sampling_mask,
            trainer_dtype=config.train.dtype,
            sampler_dtype=config.rollout.dtype,
            sampler_weights=config.rollout.weights,
        )
        item = DTYPES[config.train.dtype].itemsize
        self.weight_bytes = sum(math.prod(shape) * item for shape in expected_tensors(self.policy.facts).values())
        self.row_bytes = len(self.spec.moe_layers) * (8 * self.spec.num_experts + 6 * self.spec.top_k)

    def run(self, sequences: Callable[[], Seq[Concerned]]) -> str:
        """Write the folder; return where it is, in words. Raises MoeRLError on all ranks if rank 0 cannot write."""
        first, run = dist.get_rank() == 0, self.folder.path
        chosen: list[Concerned] = []
        begun = _Agreed()
        if first:
            with self._failing(begun):
                chosen = self._chosen(sequences())
                begun.runs = [(sequence.key, sequence.tokens) for sequence in chosen]
                name = evidence_folder.name_of(self.evidence.step, self.evidence.what)
                begun.place = str(evidence_folder.begin(run, name))
        begun = self._told(begun)
        hidden = Path(begun.place)
        try:
            followed = self._follow([tokens for _, tokens in begun.runs])
            applied = self._applied({key: len(tokens) - 1 for key, tokens in begun.runs})
            try:
                weights = self._write_weights(hidden)
            except CheckpointError as failure:  # raised on all ranks; the rows alone may decide
                weights = []
                self.evidence.left_out.append(f"the trainer's weights: {failure}")
                if first:
                    evidence_folder.abandon(hidden / evidence_folder.WEIGHTS)
            if first:
                with self._failing(begun):
                    self._write(hidden, chosen, followed, applied, weights)
                    begun.place = str(evidence_folder.publish(hidden, self.limit))
            begun = self._told(begun)  # the ranks end as soon as the first of them does
        finally:
            if first:
                evidence_folder.abandon(hidden)
        return f"evidence is in {begun.place}; moe-rl explain {run} says who was right"

    @contextmanager
    def _failing(self, begun: _Agreed) -> Iterator[None]:
        """Store an error of the body for the other ranks."""
        try:
            yield
        except Exception as error:
            begun.failure = f"{type(error).__name__}: {error}"

    def _told(self, begun: _Agreed) -> _Agreed:
        """Return rank 0's object. Raises MoeRLError if rank 0 failed."""
        begun = world.broadcast(begun, _Agreed)
        if begun.failure:
            raise MoeRLError(begun.failure)
        return begun

    def _chosen(self, sequences: Seq[Concerned]) -> list[Concerned]:
        """Choose the sequences to keep, those that the error names first, and cut the last one to the rows that fit."""
        fits = self.weight_bytes <= self.limit
        room = (self.limit - self.weight_bytes if fits else self.limit) // (2 * self.row_bytes)
        rows = min(_ROWS, self.config.train.microbatch_tokens, room)
        message, chosen = str(self.error), list[Concerned]()
        for sequence in sorted(sequences, key=lambda sequence: sequence.key not in message):
            if len(chosen) == _SEQUENCES or rows < 1:
                break
            if len(sequence.tokens) > 1:
                chosen.append(replace(sequence, tokens=sequence.tokens[: rows + 1]))
                rows -= len(chosen[-1].tokens) - 1
        if (left := len(sequences) - len(chosen)) > 0:
            self.evidence.left_out.append(f"{left} of {len(sequences)} sequences")
        return chosen

    def _follow(self, runs: list[tuple[int, ...]]) -> list[dict[str, np.ndarray]]:
        """Return the trainer's log-probabilities, choices and router logits for each run of tokens."""
        if not runs:
            return []
        canary = Canary(runs, self.store, self.spec)
        try:
            own = canary.natively(self.policy, self.evidence.version, logits=True)
        except MoeRLError as error:
            if not error.everywhere:
                raise
            self.evidence.left_out.append(f"the trainer's own results: {error}")  # its fault lasts
            return [{} for _ in runs]
        ends = np.cumsum([len(run) - 1 for run in runs])[:-1]
        chosen, logits = own.chosen.transpose(1, 0, 2).astype(np.uint16), own.logits.transpose(1, 0, 2)
        parts = (own.logprobs.astype(np.float32), chosen, logits)
        names, cut = ("trainer_logprobs", "chosen", "trainer_logits"), (np.split(part, ends) for part in parts)
        return [dict(zip(names, arrays, strict=True)) for arrays in zip(*cut, strict=True)]

    def _applied(self, rows: dict[str, int]) -> dict[str, np.ndarray]:
        """Return the routes that the step's passes should replay. rows: number of rows of each sequence."""
        mine = []
        for work in self.work:
            table = work.table
            for index, name in enumerate(table.names):
                if name in rows:
                    here = table.places.recorded & (table.places.sequence == index)
                    routes = np.stack([table.routes[layer].cpu().numpy()[here] for layer in table.routes])
                    positions = table.places.position[here].tolist()
                    mine.append(_Applied(name, list(table.routes), positions, routes.astype(np.uint16).tobytes()))
        shape = (len(self.spec.moe_layers), self.spec.top_k)
        applied: dict[str, np.ndarray] = {}
        for part in [part for parts in world.gather(mine, list[_Applied]) for part in parts]:
            routes = applied.setdefault(part.key, np.full((rows[part.key], *shape), ABSENT, np.uint16))
            by_layer = np.frombuffer(part.routes, np.uint16).reshape(len(part.layers), len(part.positions), -1)
            kept = np.flatnonzero(np.array(part.positions) < rows[part.key])
            columns = np.array([self.spec.moe_layers.index(layer) for layer in part.layers], np.int64)
            routes[np.ix_(np.array(part.positions, np.int64)[kept], columns)] = by_layer[:, kept].transpose(1, 0, 2)
        return applied

    def _write_weights(self, place: Path) -> list[KeptWeights]:
        """Write the trainer's weights, if they fit."""
        evidence = self.evidence
        if self.weight_bytes > self.limit:
            self._too_large()
            return []
        folder = place / evidence_folder.WEIGHTS
        exports = Exports(
            folder,
            self.policy.facts,
            self.config.model.path,
            DTYPES[self.config.train.dtype],
            keep=None,
            resume_from=self.folder.checkpoints,
        )
        exports.save(evidence.version, self.policy)
        exports.finish()
        path = f"{evidence_folder.WEIGHTS}/{checkpoints.name_of(evidence.version)}"
        return [KeptWeights(evidence.version, path, published=True, updates=evidence.updates)]

    def _too_large(self) -> None:
        size, limit = binary(self.weight_bytes), binary(self.limit)
        self.evidence.left_out.append(
            f"the trainer's weights: {size} do not fit into guards.evidence_mib ({limit}) beside the rest"
        )

    def _write(
        self,
        hidden: Path,
        chosen: list[Concerned],
        followed: list[dict[str, np.ndarray]],
        applied: dict[str, np.ndarray],
        weights: list[KeptWeights],
    ) -> None:
        """Write on rank 0 all but the trainer's weights."""
        evidence, arrays = self.evidence, dict[str, np.ndarray]()
        for number, (sequence, results) in enumerate(zip(chosen, followed, strict=True)):
            rows = len(sequence.tokens) - 1
            kept, read = self._record(sequence, rows)
            known = {
                "tokens": np.array(sequence.tokens, np.int32),
                "sampler_logprobs": sequence.logprobs[:rows],
                "applied": applied.get(sequence.key),
                **read,
                **results,
            }
            arrays |= {f"{number}/{name}": array for name, array in known.items() if array is not None}
            evidence.sequences.append(kept)
        made = {version for kept_rows in evidence.sequences for version, _ in kept_rows.versions}
        staleness = evidence.version - min(made, default=evidence.version)
        used = sum(array.nbytes for array in arrays.values())
        if evidence_folder.size_of(hidden) + used > self.limit:
            # The tokenizer and untrained layers are stored beside the weights.
            shutil.rmtree(hidden / evidence_folder.WEIGHTS)
            self._too_large()
            weights = []
        weights = weights + self._older(hidden, used, made - {saved.version for saved in weights if not saved.updates})
        evidence = replace(evidence, weights=weights, staleness=staleness)
        if any(sequence.plain for sequence in chosen):
            evidence = replace(evidence, temperature=1.0, truncated=False)
        evidence_folder.write(hidden, evidence, arrays)

    def _record(self, sequence: Concerned, rows: int) -> tuple[KeptRows, dict[str, np.ndarray]]:
        """Read what the sampler recorded for the first rows of a sequence, by the names in ARRAYS."""
        spans, ref = tuple((span.weight_version, span.tokens) for span in sequence.versions), sequence.ref
        if sequence.record is not None:
            return KeptRows(sequence.key, _cut(spans, rows)), {"record": sequence.record[:rows].astype(np.uint16)}
        kept = KeptRows(sequence.key, _cut(spans, rows, ahead=True))
        if ref is None:
            return kept, {}
        try:
            read = self.store.read(ref)
        except TraceError as error:
            self.evidence.left_out.append(f"the record of {sequence.key}: {error}")
            return kept, {}
        shape, first = (rows, len(self.spec.moe_layers)), min(read.first_row, rows)
        record = np.full((*shape, self.spec.top_k), ABSENT, np.uint16)
        arrays: dict[str, np.ndarray] = {"record": record}
        record[first : first + len(read.routes)] = read.routes[: rows - first]
        made = tuple((span.weight_version, span.rows) for span in read.spans)
        made = ((made[0][0], first + made[0][1]), *made[1:])
        intact = None
        if ref.source_sum:
            row_versions = versions_of_rows(read.spans)
            again = signed(ref, read.routes, self.spec.moe_layers, read.token_ids, versions=row_versions)
            intact = again.source_sum == ref.source_sum
        with suppress(TraceError):  # no logits were recorded
            logit_rows = self.store.aux(ref, "router_logits_rows").astype(np.int64)
            logits = np.full((*shape, self.spec.num_experts), np.nan, np.float32)
            logits[logit_rows[logit_rows < rows]] = self.store.aux(ref, "router_logits")[logit_rows < rows]
            arrays["sampler_logits"] = logits
        return KeptRows(sequence.key, _cut(made, rows), intact), arrays

    def _older(self, hidden: Path, used: int, versions: set[int]) -> list[KeptWeights]:
        """Return where the weights of these versions are. Those in the run folder are linked if they fit, so that they
        survive.

        used: bytes that are still to be written.
        """
        weights = []
        exported, saved = (dict(checkpoints.complete(path)) for path in (self.folder.exports, self.folder.checkpoints))
        for version in sorted(versions):
            if version == 0 and self.config.starts_from_model:
                weights.append(KeptWeights(0, str(self.config.model.path), published=True))
            elif source := exported.get(version) or saved.get(version):
                # The trainer's weights, some updates after this version, may have its name.
                name = f"{evidence_folder.WEIGHTS}/older/{source.name}"
                if evidence_folder.size_of(source) + evidence_folder.size_of(hidden) + used <= self.limit:
                    shutil.copytree(source, hidden / name, copy_function=_link)
                else:
                    name = os.path.relpath(source, hidden)  # the hidden folder is renamed where it is
                weights.append(KeptWeights(version, name, published=version in exported))
            else:
                self.evidence.left_out.append(
                    f"the weights of version {version}: the run has no checkpoint and no export of them"
                )
        return weights


@dataclass(slots=True)
class _Agreed:
    """Holds what rank 0 tells the others. runs: key and tokens of each sequence. place: the folder."""

    runs: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    place: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Applied:
    """Holds the routes that one rank should replay for a sequence. routes: the bytes of uint16 [layers, positions,
    K]."""

    key: str
    layers: list[int]
    positions: list[int]
    routes: bytes


def _cut(spans: tuple[tuple[int, int], ...], rows: int, *, ahead: bool = False) -> tuple[tuple[int, int], ...]:
    """Return (version, rows) for the first `rows` rows.

    ahead: the spans cover only the sampled tokens, and the rows before them belong to the first.
    """
    if ahead and spans:
        spans = ((spans[0][0], spans[0][1] + max(0, rows - sum(count for _, count in spans))), *spans[1:])
    kept, left = list[tuple[int, int]](), rows
    for version, count in spans:
        took = min(count, left)
        before = kept.pop()[1] if kept and kept[-1][0] == version else 0
        if before + took:
            kept.append((version, before + took))
        left -= took
    return tuple(kept)


def _link(source: str, target: str) -> None:
    """Hard-link a file; copy it if the file system cannot link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
