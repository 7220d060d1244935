"""Serve a model with vLLM and record its routes into a trace store: `moe-rl serve`. `--help` lists the options."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_rl.cli import main  # noqa: E402

# vLLM starts processes that import this file again.
if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
