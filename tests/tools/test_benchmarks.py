"""Tests what several benchmarks share, and what those of peers compare."""

import json
import shutil
from pathlib import Path

import pytest

from moe_rl.models.hf import read_model


def test_one_round_is_its_own_quartiles(benchmark):
    ratio = benchmark("updates").ratio
    assert ratio([3.0], [2.0], "a : b") == {"a : b": 1.5, "a : b, quartiles": [1.5, 1.5]}
    assert ratio([2.0, 8.0, 4.0], [2.0] * 3, "a : b") == {"a : b": 2.0, "a : b, quartiles": [1.5, 3.0]}


WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from peer_sides.turns import answer, asked
for number, _ in enumerate(asked(), 1):
    if number > 2:
        sys.exit(3)
    print("a line of a library")
    answer(number / 4)
"""


def test_a_side_answers_each_time_it_is_asked_and_its_end_is_noticed(benchmark, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    folder = str(Path(benchmark("peers").__file__).parent)
    with benchmark("peer_sides.turns").Side([str(worker), folder], [{}]) as side:
        assert [side.work(), side.work()] == [0.25, 0.5]
        with pytest.raises(SystemExit):
            side.work()
    assert side.first.returncode == 3


def test_peers_train_on_an_update_of_the_demo(benchmark, tmp_path):
    peers = benchmark("peers")
    policy = peers.DEMO / "policy"
    (tmp_path / "model").mkdir()
    shutil.copy(policy / "tokenizer.json", tmp_path / "model")
    tokens = peers.write_sequences(tmp_path)
    sequences = json.loads((tmp_path / "sequences.json").read_text())
    assert len(sequences) == 256  # 64 prompts, 8 completions each, in two updates
    assert sum(len(prompt) + len(answer) for prompt, answer in sequences) == tokens
    ends = read_model(policy).eos_token_ids
    assert all(answer[-1] in ends for _, answer in sequences)


def test_the_long_answers_end_at_a_token_that_nothing_else_ends_at(benchmark, tmp_path):
    peers = benchmark("peers")
    short, long = read_model(peers.DEMO / "policy"), read_model(peers.endless(tmp_path / "long"))
    assert long.eos_token_ids == (peers.UNKNOWN_END[0],)
    assert not set(long.eos_token_ids) & set(short.eos_token_ids)
