"""Compare sampler and trainer with and without replay; reports the "routing KL" as four numbers: `moe-rl compare`.

python tools/compare_routing_kl.py --run RUN_DIR [--sampler-dtype bfloat16 float32]
python tools/compare_routing_kl.py --config FILE [a.b=c ...]
torchrun --nproc-per-node N -- tools/compare_routing_kl.py ... parallel.expert=N
"""

import sys

from moe_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
