"""A verb whose reader has gone, as in `moe-rl show RUN | head`, ends quietly."""

import os
import sys

import pytest

from moe_rl.cli import main


@pytest.mark.parametrize(
    "arguments", [["show", "--help"], ["plan", "--config", "configs/tiny_moe_cpu.yaml"], ["patch", "--check"], []]
)
def test_it_ends_without_a_word_and_with_the_status_of_sigpipe(arguments, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(arguments) == 141
    assert capfd.readouterr().err == ""


def test_another_broken_pipe_is_told(monkeypatch):
    def breaks(options):
        raise BrokenPipeError("of an engine")

    monkeypatch.setattr("moe_rl.commands.patch.run", breaks)
    with pytest.raises(BrokenPipeError, match="of an engine"):
        main(["patch"])
