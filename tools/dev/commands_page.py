"""Writes docs/generated/commands.md: every option of every verb, from the parsers. `make generated` calls it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module

from moe_rl.cli import VERBS

HEAD = """\
<!-- `make generated` writes this page from the parsers in moe_rl/commands, and tools/dev/commands_page.py. -->

# Commands

Activate the environment first: `source .venv/bin/activate`. `moe-rl VERB --help` shows the same options, and examples.

"""
COMMON = """\

FILE may be the name of a shipped config, such as `qwen3_30b_a3b`. `a.b=c` replaces one value of a config. Paths in a
config are relative to the working directory; `configs/...` and `assets/...` are found from everywhere. A run folder
keeps absolute paths, so `export`, `compare` and `--resume` work from everywhere too.

Scripts in `tools/` do the same as verbs, without an installed command: `train_moe_rl.py`, `serve_vllm.py`, `trace.py`,
`compare_routing_kl.py`, `replay_matrix.py` (`prove`), `apply_patches.py` (`patch`) and `export_hf.py`.

Over several machines torchrun starts the ranks, on each of them: `torchrun --nproc-per-node N ... -m moe_rl train`, or
with `tools/train_moe_rl.py` in a checkout ([cluster](../howto/cluster.md)). torchrun takes `--run` for an option of its
own. To start `compare` or `export` with torchrun, put two dashes before the program: `torchrun --nproc-per-node 2 -m --
moe_rl compare --run RUN`.
"""
TAIL = """\

## Exit status

A rank of a training run ends with one of these statuses. `moe-rl train --ranks` exits with the status of the rank that
ended first. torchrun shows it as `exitcode` in its table of failures, with our message, and itself exits with 1. The
last message says how to continue.

| status | meaning |
|---|---|
| 0 | done |
| 1 | an error that nobody expected, with a traceback |
| 2 | an error with an explanation |
| 3 | another rank, torchrun or the sampler is gone, or a GPU or the network between ranks failed |
| 4 | the run collapsed (`guards.*`) and ended with a checkpoint and the report |
| 5 | the run was asked to stop and did, or its `run.max_hours` were used |

The other commands exit with 0 when they are done, and with 2 after an error with an explanation. `plan` and `doctor`
also exit with 2 when they found a problem. `trace verify` and `trace import --check` exit with 1 when something is
wrong with the traces, `check-replay` with 1 when a claim is refused, `prove` with 1 when a layout is not exact, `play`
with 1 when an episode failed, `explain` with 1 when it stays undecided, `serve` with 3 when its engine died, and
`compare` with 3 when it is not decided that replay lowered the policy KL.

## Files of a run

| in `runs/RUN/` | what |
|---|---|
| `config.yaml` | the whole config, defaults included |
| `metrics.jsonl` | one line per step ([metrics](metrics.md)) |
| `samples.jsonl` | some sequences of every step ([report](../howto/report.md)) |
| `timeline.jsonl` | what samplers, verifiers and trainers did, and when ([report](../howto/report.md)) |
| `history.jsonl` | each start of the run, and the keys and inputs that it changed |
| `inputs.jsonl` | digests of what the run reads, compared at a resume |
| `prompts.jsonl` | the prompt ledger: which prompts each step used |
| `checkpoints/` | what a run continues from ([checkpoints](../howto/checkpoints.md)); `best` leads to the best one |
| `export/` | weights as Hugging Face checkpoints, with `export.every_steps` |
| `evidence/` | what settles who was right when a check has ended the run ([guards](../howto/guards.md)) |
| `hang/` | stacks of all ranks when one was stuck ([cluster](../howto/cluster.md#while-it-runs)) |
| `profiles/` | traces and memory, with `report.profile` |
| `rollouts/`, `groups/`, `trace/` | completions and routes of the last steps, and of prompts that are being sampled |
| `sync/` | weights on their way to a sampler, with `rollout.weight_transfer: disk` |
| `engine.log`, `pool.log` | what vLLM and the sampling process said; of several engines `engine0.log`, ... |
| `failed_episodes.log` | why episodes failed |
| `trackers/` | what each tracker has got, and its log ([report](../howto/report.md)) |
| `run.lock` | held while the run lives, so that no second process writes here |
| `summary.json`, `report.html` | written at the end |
"""
PAGES = {
    "train": "../howto/own_task.md",
    "plan": "../howto/plan.md",
    "serve": "../howto/serve.md",
    "play": "../howto/environments.md",
    "trace": "../howto/serve.md",
    "report": "../howto/report.md",
    "show": "../howto/report.md",
    "explain": "../howto/guards.md",
    "compare": "../howto/compare.md",
    "check-replay": "../howto/other_trainers.md",
    "prove": "../measurements/what_was_run.md#layouts",
    "patch": "../howto/install.md",
    "export": "../reference/models.md",
    "doctor": "../howto/install.md",
}


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command with its parser; the commands of `trace` come behind it, as "trace cat" and so on."""
    for verb in VERBS:
        parser = argparse.ArgumentParser(prog=f"moe-rl {verb}")
        import_module(f"moe_rl.commands.{verb.replace('-', '_')}").add_arguments(parser)
        yield verb, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{verb} {name}", inner) for name, inner in action.choices.items())


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and positional arguments of a command, without --help and the names of its commands."""
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return [action for action in parser._actions if not isinstance(action, hidden)]


def page() -> str:
    """Return the page as Markdown."""
    lines = [HEAD, "| verb | what it does |\n|---|---|\n"]
    lines += [
        f"| [`{verb}`](#moe-rl-{verb}) | {meaning} ([more]({PAGES[verb]})) |\n" for verb, meaning in VERBS.items()
    ]
    lines.append(COMMON)
    for command, parser in parsers():
        verb, _, inner = command.partition(" ")
        lines.append(f"\n### moe-rl {command}\n" if inner else f"\n## moe-rl {command}\n")
        text = parser.description if inner else VERBS[verb]
        lines.append(f"\n{text[0].upper()}{text[1:].rstrip('.')}.{_choice(parser)}\n")
        if verb == "serve":
            lines.append("Arguments after `--` are passed on to vLLM.\n")
        if given := options(parser):
            lines.append("\n| option | meaning |\n|---|---|\n")
            lines += [f"| {_name(action)} | {_meaning(action)} |\n" for action in given]
    lines.append(TAIL)
    return "".join(lines)


def _choice(parser: argparse.ArgumentParser) -> str:
    names = [
        [action.option_strings[0] for action in group._group_actions]
        for group in parser._mutually_exclusive_groups
        if group.required
    ]
    return "".join(f" It needs one of `{'`, `'.join(group)}`." for group in names)


def _name(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or action.metavar or action.dest
    if not action.option_strings or action.nargs == 0:
        return f"`{name}`"
    value = action.metavar or ("|".join(action.choices) if action.choices else action.dest.upper())
    return f"`{name} {value}`".replace("|", "\\|")


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%").replace("|", "\\|")
    needed = "" if not action.option_strings or not action.required else "required; "
    return f"{needed}{text}"


if __name__ == "__main__":
    print(page(), end="")
