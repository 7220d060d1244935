"""Starts the ranks of a run on this machine for `moe-rl train --ranks`, with torchrun's launcher."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from moe_rl.train.hangs import statuses
from moe_rl.train.peers import EXIT_CODE

# Seconds from the end of the ranks' grace period until they are killed.
_SPARE_SECONDS = 10


def start(ranks: int, program: Sequence[str], grace_seconds: float) -> int:
    """Start this many ranks of a program and wait until they end. Return the exit status of the first that failed.

    The ranks print why they end. torchrun's own report is left out.

    Args:
        program: Arguments of the Python interpreter.
        grace_seconds: Time that the ranks need to end on request.
    """
    # torch is imported only here, so that a mistake in the options shows at once.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    logging.disable()  # the ranks themselves report what the launcher would warn of
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: the ranks share the cores
    with tempfile.TemporaryDirectory(prefix="moe_rl_ranks_") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=math.ceil(grace_seconds) + _SPARE_SECONDS,
        )
        try:
            launch_agent(config, sys.executable, list(program))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode > 0:
                return failure.exitcode
            print(f"moe_rl: rank {rank} (pid {failure.pid}) was ended by {failure.signal_name()}", file=sys.stderr)
            return EXIT_CODE
        except SignalException as error:
            # The ranks have ended by now, and recorded their statuses. Ranks that had not begun recorded none.
            return next(iter(statuses(Path(logs))), 128 + signal.Signals(error.sigval).value)
    return 0
