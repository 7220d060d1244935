"""Reproduce a shipped policy: its tokenizer, the warm-started tiny Qwen3-MoE, and the files of its task.

    python tools/dev/make_tiny_policy.py arithmetic --out assets/tiny_moe [--json assets/tiny_moe/policy_report.json]
    python tools/dev/make_tiny_policy.py reasoning_gym --out assets/tiny_gym [--json FILE]
    python tools/dev/make_tiny_policy.py calculator --out assets/tiny_tool [--json FILE]

About ten minutes on one core; a line every 50 steps. The same machine and packages give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repository root, to import `tools.dev`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "lesson", choices=["arithmetic", "reasoning_gym", "calculator"], help="what the policy is taught"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write policy/ (and task/) into")
    parser.add_argument("--json", type=Path, help="file to write the measured rates into")
    parser.add_argument("--skill-steps", type=int, default=argparse.SUPPRESS, help="replaces the shipped one")
    parser.add_argument("--style-steps", type=int, default=argparse.SUPPRESS, help="replaces the shipped one")
    given = vars(parser.parse_args())
    name, out, file = given.pop("lesson"), given.pop("out"), given.pop("json")

    from tools.dev import (
        arithmetic_policy,
        calculator_policy,
        gym_policy,
    )  # they import torch and transformers, which takes seconds
    from tools.dev.tiny_policy import make

    lessons = {"arithmetic": arithmetic_policy, "reasoning_gym": gym_policy, "calculator": calculator_policy}
    lesson = lessons[name].lesson(out)
    report = make(out / "policy", replace(lesson, warm_start=replace(lesson.warm_start, **given)))
    text = json.dumps(report, indent=2)
    print(text)
    if file:
        file.write_text(text + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
