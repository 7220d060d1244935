"""Tests `moe-rl play` against the gateway over a real engine: rewards, failures, and what is kept of each session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_rl.cli import main
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.sessions import Session
from tests.gateway.conftest import OWNER

ROW = {"question": "2+3?", "answer": 5}


@pytest.fixture
def play(running, tmp_path, monkeypatch):
    """Plays rows with `moe-rl play`; returns its exit status and what it wrote."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "token").write_text(OWNER + "\n")
    told = tmp_path / "told.json"

    def run(rows, *more, environment="played_environments.adds") -> tuple[int, dict]:
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        given = {
            "--environment": environment, "--data": str(tmp_path / "rows.jsonl"), "--gateway": running.url,
            "--token-file": str(tmp_path / "token"), "--json": str(told),
        }  # fmt: skip
        given |= dict(zip(more[::2], more[1::2], strict=True))
        told.unlink(missing_ok=True)
        status = main(["play", *(part for pair in given.items() for part in pair)])
        return status, json.loads(told.read_text()) if told.exists() else {}

    return run


def test_every_row_is_played_in_a_session_that_is_kept(running, router, play, capsys):
    status, told = play([ROW] * 3, "--rows", "2")
    assert status == 0, capsys.readouterr()
    assert told["summary"] == {
        "rows": 2, "scored": 2, "failed": 0, "reward": 1.0, "turns": 4, "undelivered": 0,
        "tokens": sum(row["tokens"] for row in told["rows"]),
        "sampled_tokens": sum(row["sampled_tokens"] for row in told["rows"]),
    }  # fmt: skip
    for row in told["rows"]:
        assert (row["rewards"], row["turns"], row["branches"]) == ([0.0, 1.0], 2, 1)
        kept = SessionKeeper(running.folder / "sessions", running.store).load(row["session"])
        assert kept.group == f"row {row['row']}"
        running.agrees(Session.of(kept), router)
        assert running.gateway.book.named(row["session"]) is None
    assert "reward 1 (0, 1), 2 turns" in capsys.readouterr().out


def test_failures_are_counted_and_told_and_their_sessions_kept(running, play, capsys):
    faults, left = ["raise", "one_reward_too_few", "die_while_it_asks"], running.gateway.counts["left"]
    status, told = play([ROW, *(ROW | {"fault": fault} for fault in faults)], "--concurrent", "4")
    out = capsys.readouterr().out
    assert status == 1, out
    assert [row["reward"] for row in told["rows"]] == [1.0, None, None, None], told
    assert (told["summary"]["failed"], told["summary"]["reward"]) == (3, 1.0)
    for row, problem in zip(told["rows"][1:], ["KeyError: 'planted'", "0 rewards", "exit code 7"], strict=True):
        assert problem in row["problem"], row
        assert problem in out and running.gateway.book.named(row["session"]) is None
        SessionKeeper(running.folder / "sessions", running.store).load(row["session"])
    assert "in adds" in out and told["rows"][1]["turns"] == 1
    assert running.gateway.counts["left"] > left, "nothing was asked when it died"


def test_a_limit_of_the_session_is_told_by_its_name(play):
    status, told = play([ROW], "--turns", "1")
    assert status == 1 and "session_limit" in told["rows"][0]["problem"]
    assert told["rows"][0]["turns"] == 1


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--gateway", "http://127.0.0.1:9", "cannot be reached"),
        ("--token-file", "no_such_file", "--token-file"),
        ("--token-file", __file__, "401"),
        ("--environment", "played_environments.no_such", "no_such"),
        ("--data", "no_such.jsonl", "no_such.jsonl"),
        ("--data", "no_such.txt", "FILE.jsonl"),
    ],
)
def test_what_cannot_be_played_is_refused(play, capsys, option, value, said):
    assert play([ROW], option, value) == (2, {})
    assert said in capsys.readouterr().err


def test_a_bad_row_and_no_row_are_refused(play, capsys, tmp_path):
    assert play([]) == (2, {})
    assert play([ROW, 3]) == (2, {})
    assert "rows.jsonl:2" in capsys.readouterr().err
