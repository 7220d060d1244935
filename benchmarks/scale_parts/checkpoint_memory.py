"""Measures the host memory that a rank needs to save a checkpoint, with 2 and with 4 replicas of a random model.

Each replica is a process with a whole model, in bfloat16 and then in float32, and its share of what the optimizer
updates: float32 weights and two moments. The memory is the most that the process ever holds during the save, less what
it held before: its copies, and whatever is gathered for them.
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
    """Return bytes of host memory per byte of what a rank's optimizer updates, for the replicas that an expert has, in
    bfloat16 and in float32; the GiB of the fullest rank; and the bytes that the busiest of 4 ranks writes, over the
    mean."""
    cluster = target.config.cluster
    assert cluster is not None
    layout = make_layout(target.config.parallel, target.facts, cluster.gpus)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("large", Path(folder) / "model")
        (model / "tokenizer.json").write_text("{}")
        seen = {
            dtype: {number: _save(number, dtype, Path(folder)) for number in REPLICAS}
            for dtype in ("bfloat16", "float32")
        }
    ratio, in_float32 = (
        at_full_size({number: most for number, (most, _) in found.items()}, layout.expert_data)[0]
        for found in seen.values()
    )
    state = max(stage.optimizer_bytes for stage in stage_memory(target.config, target.facts, layout))
    return {
        "checkpoint_bytes_per_state_byte": ratio,
        "checkpoint_bytes_per_state_byte_float32": in_float32,
        "checkpoint_gib_of_a_rank": ratio * state / 2**30,
        "checkpoint_bytes_of_busiest_writer": seen["bfloat16"][REPLICAS[-1]][1],
    }


def _save(replicas: int, dtype: str, folder: Path) -> tuple[float, float]:
    """Return the most memory of a rank over what it updates, and the most bytes of a writer over the mean."""
    out = folder / f"{dtype}-{replicas}"
    out.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(replicas)]
    subprocess.run([*launcher, RANK, folder / "model", dtype, out], stdout=sys.stderr, check=True)
    ratios = [json.loads((out / f"{rank}.json").read_text()) for rank in range(replicas)]
    written = [file.stat().st_size for file in out.glob("step-*/*.distcp")]
    return max(ratios), max(written) * replicas / sum(written)
