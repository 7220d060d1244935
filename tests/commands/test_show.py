"""`moe-rl show`: which samples of a run are printed, and in what order."""

import dataclasses
import json

import pytest

from moe_rl.cli import main
from moe_rl.report.sample_lines import SampleFile
from tests.report.test_sample_lines import LINE


@pytest.fixture
def folder(tmp_path):
    file = SampleFile(tmp_path)
    for step, reward, trainer in ((1, 0.2, -1.0), (1, 1.0, -0.9), (2, 0.0, -0.5), (2, 0.5, -2.0)):
        values = [-0.5, trainer, -0.25]
        line = dataclasses.replace(
            LINE, step=step, key=f"s{step}/{reward}", reward=reward, trainer_logprobs=values, completion="four\nfive"
        )
        file.write([line])
    file.write([dataclasses.replace(LINE, step=2, key="unseen", trainer_logprobs=[], differing_layers=[])])
    return tmp_path


@pytest.mark.parametrize(
    "options, keys",
    [
        ([], ["s2/0.0", "s2/0.5", "unseen"]),
        (["--step", "1"], ["s1/0.2", "s1/1.0"]),
        (["--best", "--count", "2"], ["s1/1.0", "s2/0.5"]),
        (["--worst", "--count", "1"], ["s2/0.0"]),
        (["--mismatch"], ["s2/0.5", "s2/0.0", "s1/1.0", "s1/0.2"]),
        (["--mismatch", "--step", "1"], ["s1/1.0", "s1/0.2"]),
    ],
)
def test_what_is_printed(folder, options, keys, capsys, tmp_path):
    assert main(["show", str(folder), *options, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert [one["key"] for one in json.loads((tmp_path / "out.json").read_text())["samples"]] == keys
    places = [printed.index(key) for key in keys]
    assert places == sorted(places)


def test_every_line_of_a_text_and_the_token_that_differs_are_there(folder, capsys):
    assert main(["show", str(folder), "--mismatch", "--count", "1"]) == 0
    printed = capsys.readouterr().out
    assert "four\n" in printed and "             five" in printed
    (row,) = [line for line in printed.splitlines() if "'plus'" in line]
    assert row.split() == ["1", "'plus'", "-1.000", "-2.000", "-1.0000", "5"]


def test_a_result_that_cannot_be_written_is_told(folder, capsys):
    file = folder / "nothing/out.json"
    assert main(["show", str(folder), "--json", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--profile"], ["--session", "s"]])
def test_what_is_not_written_as_json_is_refused(folder, options, capsys):
    assert main(["show", str(folder), *options, "--json", str(folder / "out.json")]) == 2
    assert "--json" in capsys.readouterr().err and not (folder / "out.json").exists()


@pytest.mark.parametrize("options", [["--step", "7"], []])
def test_what_is_not_there_is_refused(folder, options, capsys):
    run = folder if options else folder / "nothing"
    assert main(["show", str(run), *options]) == 2
    told = "samples.jsonl" if options else f"there is no such folder or file ({run})"
    assert told in capsys.readouterr().err
