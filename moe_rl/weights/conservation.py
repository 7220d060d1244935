"""Checks that the trainer exports what it holds: sums of each part of the model, taken before and after the export.

    parameters as megatron has them --(`megatron/live_weights.py`)--> sums of each part --\\
                  |                                                                        equal? else refused, by part
                  `--(`megatron/hf_map.py`)--> Hugging Face tensors --> sums of each part --/

A part is a Hugging Face tensor. Where one tensor holds all experts of a layer, each expert's share is a part. An update
becomes final only after the two sums of every part were equal. The sum of a part is

    sum over elements w of  w * (A w + B)  modulo 2**32, as signed numbers, where w is the element's bits

It does not depend on the order of the elements, so it is computed without undoing any layout. The function is a
permutation of the 32-bit numbers (Rivest, Permutation polynomials modulo 2^w, 2001): every change of one element
changes the sum. When a part has elements of another part, the sum shows it except in about one case in 2**40. The sum
cannot see the order of the elements within a tensor. `start.py` compares that, bit for bit, when a run starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.errors import WeightSyncError, describe, first_of
from moe_rl.weights.stream import Round

_CHUNK = 1 << 18
"""Elements that are summed at a time. The buffers for them take at most 6 MiB."""
_SMALL = 1 << 16
"""Parts of at most this many elements are summed together with others."""
_A, _B = 0x5BD1E994, 0x27D4EB2F
"""Coefficients of the polynomial: an even and an odd number below 2**31, with no pattern in their bits."""
BITS = {2: torch.int16, 4: torch.int32}
"""The integers that hold the bits of an element, by its size in bytes."""


def _term(word: int) -> int:
    """Return what an element with these bits, as a signed number, adds to a sum."""
    value = word * (_A * word + _B) % (1 << 32)
    return value - (1 << 32) if value >> 31 else value


_NEGATIVE_ZEROS = tuple(_term(-(1 << (8 * size - 1))) for size in BITS)
"""What an element of -0.0 adds, in each precision. A tensor that was multiplied by 0 has zeros of both signs."""

_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
_PLACE = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?(.+)")


@dataclass(frozen=True, slots=True)
class Content:
    """Holds the sums of a model's weights.

    parts: the number of each part of the model by its name. table: int64 [2, parts], the sums, and from how many
    elements each was made.
    """

    parts: Mapping[str, int]
    table: Tensor


class PartSums:
    """Adds up elements by part, on the device where they are.

    Small parts are copied into one buffer and summed together, since each call of torch costs as much as thousands of
    elements.
    """

    def __init__(
        self, parts: Mapping[str, int], device: torch.device, *, signed_zeros: bool = True, chunk: int | None = None
    ):
        """signed_zeros: whether -0.0 counts as another value than 0.0. chunk: elements summed at a time."""
        self.parts, self._signed_zeros, self._chunk = parts, signed_zeros, chunk or _CHUNK
        self._sums = torch.zeros(len(parts), dtype=torch.int64, device=device)
        self._elements = [0] * len(parts)
        # These buffers are made once: the first use of new memory costs ten times as much as the arithmetic in it.
        self._words, self._terms = (torch.empty(self._chunk, dtype=torch.int32, device=device) for _ in range(2))
        self._running = torch.empty(self._chunk, dtype=torch.int64, device=device)
        self._given: dict[torch.dtype, Tensor] = {}  # a buffer for the elements of each precision
        self._dtype = torch.float32  # the precision of the waiting elements
        self._waiting: list[tuple[int, int]] = []  # (part, where its elements end in the buffer)

    def add(self, part: str, values: Tensor, dtype: torch.dtype) -> None:
        """Add elements of a part, cast to `dtype`: bfloat16 or float32. Nothing refers to `values` afterwards."""
        number, count = self.parts[part], values.numel()
        self._elements[number] += count
        if not count:
            return
        small = count <= min(_SMALL, self._chunk)
        if not small or dtype != self._dtype or self._filled + count > self._chunk:
            self._mix()
            self._dtype = dtype
        if small:
            self._put(values)
            self._waiting.append((number, self._filled + count))
            return
        for piece in values.reshape(-1).split(self._chunk):
            self._put(piece)
            self._sums[number] += self._mixed(len(piece)).sum(dtype=torch.int64)

    def content(self) -> Content:
        """Return the sums of all elements so far."""
        self._mix()
        elements = torch.tensor(self._elements, dtype=torch.int64, device=self._sums.device)
        return Content(self.parts, torch.stack((self._sums, elements)))

    @property
    def _filled(self) -> int:
        return self._waiting[-1][1] if self._waiting else 0

    def _put(self, values: Tensor) -> None:
        """Copy elements into the buffer, after the waiting ones."""
        if self._dtype not in self._given:
            self._given[self._dtype] = torch.empty(self._chunk, dtype=self._dtype, device=self._sums.device)
        start = self._filled
        slot = self._given[self._dtype][start : start + values.numel()]
        slot.view(values.shape).copy_(values)
        if not self._signed_zeros:
            slot.add_(0.0)

    def _mix(self) -> None:
        """Add the waiting elements to the sums of their parts."""
        if self._filled:
            parts, ends = torch.tensor(self._waiting, device=self._sums.device).T
            running = torch.cumsum(self._mixed(self._filled), 0, dtype=torch.int64, out=self._running[: self._filled])
            self._sums.index_add_(0, parts, running[ends - 1].diff(prepend=running.new_zeros(1)))
        self._waiting = []

    def _mixed(self, count: int) -> Tensor:
        """Compute w (A w + B) of the first elements in the buffer, int32, w being an element's bits."""
        words = self._words[:count].copy_(self._given[self._dtype][:count].view(BITS[self._dtype.itemsize]))
        return torch.mul(words, _A, out=self._terms[:count]).add_(_B).mul_(words)


