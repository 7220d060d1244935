"""Write a run's weights, or an unpacked checkpoint, as a Hugging Face checkpoint: `moe-rl export`.

python tools/export_hf.py --run runs/RUN [--step 12] --out FOLDER
python tools/export_hf.py --model FOLDER --out FOLDER
torchrun --nproc-per-node N -- tools/export_hf.py --run runs/RUN --out FOLDER [parallel.b=c ...]
"""

import sys

from moe_rl.cli import main

# megatron-core may start helper processes that import this file again.
if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
