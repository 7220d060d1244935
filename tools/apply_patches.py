"""Check, apply or revert the patches of an installed vLLM, or of a checkout: `moe-rl patch`.

python tools/apply_patches.py [--vllm PATH] --check | --apply | --revert
"""

import sys

from moe_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["patch", *sys.argv[1:]]))
