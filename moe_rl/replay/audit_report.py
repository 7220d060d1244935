"""Compares what routers used with the record, and names the fault: whose routes did a wrong row have?

A wrong row says where its routes come from: from the router itself, another layer, another token, another microbatch, a
narrower type. Each fault of FAULTS has such a signature; most were reported in public, and their names are constant.

Legend for shapes: R rows of a microbatch, T tokens of a sequence, C layers as recorded, K top-k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_rl.errors import ReplayError, first_of
from moe_rl.replay.batch_check import BatchReport

FAULTS = {
    "not run": "a layer did not run for a microbatch",
    "run twice": "a layer ran twice for a microbatch",
    "other tokens": "the model was fed other tokens than the microbatch has",
    "row count": "a router saw another number of rows than its microbatch has on this rank",
    "not replayed": "routers chose for themselves",
    "orphan routers": "routers chose for themselves, and the global list has RouterReplays of no watched router: a "
    "decoder built twice (verl#7340)",
    "fused router": "routers chose for themselves: moe_router_fusion returns before it looks at the routes",
    "mtp layer": "the router of a layer that predicts further tokens has the routes of a decoder layer (NeMo-RL#4057)",
    "left entries": "recomputations took entries that an earlier pass left in the queue (SkyRL#1908)",
    "out of step": "recomputations took the routes of another microbatch (SkyRL#2233)",
    "other microbatch": "a microbatch ran with the routes of another",
    "other layer": "a layer has the routes of another layer (verl: dense or hash layers left out)",
    "batch first": "rows are sequence first and their routes batch first (miles#3146)",
    "rows shifted": "rows have the routes of a neighbouring token",
    "other slice": "rows have the routes of other tokens of their sequence: another slice of context parallelism "
    "(ms-swift#9799)",
    "other sequence": "rows have the routes of another sequence",
    "wrapped ids": "ids above 255 were stored in a byte",
    "zero rows": "rows have one set of experts, as an unwritten buffer has (vllm#44116)",
    "padding": "all padding goes to the same experts (prime-rl#3350)",
    "last writer": "the rows before a change of weights were overwritten by those after it",
    "dropped": "experts of the record were dropped: moe_expert_capacity_factor",
    "too few experts": "rows have fewer different experts than top-k (verl#4986)",
    "other experts": "rows have experts of no row of the batch",
}
"""What a report can name."""

_MOST = 0.9  # this share of the wrong rows must have the signature


@dataclass(frozen=True, slots=True, eq=False)
class RouterRun:
    """Holds one call of a router. ids, native: integers [R, K], ascending: the returned experts, and its own choice."""

    microbatch: int
    layer: int
    mtp: bool
    recomputation: bool
    ids: np.ndarray
    native: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """Holds the rows of a microbatch. sequence, position: [R]. ids: {layer: integers [R, K], ascending}; the rows of
    padding are -1."""

    sequence: np.ndarray
    position: np.ndarray
    ids: Mapping[int, np.ndarray]

    @classmethod
    def of(
        cls, routes: Seq[np.ndarray], sequence: np.ndarray, position: np.ndarray, columns: Mapping[int, int]
    ) -> Expected:
        """Gather the record of these rows, those that it lacks like padding. columns: where each layer is in the
        routes."""
        lengths = np.array([*map(len, routes)], np.int64)
        sequence = np.where((sequence >= 0) & (position < lengths[sequence]), sequence, -1)
        real, starts = sequence >= 0, np.cumsum([0, *lengths])
        rows = starts[sequence[real]] + position[real]
        ids = {}
        for layer, column in columns.items():
            flat = np.concatenate([np.asarray(record)[:, column] for record in routes]).astype(np.int64)
            experts = np.full((len(sequence), flat.shape[1]), -1, np.int64)
            experts[real] = np.sort(flat[rows], 1)
            ids[layer] = experts
        return cls(sequence, position, ids)


@dataclass(frozen=True, slots=True)
class Fault:
    """Names a fault. name: one of FAULTS. places: (microbatch, layer) of the runs that have it, in order."""

    name: str
    recomputation: bool
    places: tuple[tuple[int, int], ...]
    detail: str

    def __str__(self) -> str:
        where = first_of([f"microbatch {number} layer {layer}" for number, layer in self.places])
        run = "recomputation of " if self.recomputation else ""
        return f"{self.name}: {FAULTS[self.name]}. {self.detail} ({run}{where})"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Holds the result of a step. As text it is a page.

    Attributes:
        faults: What is wrong with what the routers used.
        record: The claims about the record itself.
        replayed, skipped, wrong: Number of router runs with the recorded experts; with the router's own; with others.
        forwards, recomputations: Number of all router runs, in forward passes and in recomputations.
        power: Share of the runs in which the router's own choice differs from the record, so that a replay that does
            nothing is noticed.
    """

    faults: tuple[Fault, ...]
    record: BatchReport
    replayed: int
    skipped: int
    wrong: int
    forwards: int
    recomputations: int
    power: float

    @property
    def names(self) -> list[str]:
        """Return the names of all faults, those of the record by the name of their claim. A shifted record also refuses
        other claims, so that claim comes first."""
        refused = [claim.name for claim in self.record.claims if claim.status == "refused"]
        refused.sort(key=lambda name: name != "shift")
        return [*dict.fromkeys([*(fault.name for fault in self.faults), *refused])]

    def refuse(self) -> None:
        """Raise ReplayError if anything is wrong with the routers or the record."""
        if self.names:
            raise ReplayError(
                "an audited step did not replay its record",
                got=first_of([*map(str, self.faults), *self.record.faults]),
                expected=f"the recorded experts in all {self.forwards + self.recomputations} runs of routers",
                do="docs/howto/other_trainers.md lists each fault and its cause",
                fault=self.names[0],
            )

    def __str__(self) -> str:
        counts = (
            f"{self.forwards} forwards and {self.recomputations} recomputations of routers: {self.replayed} replayed, "
            f"{self.skipped} skipped, {self.wrong} wrong; power {self.power:.2f}"
        )
        return "\n".join([counts, *map(str, self.faults), "record", str(self.record)])


