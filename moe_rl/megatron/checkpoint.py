"""Defines the contents of a checkpoint: Megatron's torch_dist format for weights and optimizer, our own files for the
rest.

A checkpoint is a folder with Megatron's files, one `rng-rank<r>.safetensors` per rank, an optional `run.safetensors`
with tensors of the run, and `state.json`. The last holds the other state of the run, the parallel layout that wrote the
checkpoint, digests of all other files, and a digest of itself. Megatron's files have a digest for each piece that is
read as a whole. A rank reads each piece that it needs once, and uses it only if its digest agrees. `saving.py` writes
it.

Megatron's files hold whole tensors, named by their place in the model, so that any layout can load them. Only random
generators belong to ranks: another layout, or another kind of device, seeds them again.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import starmap
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from moe_rl.checkpoint_folder import name_of, to_resume_instead
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import CheckpointError, describe
from moe_rl.megatron import lora, optimizer_slices, rng, unpickling, world
from moe_rl.megatron.frozen_policy import ReferencePolicy
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.optimizer_slices import set_slices, sharded_slices
from moe_rl.megatron.policy import Policy
from moe_rl.weights.conservation import PartSums
from moe_rl.whereabouts import HERE

STATE = "state.json"
RUN_TENSORS = "run.safetensors"
# Fields of state.json that every checkpoint has.
_FIELDS = ("step", "updates", "optimizer_step", "optimizer", "layout", "files", "pieces")
type Pieces = Mapping[str, Mapping[str, str]]
"""For each of Megatron's files the digests of its pieces, by the bytes that they are: {"0-512": "5a1e...", ...}."""
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "non_homogeneous_layers": False,
    "chained_optim_avoid_prefix": True,
}


def layout(parallel: ParallelConfig) -> dict[str, int]:
    """Return what a checkpoint records about the ranks that write it: their number and their parallel layout."""
    return {"ranks": dist.get_world_size(), **parallel.model_dump(mode="json")}


def load(path: Path, policy: Policy, *, parallel: ParallelConfig, seed: int, fields: Sequence[str] = ()) -> dict:
    """Restore weights, optimizer and random generators. All ranks call this together.

    The layout may differ from that of the save, and so may the kind of device, CPU or GPU. The generators are then
    seeded from `seed`, the run's seed, and the step.

    Args:
        fields: Fields of the `state` given to `save` that the caller reads.

    Returns:
        The `state` given to `save`, with `step`, `updates`, the `layout` that wrote the checkpoint, `optimizer`, which
            `check_optimizer` compares, and `seeded`, whether the generators were seeded.

    Raises:
        CheckpointError: A file or a field is missing, or a file is damaged, foreign, or belongs to another model.
            Raised on all ranks. The policy may then have some of the weights, and must not be used.
    """
    state, pieces = _verified(path, fields)
    _restore(path, policy, state["optimizer_step"], pieces)
    policy.updates = state["updates"]
    generators = path / f"rng-rank{dist.get_rank()}.safetensors"
    if state["layout"] == layout(parallel) and rng.fits(saved := load_file(generators)):
        rng.set_state(saved)
        return {**state, "seeded": False}
    rng.seed(seed, state["step"])
    return {**state, "seeded": True}


def load_start(path: Path, policy: Policy, *, optimizer: bool) -> dict:
    """Give a new run the weights of another run's checkpoint. All ranks call this together.

    Random generators, the count of updates and the learning rate stay those of a new run.

    Args:
        optimizer: Also take float32 weights, Adam's moments, and the count of updates for their bias correction.
            Otherwise the optimizer starts from the weights that the forward passes used.

    Returns:
        As `load`.

    Raises:
        CheckpointError: As `load`.
    """
    state, pieces = _verified(path)
    if optimizer:
        _restore(path, policy, state["optimizer_step"], pieces)
        policy.updates = 0  # restores the optimizer's learning rate
    else:
        _restore_weights(path, policy, pieces)
        for owner in policy.optimizers:
            if owner.config.use_precision_aware_optimizer:
                optimizer_slices.begin(owner)  # Adam holds the main weights, which begin as the model's
        policy.optimizer.reload_model_params()
    policy.moves += 1
    return state


def _restore(path: Path, policy: Policy, optimizer_step: int, pieces: Pieces) -> None:
    """Restore weights and optimizer."""
    with _reading(path, pieces):
        there = dist_checkpointing.load_tensors_metadata(str(path)).keys()
    loaded = _read_tensors(path, sharded(policy, loading=True, there=there), StrictHandling.RAISE_ALL, pieces)
    _set_weights(policy, loaded)
    for number, optimizer in enumerate(policy.optimizers):
        # Megatron leaves out empty entries: a rank may have no slice of any parameter.
        _set_state(optimizer, loaded.get("optimizer", {}).get(str(number), {}), optimizer_step)


