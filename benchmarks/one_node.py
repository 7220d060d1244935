"""Says what a GPU must hold when 30B parameters are trained on one node of eight GPUs of 80 GB. Runs nothing.

    python benchmarks/one_node.py [--json FILE]

planned_gib_per_gpu: the fullest GPU by the plan of configs/qwen3_30b_a3b_8gpu.yaml. Where trainer and engine share a
GPU both sides are added. usable_gib_per_gpu: what the plan may use. planned_host_gib: Adam's state of all ranks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moe_rl.config.load import load_config
from moe_rl.models.hf import read_published
from moe_rl.planning.cluster_plan import make_plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    options = parser.parse_args()
    config = load_config("qwen3_30b_a3b_8gpu")
    assert config.model.published is not None and config.cluster is not None
    plan = make_plan(config, read_published(config.model.published), config.cluster.gpus)
    assert plan.limit_bytes is not None
    sides = [plan.shared_bytes] if plan.beside else [plan.fullest.total_bytes, plan.sampler.total_bytes]
    result = {
        "planned_gib_per_gpu": round(max(sides) / 2**30, 1),
        "usable_gib_per_gpu": plan.limit_bytes / 2**30,
        "planned_host_gib": round(config.cluster.gpus * plan.fullest.memory.host_bytes / 2**30),
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