@dataclass(frozen=True, eq=False)
class Audited:
    """Holds what a step showed. Attributes as in `audit`. orphans: RouterReplays of no watched router. left_before:
    entries in the longest queue of a RouterReplay before the step."""

    layers: tuple[int, ...]
    calls: Seq[RouterRun]
    expected: Seq[Expected]
    routes: Seq[np.ndarray]
    versions: Seq[np.ndarray] | None
    columns: Mapping[int, int]
    experts: int
    recomputed: bool | None
    strangers: Seq[int]
    orphans: int
    fused: bool
    capacity: bool
    left_before: int

    def report(self, record: BatchReport) -> AuditReport:
        """Judge all runs."""
        replayed = skipped = wrong = differing = 0
        by_fault: dict[tuple[str, bool], list[tuple[tuple[int, int], str]]] = {}
        for run in self.calls:
            rows = self._wrong(run)
            native_rows = (run.ids == run.native).all(1)
            if not run.mtp and self._fits(run):
                real = self.expected[run.microbatch].sequence >= 0
                differing += bool((self._target(run) != run.native).any(1)[real].any())
            if not len(rows):
                replayed += 1
            elif native_rows[rows].all():
                skipped += 1
            else:
                wrong += 1
            for name, detail in [*self._named(run, rows, bool(native_rows.all())), *self._padding(run)]:
                by_fault.setdefault((name, run.recomputation), []).append(((run.microbatch, run.layer), detail))
        faults = [
            Fault(name, again, tuple(place for place, _ in places), places[0][1])
            for (name, again), places in by_fault.items()
        ]
        decoder = [run for run in self.calls if not run.mtp]
        return AuditReport(
            (*self._counts(), *faults),
            record,
            replayed,
            skipped,
            wrong,
            sum(not run.recomputation for run in self.calls),
            sum(run.recomputation for run in self.calls),
            differing / max(1, len(decoder)),
        )

    def _target(self, run: RouterRun) -> np.ndarray:
        """Return the experts that each row of a run should have used, [R, K]; for padding, those that it used."""
        expected = self.expected[run.microbatch]
        if run.mtp:
            return run.native
        return np.where(expected.sequence[:, None] < 0, run.ids, expected.ids[run.layer])

    def _wrong(self, run: RouterRun) -> np.ndarray:
        """Return the indices of the rows with other experts than expected."""
        return np.flatnonzero((self._target(run) != run.ids).any(1) if self._fits(run) else np.ones(len(run.ids)))

    def _fits(self, run: RouterRun) -> bool:
        """Return whether a run is of a microbatch of the step, and has its rows."""
        known = 0 <= run.microbatch < len(self.expected)
        return known and len(self.expected[run.microbatch].sequence) == len(run.ids)

    def _counts(self) -> Iterator[Fault]:
        """Name layers that ran too rarely or too often."""
        if self.strangers:
            fed = tuple((number, self.layers[0]) for number in self.strangers)
            yield Fault("other tokens", False, fed, "the audit's rows, or the batch, are not the trainer's")
        runs = Counter((run.recomputation, run.microbatch, run.layer) for run in self.calls if not run.mtp)
        places = [(number, layer) for number in range(len(self.expected)) for layer in self.layers]
        wrong: list[tuple[int, int]]
        for recomputation, needed in ((False, True), (True, self.recomputed)):
            count = {place[1:]: times for place, times in runs.items() if place[0] == recomputation}
            layers = {layer for _, layer in count}  # recomputed in one microbatch, so in all
            lacking = [key for key in places if key not in count and (needed or needed is None and key[1] in layers)]
            twice = [key for key, times in count.items() if times > 1]
            for name, wrong in (("not run", lacking), ("run twice", twice)):
                if wrong:
                    yield Fault(name, recomputation, tuple(wrong), f"{len(wrong)} of {len(places)}")

    def _padding(self, run: RouterRun) -> Iterator[tuple[str, str]]:
        """Name padding that is all sent to the same experts, and not by the router's own choice."""
        if run.mtp or not self._fits(run):
            return
        sequence = self.expected[run.microbatch].sequence
        pads = run.ids[sequence < 0]
        if len(pads) > 1 and (pads == pads[:1]).all() and not (pads == run.native[sequence < 0]).all():
            used = sorted({*pads[0].tolist()} - {self.experts})
            yield "padding", f"{len(pads)} rows have experts {used}"

    def _named(self, run: RouterRun, rows: np.ndarray, all_native: bool) -> Iterator[tuple[str, str]]:
        """Name the fault of a run with these wrong rows. Yield nothing if it has none."""
        if not len(rows):
            return
        share = f"{len(rows)} of {len(run.ids)} rows"
        if not 0 <= run.microbatch < len(self.expected):
            yield "run twice", "a forward that was not announced"
            return
        if not self._fits(run):
            yield "row count", f"{len(run.ids)} rows, not {len(self.expected[run.microbatch].sequence)}"
            return
        if run.mtp:
            for layer in self.layers:
                if (run.ids == self.expected[run.microbatch].ids[layer]).all(1)[rows].mean() >= _MOST:
                    yield "mtp layer", f"{share} have those of layer {layer}"
                    return
            yield "other experts", share
            return
        if all_native:
            name = "fused router" if self.fused else "orphan routers" if self.orphans else "not replayed"
            yield name, f"{share} differ from the record" + (f"; {self.orphans} orphans" if self.orphans else "")
            return
        for name, text in self._signatures(run, rows):
            if text is not None:
                yield name, f"{share}{text}"
                return
        yield "other experts", share

    def _signatures(self, run: RouterRun, rows: np.ndarray) -> Iterator[tuple[str, str | None]]:
        """Yield the faults in the order in which they are looked for, with a text if the rows have the signature."""
        here = self.expected[run.microbatch]
        ids, right = run.ids[rows], here.ids[run.layer][rows]
        sequence, position = here.sequence[rows], here.position[rows]

        def most(alike: np.ndarray) -> bool:
            return bool(alike.mean() >= _MOST)

        def like(wanted: np.ndarray) -> bool:
            return most((ids == wanted).all(1))

        fewer = (ids[:, 1:] == ids[:, :-1]).any(1)
        lost = (ids == self.experts).any(1)
        if self.capacity:
            yield "dropped", "" if lost.any() else None
        if self.experts > 256:
            yield "wrapped ids", "" if like(self._distinct(np.sort(right % 256, 1), run)) else None
        stale = run.recomputation and self.left_before > 0
        if stale:
            yield "left entries", f"; {self.left_before} entries were in a queue before the step"
        for number, other in enumerate(self.expected):
            same_rows = number != run.microbatch and len(other.sequence) == len(here.sequence)
            if same_rows and like(other.ids[run.layer][rows]):
                name = "out of step" if run.recomputation else "other microbatch"
                yield name, f" have those of microbatch {number}"
        for layer in self.layers:
            if layer != run.layer and like(here.ids[layer][rows]):
                yield "other layer", f" have those of layer {layer}"
        yield "last writer", self._overwritten(rows, here)
        if len(rows) > 1:
            same = (ids == ids[:1]).all(1)
            unwritten = same.all() or (most(fewer | lost) and most(same))
            yield "zero rows", f" have experts {self._used(ids[0])}" if unwritten else None
        count = len(np.unique(here.sequence[here.sequence >= 0]))
        if count > 1 and len(here.sequence) % count == 0:
            order = np.arange(len(here.sequence)).reshape(-1, count).T.reshape(-1)  # batch first, as rows of here
            yield "batch first", "" if like(here.ids[run.layer][order][rows]) else None
            order = np.argsort(order)
            yield "batch first", "" if like(here.ids[run.layer][order][rows]) else None
        whose = self._whose(run.layer)
        for shift in (-1, 1, -2, 2):
            wanted = [(s, p + shift) for s, p in zip(sequence.tolist(), position.tolist(), strict=True)]
            hit = np.array([place in whose(key) for place, key in zip(wanted, ids, strict=True)])
            yield "rows shifted", f" have those of the token {shift:+d}" if most(hit) else None
        own_text = np.array([any(s == owner for s, _ in whose(key)) for owner, key in zip(sequence, ids, strict=True)])
        yield "other slice", "" if most(own_text) else None
        yield "other sequence", "" if most(np.array([bool(whose(key)) for key in ids])) else None
        yield "too few experts", "" if most(fewer | lost) else None

    def _distinct(self, ids: np.ndarray, run: RouterRun) -> np.ndarray:
        """Return ids as a routing map would give them back: without repetition, lost ones at the end."""
        if not (run.ids == self.experts).any():
            return ids
        again = np.concatenate([np.zeros((len(ids), 1), bool), ids[:, 1:] == ids[:, :-1]], 1)
        return np.sort(np.where(again, self.experts, ids), 1)

    def _overwritten(self, rows: np.ndarray, here: Expected) -> str | None:
        """Say where the weights changed if only rows of older weights are wrong, in sequences that newer ones
        continued."""
        if self.versions is None:
            return None
        changed = {}
        for number in np.unique(here.sequence[rows]).tolist():
            versions = np.asarray(self.versions[number])
            last = int(here.position[rows][here.sequence[rows] == number].max())
            if versions[0] == versions[-1] or versions[last] == versions[-1]:
                return None
            changed[number] = int(np.flatnonzero(versions == versions[-1])[0])
        return f"; the weights of sequence {next(iter(changed))} changed at token {next(iter(changed.values()))}"

    def _used(self, ids: np.ndarray) -> list[int]:
        return sorted({*ids.tolist()} - {self.experts})

    @cached_property
    def _by_layer(self) -> dict[int, dict[bytes, list[tuple[int, int]]]]:
        return {}

    def _whose(self, layer: int) -> Callable[[np.ndarray], list[tuple[int, int]]]:
        """Return the function from experts [K] to the (sequence, position) that have them in this layer's record."""
        if layer not in self._by_layer:
            places: dict[bytes, list[tuple[int, int]]] = {}
            for number, record in enumerate(self.routes):
                ids = np.sort(np.asarray(record)[:, self.columns[layer]].astype(np.int64), 1)
                for position, key in enumerate(ids):
                    places.setdefault(key.tobytes(), []).append((number, position))
            self._by_layer[layer] = places
        return lambda ids: self._by_layer[layer].get(np.ascontiguousarray(ids, np.int64).tobytes(), [])
