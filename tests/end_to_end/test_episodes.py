"""Whole runs that train on the episodes of an environment, in every mode of the pipeline, killed and resumed."""

import json
import os
from pathlib import Path

import pytest

from moe_rl.cli import main
from moe_rl.config.load import dump_config, load_config
from moe_rl.rollout.kept import SESSION_SUFFIX, KeptRollouts
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.tasks.prompts import PromptSource
from moe_rl.trace import TraceStore
from tests.end_to_end.conftest import Launch, rows
from tests.gateway.conftest import checkpoint  # noqa: F401 - a fixture
from tests.gateway.test_training import config_of
from tests.support.task import task_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
ENVIRONMENTS = Path(__file__).parents[1] / "gateway"
CALCULATOR = "moe_rl.tasks.environments.examples.calculator.run"
STEPS = 3
MODES = {
    "sync": [],
    "one_step_off": ["pipeline.mode=one_step_off"],
    "async": ["pipeline.mode=async", "pipeline.max_staleness=2", "objective.old_logprobs=sampler"],
}


@pytest.fixture
def launch(checkpoint, tmp_path):  # noqa: F811
    """Starts a run, in a folder of its own, of three steps of four groups."""

    def start(name, *overrides, run="played_environments.chatters") -> Launch:
        folder = tmp_path / name
        folder.mkdir()
        data = [{"question": f"{a}+{b}?", "answer": a + b} for a in range(1, 4) for b in range(1, 5)]
        usual = [
            f"run.steps={STEPS}", "run.name=episodes", "rollout.prompts_per_step=4", "rollout.temperature=1.0",
            "rollout.max_prompt_tokens=800", "rollout.max_completion_tokens=64", "rollout.kv_cache_mib=64",
            "checkpoint.every_steps=1", "checkpoint.asynchronous=false", "eval.every_steps=3", "replay.keep_shards=3",
            "train.optimizer.lr=1e-5",
        ]  # fmt: skip
        config = config_of(checkpoint, folder, *usual, *overrides, run=run, rows=data)
        (folder / "given.yaml").write_text(dump_config(config))
        return again(folder, "--config", folder / "given.yaml")

    def again(folder, *arguments) -> Launch:
        path = os.pathsep.join([str(ENVIRONMENTS.parents[1]), str(ENVIRONMENTS)])
        return Launch(folder, *arguments, ranks=1, environment={"PYTHONPATH": path})

    start.again = again
    return start


def proven(folder: Path) -> None:
    """Check that every prompt ended once, and that every token was trained on with its route."""
    config = load_config(folder / "config.yaml")
    source = PromptSource(task_of(config).train, config.run.seed)
    PromptLedger.of_run(folder, config.pipeline).verify(source, steps=STEPS, whole=not config.pipeline.by_group)
    trained = [row for row in rows(folder) if row["kind"] == "train"]
    assert [row["step"] for row in trained] == [1, 2, 3]
    for row in trained:
        assert row["routing/coverage"] == 1 and row["routing/applied_mismatch"] == row["episode/failed"] == 0
        assert row["routing/consumed"] == row["routing/expected"] > 0


def test_the_calculator_trains(launch, monkeypatch, capsys):
    run = launch("calculator", run=CALCULATOR)
    assert run.wait() == 0, run.text()[-4000:]
    proven(run.folder)
    (sample, *_) = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    session = sample["key"].partition("/")[0]
    assert main(["show", str(run.folder), "--session", session]) == 0
    told = capsys.readouterr().out
    assert f"session {session}" in told and "turn 0, first" in told and "mismatch 0.0000" in told
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["compare", "--bisect", str(run.folder)]) in (0, 3)
    found = json.loads((run.folder / "bisection.json").read_text())
    assert found["fit"]["trainer"] < 1e-10, "another engine finds the same tokens and routes in the episodes"


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_goes_on(launch, tmp_path, mode):
    run = launch("killed", *MODES[mode])
    run.until(lambda: "\n 2/3" in run.text())  # the checkpoint is of step 1, or of step 2
    run.kill()
    folder = run.folder
    again = launch.again(run.runs_dir, "--resume", folder)
    assert again.wait() == 0, again.text()[-4000:]
    proven(folder)
    kept = KeptRollouts(folder / "rollouts", TraceStore(folder / "trace"))
    trained = {one.segment_of for step in kept.steps() for one in kept.load(step).sequences}
    assert len(trained) == STEPS * 8
    assert trained <= {path.name.removesuffix(SESSION_SUFFIX) for path in kept.folder.glob(f"*{SESSION_SUFFIX}")}
    if mode == "async":
        assert max(row["pipeline/staleness_max"] for row in rows(folder) if row["kind"] == "train") <= 2
        return
    whole = launch("whole", *MODES[mode])
    assert whole.wait() == 0, whole.text()[-4000:]
    # The ledger has a digest of all tokens and log-probabilities of each step, and these follow from the weights.
    assert (folder / "prompts.jsonl").read_bytes() == (whole.folder / "prompts.jsonl").read_bytes()
