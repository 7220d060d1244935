"""Says what a GPU must hold when 30B parameters are trained on one node of eight GPUs of 80 GB, and trains a tiny model
with an engine beside each of two ranks.

    python benchmarks/one_node.py [--json FILE] [--work DIR]

planned_gib_per_gpu: the fullest GPU by the plan of configs/qwen3_30b_a3b_8gpu.yaml. It trains or samples: training all
parameters and an engine do not fit on one GPU. Where a plan lets them share a GPU both sides are added.
usable_gib_per_gpu: what the plan may use. planned_host_gib: Adam's state of all ranks.
engines_beside_ranks: engines that run beside the two ranks of the tiny model. resume_differing_metrics: values of
metrics.jsonl, without times and memory, that differ between two steps and the same two of which the second was killed
with all engines and done again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from moe_rl.config.load import load_config
from moe_rl.models.hf import read_published
from moe_rl.planning.cluster_plan import make_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import `tools.dev`
from tools.dev.runs import Launch, rows  # noqa: E402

TINY = (
    *("--config", "configs/tiny_moe_cpu.yaml", "rollout.engines=2", "run.steps=2", "rollout.prompts_per_step=4"),
    *("rollout.group_size=4", "rollout.kv_cache_mib=64", "rollout.sleep_level=2", "task.overlong.cache_tokens=4"),
    *("eval.prompts=4", "checkpoint.every_steps=1", "checkpoint.asynchronous=false"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the runs in this folder")
    options = parser.parse_args()
    config = load_config("qwen3_30b_a3b_8gpu")
    assert config.model.published is not None and config.cluster is not None
    plan = make_plan(config, read_published(config.model.published), config.cluster.gpus)
    assert plan.limit_bytes is not None
    sides = [plan.shared_bytes] if plan.beside else [plan.fullest.total_bytes, plan.sampler.total_bytes]
    with tempfile.TemporaryDirectory() as folder:
        engines, differing = resumed(options.work or Path(folder))
    result = {
        "planned_gib_per_gpu": round(max(sides) / 2**30, 1),
        "usable_gib_per_gpu": plan.limit_bytes / 2**30,
        "planned_host_gib": round(config.cluster.gpus * plan.fullest.memory.host_bytes / 2**30),
        "engines_beside_ranks": engines,
        "resume_differing_metrics": differing,
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


def resumed(work: Path) -> tuple[int, int]:
    """Train the tiny model undisturbed, then killed and resumed. Return the engines that ran, and the values that
    differ."""
    whole = launched(work / "whole")
    ended(whole)
    killed = launched(work / "killed")
    killed.until(lambda: (killed.sign().get("part"), killed.sign().get("step")) == ("train", 2))
    engines = len(killed.engine_pids())
    killed.kill()
    ended(Launch(killed.runs_dir, "--resume", killed.folder))
    ours, theirs = rows(killed.folder), rows(whole.folder)
    values = [(one.get(key), other.get(key)) for one, other in zip(ours, theirs, strict=True) for key in one | other]
    return engines, sum(one != other for one, other in values)


def launched(runs: Path) -> Launch:
    """Start a run of two steps below a new folder."""
    runs.mkdir(parents=True)
    return Launch(runs, *TINY, f"run.runs_dir={runs}")


def ended(run: Launch) -> None:
    """Wait for the end of a run. Raises SystemExit with its output if it failed."""
    if run.wait():
        raise SystemExit(run.text())


if __name__ == "__main__":
    raise SystemExit(main())
