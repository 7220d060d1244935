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


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_became_shorter_ends_with_groups_that_have_begun(tmp_path, monkeypatch, steps):
    """Prompt 1 had begun and not ended in step 2, which was not the last one then."""
    ledger = PromptLedger(tmp_path / "prompts.jsonl", in_order=False)
    ledger.record(0, [0, 2], ["x/0", "x/2"], "d")
    ledger.record(1, [3, 5], ["x/3", "x/5"], "d")
    source = SimpleNamespace(
        at=lambda first, count: [SimpleNamespace(id=f"x/{number}") for number in range(first, first + count)]
    )
    rollouts = SimpleNamespace(ledger=ledger, source=source, kept=mock.Mock(), retain=mock.Mock(), engine=None)
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
