"""Runs a night in minutes: servers are killed and started again, and ranks hang, again and again.

    python benchmarks/night.py [--seconds 1800] [--seed N] [--work DIR] [--json FILE]

Two ranks train on dialogues, every third of 500 turns, over two servers. In turn, a server is killed while it samples
and started again, and a rank stops while it trains: its threads go on, so it still gives signs of life. The run that
hangs must end by itself, and is resumed. At the end every prompt must have ended once, and every token must have been
trained on with its route. Exit status: 1 if the run or a prompt is lost, or a figure misses its bound; a temporary
folder then stays.

runs_lost                     launches that ended for another reason, or did not get on
prompts_lost                  prompts that the steps lack, or have twice
turns_recorded                turns of the longest dialogue, each checked against its record; at least 500
files_per_step                trace shards of a step that is kept; at most 4
turns_published_per_second    of the sinks of one server alone, with an fsync of 15 ms; at least 200
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from shutil import copytree, rmtree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # repository root, to import `tests` and `tools`

from night_parts.sinks import turns_published_per_second
from output import tell

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.load import dump_config, load_config
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.rollout.kept import shard_step
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.trace import TraceStore
from tests.rollout.serving import Running, serving_run
from tests.support.ports import free_port
from tools.dev.runs import ROOT, Launch, RunEnded, python_path, rows

TURNS, SHORT, LONGEST = 500, 40, 8192
# Each of two servers writes a shard for all turns of a step, and another for episodes played again after a loss.
FILES = 4
# A step takes minutes on a machine that others use.
_PATIENCE, _LOOK_SECONDS = 1800.0, 0.3


class Night:
    """Keeps a run going over two servers that are killed, and through hangs of its ranks.

    Args:
        seed: of the moments.
        stack: ends servers and run.
        turns: of every third dialogue, and of the others.
        hang_seconds: `run.hang_seconds`.

    Attributes:
        counts: what happened.
    """

    def __init__(
        self,
        work: Path,
        seed: int,
        stack: ExitStack,
        *,
        turns: tuple[int, int] = (TURNS, SHORT),
        hang_seconds: float = 60,
    ):
        self.work, self.random, self.stack = work, random.Random(seed), stack
        self.counts = {"servers_killed": 0, "ranks_hung": 0, "runs_lost": 0}
        self.runs = work / "runs"
        self.runs.mkdir(parents=True)
        self.given, self.token = _config(work, self.runs, turns, hang_seconds), self.runs / "token"
        self.ports = [free_port() for _ in range(2)]
        self.threads = stack.enter_context(ThreadPoolExecutor())  # stays: what a thread starts may end with it
        self.servers = list(self.threads.map(self._serve, (0, 1)))
        urls = ",".join(server.url for server in self.servers)
        self.run = self._launch("--config", self.given, f"rollout.servers=[{urls}]")

    def strike(self, until: float) -> None:
        """Kill servers and stop ranks in turn, until time.monotonic() is `until`, then ask the run to stop."""
        for number in range(1 << 30):
            at = number // 2 % 2
            (self.kill if number % 2 == 0 else self.hang)(at)
            _say(f"{self.steps} steps, {self.counts}")
            if time.monotonic() > until:
                break
        self.end()

    def strike_at_once(self) -> None:
        """Kill a server in the first step. Stop a rank in the second, while the server starts again. Resume the run,
        and ask it to stop once it uses both servers.
        """
        self._kill(0)
        server = self.threads.submit(self._serve, 0)
        self.until(lambda: self.steps)
        self._stop(1)
        self.servers[0] = server.result()
        self._resume()
        self._await_server()
        self.end()

    def kill(self, at: int) -> None:
        """Kill a server in the middle of a step, start it again, and wait until the run uses it again."""
        self._kill(at, within=10.0)
        before = self.steps
        self.servers[at] = self._serve(at)
        self.until(lambda: self.steps > before)
        self._await_server()

    def hang(self, rank: int) -> None:
        """Stop the main thread of a rank while it trains. The run must end and name the rank; it is resumed."""
        self._stop(rank)
        self._resume()

    def end(self) -> None:
        """Ask the run to stop."""
        os.kill(self.run.rank_pid(0), signal.SIGTERM)
        self.run.wait(_PATIENCE)
        self.expect("the run was asked to stop")

    def _kill(self, at: int, within: float = 0.0) -> None:
        self.run.until(lambda: self.run.folder, _PATIENCE)
        trace = self.run.folder / "trace"
        self.until(lambda: any(trace.glob(f".step*-server{at}[.-]*")))
        time.sleep(self.random.uniform(0.0, within))
        for one in self.servers[at].processes():
            one.kill()
        self.counts["servers_killed"] += 1

    def _await_server(self) -> None:
        """Wait for a step that both servers sampled."""
        self.until(lambda: self.trained()[-1]["rollout/lost_servers"] == 0)

    def _stop(self, rank: int) -> None:
        self.run.until(lambda: self.run.sign(rank).get("phase") == "train", _PATIENCE)
        pid = self.run.rank_pid(rank)
        os.kill(pid, signal.SIGUSR2)
        self.counts["ranks_hung"] += 1
        self.run.wait(_PATIENCE)
        self.expect("and all live: ", f"rank {rank} (pid {pid}")

    def _resume(self) -> None:
        before = self.steps
        saved = checkpoints.complete(self.run.folder / "checkpoints")
        self.run = self._launch("--resume", self.run.folder, *([] if saved else ["--step", 0]))
        self.until(lambda: self.steps > before)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until condition() is true, which may take its time to find out."""
        self.run.until(lambda: condition() or time.sleep(_LOOK_SECONDS), _PATIENCE)

    def expect(self, *told: str) -> None:
        """Raise RunEnded unless the run that has ended printed this."""
        if not all(one in self.run.text() for one in told):
            raise RunEnded(f"the run ended for another reason:\n{self.run.text()[-4000:]}")

    def result(self) -> dict[str, float]:
        """Return the figures of the run, which has ended; the counts alone if it had not even begun."""
        folder = self.run.folder
        if folder is None:
            return {**self.counts}
        config, store = load_config(folder / "config.yaml"), TraceStore(folder / "trace")
        trained = self.trained()
        ledger = PromptLedger.of_run(folder, config.pipeline)
        lines = [line for step in range(self.steps) if (line := ledger.find(step)) is not None]
        used = [at for line in lines for at in line.ended()]
        keeper = SessionKeeper(folder / "rollouts", store)
        lengths = [len(keeper.load(path.stem).turns) for path in (folder / "rollouts").glob("*.session")]
        shards = [step for name in store.shards() if (step := shard_step(name)) is not None]
        whole = all(row["routing/coverage"] == 1 and row["routing/applied_mismatch"] == 0 for row in trained)
        return {
            **self.counts,
            "steps": self.steps,
            "prompts_lost": len(set(range(self.steps * config.rollout.prompts_per_step)) ^ set(used))
            + (len(used) - len(set(used))),
            "episodes_failed": sum(row["episode/failed"] for row in trained),
            "all_routes_trained_on": float(whole),
            "turns_recorded": max(lengths, default=0),
            "files_per_step": len(shards) / max(1, len(set(shards))),
        }

    @property
    def steps(self) -> int:
        """Return the number of finished steps."""
        return max((row["step"] for row in self.trained()), default=0)

    def trained(self) -> list[dict]:
        """Return the lines of metrics of the finished steps."""
        file = self.run.folder and self.run.folder / "metrics.jsonl"
        return [row for row in rows(self.run.folder) if row["kind"] == "train"] if file and file.exists() else []

    def _serve(self, at: int) -> Running:
        folder = Path(tempfile.mkdtemp(prefix=f"server{at}-", dir=self.work))
        given = [str(self.given), "--token-file", str(self.token), "--port", str(self.ports[at])]
        return self.stack.enter_context(serving_run(folder, *given))

    def _launch(self, *arguments: object) -> Launch:
        run = Launch(self.runs, *arguments, script="benchmarks/night_parts/rank.py", environment=python_path(ROOT))
        self.stack.callback(run.kill)
        return run


