"""One run folder for all ranks, on whichever hosts they are."""

from __future__ import annotations

import socket

import torch.distributed as dist

from moe_rl.errors import ConfigError, describe
from moe_rl.megatron import world
from moe_rl.train.run_folder import RunFolder


def check_seen(folder: RunFolder) -> None:
    """All ranks call it. Raises ConfigError on each when one does not see what rank 0 has written into the folder."""
    config = world.broadcast(folder.config.read_text() if dist.get_rank() == 0 else None, str)
    seen = folder.config.is_file() and folder.config.read_text() == config
    (blind,) = world.all_reduce([float(not seen)])
    if blind:
        raise ConfigError(
            describe(
                "run.runs_dir: not all ranks see the folder that rank 0 made",
                where=f"rank {dist.get_rank()} on {socket.gethostname()}: {folder.path.absolute()}",
                got=f"{'not here and ' if not seen else ''}not on {blind:.0f} ranks",
                do="put it on a filesystem that all nodes mount at the same path",
            )
        )
