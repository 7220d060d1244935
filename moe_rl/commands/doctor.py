"""Implements `moe-rl doctor`: prints the versions found and needed, what each is for, and what is missing."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from moe_rl.commands.diagnosis import Diagnosis, diagnose, fits
from moe_rl.commands.machine import ALWAYS, PARTS, VLLM, Machine, Requirement, look
from moe_rl.config.load import load_config
from moe_rl.disk import write_json
from moe_rl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe-rl doctor`."""
    parser.description = (
        "Shows what is installed here, what it enables, and what is missing. Exit status: 0 if "
        "nothing is missing, else 2."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="also check what this run needs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to this file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="replace single values of the config")


def run(options: argparse.Namespace) -> int:
    """Examine the machine and print the findings. Return the exit status."""
    if options.overrides and not options.config:
        got = " ".join(options.overrides)
        raise ConfigError("nothing to override", where={"option": "--config"}, got=got, do="give --config FILE")
    config = load_config(options.config, options.overrides) if options.config else None
    machine = look(PARTS)
    diagnosis = diagnose(machine, config)
    print(render(machine, diagnosis))
    if options.json:
        write_json(options.json, document(machine, diagnosis))
    return 2 if diagnosis.missing else 0


def verdict(machine: Machine, part: Requirement) -> str:
    """Return a word or two about a part: whether it is present, and whether this version has been run."""
    version = machine.found[part.name]
    if not version:
        return "missing" if part in ALWAYS else "absent"
    if part is VLLM:
        return machine.vllm_state
    if part.name == "NVIDIA apex":
        return machine.apex
    if not fits(part, version):
        return "never run"
    return "as run" if version.partition("+")[0] == part.tested or part.name == "Python" else "fits"


def render(machine: Machine, diagnosis: Diagnosis) -> str:
    """Format the table, vLLM's patches, the GPUs, then what is missing and which extras are absent."""
    head = ("part", "found", "needed", "verdict", "for")
    rows = [
        (part.name, machine.found[part.name] or "-", part.required or "any", verdict(machine, part), part.enables)
        for part in PARTS
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(4)]
    widths.append(0)
    lines = ["  ".join(map(str.ljust, row, widths)) for row in (head, *rows)]
    lines += [f"vLLM patch {name}: {state}" for name, state in machine.vllm_patches.items()]
    lines += [f"GPU {rank}: {gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB" for rank, gpu in enumerate(machine.gpus)]
    lines += [f"note: {note}" for note in diagnosis.notes]
    lines += [f"missing: {problem}" for problem in diagnosis.missing]
    lines.append(f"{len(diagnosis.missing)} missing" if diagnosis.missing else "nothing is missing")
    return "\n".join(lines)


def document(machine: Machine, diagnosis: Diagnosis) -> dict:
    """Return the same findings for programs."""
    parts = [
        {**dataclasses.asdict(part), "found": machine.found[part.name], "verdict": verdict(machine, part)}
        for part in PARTS
    ]
    rest = dataclasses.asdict(machine)
    del rest["found"]
    return {"parts": parts, **rest, **dataclasses.asdict(diagnosis)}
