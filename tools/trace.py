"""Look into, check, fill and draw a store of routing traces, as `moe-rl trace` does."""

from __future__ import annotations

import argparse
import sys

from moe_rl.commands.trace import add_arguments, run


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
