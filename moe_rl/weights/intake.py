"""Checks an update in a sampler's worker and tracks which weights the worker holds. Independent of the engine.

idle -- part 0 --> under way -- ... --> final part confirmed --> idle, with the new version

A refusal before the first tensor is loaded leaves the old weights in place. A later refusal leaves a mixture of two
versions; nothing is whole until a complete update arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from moe_rl.errors import WeightSyncError, first_of
from moe_rl.weights.digest import TensorDigests, dtype_name, tensor_digests, total_digest
from moe_rl.weights.update import Broadcast, DTypeName, Holding, Merge, Received, TensorInfo, WeightUpdate

_FINER = {"bfloat16": 0, "float32": 1}


class Intake:
    """Tracks one worker's updates.

    Args:
        expected: {name: shape} of all tensors that a whole update brings.
        dtype: dtype that the sampler computes in. Tensors may arrive in a wider dtype, as float32 biases do.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], dtype: DTypeName = "bfloat16"):
        self._expected, self._dtype = expected, dtype
        self._version, self._digest, self._whole = 0, "", True
        self._update: WeightUpdate | None = None
        self.merge: Merge | None = None
        self._digests: dict[str, str] = {}
        self._before: dict[str, str] = {}  # of the last whole version
        self._received = TensorDigests()

    def forget(self) -> None:
        """Start over for another trainer: versions restart, and nothing is whole before the first update."""
        self._version, self._digest, self._whole, self._update, self._before = 0, "", False, None, {}

    def holding(self, refused: str = "") -> Holding:
        return Holding(self._version, self._digest, self._whole, refused)

    def admit(self, update: WeightUpdate) -> None:
        """Check everything about a part except its bytes.

        Raises:
            WeightSyncError: the part is out of order, or has tensors that the model lacks, that came before, or that
                are missing. The update is then over.
        """
        before, self._update = self._update, None
        self._check_order(update, before)
        if update.number == 0:
            self._digests, self._received, self.merge = {}, TensorDigests(), update.merge
            if update.merge is not None:
                self._check_tensors(update.merge.tensors, self._expected, whole=True)
        names = [info.name for info in update.tensors]
        if isinstance(update.source, Received):
            if sorted(names) != sorted(self._received.read()):
                raise WeightSyncError(
                    "The digests are not for the tensors that were broadcast", got=len(names), fault="names"
                )
        else:
            due = self._expected
            if self.merge is not None:
                due = {info.name: info.shape for info in self.merge.adapters}
            self._check_tensors(update.tensors, due, whole=update.final or isinstance(update.source, Broadcast))
        self._update = update

    def confirm(self, tensors: Mapping[str, Tensor], on_tensor: Callable[[], None]) -> None:
        """Check the bytes of the admitted part, in the memory that is loaded next.

        Raises:
            WeightSyncError: a tensor differs from what the trainer announced; names the first one.
        """
        update = self._part()
        announced = {info.name for info in update.tensors}
        for name in sorted(announced ^ tensors.keys()):
            was = "was announced but is not there" if name in announced else "is there but was not announced"
            raise WeightSyncError(f"A tensor {was}", where={"tensor": name}, fault="names")
        digests = TensorDigests()
        for info in update.tensors:
            tensor = tensors[info.name]
            if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (info.dtype, info.shape):
                got = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
                expected = f"{info.dtype} {info.shape}"
                message = "A tensor does not have the announced dtype and shape"
                raise WeightSyncError(message, where={"tensor": info.name}, got=got, expected=expected, fault="kind")
            digests.add(info.name, tensor)
            on_tensor()
        for info in update.tensors:
            self._agree(info, digests.read()[info.name])
        if update.final:
            self._check_stale(update)

    def confirm_merged(self, tensors: Mapping[str, Tensor], on_tensor: Callable[[], None]) -> None:
        """Check tensors that were made from the checkpoint and the adapters.

        Raises:
            WeightSyncError: one differs from the trainer's; names the first one, and whether it is an old version's.
        """
        digests, announced = tensor_digests(tensors.items(), on_tensor), self._announced()
        wrong = [name for name in digests if digests[name] != announced[name]]
        if wrong:
            stale = all(digests[name] == self._before.get(name) for name in wrong)
            raise WeightSyncError(
                "The sampler's checkpoint and the adapters make other tensors than the trainer has",
                where={"tensor": wrong[0]},
                got=f"what version {self._version} had" if stale else f"digest {digests[wrong[0]]}",
                expected=announced[wrong[0]],
                do="check that trainer and sampler read the same files under model.path, and what happens to adapters "
                "between the optimizer and the sampler; with train.lora.sync: merged all weights are sent",
                fault="stale" if stale else "merge",
            )

    def received(self, tensors: Iterable[tuple[str, Tensor]], on_tensor: Callable[[], None]) -> None:
        """Record the digests of broadcast tensors; the trainer's digests follow in the next part."""
        for name, tensor in tensors:
            self._received.add(name, tensor)
            on_tensor()

    def confirm_received(self) -> None:
        """Compare the trainer's digests with those of the received tensors. Raises WeightSyncError as `confirm`
        does."""
        update = self._part()
        for info in update.tensors:
            self._agree(info, self._received.read()[info.name])
        self._check_stale(update)

    def touch(self) -> None:
        """Mark the weights as incomplete: loading starts now."""
        self._whole = False

    def abandon(self) -> None:
        """End the update under way, after a refusal or when the trainer starts a new one."""
        self._update = None

    @property
    def complete(self) -> bool:
        """Return whether the final part was admitted, and no part was refused."""
        return self._update is not None and self._update.final

    def finish(self) -> None:
        """Record the new version as whole: the final part is loaded."""
        update, self._update = self._part(), None
        self._before = self._announced()
        self._version, self._digest, self._whole = update.version, total_digest(self._before), True

    def _announced(self) -> dict[str, str]:
        """Return the digests of all tensors of the model, also where only adapters were sent."""
        return self._digests if self.merge is None else {info.name: info.digest for info in self.merge.tensors}

    def _part(self) -> WeightUpdate:
        if self._update is None:
            raise WeightSyncError("No update is under way")
        return self._update

    def _check_order(self, update: WeightUpdate, before: WeightUpdate | None) -> None:
        known = (before.version, before.replaces, before.changed, before.number + 1) if before is not None else None
        if update.number and (update.version, update.replaces, update.changed, update.number) != known:
            raise WeightSyncError(
                "A part of another update came",
                got=f"part {update.number} of version {update.version}",
                expected=f"part {known[3]} of version {known[0]}" if known else "part 0 of an update",
                do="send the whole update again, from one trainer",
                fault="order",
            )
        if update.replaces != self._version:
            raise WeightSyncError(
                "The sampler does not hold the version that the trainer expects",
                got=f"an update that replaces version {update.replaces}",
                expected=f"version {self._version}, which the sampler holds",
                do="check for a second trainer, or a sampler that was restarted",
                fault="version",
            )
        if update.version <= self._version and update.version + self._version > 0:
            raise WeightSyncError(
                "The new weights are stale",
                got=f"version {update.version}",
                expected=f"a version above {self._version}, which the sampler holds",
                fault="stale",
            )

    def _check_tensors(
        self, infos: Sequence[TensorInfo], expected: Mapping[str, tuple[int, ...]], *, whole: bool
    ) -> None:
        """Check that these tensors are among the expected ones, and complete them if they are to be whole."""
        names = [info.name for info in infos]
        wrong = [info for info in infos if info.shape != expected.get(info.name, info.shape)]
        repeated = self._digests.keys() & set(names) | {name for name, times in Counter(names).items() if times > 1}
        self._name("unknown", "hold tensors that the model does not have", set(names) - expected.keys())
        self._name(
            "shape", "hold tensors of the wrong shape", [f"{i.name} {i.shape} for {expected[i.name]}" for i in wrong]
        )
        self._name("twice", "hold tensors twice", repeated)
        rounded = [info for info in infos if _FINER[info.dtype] < _FINER[self._dtype]]
        if rounded and expected is self._expected:
            raise WeightSyncError(
                "The new weights have lower precision than the sampler computes in",
                where={"tensor": rounded[0].name},
                got=f"{rounded[0].dtype} in {len(rounded)} of {len(names)} tensors",
                expected=self._dtype,
                do="start the sampler with the precision set by rollout.dtype",
                fault="precision",
            )
        if whole:
            self._name("missing", "lack tensors of the model", expected.keys() - self._digests.keys() - set(names))

    @staticmethod
    def _name(fault: str, what: str, names: Iterable[str]) -> None:
        names = sorted(names)
        if names:
            raise WeightSyncError(
                f"The new weights {what}",
                got=first_of(names, separator=", "),
                do="send every tensor of the engine's checkpoint, or every adapter, exactly once per update",
                fault=fault,
            )

    def _agree(self, info: TensorInfo, digest: str) -> None:
        if digest != info.digest:
            raise WeightSyncError(
                "The sampler got other weights than were sent",
                where={"tensor": info.name},
                got=f"digest {digest}",
                expected=info.digest,
                do="check for damaged memory or a damaged disk, or for two trainers that write to the same place",
                fault="digest",
            )
        self._digests[info.name] = digest

    def _check_stale(self, update: WeightUpdate) -> None:
        if update.changed and total_digest(self._announced()) == self._digest:
            raise WeightSyncError(
                "The new weights are stale",
                got=f"the bytes of version {self._version} as version {update.version}",
                expected="different bytes, because the trainer's weights have changed",
                do="check whether weights are exported before the optimizer's step has reached them",
                fault="stale",
            )
