"""Train a mixture-of-experts policy by RL with routing replay: `moe-rl train`.

    torchrun --nproc-per-node 2 tools/train_moe_rl.py --config configs/tiny_moe_cpu.yaml [a.b=c ...]
    torchrun --nproc-per-node 2 tools/train_moe_rl.py --resume runs/RUN [parallel.b=c ...]
    python tools/train_moe_rl.py --config configs/tiny_moe_cpu.yaml --plan

`moe_rl/commands/train.py` checks the request. `moe_rl/train/loop.py` contains the whole training loop.
"""

import argparse
import sys

from moe_rl.commands import train

# megatron-core may start helper processes that import this file again.
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    sys.exit(train.run(parser.parse_args()))
