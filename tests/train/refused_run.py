"""Runs training as `stand_in_run` does, with a sampler whose routes have changed since they left its engine.

python refused_run.py ARGUMENT ...
"""

import runpy
import sys
from dataclasses import replace

from moe_rl.rollout import rollouts
from tests.train.one_step import RandomSampler


class Forgetful(RandomSampler):
    """Stands in for an engine whose checksums are those of other routes."""

    def _completed(self, request, writer):
        completion = super()._completed(request, writer)
        return replace(completion, routes=replace(completion.routes, source_sum=f"{1:016x}"))


if __name__ == "__main__":
    rollouts.start_sampler = Forgetful
    sys.argv[0] = "train_moe_rl.py"
    runpy.run_path("tools/train_moe_rl.py", run_name="__main__")
