"""Runs that play episodes over real servers. One of two servers is killed while they are played."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_rl.config.load import dump_config, load_config
from moe_rl.gateway.episode_gateway import FAILURES
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.rollout.kept import KeptRollouts
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource
from moe_rl.trace import TraceStore
from tests.end_to_end.conftest import Launch, rows
from tests.end_to_end.test_pipeline_servers import stop_while_it_samples
from tests.gateway.conftest import checkpoint  # noqa: F401 - a fixture
from tests.gateway.test_training import config_of
from tests.rollout.serving import Running, serving_run
from tests.support.task import task_of

pytestmark = [pytest.mark.long, pytest.mark.nightly, pytest.mark.timeout(1800)]
ENVIRONMENTS = Path(__file__).parents[1] / "gateway"


@pytest.fixture(scope="module")
def served(checkpoint, tmp_path_factory):  # noqa: F811
    """What starts a run of a number of steps on some of the servers, and the two servers."""
    runs = tmp_path_factory.mktemp("runs")
    token = runs / "token"
    usual = [
        "run.name=episodes", "rollout.prompts_per_step=4", "rollout.temperature=1.0", "rollout.max_prompt_tokens=800",
        "rollout.max_completion_tokens=64", "rollout.kv_cache_mib=64", "rollout.sleep_level=0",
        "replay.native_every=0", "train.optimizer.lr=1e-5",
    ]  # fmt: skip
    data = [{"question": f"{a}+{b}?", "answer": a + b} for a in range(1, 4) for b in range(1, 5)]
    run = "played_environments.chatters_with_a_stop"
    given = runs / "given.yaml"
    given.write_text(dump_config(config_of(checkpoint, runs, *usual, run=run, rows=data)))
    path = os.pathsep.join([str(ENVIRONMENTS.parents[1]), str(ENVIRONMENTS)])
    with ExitStack() as stack, ThreadPoolExecutor() as both:

        def serve(name: str) -> Running:
            folder = tmp_path_factory.mktemp(name)
            return stack.enter_context(serving_run(folder, str(given), "--token-file", str(token)))

        servers = list(both.map(serve, ("first", "second")))

        def launch(steps: int, used: list[Running], *overrides: str) -> Launch:
            urls = ",".join(server.url for server in used)
            ours = [f"run.steps={steps}", f"replay.keep_shards={steps}", f"eval.every_steps={steps}"]
            where = [f"rollout.servers=[{urls}]", f"rollout.token_file={token}"]
            arguments = ["--config", given, *ours, *where, *overrides]
            return Launch(runs, *arguments, ranks=1, environment={"PYTHONPATH": path})

        yield launch, servers


def proven(folder: Path, steps: int) -> list[dict]:
    """The rows of the steps of a finished run, after the proof that each prompt ended once, each token was trained on
    with its route, and no episode failed."""
    config = load_config(folder / "config.yaml")
    source = PromptSource(task_of(config).train, config.run.seed)
    PromptLedger.of_run(folder, config.pipeline).verify(source, steps=steps, whole=not config.pipeline.by_group)
    trained = [row for row in rows(folder) if row["kind"] == "train"]
    assert [row["step"] for row in trained] == [*range(1, steps + 1)]
    for row in trained:
        assert row["routing/coverage"] == 1 and row["routing/applied_mismatch"] == row["episode/failed"] == 0
        assert row["routing/consumed"] == row["routing/expected"] > 0
    assert not (folder / FAILURES).exists()
    return trained


def shards(folder: Path) -> list[list[str]]:
    """For each episode, the shards that have the records of its turns, in order."""
    store = TraceStore(folder / "trace")
    keeper = SessionKeeper(folder / "rollouts", store)
    kept = KeptRollouts(folder / "rollouts", store)
    names = {one.segment_of for step in kept.steps() for one in kept.load(step).sequences}
    return [[turn.routes.parts[0].shard for turn in keeper.load(name).turns] for name in sorted(names)]


def test_a_synchronous_run_plays_over_a_server(served):
    launch, (server, _) = served
    run = launch(2, [server])
    assert run.wait() == 0, run.text()[-4000:]
    proven(run.folder, 2)
    found = shards(run.folder)
    assert found and all(name.endswith("-server0") for names in found for name in names)


def test_an_asynchronous_run_goes_on_when_a_server_is_killed(served):
    launch, servers = served
    more = ["pipeline.mode=async", "pipeline.max_staleness=1", "objective.old_logprobs=sampler"]
    run = launch(5, servers, *more, "rollout.max_lost_servers=1")
    run.until(lambda: "\n 1/5" in run.text())
    stop_while_it_samples(run, servers[1], 1)
    for one in servers[1].processes():
        one.kill()
    assert run.wait() == 0, run.text()[-4000:]
    (told,) = re.findall(r"^moe_rl: server (\d+) is no longer used: (.*)$", (run.folder / "pool.log").read_text(), re.M)
    assert told[0] == "1" and servers[1].url in told[1]
    trained = proven(run.folder, 5)
    lost = [row["rollout/lost_servers"] for row in trained]
    assert lost[0] == 0 and lost == sorted(lost) and lost[-1] == 1
    assert max(row["pipeline/staleness_max"] for row in trained) <= 1
    found = shards(run.folder)
    places = [[int(name[-1]) for name in names] for names in found]
    assert all(one == sorted(one, reverse=True) for one in places), "a turn behind the loss is of the lost server"
