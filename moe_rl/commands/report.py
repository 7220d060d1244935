"""Implements `moe-rl report`: writes the report of a finished or unfinished run, or a page that compares several runs.

moe-rl report RUN                      writes RUN/report.html
moe-rl report RUN --share FILE         writes a page for others: no prompts, paths, hosts or keys; names of
                                       rewards, levels and held-out sets stay
moe-rl report RUN RUN --out FILE       writes a page with both runs
"""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_rl.errors import ConfigError
from moe_rl.report import lines, run_config
from moe_rl.report.run_page import FILE, write_report
from moe_rl.report.runs_page import MOST, write_comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe-rl report`."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"with several runs: the page (default: runs_{FILE} in this folder)"
    )
    parser.add_argument(
        "--share", type=Path, metavar="FILE", help="with one run: a page without prompts, paths, hosts and keys"
    )


def run(options: argparse.Namespace) -> int:
    """Write the page and print its path. Return the exit status."""
    _check(options)
    if len(options.runs) > 1:
        path = write_comparison(options.runs, options.out or Path(f"runs_{FILE}"))
    else:
        path = write_report(options.runs[0], options.share)
    print(f"report: {path}")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for a folder that is not a run, for too many runs, and for --out with one run."""
    for folder in options.runs:
        if not (folder / run_config.FILE).is_file() and not (folder / lines.FILE).is_file():
            raise ConfigError(
                "not a run folder" if folder.is_dir() else "there is no such folder",
                where={"argument": "RUN", "folder": folder},
                expected=f"a folder with {run_config.FILE} or {lines.FILE} in it",
                do="give the run folder that the run printed",
            )
    if len(options.runs) > MOST:
        raise ConfigError(
            "too many runs for one page", where={"argument": "RUN"}, got=len(options.runs), expected=f"at most {MOST}"
        )
    if options.share is not None and len(options.runs) > 1:
        got = f"{len(options.runs)} runs"
        raise ConfigError(
            "only the page of one run can be shared", where={"option": "--share"}, got=got, expected="one run"
        )
    if options.out is not None and len(options.runs) == 1:
        do = "leave it out, name several runs, or give --share"
        raise ConfigError("one run has its report in its own folder", where={"option": "--out"}, got=options.out, do=do)
