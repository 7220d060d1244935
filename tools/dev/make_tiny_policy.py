"""Reproduce assets/tiny_moe: the arithmetic task, the tokenizer and the warm-started tiny Qwen3-MoE policy.

    python tools/dev/make_tiny_policy.py --out assets/tiny_moe [--json assets/tiny_moe/policy_report.json]

About ten minutes on one core; a line every 100 steps. The same machine and packages give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # repository root, to import `tools.dev`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write policy/ and task/ into")
    parser.add_argument("--json", type=Path, help="file to write the measured rates into")
    parser.add_argument("--arithmetic-steps", type=int, default=argparse.SUPPRESS, help="replaces the shipped one")
    parser.add_argument("--style-steps", type=int, default=argparse.SUPPRESS, help="replaces the shipped one")
    given = vars(parser.parse_args())
    out, file = given.pop("out"), given.pop("json")

    from tools.dev.tiny_policy import WarmStartConfig, make  # imports torch and transformers, which takes seconds

    text = json.dumps(make(out, WarmStartConfig(**given)), indent=2)
    print(text)
    if file:
        file.write_text(text + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
