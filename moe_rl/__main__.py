"""Runs `python -m moe_rl VERB` and `torchrun -m moe_rl VERB`."""

import sys

from moe_rl.cli import main

# megatron-core and vLLM may start helper processes that import this file again.
if __name__ == "__main__":
    sys.exit(main())
