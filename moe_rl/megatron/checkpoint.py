"""Checkpoints: megatron's torch_dist format for weights and optimizer, ours for everything else, published whole.

A checkpoint is the folder `checkpoints/step-000012`: megatron's files, `rng-rank<r>.safetensors` for each rank, the
run's own tensors in `run.safetensors` where it has some, and `state.json`, which holds the run's other state, the
layout that wrote it and the digest of every other file. It is written under a hidden name and renamed when every byte
is on disk, so a folder with that name is complete; it is read only after its digests agree.

Megatron's files hold whole tensors, named after their place in the model, so that any layout can read them. Only the
random generators belong to the ranks: another layout begins theirs anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from moe_rl.config.schema import ParallelConfig
from moe_rl.errors import CheckpointError, describe
from moe_rl.megatron import rng, world
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy, ReferencePolicy

_NAME = re.compile(r"step-(\d{6})")
_RUN_TENSORS = "run.safetensors"
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "non_homogeneous_layers": False,
    "chained_optim_avoid_prefix": True,
}


def save(
    folder: Path,
    step: int,
    policy: Policy,
    state: dict,
    *,
    parallel: ParallelConfig,
    keep: int,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write the checkpoint after `step` steps. All ranks call it; returns the published folder.

    state: JSON values to give back on load. parallel: the layout of the ranks. keep: older checkpoints beyond so many
    are removed afterwards. tensors: of the run, equal on all ranks, for `run_tensors`.
    """
    rank = dist.get_rank()
    final, hidden = folder / f"step-{step:06d}", folder / f".step-{step:06d}.tmp"
    if rank == 0:
        # A run that was resumed writes again what it wrote before it was cut off.
        shutil.rmtree(final, ignore_errors=True)
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded(policy, loading=False), str(hidden), content_metadata=dict(_CONTENT))
    save_file(rng.state(), hidden / f"rng-rank{rank}.safetensors")
    dist.barrier()
    if rank == 0:
        if tensors:
            save_file(tensors, hidden / _RUN_TENSORS)
        files = sorted(p for p in hidden.rglob("*") if p.is_file())
        whole = {
            **state,
            "step": step,
            "updates": policy.updates,
            "optimizer_step": _optimizer_step(policy),
            "layout": layout(parallel),
            "files": {str(p.relative_to(hidden)): _digest(p) for p in files},
        }
        (hidden / "state.json").write_text(json.dumps(whole, indent=1))
        for path in (*files, hidden / "state.json", hidden):
            _fsync(path)
        hidden.rename(final)
        _fsync(folder)
        for _, old in complete(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def complete(folder: Path) -> list[tuple[int, Path]]:
    """(steps done, folder) of every complete checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))


def latest(folder: Path) -> Path:
    """The newest complete checkpoint. Raises CheckpointError when there is none."""
    found = complete(folder)
    if not found:
        raise CheckpointError(
            describe(
                "the run has no checkpoint to resume from",
                where=str(folder),
                got="none",
                expected="step-<number>",
                do="start the run anew",
            )
        )
    return found[-1][1]


def layout(parallel: ParallelConfig) -> dict[str, int]:
    """What a checkpoint says of the ranks that wrote it: their number, and how they are laid out."""
    return {"ranks": dist.get_world_size(), **parallel.model_dump(mode="json")}


def load(path: Path, policy: Policy, *, parallel: ParallelConfig, seed: int) -> dict:
    """Put weights, optimizer and random generators back; returns the `state` given to `save`, with `step`, `updates`
    and the `layout` that wrote it. All ranks call it.

    The layout may be another than the one that saved. Then the generators are seeded from seed, the run's, and the
    step. Raises CheckpointError, on all ranks, when a file is missing or damaged or of another model; the policy is not
    changed then.
    """
    state = _verified(path)
    loaded = _read_tensors(path, _sharded(policy, loading=True), StrictHandling.RAISE_ALL)
    for number, chunk in enumerate(policy.chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{number}"], strict=True)
    for number, optimizer in enumerate(policy.optimizers):
        _set_state(optimizer, loaded["optimizer"][str(number)], state["optimizer_step"])
    policy.updates = state["updates"]
    if state["layout"] == layout(parallel):
        rng.set_state(load_file(path / f"rng-rank{dist.get_rank()}.safetensors"))
    else:
        rng.seed(seed, state["step"])
    return state


def run_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The `tensors` given to `save`, of a checkpoint that was loaded: its files agree with their digests."""
    file = path / _RUN_TENSORS
    return load_file(file) if file.is_file() else {}


def load_weights(path: Path, policy: Policy | ReferencePolicy) -> dict:
    """Put the weights back, and nothing else; returns what `load` does. All ranks call it.

    The weights are those that the passes computed with: a policy in float32 gets the rounded ones of a run in bfloat16.
    The optimizer keeps what it had, so the policy may be scored, not trained. Raises CheckpointError as `load`.
    """
    state = _verified(path)
    loaded = _read_tensors(path, _sharded_model(policy), StrictHandling.RAISE_UNEXPECTED)
    for number, chunk in enumerate(policy.chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{number}"], strict=True)
    return state


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What rank 0 tells the others of a checkpoint: what is wrong with it, or its state."""

    error: str = ""
    state: dict = field(default_factory=dict)


def _verified(path: Path) -> dict:
    """The content of state.json but for the digests, once rank 0 has found every file to agree with them."""
    verdict = None
    if dist.get_rank() == 0:
        try:
            verdict = _Verdict(state=_read_state(path))
        except CheckpointError as error:
            verdict = _Verdict(error=str(error))
    verdict = world.broadcast(verdict, _Verdict)
    if verdict.error:
        raise CheckpointError(verdict.error)
    return verdict.state


def _read_state(path: Path) -> dict:
    try:
        state = json.loads((path / "state.json").read_text())
        files = state.pop("files")
        if missing := {"step", "updates", "optimizer_step", "layout"} - state.keys():
            raise KeyError(*missing)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            describe(
                "a checkpoint's state.json is missing or damaged",
                where=str(path),
                got=repr(error),
                do="remove this checkpoint to resume from an older one",
            )
        ) from error
    for name, digest in files.items():
        file = path / name
        got = _digest(file) if file.is_file() else "no such file"
        if got != digest:
            raise CheckpointError(
                describe(
                    "a checkpoint file is damaged",
                    where=str(file),
                    got=got,
                    expected=digest,
                    do="remove this checkpoint to resume from an older one",
                )
            )
    return state


def _read_tensors(path: Path, wanted: dict, strict: StrictHandling) -> dict:
    """What `wanted` names, read from the files; nothing may be missing in them and, by `strict`, nothing left over."""
    try:
        with warnings.catch_warnings():
            # Of how megatron calls torch, from every rank: nothing that a user could mend.
            warnings.simplefilter("ignore")
            return dist_checkpointing.load(wanted, str(path), strict=strict)
    except (CheckpointingException, CheckpointException) as error:
        failures = error.failures if isinstance(error, CheckpointException) else {}
        reason = next((failure for failure, _ in failures.values()), error)
        raise CheckpointError(
            describe(
                "a checkpoint is not of this model",
                where=str(path),
                got=_shortened(str(reason)),
                do="resume with the model.path that the run had",
            )
        ) from error


def _shortened(reason: str) -> str:
    """Megatron lists tensors in an order of its own on every rank: the first three by name, and how many there are."""
    names = sorted(set(re.findall(r"'([^']+)'", reason)))
    if len(names) < 4:
        return reason[:300]
    return f"{reason.split("'")[0].rstrip(' {[(:')}: {', '.join(names[:3])} and {len(names) - 3} more"


def _sharded_model(policy: Policy | ReferencePolicy) -> dict:
    return {
        f"model{number}": unwrap(chunk).sharded_state_dict(metadata=dict(_CONTENT))
        for number, chunk in enumerate(policy.chunks)
    }


def _sharded(policy: Policy, *, loading: bool) -> dict:
    """Sharded tensors of the model and of its optimizers, and nothing else: a tensor has the name of its parameter,
    whatever chunk or optimizer holds it, while all that is not a tensor (lr, betas, step) would be named after these.
    It comes from the config; the one number among it that changes is in state.json.
    """
    # Megatron puts its process groups into the metadata that it is given.
    model = _sharded_model(policy)
    optimizers = {}
    for number, optimizer in enumerate(policy.optimizers):
        # Adam has no moments before its first step, but a checkpoint always has.
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        whole = optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(_CONTENT))
        optimizers[str(number)], _ = extract_sharded_base(whole)
    return {**model, "optimizer": optimizers}


def _set_state(optimizer: MegatronOptimizer, loaded: dict, step: int) -> None:
    """Give an optimizer its part of what was loaded as `_sharded`."""
    state = optimizer.state_dict()
    of_torch = state.get("optimizer", state)
    for group in of_torch["param_groups"]:
        group["step"] = step
    if isinstance(optimizer, DistributedOptimizer):
        sharding = _CONTENT["distrib_optim_sharding_type"]
        state |= {"param_state": loaded["param_state"], "param_state_sharding_type": sharding}
    else:
        of_torch["state"] = loaded.get("optimizer", loaded)["state"]
        if "fp32_from_fp16_params" in state:
            state["fp32_from_fp16_params"] = loaded["fp32_from_fp16_params"]
    optimizer.load_state_dict(state)


def _optimizer_step(policy: Policy) -> int:
    # TransformerEngine's Adam does not count in a group without parameters.
    return max(int(group.get("step", 0)) for group in policy.optimizer.param_groups)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
