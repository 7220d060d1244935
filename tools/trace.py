"""Inspect, verify, fill and plot a store of routing traces: `moe-rl trace`.

python tools/trace.py inspect | verify | cat | import | export | repair | bench | plot STORE
"""

import sys

from moe_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["trace", *sys.argv[1:]]))
