"""Runs what takes too long for `make test-all`, part by part:

    python -m tools.dev.nightly [PART ...] [--out build/nightly] [--again]

Every part is a command with a time limit of its own. One that fails stops no other: its log stays in FOLDER, and
FOLDER/nightly.json says what became of each part, of which state of the code. A part that passed on the present state
is not run again, so an interrupted night goes on where it was. Exit status: 0 if every part has passed, 1 if not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from moe_rl.disk import write_json
from tools.dev.gpu_day import Part, run
from tools.dev.runs import ROOT

_PYTEST = ("-m", "pytest", "-q", "-m")
_FIRST_MACHINE = "tests/tools/test_first_machine.py"
_EXTRAS = "tests/package/test_extras.py"

PARTS = {
    "mutants": Part(
        "one-line faults in a copy of the code, and the test that notices each", 3600, ("-m", "tests.mutants")
    ),
    "pairs": Part("all pairs of switches that the checks accept", 2 * 3600, ("benchmarks/pairs.py",)),
    "layouts": Part(
        "four ranks, and whole runs that are struck, resumed and played over servers", 2 * 3600,
        (*_PYTEST, "nightly", f"--ignore={_FIRST_MACHINE}", f"--ignore={_EXTRAS}"), writes=False,
    ),
    "first_machine": Part(
        "the day on a GPU, run dry with the versions of a likely first machine; needs a network", 3600,
        (*_PYTEST, "nightly", _FIRST_MACHINE), writes=False,
    ),
    "extras": Part(
        "pip installs each extra; needs a network", 3600, (*_PYTEST, "nightly", _EXTRAS), writes=False,
    ),
    "seeds": Part(
        "comparisons with independent models, 20 seeds each", 1800,
        (*_PYTEST, "seeds", "--seeds", "20", "tests/distributed", "tests/rollout"), writes=False,
    ),
    "chaos": Part(
        "faults planted into whole runs", 3600,
        (*_PYTEST, "chaos", "tests/chaos", "--ignore=tests/chaos/test_flight.py"), writes=False,
    ),
    "flight": Part(
        "every process struck in every state of a group", 3600, (*_PYTEST, "chaos", "tests/chaos/test_flight.py"),
        writes=False,
    ),
    "soak": Part(
        "a run that is killed at random and resumed", 3600, ("tools/dev/soak.py", "--kills", "10", "--minutes", "40"),
    ),
    "night": Part(
        "dialogues of 500 turns while servers are killed and ranks hang, for 30 minutes", 2 * 3600,
        ("benchmarks/night.py",),
    ),
}  # fmt: skip
"""In the order in which they run."""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that have not passed on this state of the code. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them if none is named")
    parser.add_argument(
        "--out", type=Path, default=Path("build/nightly"), metavar="FOLDER", help="for logs and results"
    )
    parser.add_argument("--again", action="store_true", help="also run parts that passed on this state of the code")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    file, state = options.out / "nightly.json", state_of_the_code()
    found = json.loads(file.read_text()) if file.is_file() else {}
    chosen = options.parts or list(PARTS)
    for name in chosen:
        if not options.again and _passed(found.get(name), state):
            print(f"{name}: it has passed", flush=True)
            continue
        print(f"{name}: {PARTS[name].what}, at most {PARTS[name].seconds / 60:g} minutes", flush=True)
        outcome = run(name, PARTS[name], options.out, "CPU", dry=False)
        found[name] = {"state": state} | asdict(outcome)
        write_json(file, found)  # after every part, for the case that this process is ended
        print(f"  {outcome.failed or 'passed'}, {outcome.seconds / 60:.1f} minutes", flush=True)
    return 0 if all(_passed(found[name], state) for name in chosen) else 1


def state_of_the_code() -> str:
    """Return the commit; with a digest of the difference where the checkout has one."""
    commit, changed, untracked = (
        subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True).stdout
        for command in (
            ("rev-parse", "HEAD"), ("diff", "HEAD"), ("ls-files", "--others", "--exclude-standard", "-z")
        )
    )  # fmt: skip
    names = [ROOT / name.decode() for name in untracked.split(b"\0") if name]
    for name in filter(Path.is_file, names):  # neither other checkouts nor links to nowhere
        with name.open("rb") as file:
            changed += str(name).encode() + hashlib.file_digest(file, "sha256").digest()
    return commit.decode().strip() + (f"+{hashlib.sha256(changed).hexdigest()[:12]}" if changed else "")


def _passed(outcome: dict[str, object] | None, state: str) -> bool:
    return outcome is not None and outcome["state"] == state and not outcome["failed"]


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # what it has begun ends with it
        signal.signal(number, lambda *_: sys.exit(143))
    raise SystemExit(main())
