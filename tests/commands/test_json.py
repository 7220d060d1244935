"""Tests what the verbs do with the file of --json before they work."""

import sys
from contextlib import suppress

import pytest

from moe_rl import cli
from moe_rl.commands import doctor, train


@pytest.mark.parametrize("arguments", [["doctor"], ["train", "--config", "tiny_moe_cpu"]])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.setattr(doctor, "run", lambda options: pytest.fail("it worked before it looked"))
    monkeypatch.setattr(train, "_configure", lambda options: pytest.fail("it worked before it looked"))
    assert cli.main([*arguments, "--json", str(tmp_path / "absent" / "out.json")]) == 2
    assert "--json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["doctor"], ["train", "--config", "tiny_moe_cpu"]])
def test_a_folder_that_only_the_first_rank_has_is_enough(tmp_path, monkeypatch, arguments):
    """Only that rank writes the file."""
    reached = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(doctor, "run", reached.append)
    monkeypatch.setattr(train, "_configure", lambda options: reached.append(options) or sys.exit(7))
    with suppress(SystemExit):
        cli.main([*arguments, "--json", str(tmp_path / "absent" / "out.json")])
    assert len(reached) == 1
