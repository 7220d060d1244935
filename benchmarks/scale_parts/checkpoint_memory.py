"""Measures the host memory that a rank needs to save a checkpoint, with 2 and with 4 replicas of a random model.

Each replica is a process with a whole model in bfloat16, and its share of the optimizer's state. The memory is the most
that the process ever holds during the save, less what it held before: its copies, and whatever is gathered for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from models import make_model
from scale_parts.target import Target, at_full_size

from moe_rl.config.layout import make_layout
from moe_rl.planning.memory import stage_memory

REPLICAS = (2, 4)
RANK = Path(__file__).with_name("saving_rank.py")


def measured(target: Target) -> dict[str, float]:
    """Return bytes of host memory per byte of a rank's own optimizer state, for the replicas that an expert has, and
    the GiB of the fullest rank; and the bytes that the busiest of 4 ranks writes, over the mean."""
    cluster = target.config.cluster
    assert cluster is not None
    layout = make_layout(target.config.parallel, target.facts, cluster.gpus)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("large", Path(folder) / "model")
        (model / "tokenizer.json").write_text("{}")
        seen = {number: _save(number, Path(folder)) for number in REPLICAS}
    ratio, _ = at_full_size({number: most for number, (most, _) in seen.items()}, layout.expert_data)
    state = max(stage.optimizer_bytes for stage in stage_memory(target.config, target.facts, layout))
    return {
        "checkpoint_bytes_per_state_byte": ratio,
        "checkpoint_gib_of_a_rank": ratio * state / 2**30,
        "checkpoint_bytes_of_busiest_writer": seen[REPLICAS[-1]][1],
    }


def _save(replicas: int, folder: Path) -> tuple[float, float]:
    """Return the most memory of a rank over its own state, and the most bytes of a writer over the mean."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(replicas)]
    subprocess.run([*launcher, RANK, folder], stdout=sys.stderr, check=True)
    ratios = [json.loads((folder / f"{replicas}-{rank}.json").read_text()) for rank in range(replicas)]
    written = [file.stat().st_size for file in (folder / str(replicas)).glob("step-*/*.distcp")]
    return max(ratios), max(written) * replicas / sum(written)
