"""Measures how long a broadcast of weights takes, from four trainer ranks to one sampler that drops what it gets."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scale_parts.target import Target

from moe_rl.planning.sampler_memory import weight_sync_bytes

RANKS = 4


def measured(target: Target) -> dict[str, float]:
    """Return what the whole model takes by the law of bytes: seconds by the clock, and the processor seconds of rank 0
    and what it sends, in GB."""
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "seen.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        rank = ["-m", "scale_parts.broadcast_rank", str(seen)]
        subprocess.run([*launcher, *rank], cwd=Path(__file__).parents[1], stdout=sys.stderr, check=True)
        found = json.loads(seen.read_text())
    times = weight_sync_bytes(target.facts, target.config.rollout.dtype) / found["bytes"]
    return {
        "weight_broadcast_seconds": found["clock"] * times,
        "weight_broadcast_rank_0_cpu_seconds": found["processor"] * times,
        "weight_broadcast_rank_0_sent_gb": found["sent"] * times / 1e9,
    }
