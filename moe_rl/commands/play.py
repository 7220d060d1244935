"""`moe-rl play`: run an environment on the rows of a file, against a gateway that is served.

    moe-rl play --environment my_module.run --data FILE.jsonl --gateway URL --token-file FILE

Each row gets its own session. The environment, an async function `run(session, row)`, plays it in its own process. An
episode whose environment raises, crashes, hangs or returns no reward has failed: it has no reward.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from moe_rl.config.prompt_sources import PromptSourceConfig
from moe_rl.disk import write_json
from moe_rl.errors import About, ConfigError, DataError
from moe_rl.tasks.environments.environment_pool import EnvironmentPool
from moe_rl.tasks.environments.player import GatewayOwner, PlayedRow, play_rows
from moe_rl.tasks.rows import read_rows

# The end of a traceback says where it happened.
_SHOWN_LINES = 6
_SUMMED = ("turns", "undelivered", "tokens", "sampled_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe-rl play`."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--environment", required=True, metavar="DOTTED", help="path of the environment's function")
    add("--data", required=True, metavar="FILE", help="rows: FILE.jsonl or FILE.parquet")
    add("--gateway", required=True, metavar="URL", help="address of the gateway")
    add("--token-file", required=True, type=Path, metavar="FILE", help="file with its owner's token")
    add("--rows", type=_count, metavar="N", help="play the first N rows (default: all)")
    add("--concurrent", type=_count, default=8, metavar="N", help="episodes at once (default: 8)")
    add("--seconds", type=_seconds, default=300.0, metavar="X", help="time limit of an episode (default: 300)")
    add("--memory-mib", type=_count, default=4096, metavar="N", help="memory of each process (default: 4096)")
    add("--python", type=Path, metavar="FILE", help="interpreter for the environment (default: that of this command)")
    add("--turns", type=_count, metavar="N", help="most turns of a session (default: the gateway's)")
    add("--tokens", type=_count, metavar="N", help="most tokens of a session (default: the gateway's)")
    add("--json", type=Path, metavar="FILE", help="write each row's result and the summary to this file")


def run(options: argparse.Namespace) -> int:
    """Play the rows. Returns the exit status: 0 when all have rewards, 1 when some failed, 2 for an explained error."""
    played = asyncio.run(_play(options))
    totals = summary(played)
    mean = "none" if totals["reward"] is None else f"{totals['reward']:.4g}"
    print(
        f"{totals['rows']} rows: {totals['scored']} scored, {totals['failed']} failed; mean reward {mean}, "
        f"{totals['turns']} turns, {totals['tokens']} tokens ({totals['sampled_tokens']} sampled)"
    )
    if options.json:
        rows = [asdict(row) | {"reward": row.reward} for row in played]
        write_json(options.json, {"environment": options.environment, "summary": totals, "rows": rows})
    return 1 if totals["failed"] else 0


async def _play(options: argparse.Namespace) -> list[PlayedRow]:
    rows = read_data(options.data, options.rows)
    try:
        token = options.token_file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        where: About = {"option": "--token-file", "file": options.token_file}
        raise ConfigError("the token cannot be read", where=where, got=error) from error
    played = []
    with EnvironmentPool(
        options.environment,
        concurrent=options.concurrent,
        seconds=options.seconds,
        memory_limit_mib=options.memory_mib,
        python=options.python,
    ) as pool:
        async with GatewayOwner(options.gateway, token, turns=options.turns, tokens=options.tokens) as owner:
            async for row in play_rows(rows, pool, owner):
                print(text(row), flush=True)
                played.append(row)
    return sorted(played, key=lambda result: result.row)


def read_data(file: str, most: int | None) -> list[Mapping[str, Any]]:
    """Return the first rows of a file. Raises DataError for a row that cannot be read, and if there are no rows."""
    source: About = {"option": "--data", "file": file}
    if Path(file).suffix not in (".jsonl", ".parquet"):
        raise DataError("rows cannot be read from this file", where=source, expected="FILE.jsonl or FILE.parquet")
    rows: list[Mapping[str, Any]] = []
    for where, row in islice(read_rows(PromptSourceConfig(name="data", data=file), "--data", set()), most):
        if isinstance(row, ValueError):
            raise DataError("a row cannot be read", where=where, got=row)
        rows.append(row)
    if not rows:
        raise DataError("there are no rows", where=source)
    return rows


def text(row: PlayedRow) -> str:
    """Format the result of one row."""
    undelivered = f" and {row.undelivered} that it never received" if row.undelivered else ""
    has = f"{row.turns} turns{undelivered}, {row.tokens} tokens ({row.sampled_tokens} sampled), {row.seconds:.1f} s"
    head = f"row {row.row}, session {row.session}: "
    if row.rewards is None:
        lines = [line for line in row.traceback.splitlines() if line.strip()][-_SHOWN_LINES:]
        return "\n".join([f"{head}failed, {has}: {row.problem}", *(f"    {line}" for line in lines)])
    by_turn = f" ({', '.join(f'{reward:g}' for reward in row.rewards)})" if isinstance(row.rewards, tuple) else ""
    return f"{head}reward {row.reward:g}{by_turn}, {has}"


def summary(played: Sequence[PlayedRow]) -> dict[str, Any]:
    """Return counts, and the mean reward of the rows that have one."""
    rewards = [row.reward for row in played if row.reward is not None]
    return {
        "rows": len(played),
        "scored": len(rewards),
        "failed": len(played) - len(rewards),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        **{name: sum(getattr(row, name) for row in played) for name in _SUMMED},
    }


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("expected at least 1")
    return value


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) < 1e6:
        raise argparse.ArgumentTypeError("expected more than 0 and less than a million")
    return value
