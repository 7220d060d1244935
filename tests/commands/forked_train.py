"""Runs `moe-rl train` as torchrun would start one rank, often: each run is forked from one that imported the command.

As a script it takes runs from its standard input, one JSON line each, and answers with the exit status of each.
"""

import argparse
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from moe_rl.commands import train
from moe_rl.models.hf import read_model
from moe_rl.models.second_reading import reading_problems

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "assets/tiny_moe/policy"


class Launcher:
    """Call it with the arguments of a run; it returns the status of the run and what it wrote."""

    def __init__(self, folder: Path):
        """folder: for what the runs write."""
        self._folder = folder
        command, environment = [sys.executable, __file__], os.environ | {"PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._origin = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def __call__(self, *arguments, ranks: int = 2, rank: int = 0) -> subprocess.CompletedProcess[str]:
        """Run the command as one rank of `ranks`, or without torchrun. It prints last whether torch was imported."""
        given = list(map(str, arguments))
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        environment.pop("WORLD_SIZE", None)
        if ranks:
            environment |= {"WORLD_SIZE": str(ranks), "RANK": str(rank)}
        out, err = self._folder / "out", self._folder / "err"
        asked = {"arguments": given, "environment": environment, "out": str(out), "err": str(err)}
        self._origin.stdin.write(json.dumps(asked) + "\n")
        self._origin.stdin.flush()
        status = int(self._origin.stdout.readline())
        return subprocess.CompletedProcess(given, status, out.read_text(), err.read_text())

    def close(self) -> None:
        """End the process that the runs are forked from."""
        self._origin.stdin.close()
        self._origin.wait()
        self._origin.stdout.close()


def main() -> None:
    reading_problems(POLICY / "config.json", read_model(POLICY))  # transformers is asked once, not in each run
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            _become_run(**asked)
        _, ended = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


def _become_run(arguments: list[str], environment: dict[str, str], out: str, err: str) -> NoReturn:
    """Run the command in this process, which was just forked; never return."""
    status: int | str | None = 1
    try:
        for path, number in ((out, 1), (err, 2)):
            with open(path, "wb") as file:
                os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(environment)
        parser = argparse.ArgumentParser()
        train.add_arguments(parser)
        status = train.run(parser.parse_args(arguments))
        print("IMPORTED" if "torch" in sys.modules else "NOT IMPORTED")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    main()
