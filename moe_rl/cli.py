"""`moe-rl VERB ...`, also as `python -m moe_rl` and `torchrun -m moe_rl`. The scripts in tools/ call it too.

A verb's module is imported when the verb is called, so that `moe-rl patch` does not wait for torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

VERBS = {
    "train": "train a policy with routing replay; start it with torchrun",
    "plan": "print every number that follows from a config, and every problem; start nothing",
    "serve": "serve a model with vLLM and record its routes",
    "trace": "look into a trace store, check it, move routes in and out",
    "show": "print what the policy wrote, and where sampler and trainer differ",
    "compare": "compare sampler and trainer without and with replay",
    "prove": "prove on this machine that a layout replays exactly",
    "patch": "check, apply or take back the patches of an installed vLLM or a checkout",
    "export": "write a run's weights as a Hugging Face checkpoint",
    "doctor": "say what is installed here, what it enables and what is missing",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Call a verb with what follows it. Returns its exit status.

    What stands behind "--" is not ours: it is handed on to vLLM by `serve`, and refused by every other verb.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in VERBS:
        _overview().parse_args(given or ["--help"])
    verb, *rest = given
    cut = rest.index("--") if "--" in rest else len(rest)
    module = import_module(f"moe_rl.commands.{verb}")
    parser = argparse.ArgumentParser(prog=f"moe-rl {verb}")
    module.add_arguments(parser)
    options = parser.parse_args(rest[:cut])
    if verb == "serve":
        options.further = rest[cut + 1 :]
    elif rest[cut:]:
        parser.error(f"what follows -- is for vLLM, and {verb} starts none by itself: {' '.join(rest[cut:])}")
    return module.run(options)


def _overview() -> argparse.ArgumentParser:
    """The parser that knows the verbs by name only; it answers --help, and a verb that is none of them."""
    parser = argparse.ArgumentParser(prog="moe-rl", epilog="moe-rl VERB --help says more about one of them.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for verb, meaning in VERBS.items():
        verbs.add_parser(verb, help=meaning)
    return parser
