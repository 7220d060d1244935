"""Runs training on one rank through its command, with the stand-in sampler of `one_step`.

python stand_in_run.py ARGUMENT ...
"""

import runpy
import sys

from moe_rl.train import trainer
from tests.train.one_step import RandomSampler

if __name__ == "__main__":
    trainer.start_sampler = RandomSampler
    sys.argv[0] = "train_moe_rl.py"
    runpy.run_path("tools/train_moe_rl.py", run_name="__main__")
