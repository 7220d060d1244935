"""Runs `moe-rl VERB ...`, also as `python -m moe_rl` and `torchrun -m moe_rl`. The scripts in tools/ call it too.

A verb's module is imported when the verb is called, so that `moe-rl patch` does not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module

from moe_rl.disk import check_writable
from moe_rl.errors import MoeRLError, what_lacks

VERBS = {
    "train": "train a policy with routing replay",
    "plan": "print every number derived from a config, and every problem; train nothing",
    "serve": "serve a model with vLLM and record its routes",
    "play": "run an environment on the rows of a file, against a served gateway",
    "trace": "inspect or verify a trace store, and import or export routes",
    "report": "write the report of a finished or unfinished run, or compare several runs",
    "show": "print what the policy wrote, and where sampler and trainer differ",
    "explain": "say who was right when a check ended a run",
    "compare": "compare sampler and trainer with and without replay",
    "check-replay": "check the routes of a batch that any trainer has saved",
    "prove": "prove on this machine that a layout replays exactly",
    "patch": "check, apply or revert the patches of an installed vLLM or a checkout",
    "export": "write a run's weights as a Hugging Face checkpoint",
    "doctor": "show what is installed here, what it enables and what is missing",
}


# The extra that a verb needs; `train` for all others. Most of `trace`, and `check-replay`, need none.
_EXTRAS = {"serve": "serve", "patch": "serve", "trace": "analysis", "check-replay": "analysis"}

# What shells say of a process that SIGPIPE ended: 128 + 13.
_READER_GONE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb with the arguments after it. Return its exit status: 2 for an error that explains itself.

    `serve` passes arguments after "--" to vLLM; every other verb rejects them. A verb ends quietly, with status 141,
    when nobody reads its output any more, as in `moe-rl show RUN | head`.
    """
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # Python flushes once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE


def _reader_is_gone() -> bool:
    """Return whether nobody reads standard output any more. A flush would not tell: PYTHONUNBUFFERED leaves it
    nothing to write."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _run(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in VERBS:
        _overview().parse_args(given or ["--help"])
    verb, *rest = given
    cut = rest.index("--") if "--" in rest else len(rest)
    try:
        module = import_module(f"moe_rl.commands.{verb.replace('-', '_')}")
        parser = argparse.ArgumentParser(prog=f"moe-rl {verb}")
        module.add_arguments(parser)
        options = parser.parse_args(rest[:cut])
        if verb == "serve":
            options.further = rest[cut + 1 :]
        elif rest[cut:]:
            parser.error(f"arguments after -- are for vLLM, and {verb} does not start vLLM: {' '.join(rest[cut:])}")
        # `train` checks this as it checks all else: as one of many ranks. Only the first one writes the file.
        first = os.environ.get("RANK", "0") == "0"
        if first and verb != "train" and getattr(options, "json", None) is not None:
            check_writable(options.json, "--json")
        return module.run(options)
    except MoeRLError as error:
        if os.environ.get("RANK", "0") == "0":  # every rank under torchrun finds the same, or the first one alone
            print(f"moe-rl: {error}", file=sys.stderr, flush=True)
        return 2
    except (ImportError, SyntaxError) as error:
        if lacks := what_lacks(f"moe-rl {verb}", error, _EXTRAS.get(verb, "train")):
            print(lacks, file=sys.stderr)
            return 2
        raise


def _overview() -> argparse.ArgumentParser:
    """Build the parser that knows only the names of the verbs. It answers --help and unknown verbs."""
    parser = argparse.ArgumentParser(prog="moe-rl", epilog="moe-rl VERB --help explains a verb.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for verb, meaning in VERBS.items():
        verbs.add_parser(verb, help=meaning)
    return parser
