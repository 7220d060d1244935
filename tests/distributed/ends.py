"""A run whose steps are one update on the batch of the proof, with a key lost on the last rank: started as any run is,
through the command line, so that what becomes of its ranks is what would become of a run's.

    torchrun --nproc-per-node N ends.py CHECKPOINT ARGUMENTS_OF_THE_COMMAND ...
"""

import argparse
import sys
from pathlib import Path

from moe_rl.commands import train
from moe_rl.proof.cases import Case
from tests.support.planted import FAULTS

CHECKPOINT = Path(sys.argv[1])


class Trainer:
    """Stands for the parts of a run. The loop's first call takes the update."""

    def __init__(self, config, folder, task, peers, stack):
        self.config, self.peers = config, peers

    def check_start(self):
        from moe_rl.megatron import world
        from moe_rl.megatron.policy import Policy
        from moe_rl.models.hf import read_model
        from moe_rl.proof.trial import Trial

        parallel = dict(self.config.parallel)
        case, facts = Case(world.dist.get_world_size(), parallel), read_model(CHECKPOINT)
        policy = Policy(facts, case.train_config, case.parallel_config, CHECKPOINT, temperature=1.0)
        trial = Trial(facts, case, policy)
        if world.dist.get_rank() == case.ranks - 1:
            FAULTS["lost key"].plant(policy, lambda: print("planted", flush=True))
        with self.peers.phase("train", 1):
            trial.update(trial.tables)


def main():
    from moe_rl.train import loop

    loop.Trainer = Trainer
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return train.run(parser.parse_args(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
