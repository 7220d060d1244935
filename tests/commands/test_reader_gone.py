"""A verb whose reader has gone, as in `moe-rl show RUN | head`, ends quietly."""

import io
import os
import sys

import pytest

from moe_rl.cli import main

PLAN, CHECK = ["plan", "--config", "configs/tiny_moe_cpu.yaml"], ["patch", "--check"]


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    # Where PYTHONUNBUFFERED is set, argparse itself passes over the broken pipe when it prints its help.
    [(["show", "--help"], False), ([], False), (PLAN, False), (CHECK, False), (PLAN, True), (CHECK, True)],
)
def test_it_ends_without_a_word_and_with_the_status_of_sigpipe(arguments, unbuffered, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    buffering = 0 if unbuffered else -1
    with io.TextIOWrapper(open(writer, "wb", buffering), "utf-8", write_through=unbuffered) as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(arguments) == 141
    assert capfd.readouterr().err == ""


def test_another_broken_pipe_is_told(monkeypatch):
    def breaks(options):
        raise BrokenPipeError("of an engine")

    monkeypatch.setattr("moe_rl.commands.patch.run", breaks)
    with pytest.raises(BrokenPipeError, match="of an engine"):
        main(["patch"])
