"""Sampler against trainer, natively routed and under replay: the "routing KL" as four numbers that are kept apart.

python tools/compare_routing_kl.py --run RUN_DIR [--sampler-dtype bfloat16 float32]
python tools/compare_routing_kl.py --config FILE [a.b=c ...]
torchrun --nproc-per-node N -- tools/compare_routing_kl.py ... parallel.expert=N
"""

import argparse
import sys

from moe_rl.commands import compare

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    sys.exit(compare.run(parser.parse_args()))
