"""Logs a run: one aligned console line and one JSON line per step."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from moe_rl.disk import write_all, writing
from moe_rl.errors import About, ArgumentError
from moe_rl.report.format import duration, percent, scientific
from moe_rl.report.lines import FILE, encode, read_rows, write_rows
from moe_rl.report.metrics import Mode
from moe_rl.report.registry import check_eval, check_step

_HEADER_EVERY = 20
_ETA_OVER = 10  # steps


class RunLog:
    """Writes metrics.jsonl and the console output of a run, on one rank.

    A terminal also shows a progress bar below the lines. An existing log is continued: a last line that a kill left
    incomplete is dropped, with a message.
    """

    def __init__(self, run_dir: Path, *, total_steps: int, mode: Mode):
        self._path = Path(run_dir) / FILE
        self._total = total_steps
        self._mode = mode
        self._console: Console | None = None
        self._progress: Progress | None = None
        self._lines_since_header = _HEADER_EVERY
        self._intervals: deque[float] = deque(maxlen=_ETA_OVER)
        self._last_time: float | None = None
        self._last_step = 0
        if sys.stderr.isatty():
            self._console = Console(stderr=True)
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            )
            self._task = self._progress.add_task("starting", total=total_steps)
            self._progress.start()
        self._continue(before=None)
        self._file = self._path.open("ab", buffering=0)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Log training step 1 <= step <= total_steps.

        Raises:
            ValueError: the keys do not match the registry, or the step does not follow the last one logged.
        """
        check_step(metrics, mode=self._mode)
        if not self._last_step < step <= self._total:
            where: About = {"file": self._path}
            expected = f"{self._last_step + 1} to {self._total}"
            what, do = "a step is logged out of order", "rewind the log before a resume"
            raise ArgumentError(what, where=where, got=step, expected=expected, do=do, fault="order")
        self._write(encode(step, "train", metrics))
        self._last_step = step
        now = time.monotonic()
        self._intervals.append(metrics["time/step"] if self._last_time is None else now - self._last_time)
        self._last_time = now
        columns = self._columns(step, metrics)
        if self._lines_since_header >= _HEADER_EVERY:
            self._print("  ".join(title.rjust(width) for title, width, _ in columns))
            self._lines_since_header = 0
        self._lines_since_header += 1
        self._print("  ".join(text.rjust(width) for _, width, text in columns))
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def eval_row(self, step: int, metrics: dict[str, float]) -> None:
        """Log an evaluation of the policy after `step` training steps; 0 is the initial policy."""
        check_eval(metrics)
        self._write(encode(step, "eval", metrics))
        self._evaluations[step] = metrics
        text = f"held-out after step {step}: pass {percent(metrics['eval/pass_rate'])}"
        if "eval/pass_rate_greedy" in metrics:
            text += f", greedy {percent(metrics['eval/pass_rate_greedy'])}"
        pass_at, levels = [], []
        for key, value in metrics.items():
            match key.split("/"):
                case ["eval", "level", *name]:
                    levels.append(f"{'/'.join(name)} {percent(value, 0)}")
                case ["eval", "pass_at", source, k]:
                    pass_at.append(f"{source} pass@{k} {percent(value)}")
        self._print(", ".join([text, *pass_at]) + (f" ({', '.join(levels)})" if levels else ""))

    def evaluation(self, step: int) -> Mapping[str, float | None] | None:
        """Return the logged metrics of the evaluation after `step` training steps; None if the log has none."""
        return self._evaluations.get(step)

    def note(self, text: str) -> None:
        """Print one line of text that is not a metric."""
        self._print(text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show on a terminal what the run is doing. Phases may be nested."""
        if self._progress is None:
            yield
            return
        before = self._progress.tasks[self._task].description
        self._progress.update(self._task, description=name)
        try:
            yield
        finally:
            self._progress.update(self._task, description=before)

    def rewind(self, step: int) -> None:
        """Atomically drop every line with a step >= `step`, and an incomplete last line. A resumed run logs these steps
        again.
        """
        self._file.close()
        self._continue(before=step)
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()
        if self._progress is not None:
            self._progress.stop()

    def _continue(self, *, before: int | None) -> None:
        """Prepare the end of the file for appending. Keep only the steps before `before`."""
        rows, torn = read_rows(self._path)
        kept = [row for row in rows if before is None or row["step"] < before]
        if torn:
            self._print(f"{self._path.name}: dropped an incomplete last line")
        if len(kept) < len(rows):
            self._print(f"{self._path.name}: dropped {len(rows) - len(kept)} lines of step {before} and later")
        if torn or len(kept) < len(rows) or (rows and not self._path.read_bytes().endswith(b"\n")):
            write_rows(self._path, kept)
        self._evaluations: dict[int, Mapping[str, float | None]] = {
            row["step"]: {key: value for key, value in row.items() if key.startswith("eval/")}
            for row in kept
            if row["kind"] == "eval"
        }
        trained = {row["step"] for row in kept if row["kind"] == "train"}
        self._last_step = max(trained, default=0)
        if before is not None and (lost := sorted(set(range(1, before)) - trained)):
            steps = f"{', '.join(map(str, lost[:5]))}{' ...' if len(lost) > 5 else ''}"
            self._print(
                f"{self._path.name}: the lines of {len(lost)} steps are lost; the report will lack them: {steps}"
            )
        if self._progress is not None:
            self._progress.update(self._task, completed=self._last_step)

    def _write(self, line: str) -> None:
        data = line.encode()
        with writing("a line of the metrics could not be written", self._path, size=len(data)):
            write_all(self._file.fileno(), data)

    def _print(self, text: str) -> None:
        with writing("the output of the run could not be written", "stdout"):
            # With both streams on one terminal, a line must be printed through the progress bar, or it would break the
            # bar. A redirected stdout gets plain lines.
            if self._console is not None and sys.stdout.isatty():
                self._console.print(Text(text), soft_wrap=True)
            else:
                print(text, flush=True)

    def _columns(self, step: int, m: dict[str, float]) -> list[tuple[str, int, str]]:
        """Return title, width and text of each column. The columns of replay appear only with replay."""

        def pct(key: str) -> str:
            return f"{100 * m[key]:.2f}" if key in m else "-"

        routes = [("native%", 7, pct("routing/native_mismatch"))]
        if self._mode == "r3":
            routes = [("shadow%", 7, pct("routing/shadow_mismatch"))]
        if self._mode != "off":
            taken = f"{m['routing/consumed']:.0f}/{m['routing/expected']:.0f}"
            routes += [("applied", 7, f"{m['routing/applied_mismatch']:.0f}"), ("routes taken", 15, taken)]
        # Sampling and training together over the whole step: the throughput for the user.
        tokens = m["rollout/sequences"] * m["rollout/completion_tokens_mean"]
        rate = tokens / m["time/step"] if m["time/step"] > 0 else float("nan")
        return [
            ("step", max(4, 2 * len(str(self._total)) + 1), f"{step}/{self._total}"),
            ("reward", 6, f"{m['reward/mean']:.3f}"),
            ("pass", 6, percent(m["reward/pass_rate"])),
            ("len", 6, f"{m['rollout/completion_tokens_mean']:.1f}"),
            ("kl k3", 7, scientific(m["policy_kl/k3"])),
            *routes,
            ("clip%", 6, pct("objective/clip_fraction")),
            ("grad", 6, f"{m['optim/grad_norm']:.3f}"),
            ("sec", 6, f"{m['time/step']:.2f}"),
            ("tok/s", 6, f"{rate:.0f}"),
            ("eta", 6, duration(statistics.fmean(self._intervals) * (self._total - step))),
        ]
