"""Prove that replay is exact in each layout and schedule: `moe-rl prove`.

python tools/replay_matrix.py [--ranks N] [--json FILE] [--write docs/generated/layouts.md]
python tools/replay_matrix.py --ranks 4 parallel.tensor=2 parallel.expert=4 train.recompute=moe
"""

import sys

from moe_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["prove", *sys.argv[1:]]))
