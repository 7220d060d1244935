"""One rank of the tests of what outlives a step: weights to the sampler, the reference, a checkpoint.

    torchrun --nproc-per-node N state_worker.py CHECKPOINT OUT PARALLEL

Rank r writes OUT/rank<r>.pt; the parts of the weights lie in OUT/parts.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from moe_rl.config.hf import read_model
from moe_rl.config.schema import ParallelConfig
from moe_rl.megatron import world
from tests.distributed.policy_worker import own_share, train_config


class Engine:
    """Takes the weights where a sampler would."""

    def update_weights(self, files, version, digest):
        from moe_rl.sync.weights import read_parts

        self.weights = {name: tensor.clone() for name, tensor in read_parts(files)}
        self.writers = [file.name for file in files]


def main():
    path, out, parallel = sys.argv[1:]
    path, out, parallel = Path(path), Path(out), ParallelConfig.model_validate_json(parallel)
    world.start(parallel, seed=1, timeout_seconds=60)
    from moe_rl.megatron import checkpoint
    from moe_rl.megatron.policy import Policy, ReferencePolicy
    from moe_rl.train.weights import send_weights

    facts, train = read_model(path), train_config()

    def loss(number, values):
        m = microbatches[number]
        return -(values * m.advantages[m.sequence_ids]).sum() / count

    build = (facts, train, parallel, path)
    policy = Policy(*build, temperature=1.0)
    count, microbatches, _ = own_share(facts, parallel, policy.layers)
    engine = Engine() if dist.get_rank() == 0 else None
    sent = send_weights(policy, engine, out / "parts", 0, "float32")

    policy.update(microbatches, None, loss)
    checkpoint.save(out / "checkpoints", 1, policy, {}, keep=1)
    straight = [policy.update(microbatches, None, loss).grad_norm for _ in range(2)]

    resumed = Policy(*build, temperature=1.0)
    folder = checkpoint.latest(out / "checkpoints")
    checkpoint.read_state(folder)
    checkpoint.load(folder, resumed)
    again = [resumed.update(microbatches, None, loss).grad_norm for _ in range(2)]

    reference = ReferencePolicy(*build, temperature=1.0).logprobs(microbatches)
    torch.save(
        {
            "sent": sent,
            "weights": engine.weights if engine else {},
            "writers": engine.writers if engine else [],
            "norms": (straight, again),
            "final": [dict(p.export(torch.float32, dense=True, experts=True)) for p in (policy, resumed)],
            "logprobs": {
                i: lp[m.sequence_ids == n]
                for m, lp in zip(microbatches, reference, strict=True)
                for n, i in enumerate(m.indices)
            },
        },
        out / f"rank{dist.get_rank()}.pt",
    )
    world.stop()


if __name__ == "__main__":
    main()
