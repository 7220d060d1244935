"""Runs every pair of switches that the checks of the config accept: `python benchmarks/pairs.py --json FILE`.

A covering array has each accepted pair of levels in at least one row. A row that needs a run of its own is a real one:
torchrun, two ranks, an engine, three steps. Rows that differ only in what a step computes are trained on the rollouts
that such a run has kept, in one process a rank. A row that dies is reduced: its switches are put back to their defaults
while it still dies.

FILE gets: pairs (those that the checks accept), covered (those in a row that ended well), failed (rows that died),
refused (pairs that the checks refuse, each with the message). Results are kept in the folder --work: what was done with
the same code is not done again, so an interrupted call goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pair_parts.covering import Array, covering, pairs_of
from pair_parts.models import write_models
from pair_parts.switches import DEFAULTS, ON_KEPT, RANKS, ROOT, STEPS, SWITCHES, Checks, Row, named, settings

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.load import load_config
from moe_rl.parent import torchrun
from moe_rl.report.history import read_history
from moe_rl.report.lines import read_run
from moe_rl.report.trackers import read_state
from moe_rl.train.run_folder import RunFolder

sys.path.insert(0, str(ROOT))  # to import `tools.dev`
from tools.dev.gpu_day import ended
from tools.dev.runs import Launch, RunEnded, python_path

BENCHMARKS = Path(__file__).parent
# Seconds. Other work may keep the machine busy.
RUN_SECONDS, KEPT_SECONDS = 900, 900
# The files that decide what a row does.
CODE = (
    "moe_rl/**/*.py",
    "benchmarks/pairs.py",
    "benchmarks/pair_parts/*.py",
    "patches/vllm/**/*.patch",
    "configs/*.yaml",
)
_END = 3000


class Died(Exception):
    """Reports how a row ended that should have ended well."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--work", type=Path, default=Path("runs/pairs"), metavar="DIR", help="folder of the results")
    parser.add_argument("--seed", type=int, default=1, help="of the array")
    parser.add_argument("--runs", metavar="N,N", help="only these runs of the array, from 0")
    parser.add_argument("--tries", type=int, default=8, help="most further runs that reduce a row that died")
    parser.add_argument("--list", action="store_true", help="print the array and run nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM; the same call goes on"))  # runs end first
    work = options.work.absolute()
    write_models(work / "models")
    checks = Checks(work / "models")
    array = kept_array(work / f"array-{code_digest()[:24]}-{options.seed}.json", lambda: covering(checks, options.seed))
    if options.list:
        for number, rows in enumerate(array.runs):
            for row in rows:
                print(number, told(row))
        for pair, message in refusals(array).items():
            print(f"refused: {pair}: {message}")
        print(f"{len(array.runs)} runs, {sum(map(len, array.runs))} rows, {len(array.pairs)} pairs")
        return 0
    chosen = [int(one) for one in options.runs.split(",")] if options.runs else range(len(array.runs))
    results = []
    for number in chosen:
        print(f"run {number} of {len(array.runs)}: {told(array.runs[number][0])}", file=sys.stderr, flush=True)
        results += Rows(array.runs[number], work, checks, options.tries).done()
    result = summary(array, results)
    print(
        {key: result[key] for key in ("pairs", "covered", "failed", "runs", "rows")},
        f"{len(result['refused'])} refused",
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["failed"] else 0


def kept_array(file: Path, make: Callable[[], Array]) -> Array:
    """Return the array in `file`. Make it if it is not there."""
    if not file.exists():
        file.write_text(make().text())
    return Array.read(file.read_text())


def told(row: Row) -> str:
    """Return what a row has other than the defaults."""
    return (
        ", ".join(f"{switch}: {level}" for switch, level in row.items() if level != DEFAULTS[switch]) or "the defaults"
    )


def refusals(array: Array) -> dict[str, str]:
    """Return the message of each refused pair: one that names both switches, if there is one."""
    found = {}
    for pair, messages in array.refused.items():
        best = max(messages, key=lambda message: sum(switch in named(message) for switch, _ in pair))
        found[" x ".join(f"{switch}: {level}" for switch, level in sorted(pair))] = best
    return found


def summary(array: Array, results: Sequence[dict]) -> dict:
    """Return what the JSON file gets."""
    well = [pairs_of(result["row"]) for result in results if not result["died"]]
    return {
        "pairs": len(array.pairs),
        "covered": len(array.pairs.intersection(*[set().union(*well)])),
        "failed": sum(bool(result["died"]) for result in results),
        "runs": len(array.runs),
        "rows": sum(map(len, array.runs)),
        "seconds": sum(result["seconds"] for result in results),
        "died": [result for result in results if result["died"]],
        "refused": refusals(array),
    }


class Rows:
    """Runs the rows of one run of the array, or reads what became of them."""

    def __init__(self, rows: list[Row], work: Path, checks: Checks, tries: int):
        self.rows, self.work, self.checks, self.tries = rows, work, checks, tries
        self.code = code_digest()

    def done(self) -> list[dict]:
        """Return a result for each row: what it died of, "" if it ended well."""
        results = [self._kept(row) for row in self.rows]
        if all(results):
            return results
        folder = self.work / f"run-{_digest(self.rows[0])[:12]}"
        began = time.monotonic()
        died = self._died(lambda: run_once(self.rows[0], folder, self.checks.models))
        first = self._note(self.rows[0], died, began, whole=True)
        if died:  # its rollouts are of no use, and rows on them are not covered
            return [first]
        results = [first, *self._on_kept(folder)]
        if not any(result["died"] for result in results):
            shutil.rmtree(folder)
        return results

    def _on_kept(self, folder: Path) -> list[dict]:
        results: list[dict] = []
        while left := self.rows[1 + len(results) :]:
            began = time.monotonic()
            ended, died = train_on_kept(left, folder, self.checks.models)
            results += [self._note(row, "", began) for row in left[:ended]]
            if died:
                results.append(self._note(left[ended], died, began, folder=folder))
        return results

    def _note(self, row: Row, died: str, began: float, *, whole: bool = False, folder: Path | None = None) -> dict:
        """Keep the result of a row that ended. If it died, find out what of it kills it."""
        result = {"row": row, "died": died, "seconds": round(time.monotonic() - began, 1)}
        if died:
            print(f"died: {told(row)}\n{died}", file=sys.stderr, flush=True)
            open_ = tuple(SWITCHES) if whole else ON_KEPT
            result["cause"] = told(self._reduced(row, open_, folder))
            print(f"it still dies with: {result['cause']}", file=sys.stderr, flush=True)
        file = self._file(row)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
        return result

    def _reduced(self, row: Row, switches: Sequence[str], kept: Path | None) -> Row:
        """Put switches of a row back to their defaults, half of them at a time, while it still dies."""
        left, tries = [switch for switch in switches if row[switch] != DEFAULTS[switch]], self.tries
        size = max(1, len(left) // 2)
        while tries and left:
            for at in range(0, len(left), size):
                tried = row | {switch: DEFAULTS[switch] for switch in left[at : at + size]}
                if not tries or self.checks.problems(tried):
                    continue
                tries -= 1
                if kept is None:
                    ended = not self._died(lambda: run_once(tried, self.work / "reduced", self.checks.models))  # noqa: B023
                else:
                    ended = not train_on_kept([tried], kept, self.checks.models)[1]
                if not ended:
                    row, left = tried, left[:at] + left[at + size :]
                    break
            else:
                if size == 1:
                    break
                size = max(1, size // 2)
        return row

    def _died(self, work: Callable[[], None]) -> str:
        try:
            work()
        except Died as error:
            return str(error)
        return ""

    def _kept(self, row: Row) -> dict | None:
        file = self._file(row)
        result = json.loads(file.read_text()) if file.exists() else None
        return result if result and not result["died"] else None  # what died may have died of a busy machine

    def _file(self, row: Row) -> Path:
        return self.work / "rows" / f"{_digest([self.code, row])[:24]}.json"


def run_once(row: Row, folder: Path, models: Path) -> None:
    """Make a run, and end it on the way and resume it if the row says so. Raises Died."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {
        **python_path(BENCHMARKS),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file://{folder}/mlflow",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    config, overrides = settings(row, models)

    def start(*arguments: object) -> Launch:
        return Launch(folder, *arguments, ranks=RANKS, environment=environment)

    def well(launch: Launch) -> None:
        if launch.wait(RUN_SECONDS):
            raise Died(launch.text()[-_END:])

    launch = start("--config", config, f"run.runs_dir={folder}", *overrides)
    try:
        if row["end"] == "own":
            well(launch)
        else:
            launch.until(
                lambda: launch.folder and checkpoints.complete(launch.folder / checkpoints.FOLDER), RUN_SECONDS
            )
            if row["end"] == "killed":
                launch.kill()
            else:
                launch.process.send_signal(signal.SIGTERM)
                launch.wait(RUN_SECONDS)
            launch = start("--resume", launch.folder)
            well(launch)
    except RunEnded as error:
        raise Died(str(error)[-_END:]) from None
    finally:
        launch.kill()
    check(row, launch.folder, launch.text())


def check(row: Row, path: Path, said: str) -> None:
    """Check what a run that ended has left. Raises Died."""
    summary, found = json.loads((path / "summary.json").read_text()), read_run(path)
    early = summary["ended_early"] if row["eval"] == "best" else None
    steps = [line["step"] for line in found.train]
    wrong = {
        "a traceback": "Traceback" in said,
        "an early end": bool(summary["ended_early"]) and not early,
        f"the steps {steps}": steps != list(range(1, len(steps) + 1)) or (len(steps) != STEPS and not early),
        "a loss that is not finite": not all(map(math.isfinite, found.series("objective/loss")[1])),
        "a skipped update": any(found.series("optim/skipped")[1]),
        "routes that were not taken": any(found.series("routing/applied_mismatch")[1]),
        "no report": not (path / "report.html").is_file(),
        "no export": row["export"] != "no" and not any(RunFolder(path).exports.glob("step*")),
        "no samples": (path / "samples.jsonl").exists() and not _sampled(row, path),
        "no second start": row["end"] != "own" and not any(start.after for start in read_history(path)),
    }
    for name in load_config(path / "config.yaml").report.trackers:
        state = read_state(path, name)
        wrong[f"{name} that failed: {state.error}"] = bool(state.failures) or not state.reported
    if any(wrong.values()):
        raise Died(f"the run ended, with {', '.join(what for what, holds in wrong.items() if holds)}\n{said[-_END:]}")


def _sampled(row: Row, path: Path) -> bool:
    return bool((path / "samples.jsonl").read_text().strip()) == (row["samples"] != "0")


def train_on_kept(rows: Sequence[Row], folder: Path, models: Path) -> tuple[int, str]:
    """Train with each row on the rollouts of the run below `folder`. Return how many ended well, and what the next one
    died of."""
    (run,) = (path for path in folder.iterdir() if (path / "config.yaml").is_file())
    asked, out, log = folder / "rows.json", folder / "rows.jsonl", folder / "rows.log"
    asked.write_text(json.dumps([settings(row, models) for row in rows]))
    out.write_text("")
    command = [*torchrun(RANKS), str(BENCHMARKS / "pair_parts/on_kept.py"), *map(str, (run, asked, out))]
    environment = python_path(BENCHMARKS) | {"OMP_NUM_THREADS": "1"}
    status = ended(command, log, seconds=KEPT_SECONDS, environment=environment)
    seen = [json.loads(line) for line in out.read_text().splitlines()]
    bad = next((n for n, metrics in enumerate(seen) if not healthy(metrics)), len(seen))
    if bad < len(seen):
        return bad, f"it ended with {seen[bad]}"
    return len(seen), "" if status == 0 else log.read_text()[-_END:]


def healthy(metrics: dict[str, float]) -> bool:
    """Return whether a step on kept rollouts was one: finite, with an update, and every route taken."""
    return (
        math.isfinite(metrics["objective/loss"])
        and math.isfinite(metrics["optim/grad_norm"])
        and not metrics["optim/skipped"]
        and not metrics.get("routing/applied_mismatch")
    )


def code_digest() -> str:
    """Return a digest of the code that a row runs."""
    files = sorted({path for pattern in CODE for path in ROOT.glob(pattern) if path.is_file()})
    return _digest([[str(path.relative_to(ROOT)), hashlib.sha256(path.read_bytes()).hexdigest()] for path in files])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
