"""Checkpoints: megatron's torch_dist format for weights and optimizer, ours for everything else, published whole.

A checkpoint is the folder `checkpoints/step-000012`: megatron's files, `rng-rank<r>.safetensors` for each rank, and
`state.json`, which holds the run's own state and the digest of every other file. It is written under a hidden name and
renamed when every byte is on disk, so a folder with that name is complete; it is read only after its digests agree.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing, tensor_parallel
from safetensors.torch import load_file, save_file

from moe_rl.errors import CheckpointError, describe
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy

_NAME = re.compile(r"step-(\d{6})")
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "non_homogeneous_layers": False,
    "chained_optim_avoid_prefix": True,
}


def save(folder: Path, step: int, policy: Policy, state: dict, *, keep: int) -> Path:
    """Write the checkpoint after `step` steps. All ranks call it; returns the published folder.

    state: JSON values to give back on load. keep: older checkpoints beyond so many are removed afterwards.
    """
    rank = dist.get_rank()
    final, hidden = folder / f"step-{step:06d}", folder / f".step-{step:06d}.tmp"
    if rank == 0:
        # A run that was resumed writes again what it wrote before it was cut off.
        shutil.rmtree(final, ignore_errors=True)
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded(policy, loading=False), str(hidden), content_metadata=_CONTENT)
    save_file(_rng_state(), hidden / f"rng-rank{rank}.safetensors")
    dist.barrier()
    if rank == 0:
        files = sorted(p for p in hidden.rglob("*") if p.is_file())
        whole = {
            **state,
            "step": step,
            "updates": policy.updates,
            "optimizer_step": _optimizer_step(policy),
            "world_size": dist.get_world_size(),
            "files": {str(p.relative_to(hidden)): _digest(p) for p in files},
        }
        (hidden / "state.json").write_text(json.dumps(whole, indent=1))
        for path in (*files, hidden / "state.json", hidden):
            _fsync(path)
        hidden.rename(final)
        _fsync(folder)
        for _, old in _complete(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def latest(folder: Path) -> Path:
    """The newest complete checkpoint. Raises CheckpointError when there is none."""
    complete = _complete(folder)
    if not complete:
        raise CheckpointError(
            describe(
                "the run has no checkpoint to resume from",
                where=str(folder),
                got="none",
                expected="step-<number>",
                do="start the run anew",
            )
        )
    return complete[-1][1]


def read_state(path: Path) -> dict:
    """The `state` given to `save`, with step and updates, once every file's digest was checked. Needs no other rank."""
    try:
        state = json.loads((path / "state.json").read_text())
        files = state["files"]
    except (OSError, ValueError, KeyError) as error:
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


def load(path: Path, policy: Policy) -> None:
    """Put weights, optimizer and random state back. All ranks call it, after `read_state` accepted the files.

    Raises CheckpointError when the layout differs from the one that saved.
    """
    state = json.loads((path / "state.json").read_text())
    if state["world_size"] != dist.get_world_size():
        raise CheckpointError(
            describe(
                "the checkpoint is of another number of ranks",
                where=str(path),
                got=dist.get_world_size(),
                expected=state["world_size"],
                do="resume with as many ranks as the run had",
            )
        )
    loaded = dist_checkpointing.load(_sharded(policy, loading=True), str(path))
    for number, chunk in enumerate(policy.chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{number}"], strict=True)
    for number, optimizer in enumerate(_optimizers(policy)):
        current = optimizer.state_dict()
        for group in current["optimizer"]["param_groups"]:
            group["step"] = state["optimizer_step"]
        optimizer.load_state_dict(
            {
                **current,
                "param_state": loaded["optimizer"][str(number)],
                "param_state_sharding_type": _CONTENT["distrib_optim_sharding_type"],
            }
        )
    policy.updates = state["updates"]
    _set_rng_state(load_file(path / f"rng-rank{dist.get_rank()}.safetensors"))


def _sharded(policy: Policy, *, loading: bool) -> dict:
    """Sharded tensors of the model and of the optimizer. The optimizer's param groups (lr, betas, step) stay out: they
    are not sharded, come from the config, and the one number among them that changes is in state.json."""
    model = {
        f"model{number}": unwrap(chunk).sharded_state_dict(metadata=dict(_CONTENT))  # megatron adds its groups to it
        for number, chunk in enumerate(policy.chunks)
    }
    optimizer = policy.optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(_CONTENT))
    parts = [optimizer] if "param_state" in optimizer else [optimizer[key] for key in sorted(optimizer)]
    return {**model, "optimizer": {str(number): part["param_state"] for number, part in enumerate(parts)}}


def _optimizers(policy: Policy):
    return getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])


def _optimizer_step(policy: Policy) -> int:
    return int(_optimizers(policy)[0].optimizer.param_groups[0].get("step", 0))


def _rng_state() -> dict[str, torch.Tensor]:
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {"host": torch.get_rng_state(), **{f"tracker.{name}": s.cpu().clone() for name, s in tracker.items()}}


def _set_rng_state(saved: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(saved.pop("host"))
    tensor_parallel.get_cuda_rng_tracker().set_states({k.removeprefix("tracker."): v for k, v in saved.items()})


def _complete(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    return sorted((int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)))


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
