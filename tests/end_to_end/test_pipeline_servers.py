"""An asynchronous run on two real servers. One is struck while it samples, and the other one goes on alone."""

import fcntl
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from moe_rl.trace.manifest import MANIFEST
from tests.end_to_end.conftest import Launch, config, rows
from tests.end_to_end.test_pipeline import ASYNC, batches, proven
from tests.rollout.serving import Running, serving_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folder of the runs, what a run's config says of the servers, and the two servers."""
    runs = tmp_path_factory.mktemp("runs")
    _, *given = config(f"run.runs_dir={runs}", *ASYNC, "rollout.kv_cache_mib=128")
    token = runs / "token"
    with ExitStack() as stack, ThreadPoolExecutor() as both:

        def start(name: str) -> Running:
            return stack.enter_context(serving_run(tmp_path_factory.mktemp(name), *given, "--token-file", str(token)))

        servers = list(both.map(start, ("first", "second")))
        urls = ",".join(server.url for server in servers)
        yield runs, ["--config", *given, f"rollout.servers=[{urls}]", f"rollout.token_file={token}"], servers


def stop_while_it_samples(run: Launch, server: Running, number: int) -> None:
    """Stop a server, all its processes, when it has begun to fill the shard of a group and has not published it.

    Not while it holds the lock of the manifest: then no server could publish, and both would be lost.
    """

    def caught() -> bool:
        for one in server.processes():
            one.suspend()
        if any((run.folder / "trace").glob(f".group*-server{number}*")):
            with open(run.folder / "trace" / MANIFEST, "rb") as manifest, suppress(BlockingIOError):
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        for one in server.processes():
            one.resume()
        return False

    run.until(caught)


@pytest.mark.parametrize("strike", [pytest.param("stopped", marks=pytest.mark.nightly), "killed"])
def test_a_run_goes_on_when_a_server_is_struck(served, strike):
    """The server that is stopped goes on behind the first run, and the second run can take it."""
    runs, settings, (_, struck) = served
    more = ["rollout.max_lost_servers=1", "pipeline.max_staleness=2", "run.steps=6", "replay.keep_shards=6"]
    run = Launch(runs, *settings, *more, "run.peer_timeout_seconds=60")
    run.until(lambda: "\n 2/6" in run.text())
    stop_while_it_samples(run, struck, 1)
    if strike == "killed":
        for one in struck.processes():
            one.kill()
    try:
        assert run.wait() == 0, run.text()[-4000:]
    finally:
        if strike == "stopped":
            for one in struck.processes():
                one.resume()
    (told,) = re.findall(r"^moe_rl: server (\d+) is no longer used: (.*)$", (run.folder / "pool.log").read_text(), re.M)
    assert told[0] == "1" and struck.url in told[1]
    trained = [row for row in rows(run.folder) if row["kind"] == "train"]
    lost = [row["rollout/lost_servers"] for row in trained]
    assert lost[0] == 0 and lost == sorted(lost) and lost[-1] == 1
    assert max(row["pipeline/staleness_max"] for row in trained) in (1, 2)
    assert all(row["routing/applied_mismatch"] == 0 and row["routing/coverage"] == 1 for row in trained)
    assert len(proven(run.folder)) == 6
    # The first call of a group fills shard group<cursor>-0. Those of the lost server needed another call.
    kept = batches(run.folder)
    steps = {step: [one.routes.parts[0].shard for one in kept.load(step).sequences] for step in kept.steps()}
    assert any(name.endswith("-server1") for step in (1, 2) for name in steps[step])
    moved = [name for names in steps.values() for name in names if not re.fullmatch(r"group\d+-0-server[01]", name)]
    assert moved and all(re.fullmatch(r"group\d+-1-server0", name) for name in moved)
