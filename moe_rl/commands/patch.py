"""Implements `moe-rl patch`: checks, applies or reverts the patch series of a vLLM."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_rl.disk import write_json
from moe_rl.errors import MoeRLError
from moe_rl.vllm import patches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe-rl patch`."""
    parser.description = (
        "Check, apply or revert the patches of a vLLM. Exit status: 0 done, 2 an error with an explanation."
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        metavar="PATH",
        help="git checkout of vLLM, or folder of a vllm package (default: the installed one)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the resulting state to this file")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check",
        action="store_const",
        const=patches.check,
        dest="action",
        help="say whether it is patched, and which files are not as they should be (default)",
    )
    action.add_argument("--apply", action="store_const", const=patches.apply, dest="action", help="put them in")
    action.add_argument("--revert", action="store_const", const=patches.revert, dest="action", help="take them out")
    parser.set_defaults(action=patches.check)


def run(options: argparse.Namespace) -> int:
    """Run the action, then print the state of vLLM. Return the exit status."""
    patches.inspect(options.vllm)  # raises where there is none
    status = 0
    try:
        options.action(options.vllm)
    except MoeRLError as error:
        print(error, file=sys.stderr)
        status = 2
    state = patches.inspect(options.vllm)
    ran = state.series and state.series.ran
    print(f"vLLM {state.version} in {state.root}: {state.summary}")
    for name, kind in state.patches.items():
        print(f"  {name}: {kind}")
    if state.series:
        print(f"  ran: {ran or 'never; no engine starts with these patches'}")
    if options.json:
        document = {
            "root": str(state.root),
            "version": state.version,
            "state": state.summary,
            "ran": ran,
            "patches": state.patches,
            "files": state.files,
        }
        write_json(options.json, document)
    return status
