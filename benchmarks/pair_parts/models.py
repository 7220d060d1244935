"""Makes the models of `pairs.py`: random ones of each family, with tied embeddings and without, and a tokenizer with a
chat template."""

from __future__ import annotations

import itertools
import shutil
import sys
from pathlib import Path

from pair_parts.switches import FAMILIES, ROOT, SWITCHES, model_name

TOKENIZER = ROOT / "assets/tiny_tool/policy"
# Ranks can share the vocabulary and the layers, and vLLM's kernels for CPUs accept the widths of heads.
SIZES = {"vocab_size": 296, "num_hidden_layers": 4, "head_dim": 32}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}


def write_models(folder: Path) -> None:
    """Write the models that are not there."""
    sys.path.insert(0, str(ROOT))  # for `tests`
    from tests.support.families import write_checkpoint

    for family, tied in itertools.product(FAMILIES, SWITCHES["tied"]):
        path = folder / model_name(family, tied)
        if not path.exists():
            half = path.with_suffix(".tmp")
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir(parents=True)
            sizes = SIZES | (LATENT if family == "deepseek" else {})
            write_checkpoint(family, half, tie_word_embeddings=tied == "yes", **sizes)
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copyfile(TOKENIZER / name, half / name)
            half.rename(path)