def _restore_weights(path: Path, policy: Policy | ReferencePolicy, pieces: Pieces) -> None:
    _set_weights(policy, _read_tensors(path, _sharded_model(policy), StrictHandling.RAISE_UNEXPECTED, pieces))


def _set_weights(policy: Policy | ReferencePolicy, loaded: dict) -> None:
    for number, chunk in enumerate(policy.chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{number}"], strict=not policy.trains_adapters)


def run_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the `tensors` given to `save`. Call it after `load`, which checks the digests."""
    file = path / RUN_TENSORS  # not kept open: the run removes it when the checkpoint is old
    return {name: tensor.clone() for name, tensor in load_file(file).items()} if file.is_file() else {}


def load_weights(path: Path, policy: Policy | ReferencePolicy) -> dict:
    """Restore the weights only, and read nothing else. All ranks call this together.

    These are the weights that the forward passes used: a float32 policy gets the rounded weights of a bfloat16 run. The
    optimizer is not restored, so the policy can score but not train.

    Returns:
        As `load`.

    Raises:
        CheckpointError: As `load`.
    """
    state, pieces = _verified(path)
    _restore_weights(path, policy, pieces)
    return state


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Tells the other ranks what rank 0 knows about a checkpoint: its state, or what is wrong."""

    error: str = ""
    state: dict = field(default_factory=dict)


def _verified(path: Path, fields: Sequence[str] = ()) -> tuple[dict, Pieces]:
    """Check the sizes of Megatron's files and the digests of the others, each rank its share. Return state.json without
    digests, and those of the pieces, which are checked when they are read."""
    verdict = None
    if dist.get_rank() == 0:
        try:
            verdict = _Verdict(state=_read_state(path, fields))
        except CheckpointError as error:
            verdict = _Verdict(error=str(error))
    verdict = world.broadcast(verdict, _Verdict)
    if verdict.error:
        raise CheckpointError(verdict.error)
    files, pieces = verdict.state.pop("files"), verdict.state.pop("pieces")
    checks: list[tuple[Path, Callable[[Path], str], str]]
    checks = [(path / name, digest, expected) for name, expected in files.items()]
    checks += [(path / name, _size, f"{max(map(_end, spans))} bytes") for name, spans in pieces.items()]
    _agree(next(filter(None, starmap(_damage, checks[dist.get_rank() :: dist.get_world_size()])), ""))
    return verdict.state, pieces


def _agree(problem: str) -> None:
    """Raise CheckpointError on all ranks if one of them has a problem."""
    for told in filter(None, world.gather(problem, str)):
        raise CheckpointError(told)


def sealed(state: dict) -> str:
    """Return the text of state.json: JSON with a digest of all its other content."""
    return json.dumps(state | {"digest": xxhash.xxh3_128_hexdigest(json.dumps(state).encode())}, indent=1)


def _read_state(path: Path, fields: Sequence[str]) -> dict:
    """Read state.json, and check it and the names of the folder and its files. fields: required besides _FIELDS."""
    try:
        text = (path / STATE).read_text()
        state = json.loads(text)
        got = state.pop("digest", "no digest")
        if sealed(state) != text:
            raise ValueError(f"{got}, which is not the digest of its content")
        names = {file.name for file in path.iterdir()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            "a checkpoint's state.json is missing or damaged",
            where={"file": path},
            got=repr(error),
            do=to_resume_instead(path),
        ) from error
    if absent := [name for name in (*_FIELDS, *fields) if name not in state]:
        raise CheckpointError(
            "a checkpoint was written by another version of moe_rl",
            where={"file": path / STATE, "field": ", ".join(absent)},
            got="no such field",
            do="continue with the version that wrote it, or start a new run",
        )
    if path.name != name_of(state["step"]):
        raise CheckpointError(
            "a checkpoint's folder is named after another step",
            where={"file": path},
            got=f"step {state['step']}",
            do=f"rename the folder to {name_of(state['step'])}, or {to_resume_instead(path)}",
        )
    if foreign := sorted(names - state["files"].keys() - state["pieces"].keys() - {STATE}):
        raise CheckpointError(
            "a checkpoint's folder has files that do not belong to it",
            where={"file": path},
            got=", ".join(foreign),
            expected="only the files that state.json names",
            do="remove the other files",
        )
    return state


def _damage(file: Path, read: Callable[[Path], str], expected: str) -> str:
    """Return what is wrong with a file; "" if `read` returns what is expected of it."""
    try:
        got = read(file)
    except OSError as error:  # missing, or on a disk that can no longer read it
        got = str(error)
    if got == expected:
        return ""
    do = to_resume_instead(file.parent)
    return describe("a checkpoint file is damaged", where={"file": file}, got=got, expected=expected, do=do)


def _size(file: Path) -> str:
    return f"{file.stat().st_size} bytes"


def _end(span: str) -> int:
    return int(span.partition("-")[2])


def _piece(pieces: Pieces, file: IO[bytes], offset: int, length: int) -> BytesIO:
    """Read a piece of a file and check its digest. Raises CheckpointError."""
    path, content = Path(file.name), b""
    HERE.leave()  # a rank that reads on is no hang, however large the checkpoint

    def read(_: Path) -> str:
        nonlocal content
        file.seek(offset)
        content = file.read(length)
        return xxhash.xxh3_128_hexdigest(content)

    expected = pieces.get(path.name, {}).get(f"{offset}-{offset + length}", "no such piece")
    if damage := _damage(path, read, expected):
        raise CheckpointError(damage)
    return BytesIO(content)


def _read_tensors(path: Path, wanted: dict, strict: StrictHandling, pieces: Pieces) -> dict:
    """Read the tensors in `wanted` from the files. None may be missing; `strict` says whether others may be left over.

    All ranks call this together. What is wrong on one is raised on all.
    """
    loaded: dict = {}
    problem = ""
    try:
        with _reading(path, pieces):
            loaded = dist_checkpointing.load(wanted, str(path), strict=strict)
    except CheckpointError as error:
        problem = str(error)
    _agree(problem)
    return loaded


@contextmanager
def _reading(path: Path, pieces: Pieces) -> Iterator[None]:
    """Within this context, Megatron reads files without trusting them. Raises its errors as CheckpointError."""
    try:
        with warnings.catch_warnings(), unpickling.restricted(path, partial(_piece, pieces)):
            # Every rank would warn about how Megatron calls torch, which a user cannot change.
            warnings.simplefilter("ignore")
            yield
    except (CheckpointingException, CheckpointException) as error:
        failures = error.failures if isinstance(error, CheckpointException) else {}
        reason = next((failure for failure, _ in failures.values()), error)
        raise CheckpointError(
            "a checkpoint belongs to another model",
            where={"file": path},
            got=_shortened(str(reason)),
            do="resume with the run's own model.path",
        ) from error


def _shortened(reason: str) -> str:
    """Shorten Megatron's list of tensors, whose order differs between ranks, to three names and a count."""
    names = sorted(set(re.findall(r"'([^']+)'", reason)))
    if len(names) < 4:
        return reason[:300]
    return f"{reason.split("'")[0].rstrip(' {[(:')}: {', '.join(names[:3])} and {len(names) - 3} more"


def _sharded_model(policy: Policy | ReferencePolicy) -> dict:
    """Return the model's sharded tensors: only those of the adapters, if nothing else is trained."""
    return {
        f"model{number}": lora.sharded(unwrap(chunk), policy.facts)
        if policy.trains_adapters
        else unwrap(chunk).sharded_state_dict(metadata=dict(CONTENT))
        for number, chunk in enumerate(policy.chunks)
    }


def sharded(policy: Policy, *, loading: bool, there: Collection[str] = ()) -> dict:
    """Return the sharded tensors of the model and its optimizers, and nothing else.

    `there` has the names of the tensors in the checkpoint that is loaded.

    Tensors are named after their parameter, whichever chunk or optimizer holds them. Values that are not tensors (lr,
    betas, step) would be named after the chunk or optimizer, so they are left out: they come from the config, and the
    step, the only one that changes, is in state.json.
    """
    # Megatron adds its process groups to the metadata dict that it receives, hence the copies of CONTENT.
    model = _sharded_model(policy)
    optimizers = {}
    for number, optimizer in enumerate(policy.optimizers):
        # Adam has no moments before its first step, but a checkpoint always contains them.
        optimizer_slices.begin(optimizer)
        if isinstance(optimizer, DistributedOptimizer):
            optimizers[str(number)] = sharded_slices(optimizer, model, loading=loading, there=there)
        else:
            whole = optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(CONTENT))
            optimizers[str(number)], _ = extract_sharded_base(whole)
    return {**model, "optimizer": optimizers}


def _set_state(optimizer: MegatronOptimizer, loaded: dict, step: int) -> None:
    """Restore an optimizer from its part of the loaded `sharded` tensors."""
    distributed = isinstance(optimizer, DistributedOptimizer)
    # These hold their state themselves. A state dict would copy all of it, on the GPU.
    if distributed and (optimizer_slices.is_offloaded(optimizer) or optimizer.config.use_precision_aware_optimizer):
        optimizer_slices.set_steps(optimizer, step)
        set_slices(optimizer, loaded)
        return
    state = optimizer.state_dict()
    of_torch = state.get("optimizer", state)
    for group in of_torch["param_groups"]:
        group["step"] = step
    if not distributed:
        of_torch["state"] = loaded.get("optimizer", loaded)["state"]
        if "fp32_from_fp16_params" in state:
            state["fp32_from_fp16_params"] = loaded["fp32_from_fp16_params"]
    optimizer.load_state_dict(state)
    if distributed:
        set_slices(optimizer, loaded)


def optimizer_sums(tensors: dict) -> list[dict[str, tuple[int, int]]]:
    """Return for each rank {kind of optimizer state: sum over its elements, their number}, see `weights.conservation`.
    `tensors` is what `sharded` returned.

    What several ranks hold is counted once, so the totals do not depend on the layout. All ranks call this together.
    """
    entries = [
        entry
        for entry in nested_values(tensors["optimizer"])
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and not any(map(int, _replica(entry)))
    ]
    kinds = [entry.key.split(".")[2] for entry in entries]  # of optimizer.state.exp_avg.NAME
    sums = PartSums({kind: column for column, kind in enumerate(sorted(set(kinds)))}, world.device())
    for kind, entry in zip(kinds, entries, strict=True):
        sums.add(kind, entry.data, entry.data.dtype)
    total = sums.content()
    by_kind = {kind: (int(total.table[0, column]), int(total.table[1, column])) for kind, column in total.parts.items()}
    return world.gather(by_kind, dict[str, tuple[int, int]])


def _replica(entry: ShardedTensor | ShardedTensorFactory) -> tuple[int, ...]:
    return entry.replica_id if isinstance(entry.replica_id, tuple) else (entry.replica_id,)


def totals(sums: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, list[int]]:
    """Add up what `optimizer_sums` returned: for each kind, the sum modulo 2**64 and the number of elements."""
    by_kind: dict[str, list[int]] = {}
    for rank in sums:
        for kind, (total, elements) in rank.items():
            pair = by_kind.setdefault(kind, [0, 0])
            pair[0], pair[1] = (pair[0] + total) % (1 << 64), pair[1] + elements
    return dict(sorted(by_kind.items()))


def check_optimizer(path: Path, policy: Policy, saved: Mapping[str, Sequence[int]]) -> None:
    """Check that the optimizer has the state that a checkpoint was written from. All ranks call this together.

    Args:
        saved: What `totals` returned when the checkpoint at `path` was written.

    Raises:
        CheckpointError: The state differs. Raised on all ranks; the message names the ranks that have only zeros.
    """
    sums = optimizer_sums(sharded(policy, loading=False))
    now = totals(sums)
    wrong = [kind for kind in sorted(now.keys() | saved.keys()) if now.get(kind) != list(saved.get(kind, ()))]
    if not wrong:
        return
    zeros = [
        str(rank)
        for rank, by_kind in enumerate(sums)
        if any(by_kind.get(kind, (1, 0))[0] == 0 < by_kind[kind][1] for kind in wrong)
    ]
    raise CheckpointError(
        "the optimizer does not have the state that the checkpoint holds",
        where={"file": path},
        got=f"other {', '.join(wrong)}" + (f", only zeros on rank {', '.join(zeros)}" if zeros else ""),
        expected="Adam's moments and main weights as they were saved",
        do=f"look for what changes the optimizer after it was loaded, or {to_resume_instead(path)}",
        fault="optimizer",
    )


def optimizer_step(policy: Policy) -> int:
    """Return the number of updates that Adam has made, which its bias correction depends on."""
    return optimizer_slices.steps(policy.optimizers)


def digest(path: Path, begin: int = 0, end: int = sys.maxsize) -> str:
    """Return the xxh3-128 digest of a file's bytes from `begin` to `end` as hex."""
    state, left = xxhash.xxh3_128(), end - begin
    with path.open("rb") as file:
        file.seek(begin)
        while block := file.read(min(left, 1 << 22)):
            state.update(block)
            left -= len(block)
    return state.hexdigest()
