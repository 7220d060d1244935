"""Runs everything that waits for a GPU, in 8 minutes on one, and in 7 more what needs vLLM:

    tools/dev/gpu_day.sh [PART ...] [--out FOLDER] [--with FILE ...] [--page FILE] [--json FILE] [--dry]

Every part is a command with a time limit of its own. One that fails stops no other: its log stays in FOLDER, and
FOLDER/gpu_day.json says why. `--with` takes the parts of earlier files too; without a PART, only parts that are not
done in these files are run. Parts that need vLLM are left out where it is not installed. Nothing is downloaded:
`make gpu-kit` packs what a machine without network lacks. --dry runs the same commands at small sizes, also without a
GPU. Exit status: 0 if no part failed, 1 if one did, 2 with one message where nothing was begun.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repository root, to import `tools.dev`

from moe_rl.commands.machine import PARTS as REQUIREMENTS
from moe_rl.commands.machine import VLLM, Machine, found_version, look
from moe_rl.disk import write_json
from tools.dev.runs import ROOT, python_path

# Seconds that a command has to end its own processes.
_GRACE = 10.0

_DRY = 5  # a dry run measures nothing: others may keep the processors busy

# The last line of a traceback, behind what torchrun says of the rank; and errors that only report another process.
_RANK, _ERROR = re.compile(r"^\[rank\d+\]: "), re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Fault|Exit|Refused)(: |$)")
_CONSEQUENCES = ("subprocess.CalledProcessError", "torch.distributed.elastic", "ChildFailedError")

fill = partial(textwrap.fill, width=120, break_on_hyphens=False, break_long_words=False)

_REAL_WIDTH = ("--model", "qwen3_30b_a3b", "--ranks", "1", "--dtype", "bfloat16", "--tokens", "2048")
_SMALL = ("--model", "tiny", "--ranks", "1", "--tokens", "64")


@dataclass(frozen=True, slots=True)
class Part:
    """Describes one command.

    Attributes:
        what: it finds out.
        seconds: its time limit.
        command: what Python runs.
        sizes: further arguments on a GPU.
        small: further arguments of a dry run.
        needs_vllm: whether it starts an engine.
        writes: whether it takes `--json FILE`.
    """

    what: str
    seconds: float
    command: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    needs_vllm: bool = False
    writes: bool = True


PARTS = {
    "smoke": Part(
        "one update in which no layer may wait, a copy under load, a CUDA graph, two passes on equal weights", 60,
        ("benchmarks/gpu_smoke.py",),
    ),
    "proof": Part(
        "`moe-rl prove`: replay is exact on one rank", 100, ("-m", "moe_rl", "prove", "--ranks", "1"),
        small=("train.recompute=moe",),
    ),
    "tests": Part(
        "the tests marked `gpu`", 100,
        ("-m", "pytest", "-m", "gpu", "-q", "-rs", "tests/gpu"), small=("--collect-only",), writes=False,
    ),
    "step_overhead": Part(
        "updates that route natively, replay, or replay by plans, on 4 layers of Qwen3-30B-A3B", 100,
        ("benchmarks/step_overhead.py",), (*_REAL_WIDTH, "--pairs", "6"), (*_SMALL, "--pairs", "1"),
    ),
    "overlap": Part(
        "what chunks of rows cost, on the same layers", 70,
        ("benchmarks/overlap.py", "--chunks", "2"), (*_REAL_WIDTH, "--rounds", "4"), (*_SMALL, "--rounds", "1"),
    ),
    "digest": Part(
        "the device's digest of the weights, GB/s", 50,
        ("benchmarks/weight_sync.py", "--ways"), ("--mib", "1000"), ("--mib", "8", "--rounds", "1"),
    ),
    "recording": Part(
        "throughput with recording : without, compiled, with CUDA graphs", 210,
        ("benchmarks/recording.py", "--graphs"), ("--prompts", "16", "--samples", "16", "--tokens", "256"),
        ("--model", "tiny", "--pairs", "1", "--prompts", "2", "--samples", "2", "--tokens", "8"),
        needs_vllm=True,
    ),
    "cuda_ipc": Part(
        "weights from the trainer to an engine on the same GPU, GB/s", 120,
        ("benchmarks/weight_sync.py",), ("--ways", "cuda_ipc", "--mib", "4000", "--rounds", "3"),
        ("--ways", "shared_memory", "--mib", "8", "--rounds", "1"), needs_vllm=True,
    ),
    "sleep": Part(
        "the memory that a sleeping engine gives back", 90,
        ("benchmarks/sleeping.py",), (), ("--mib", "8", "--kv-cache-mib", "16"), needs_vllm=True,
    ),
}  # fmt: skip
"""In the order in which they run, what matters most first. Without vLLM their limits are 8 minutes together."""


@dataclass(slots=True)
class Outcome:
    """Says what came of a part.

    Attributes:
        command: what ran, in the repository's root.
        device: the GPU's name; "CPU" for a dry run.
        failed: why there is no result; "" if there is one.
        result: what the command wrote.
    """

    command: str
    device: str
    dry: bool
    seconds: float = 0.0
    failed: str = ""
    log: str = ""
    result: Any = field(default=None)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, and write the file and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all that are not done if none is named"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu_day"), metavar="FOLDER", help="for the logs and files"
    )
    parser.add_argument(
        "--with", type=Path, nargs="+", default=[], dest="earlier", metavar="FILE", help="earlier results"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write which parts are done, failed and left out")
    parser.add_argument("--dry", action="store_true", help="small sizes, also without a GPU")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    machine = look(REQUIREMENTS)
    if not machine.gpus and not options.dry:
        parser.error("there is no GPU that nvidia-smi knows; --dry runs small sizes without one")
    outcomes = {name: one for file in options.earlier for name, one in json.loads(file.read_text())["parts"].items()}
    options.out.mkdir(parents=True, exist_ok=True)
    device = machine.gpus[0].name if machine.gpus else "CPU"
    done = {name for name, one in outcomes.items() if not one["failed"] and one["dry"] == options.dry}
    chosen = options.parts or [name for name in PARTS if name not in done]
    if left_out := {name for name in chosen if PARTS[name].needs_vllm and not found_version(VLLM)}:
        print(f"left out, because vLLM is not installed: {', '.join(sorted(left_out))}", flush=True)
    written = _write(options.out, machine, outcomes)
    for name in (one for one in chosen if one not in left_out):
        print(f"{name}: {PARTS[name].what}, at most {PARTS[name].seconds:g} s", flush=True)
        outcome = run(name, PARTS[name], options.out, device, dry=options.dry)
        print(f"  {outcome.failed or 'done'}, {outcome.seconds:.0f} s", flush=True)
        outcomes[name] = asdict(outcome)
        written = _write(options.out, machine, outcomes)  # after every part, for the case that this process is ended
    if options.page:
        options.page.write_text(page(written))
    failed = sorted(name for name, one in outcomes.items() if one["failed"])
    if options.json:
        done = sorted(outcomes.keys() - set(failed))
        write_json(options.json, {"parts_done": len(done), "parts_failed": len(failed), "done": done, "failed": failed,
                                  "left_out": sorted(left_out), **written})  # fmt: skip
    return 1 if failed else 0


def _write(out: Path, machine: Machine, outcomes: Mapping[str, Any]) -> dict[str, Any]:
    """Write and return what is known by now."""
    known = {
        "when": datetime.now(UTC).isoformat(timespec="minutes"),
        "versions": labelled(machine),
        "parts": {name: outcomes[name] for name in PARTS if name in outcomes},
    }
    write_json(out / "gpu_day.json", known)
    return known


def run(name: str, part: Part, out: Path, device: str, *, dry: bool) -> Outcome:
    """Run one part. Its output goes to OUT/NAME.log."""
    file, log = out.resolve() / f"{name}.json", out.resolve() / f"{name}.log"
    file.unlink(missing_ok=True)
    arguments = [*part.command, *(part.small if dry else part.sizes)]
    outcome = Outcome(" ".join(["python", *arguments]), device, dry, log=log.name)
    begin, limit = time.monotonic(), part.seconds * (_DRY if dry else 1)
    status = ended([sys.executable, *arguments, *(["--json", str(file)] if part.writes else [])], log, seconds=limit)
    outcome.seconds = round(time.monotonic() - begin, 1)
    if status is None:
        outcome.failed = f"it had not ended after {limit:g} s"
    elif status:
        outcome.failed = f"exit status {status}: {root_error(log)}"
    elif part.writes and not file.is_file():
        outcome.failed = "it wrote no result"
    elif part.writes:
        outcome.result = json.loads(file.read_text())
    else:
        outcome.result = _last_line(log)
    return outcome


def labelled(machine: Machine) -> dict[str, str]:
    """Return the version of each part, and whether it is one that we ask for: the first GPU may stand in a machine with
    others, which are imported and not compared."""
    wanted = {part.name: part.required for part in REQUIREMENTS}

    def label(name: str, version: str) -> str:
        meets = not wanted[name] or not version or version in SpecifierSet(wanted[name], prereleases=True)
        return (version or "missing") + ("" if meets else f" (not {wanted[name]})")

    return {name: label(name, version) for name, version in machine.found.items()}


def root_error(log: Path) -> str:
    """Return the error that a command's output begins with. Errors behind it tell that a rank or a child has ended."""
    lines = [_RANK.sub("", line) for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if _ERROR.match(line) and not line.startswith(_CONSEQUENCES)]
    return errors[0][:300] if errors else _last_line(log)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def ended(command: list[str], log: Path, *, seconds: float, environment: Mapping[str, str] | None = None) -> int | None:
    """Run a command in the repository's root. Returns its exit status; None if it had to be ended with all of its
    session. It is asked to end first: it may have sessions of its own.

    environment: what it gets besides that of this process.
    """
    given = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} | python_path() | dict(environment or {})
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=os.environ | given, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def page(found: Mapping[str, Any]) -> str:
    """Return the page of docs/generated about the parts that ran."""
    parts: Mapping[str, Mapping[str, Any]] = found["parts"]
    real = sorted({one["device"] for one in parts.values() if not one["dry"]})
    begin = f"These parts ran on one {' and one '.join(real)}." if real else "**Never run on a GPU.**"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "# On a GPU",
        "",
        fill(
            f"{begin} `tools/dev/gpu_day.sh --page docs/generated/gpu.md` runs all that waits for a GPU, and writes "
            "this page. It takes 8 minutes, and 7 more where vLLM is installed. `make gpu-kit` packs what a machine "
            "without network lacks, and prints the commands. A second run does what failed in the first:"
        ),
        "",
        "<!-- needs: gpu -->",
        "```sh",
        "tools/dev/gpu_day.sh --out build/one",
        "tools/dev/gpu_day.sh --out build/two --with build/one/gpu_day.json --page docs/generated/gpu.md",
        "```",
        "",
        fill(
            "A dry part ran the same command at a small size; the tests were only collected. Its figures "
            "say that the command works, and nothing else, so they are not on this page."
        ),
        "",
        fill(f"Written at {found['when']}. Versions: {versions}."),
        "",
        "| part | what it finds out | ran on | seconds | result |",
        "|---|---|---|---|---|",
    ]
    for name, part in PARTS.items():
        one = parts.get(name)
        where = "" if one is None else "CPU, dry" if one["dry"] and one["device"] == "CPU" else one["device"]
        state = "not run" if one is None else one["failed"].replace("|", " ") or "done"
        seconds = f"{one['seconds']:.0f}" if one else ""
        lines.append(f"| {name} | {part.what} | {where} | {seconds} | {state} |")
    for name, one in parts.items():
        if not one["dry"] and not one["failed"]:
            lines += ["", f"## {name}", "", f"`{one['command']}`", "", *_figures(one["result"])]
    return "\n".join(lines) + "\n"


def _figures(result: object) -> Iterable[str]:
    """Return what a part found, as a table of its numbers, or as its last line."""
    if not isinstance(result, dict):
        return [f"{len(result)} rows in the file" if isinstance(result, list) else str(result)]
    plain = {key: value for key, value in result.items() if not isinstance(value, dict | list)}
    shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in plain.items()}
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in shown.items())]


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # what it has begun ends with it
        signal.signal(number, lambda *_: sys.exit(143))
    raise SystemExit(main())
