"""Plants faults into a copy of the checkout and says which test kills each.

python -m tests.mutants                        all of them
python -m tests.mutants NAME ... --room trace  some of them
python -m tests.mutants --record               also keep the results, which docs/generated/mutants.md is written from

Exit status: 0 when every fault was killed, 1 when one survived.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import deque
from pathlib import Path
from typing import NoReturn

from tests.mutants.faults import MUTANTS, Mutant
from tests.mutants.planting import Outcome, StaleEntry, copy_checkout, failing, judge, preload, with_fault
from tests.mutants.table import RESULTS, fingerprint, read_results

_ANSWER = "answer.json"


def main() -> int:
    """Read the options, judge the mutants, print a line for each. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Plant faults, see who notices.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the faults to plant (default: all)")
    parser.add_argument("--room", help="only the faults of this room")
    parser.add_argument("--all-tests", action="store_true", help="run the tests marked long too")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="faults at once (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--record", action="store_true", help=f"keep the results in {RESULTS.name}")
    options = parser.parse_args()
    unknown = set(options.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTANTS if (not options.names or m.name in options.names) and options.room in (None, m.room)]
    if not chosen:
        parser.error(f"no faults in the room {options.room}")
    try:
        for mutant in chosen:
            with_fault(mutant)
        outcomes, vacuous = _judge(chosen, jobs=options.jobs, all_tests=options.all_tests)
    except StaleEntry as error:
        print(f"stale entry: {error}", file=sys.stderr)
        return 2
    survived = [outcome for outcome in outcomes if not outcome.killer or outcome.killer in vacuous]
    for test in vacuous:
        print(f"{test} fails without a fault too, and kills nothing")
    print(f"{len(outcomes) - len(survived)} of {len(outcomes)} faults were killed")
    results = {o.mutant.name: _result(o) for o in outcomes if o not in survived}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.record:
        known = {mutant.name for mutant in MUTANTS}
        kept = {name: one for name, one in read_results().items() if name in known} | results
        RESULTS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    return 1 if survived else 0


def _judge(chosen: list[Mutant], *, jobs: int, all_tests: bool) -> tuple[list[Outcome], list[str]]:
    """Judge each mutant in a process of its own; return the outcomes, and the killers that fail without a fault too."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free = [Path(folder) / str(number) for number in range(jobs)]
        for copy in free:
            copy_checkout(copy)
        preload()
        running: dict[int, tuple[Mutant, Path]] = {}
        waiting = deque(chosen)
        try:
            while waiting or running:
                if waiting and free:
                    mutant, copy = waiting.popleft(), free.pop()
                    if not (child := os.fork()):
                        _judge_alone(mutant, copy, all_tests=all_tests)
                    running[child] = mutant, copy
                    continue
                child, ended = os.wait()
                mutant, copy = running.pop(child)
                free.append(copy)
                if os.waitstatus_to_exitcode(ended):
                    raise SystemExit(f"{mutant.name} could not be judged")
                outcomes.append(Outcome(mutant, *json.loads((copy / _ANSWER).read_text())))
                told = f"killed by {outcomes[-1].killer}" if outcomes[-1].killer else "SURVIVED"
                print(f"{outcomes[-1].seconds:6.1f} s  {mutant.room:12} {mutant.name}: {told}", flush=True)
        finally:
            for child in running:  # left only when this process is ended; each ends its pytest
                os.kill(child, signal.SIGTERM)
        killers = sorted({outcome.killer for outcome in outcomes if outcome.killer})
        return outcomes, failing(free[0], killers, all_tests=all_tests)


def _judge_alone(mutant: Mutant, copy: Path, *, all_tests: bool) -> NoReturn:
    """Judge one mutant in this process, which was just forked, leave the answer in the copy, and end the process."""
    status = 1
    try:
        outcome = judge(mutant, copy, all_tests=all_tests)
        (copy / _ANSWER).write_text(json.dumps([outcome.killer, outcome.seconds]))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _result(outcome: Outcome) -> dict[str, object]:
    return {
        "fault": fingerprint(outcome.mutant),
        "killer": outcome.killer,
        "seconds": round(outcome.seconds, 1),
    }


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # what it has begun ends with it
        signal.signal(number, lambda *_: sys.exit(143))
    sys.exit(main())