def _config(work: Path, runs: Path, turns: tuple[int, int] = (TURNS, SHORT), hang_seconds: float = 60) -> Path:
    """Write the config of the run, its rows, and its policy: that of tool use, for longer dialogues."""
    many, few = turns
    policy = work / "policy"
    copytree(ROOT / "assets/tiny_tool/policy", policy)
    shape = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": LONGEST}))
    rows = work / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"{at}", "turns": few if at % 3 else many}) + "\n" for at in range(1000))
    )
    heldout = work / "heldout.jsonl"
    heldout.write_text(json.dumps({"question": "held out", "turns": 2}) + "\n")
    config = load_config(
        ROOT / "configs/tool_use_cpu.yaml",
        [
            f"run.runs_dir={runs}", "run.name=night", "run.steps=1000", f"run.hang_seconds={hang_seconds}",
            "run.peer_timeout_seconds=120", f"model.path={policy}", f"task.train=[{{name: sums, data: {rows}}}]",
            f"task.heldout=[{{name: sums, data: {heldout}}}]",
            "task.environment.run=benchmarks.night_parts.dialogue.run",
            "task.environment.seconds=3600", f"task.environment.turns={many}", f"task.environment.tokens={LONGEST}",
            "rollout.prompts_per_step=2", "rollout.group_size=2", f"rollout.max_prompt_tokens={LONGEST - 8}",
            "rollout.max_completion_tokens=8", "rollout.kv_cache_mib=128", "rollout.max_lost_servers=1",
            "rollout.sleep_level=0", f"rollout.token_file={runs / 'token'}", f"train.microbatch_tokens={LONGEST}",
            "train.updates_per_step=1", "checkpoint.every_steps=1", "eval.prompts=1", "eval.every_steps=1000",
            "replay.native_every=0", "replay.keep_shards=1000",
            # Far from its task the policy says half characters, which end a branch; at this temperature it says few.
            "rollout.temperature=0.5", "task.environment.credit=branch",
        ],
    )  # fmt: skip
    path = runs / "given.yaml"
    path.write_text(dump_config(config))
    return path


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0, help="time after which nothing more is struck")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--work", type=Path, metavar="DIR", help="new folder for the run (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args(argv)
    until = time.monotonic() + options.seconds
    figures: dict[str, float] = {"turns_published_per_second": turns_published_per_second()}
    _say(f"{figures}")
    work = options.work or Path(tempfile.mkdtemp(prefix="night-"))
    with ExitStack() as stack:
        night = Night(work, options.seed, stack)
        try:
            night.strike(until)
        except RunEnded as error:
            night.counts["runs_lost"] += 1
            print(error, file=sys.stderr)
        figures = night.result() | figures
    tell(figures, options.json)
    if not passed(figures):
        _say(f"the run and its servers' logs stay in {work}")
        return 1
    if options.work is None:
        rmtree(work)
    return 0


def passed(figures: dict[str, float]) -> bool:
    """Return whether nothing was lost, and each figure is within its bound."""
    return (
        not any(figures[name] for name in ("runs_lost", "prompts_lost", "episodes_failed"))
        and figures["all_routes_trained_on"] == 1
        and figures["turns_recorded"] >= TURNS
        and figures["files_per_step"] <= FILES
        and figures["turns_published_per_second"] >= 200
    )


if __name__ == "__main__":
    sys.exit(main())
