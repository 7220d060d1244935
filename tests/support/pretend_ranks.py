"""Runs what a rank does in a step on the pretend device, and plants faults into it:

    torchrun --nproc-per-node 2 pretend_ranks.py FOLDER CHECKPOINT [CONFIG OVERRIDE ...]

Rank 0 writes FOLDER/seen.json: the metrics of the step, how often the host waited for the device and where, and which
planted faults were noticed.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.support import pretend_cuda
from tests.support.pretend_cuda import Device, PretendFault, PretendTensor

EVERY_ROUND = 20_000  # bytes of a round of the weight stream: several rounds of each rank


def main() -> int:
    warnings.filterwarnings("ignore")
    folder, checkpoint, overrides = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    with pretend_cuda.installed() as device:
        pretend_cuda.fit_megatron()
        import torch.distributed as dist

        from moe_rl.megatron import world

        world.join(timeout_seconds=120)
        seen = measure(device, folder, checkpoint, overrides)
        if dist.get_rank() == 0:
            (folder / "seen.json").write_text(json.dumps(seen))
        world.stop()
    return 0


def measure(device: Device, folder: Path, checkpoint: Path, overrides: list[str]) -> dict[str, Any]:
    from moe_rl.clock import Clock
    from moe_rl.proof import rank
    from moe_rl.proof.cases import Case
    from tests.distributed.jobs.step import VERSION, made

    step, sequences, groups = made("pretend", {"overrides": overrides}, checkpoint, folder)
    device.levels = levels()

    def run() -> dict[str, float]:
        device.syncs.clear()
        return step.run(sequences, groups, step=1, weight_version=VERSION, measure_native=False, clock=Clock())

    with counted(step.policy) as counts:
        metrics = run()
    syncs = [[*key, number] for key, number in sorted(device.syncs.items())]
    weights = weight_stream(device, step.policy)
    proof = rank.run(Case(2, {"expert": 2}), checkpoint)["dispatch"]
    faults = sorted(set(device.faults))  # before anything is planted
    return {
        "metrics": {key: value for key, value in metrics.items() if not key.startswith(("time/", "throughput/"))},
        "counts": counts,
        "syncs": syncs,
        "weights": weights,
        "proof": proof,
        "faults": faults,
        "plants": {name: plant(device, run) for name, plant in PLANTS.items()},
    }


def levels() -> dict[Any, str]:
    """Return {function: how often it runs}, for the innermost of these in the stack of a wait."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.transformer_block import TransformerBlock

    from moe_rl.megatron import schedule
    from moe_rl.megatron.microbatch import Microbatch, pack
    from moe_rl.megatron.policy import Policy
    from moe_rl.replay import plans, routes
    from moe_rl.replay.replay_pass import ReplayPass

    return {
        TransformerBlock.forward: "layer",
        torch.autograd.graph._engine_run_backward: "layer",
        Microbatch.begin_forward: "microbatch",
        schedules.forward_step: "microbatch",
        pack: "packing",
        routes.microbatch_routes: "packing",
        schedule.logprobs: "pass",
        ReplayPass._close: "pass",
        Policy.update: "update",
        Policy._gradient_norm: "norm",
        plans._entries: "thread",
    }


@contextmanager
def counted(policy) -> Iterator[dict[str, int]]:
    """Count what a step does: passes, updates, and the microbatches that are packed and run forward."""
    from moe_rl.megatron import microbatch
    from moe_rl.megatron import policy as policies
    from moe_rl.megatron.microbatch import Microbatch

    parameters = sum(1 for chunk in policy.chunks for _ in chunk.parameters())
    counts = {"passes": 0, "updates": 0, "packed": 0, "forwards": 0, "parameters": parameters}

    def counting(what: str, call: Callable) -> Callable:
        def called(*args: Any, **options: Any) -> Any:
            counts[what] += 1
            return call(*args, **options)

        return called

    with (
        patch.object(policies, "replay_pass", counting("passes", policies.replay_pass)),
        patch.object(policy, "update", counting("updates", policy.update)),
        patch.object(microbatch, "microbatch_routes", counting("packed", microbatch.microbatch_routes)),
        patch.object(Microbatch, "begin_forward", counting("forwards", Microbatch.begin_forward)),
    ):
        yield counts


def weight_stream(device: Device, policy) -> dict[str, Any]:
    """Hand this rank's weights over as for a broadcast. On the rank that sends: what arrived, and its digests."""
    import torch.distributed as dist

    from moe_rl.megatron import world
    from moe_rl.weights.digest import tensor_digest
    from moe_rl.weights.stream import WeightStream

    device.syncs.clear()
    stream = WeightStream(policy.export_rounds(torch.bfloat16, EVERY_ROUND, host=False), world)
    if dist.get_rank():
        stream.hand_over()
        return {}
    tensors = dict(stream)
    told = {info.name: info.digest for infos in stream.own for info in stream.digested(infos)}
    return {
        "on_device": all(isinstance(tensor, PretendTensor) for tensor in tensors.values()),
        "tensors": len(tensors),
        "buckets": len(stream.buckets),
        "syncs": sum(device.syncs.values()),
        "wrong_digests": sum(tensor_digest(name, tensor) != told[name] for name, tensor in tensors.items()),
    }


def _item(device: Device, run: Callable) -> bool:
    """Reads a number in a layer."""
    from moe_rl.megatron.dispatcher import PlannedDispatcher

    def reads(dispatcher, chunk, routing_map, probs):
        routing_map.sum().item()
        raise PretendFault("the first layer has read it")

    with patch.object(PlannedDispatcher, "follow", reads):
        _refused(run, "has read")
    return any(level == "layer" and kind == "_local_scalar_dense" for level, kind, _ in device.syncs)


def _index_on_host(device: Device, run: Callable) -> bool:
    """Leaves the order of the rows, by which every layer sends them, in host memory."""
    from moe_rl.replay import plans

    entries = plans._entries
    with patch.object(plans, "_entries", lambda *given: entries(*given).cpu()):
        return _refused(run, "same device")


def _collective_of_host(device: Device, run: Callable) -> bool:
    """Gives NCCL a tensor in host memory."""
    from moe_rl.megatron import world

    with patch.object(world, "device", lambda: torch.device("cpu")):
        return _refused(lambda: world.all_reduce([1.0]), "NCCL")


def _result_before_its_wait(device: Device, run: Callable) -> bool:
    """Uses what a collective writes before waiting for it."""
    import torch.distributed as dist

    value = torch.ones(3, device="cuda")
    work = dist.all_reduce(value, async_op=True)
    caught = _refused(lambda: value + 1, "does not wait")
    work.wait()
    return caught and value.tolist() == [2.0] * 3


def _refused(call: Callable[[], object], words: str) -> bool:
    try:
        call()
    except PretendFault as error:
        return words in str(error)
    return False


PLANTS = {
    "item() in a layer": _item,
    "an index in host memory": _index_on_host,
    "a collective of a host tensor": _collective_of_host,
    "a collective's result before its wait": _result_before_its_wait,
}


if __name__ == "__main__":
    sys.exit(main())
