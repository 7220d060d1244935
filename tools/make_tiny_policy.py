"""Reproduce assets/tiny_moe: the arithmetic task, the tokenizer and the warm-started tiny Qwen3-MoE policy.

    python tools/make_tiny_policy.py --out assets/tiny_moe [--json assets/tiny_moe/policy_report.json]

About ten minutes on one core. The same machine and packages give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM

from moe_rl.tasks.arithmetic import build_splits, write_jsonl
from moe_rl.train import warm_start as ws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write policy/ and task/ into")
    parser.add_argument("--json", type=Path, help="file to write the measured rates into")
    parser.add_argument("--arithmetic-steps", type=int, default=ws.WarmStartConfig().arithmetic_steps)
    parser.add_argument("--style-steps", type=int, default=ws.WarmStartConfig().style_steps)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time and hides nothing here
    config = ws.WarmStartConfig(arithmetic_steps=args.arithmetic_steps, style_steps=args.style_steps)

    train, heldout = build_splits()
    (args.out / "task").mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "task" / "train.jsonl", "train", train)
    write_jsonl(args.out / "task" / "heldout.jsonl", "heldout", heldout)

    started = time.monotonic()
    tokenizer = ws.build_tokenizer()
    policy = ws.build_policy(config.seed)
    training = ws.warm_start(policy, tokenizer, {problem.key for problem in heldout}, config)
    seconds = time.monotonic() - started
    folder = args.out / "policy"
    ws.save_policy(policy, tokenizer, folder)

    report = {"styles": ws.STYLES, "training": training, "training_seconds": round(seconds)}
    for dtype in (torch.bfloat16, torch.float32):
        shipped = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        report[str(dtype).removeprefix("torch.")] = ws.evaluate(shipped, tokenizer, heldout)
    report["expert_load"] = ws.expert_usage(shipped, tokenizer, heldout)
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