def parts_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Number the parts of a model. shapes: of its Hugging Face tensors by name."""
    names = (part for name, shape in shapes.items() for part in _names(name, shape[0]))
    return {part: number for number, part in enumerate(names)}


def _names(name: str, experts: int) -> Iterator[str]:
    stacked = _STACKED.fullmatch(name)
    if stacked is None:
        yield name
        return
    front, what, bias = stacked.groups()
    for expert in range(experts):
        for projection in ("gate_proj", "up_proj") if what == "gate_up_proj" else (what,):
            yield f"{front}.{expert}.{projection}.{'bias' if bias else 'weight'}"


def cut(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Cut a Hugging Face tensor into (part, its elements). In gate_up_proj, gate and up alternate in the last axis."""
    stacked = _STACKED.fullmatch(name)
    if stacked is None:
        yield name, tensor
        return
    halves = stacked[2] == "gate_up_proj"
    pieces = (piece for expert in tensor for piece in ((expert[..., ::2], expert[..., 1::2]) if halves else (expert,)))
    yield from zip(_names(name, len(tensor)), pieces, strict=True)


class Conservation:
    """Compares each export with what the trainer holds, and remembers what it held before. All ranks have one."""

    def __init__(self) -> None:
        self._before: tuple[int, Content] | None = None
        self._now: tuple[int, Content] | None = None
        self._counts: dict[torch.device, PartSums] = {}

    def begin(self, held: Content, version: int) -> None:
        """Begin an export of `version`. held: what all ranks hold together."""
        self._now, self._counts = (version, held), {}

    def watched(self, rounds: list[Round]) -> list[Round]:
        """Return the same rounds. Their tensors are added to the sums when they are taken."""
        return [Round(run.whole, self._counted(run.tensors)) for run in rounds]

    def _counted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        assert self._now is not None
        parts = self._now[1].parts
        for name, tensor in tensors:
            if tensor.device not in self._counts:
                self._counts[tensor.device] = PartSums(parts, tensor.device)
            count = self._counts[tensor.device]
            with torch._C.DisableTorchFunction():  # the CPU back end's function mode triples the time of small calls
                for part, piece in cut(name, tensor):
                    if part in parts:  # the sampler itself refuses a tensor that its model lacks
                        count.add(part, piece, tensor.dtype)
            yield name, tensor

    def settle(self, device: torch.device) -> None:
        """Compare the sums, once all rounds have been taken. All ranks call this together.

        device: that of the tensors that the ranks exchange. Raises WeightSyncError on all ranks when a part was not
        exported as the trainer holds it.
        """
        assert self._now is not None
        version, held = self._now
        table = sum(
            (count.content().table.to(device) for count in self._counts.values()),
            torch.zeros_like(held.table, device=device),
        )
        dist.all_reduce(table)
        if problem := difference(Content(held.parts, table.cpu()), held, self._before, version):
            raise WeightSyncError(problem)
        self.settled(held, version)

    def settled(self, held: Content, version: int) -> None:
        """Note that the sampler now has what the trainer holds, as `version`."""
        self._before, self._now, self._counts = (version, held), None, {}


def difference(exported: Content, held: Content, before: tuple[int, Content] | None, version: int) -> str:
    """Say which parts were exported wrongly, see `differences`. Return "" when all are right."""
    problems = differences(exported, held, before)
    if not problems:
        return ""
    return describe(
        "the exported weights are not what the trainer holds",
        where={"version": version},
        got=f"{len(problems)} of {len(held.parts)} parts of the model wrong: {first_of(problems)}",
        expected="every part as the trainer holds it",
        do="look for what names, gathers or keeps these tensors between the optimizer and the sampler, as "
        "moe_rl/megatron/hf_map.py does; nothing has been sampled from them",
    )


def differences(got: Content, held: Content, before: tuple[int, Content] | None) -> list[str]:
    """Name each part whose sum differs from what is held, and what it is instead.

    before: an earlier version, and what was held then.
    """
    wrong = (got.table != held.table).any(0).nonzero().flatten().tolist()
    if not wrong:
        return []
    known: dict[tuple[int, ...], str] = {}
    ages = [(held, "")] + ([(before[1], f" was in version {before[0]}")] if before else [])
    for content, when in reversed(ages):
        names = list(content.parts)
        known |= {
            tuple(column): f"what {place(names[number])}{when or ' is'}"
            for number, column in enumerate(_columns(content))
        }
    names, columns = list(held.parts), _columns(got)
    earlier = _columns(before[1]) if before else None
    problems = []
    for number in wrong:
        total, elements = columns[number]
        if not elements:
            what = "nothing"
        elif elements != held.table[1, number]:
            what = f"{elements} elements for {int(held.table[1, number])}"
        elif earlier is not None and before is not None and earlier[number] == columns[number]:
            what = f"stale, what it was in version {before[0]}"
        else:
            what = "only zeros" if _all_zeros(total, elements) else known.get(columns[number], "other values")
        problems.append(f"{place(names[number])}: {what}")
    return problems


def _all_zeros(total: int, elements: int) -> bool:
    """Return whether a sum is that of this many zeros, of either sign. Other values have such a sum in at most one case
    in a billion."""
    return any(total % term == 0 and 0 <= total // term <= elements for term in _NEGATIVE_ZEROS)


def place(part: str) -> str:
    """Name a part in words: layer 3, expert 5, up_proj.weight."""
    match = _PLACE.fullmatch(part)
    if match is None:
        return part
    layer, expert, rest = match.groups()
    return f"layer {layer}, " + (f"expert {expert}, {rest}" if expert else rest)


def _columns(content: Content) -> list[tuple[int, ...]]:
    return [tuple(column) for column in content.table.T.tolist()]
