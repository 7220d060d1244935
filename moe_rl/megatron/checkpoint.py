"""What a checkpoint holds: megatron's torch_dist format for weights and optimizer, ours for everything else.

It is a folder of megatron's files, `rng-rank<r>.safetensors` for each rank, the run's own tensors in `run.safetensors`
where it has some, and `state.json`, which holds the run's other state, the layout that wrote it, the digest of every
other file and one of itself. How it is written: saving.py. It is read only after its digests agree.

Megatron's files hold whole tensors, named after their place in the model, so that any layout can read them. Only the
random generators belong to the ranks: another layout begins theirs anew.
"""

from __future__ import annotations

import json
import re
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
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from moe_rl.checkpoint_folder import name_of, to_resume_instead
from moe_rl.config.training import ParallelConfig
from moe_rl.errors import CheckpointError, describe
from moe_rl.megatron import rng, unpickling, world
from moe_rl.megatron.model import unwrap
from moe_rl.megatron.policy import Policy, ReferencePolicy

STATE = "state.json"
RUN_TENSORS = "run.safetensors"
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "non_homogeneous_layers": False,
    "chained_optim_avoid_prefix": True,
}


def layout(parallel: ParallelConfig) -> dict[str, int]:
    """What a checkpoint says of the ranks that wrote it: their number, and how they are laid out."""
    return {"ranks": dist.get_world_size(), **parallel.model_dump(mode="json")}


def load(path: Path, policy: Policy, *, parallel: ParallelConfig, seed: int) -> dict:
    """Put weights, optimizer and random generators back; returns the `state` given to `save`, with `step`, `updates`
    and the `layout` that wrote it. All ranks call it.

    The layout may be another than the one that saved. Then the generators are seeded from seed, the run's, and the
    step. Raises CheckpointError, on all ranks, when a file is missing, damaged, not of it or of another model; the
    policy is not changed then.
    """
    state = _verified(path)
    loaded = _read_tensors(path, sharded(policy, loading=True), StrictHandling.RAISE_ALL)
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
    file = path / RUN_TENSORS
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
    """The content of state.json but for the digests, once the ranks, each its share, have found every file to agree."""
    verdict = None
    if dist.get_rank() == 0:
        try:
            verdict = _Verdict(state=_read_state(path))
        except CheckpointError as error:
            verdict = _Verdict(error=str(error))
    verdict = world.broadcast(verdict, _Verdict)
    if verdict.error:
        raise CheckpointError(verdict.error)
    mine = sorted(verdict.state.pop("files").items())[dist.get_rank() :: dist.get_world_size()]
    found = next(filter(None, (_damage(path / name, expected) for name, expected in mine)), "")
    for damage in filter(None, world.gather(found, str)):
        raise CheckpointError(damage)
    return verdict.state


def sealed(state: dict) -> str:
    """The text of state.json: JSON with a digest of all the rest of it."""
    return json.dumps(state | {"digest": xxhash.xxh3_128_hexdigest(json.dumps(state).encode())}, indent=1)


def _read_state(path: Path) -> dict:
    """What was given to `sealed`, of a folder with the right name and no other files than it should have."""
    try:
        text = (path / STATE).read_text()
        state = json.loads(text)
        got = state.pop("digest", "no digest")
        if sealed(state) != text:
            raise ValueError(f"{got}, which is not the digest of the rest of it")
        names = {file.name for file in path.iterdir()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            describe(
                "a checkpoint's state.json is missing or damaged",
                where=str(path),
                got=repr(error),
                do=to_resume_instead(path),
            )
        ) from error
    if path.name != name_of(state["step"]):
        raise CheckpointError(
            describe(
                "a checkpoint is of another step than its folder is named after",
                where=str(path),
                got=f"step {state['step']}",
                do=f"give it back the name {name_of(state['step'])}, or {to_resume_instead(path)}",
            )
        )
    if foreign := sorted(names - state["files"].keys() - {STATE}):
        raise CheckpointError(
            describe(
                "a checkpoint's folder has files that are not of it",
                where=str(path),
                got=", ".join(foreign),
                expected="those that state.json names",
                do="remove them",
            )
        )
    return state


def _damage(file: Path, expected: str) -> str:
    """What is wrong with a file; "" when its digest agrees."""
    try:
        got = digest(file)
    except OSError as error:  # not there, or on a disk that cannot read it any more
        got = str(error)
    if got == expected:
        return ""
    do = to_resume_instead(file.parent)
    return describe("a checkpoint file is damaged", where=str(file), got=got, expected=expected, do=do)


def _read_tensors(path: Path, wanted: dict, strict: StrictHandling) -> dict:
    """What `wanted` names, read from the files; nothing may be missing in them and, by `strict`, nothing left over."""
    try:
        with warnings.catch_warnings(), unpickling.restricted(path):
            # Every rank warns of how megatron calls torch: nothing that a user could mend.
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
        f"model{number}": unwrap(chunk).sharded_state_dict(metadata=dict(CONTENT))
        for number, chunk in enumerate(policy.chunks)
    }


def sharded(policy: Policy, *, loading: bool) -> dict:
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
        whole = optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(CONTENT))
        optimizers[str(number)], _ = extract_sharded_base(whole)
    return {**model, "optimizer": optimizers}


def _set_state(optimizer: MegatronOptimizer, loaded: dict, step: int) -> None:
    """Give an optimizer its part of what was loaded as `sharded`."""
    state = optimizer.state_dict()
    of_torch = state.get("optimizer", state)
    for group in of_torch["param_groups"]:
        group["step"] = step
    if isinstance(optimizer, DistributedOptimizer):
        sharding = CONTENT["distrib_optim_sharding_type"]
        state |= {"param_state": loaded["param_state"], "param_state_sharding_type": sharding}
    else:
        of_torch["state"] = loaded.get("optimizer", loaded)["state"]
        if "fp32_from_fp16_params" in state:
            state["fp32_from_fp16_params"] = loaded["fp32_from_fp16_params"]
    optimizer.load_state_dict(state)


def optimizer_step(policy: Policy) -> int:
    """Updates that Adam has made: what its bias correction counts."""
    # TransformerEngine's Adam does not count in a group without parameters.
    return max(int(group.get("step", 0)) for group in policy.optimizer.param_groups)


def digest(path: Path) -> str:
    """xxh3-128 of a file, hex."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()
