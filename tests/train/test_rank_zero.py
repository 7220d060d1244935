"""Tests how a run ends on rank 0."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest

from moe_rl.config.load import load_config
from moe_rl.errors import DataError
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.train import rank_zero, resume
from moe_rl.train.rank_zero import RankZero

CONFIG = "configs/tiny_moe_cpu.yaml"
SOURCE = SimpleNamespace(
    at=lambda first, count: [SimpleNamespace(id=f"x/{number}") for number in range(first, first + count)]
)


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_became_shorter_ends_with_groups_that_have_begun(tmp_path, monkeypatch, steps):
    """Prompt 1 had begun and not ended in step 2, which was not the last one then."""
    ledger = PromptLedger(tmp_path / "prompts.jsonl", in_order=False)
    ledger.record(0, [0, 2], ["x/0", "x/2"], "d")
    ledger.record(1, [3, 5], ["x/3", "x/5"], "d")
    rollouts = SimpleNamespace(ledger=ledger, source=SOURCE, kept=mock.Mock(), retain=mock.Mock(), engine=None)
    main = RankZero(mock.Mock(), None, None, rollouts, mock.Mock())
    config = load_config(CONFIG, ["pipeline.mode=async", f"run.steps={steps}"])
    trainer = mock.Mock(config=config, **{"store.unpublished.return_value": []})
    monkeypatch.setattr(resume, "left_behind", mock.Mock(side_effect=DataError("nothing was finished")))
    for name in ("summarize", "write_report", "checkpoint_folder"):
        monkeypatch.setattr(rank_zero, name, mock.Mock())
    resume._restore_rollouts(trainer, main, 2)
    ends = nullcontext() if steps == 2 else pytest.raises(DataError, match="wrong end")  # a later step ends them
    with ends:
        main.end_run(config, mock.Mock(), mock.Mock(best=None), done=2, collapse=None, early="")
    assert rank_zero.write_report.called == (steps == 2)


@pytest.mark.parametrize("replays", [True, False])
def test_a_replayed_run_ends_with_the_groups_that_the_other_run_had_begun(tmp_path, monkeypatch, replays):
    """Prompt 1 had begun there when it was made shorter, or when it ended early."""
    ledger = PromptLedger(tmp_path / "prompts.jsonl", in_order=False)
    ledger.record(0, [0, 2], ["x/0", "x/2"], "d")
    main = RankZero(mock.Mock(), None, None, SimpleNamespace(ledger=ledger, source=SOURCE, engine=None), mock.Mock())
    config = load_config(CONFIG, ["pipeline.mode=async", "run.steps=1"])
    config = config.model_copy(update={"run": config.run.model_copy(update={"replays": tmp_path if replays else None})})
    for name in ("summarize", "write_report", "checkpoint_folder"):
        monkeypatch.setattr(rank_zero, name, mock.Mock())
    with nullcontext() if replays else pytest.raises(DataError, match="wrong end"):
        main.end_run(config, mock.Mock(), mock.Mock(best=None), done=1, collapse=None, early="")
    assert rank_zero.write_report.called == replays
