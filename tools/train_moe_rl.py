"""Train a mixture-of-experts policy by RL with routing replay.

    torchrun --nproc-per-node 2 tools/train_moe_rl.py --config configs/tiny_moe_cpu.yaml [a.b=c ...]
    torchrun --nproc-per-node 2 tools/train_moe_rl.py --resume runs/RUN [parallel.b=c ...]
    python tools/train_moe_rl.py --config configs/tiny_moe_cpu.yaml --plan

`moe_rl/train/loop.py` tells the whole story of a run.
"""

import sys

from moe_rl.train.launch import main

# megatron-core may start helper processes that import this file again.
if __name__ == "__main__":
    sys.exit(main())
