"""The console command `moe-rl`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moe_rl.doctor.command import add_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status of the subcommand."""
    parser = argparse.ArgumentParser(prog="moe-rl")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_arguments(commands.add_parser("doctor", help="what is installed here, and what is missing"))
    options = parser.parse_args(arguments)
    return options.command(options)


if __name__ == "__main__":
    sys.exit(main())
