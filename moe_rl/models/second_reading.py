"""Reads config.json a second time, through transformers, and says where the two readings differ.

vLLM builds its model from the config classes of transformers. They fill in missing keys, and choose between two
spellings of one key. Our reader then reads their output, which is written out in full, with no key left to fill in. A
later version of transformers may read a file differently, so a run compares the two before it starts.

Run as a program, this file prints a config.json as transformers reads it. It does not load torch, so that a plan need
not wait for it.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_rl.errors import ConfigError, Problem, describe
from moe_rl.models.facts import ModelFacts
from moe_rl.models.hf import FAMILIES, facts_of

_SECONDS = 300
# Fields of ModelFacts that have another name in config.json.
_KEYS = {
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "top_k": "num_experts_per_tok",
    "groups": "n_group",
    "top_groups": "topk_group",
    "routed_scaling": "routed_scaling_factor",
    "rotary_fraction": "partial_rotary_factor",
    "yarn": "rope_parameters",
    "mtp_layers": "num_nextn_predict_layers",
    "window": "sliding_window",
    "windowed_layers": "layer_types",
    "qk_norm": "use_qk_norm",
}


def reading_problems(file: Path, facts: ModelFacts) -> list[Problem]:
    """Return one message for each number of a model that transformers reads differently from this config.json.

    facts: the result of `read_model` for the file.
    """

    def differs(field: str, got: object, expected: object) -> Problem:
        return describe(
            "transformers, through which the sampler reads config.json, reads another value than the trainer",
            where={"key": "model.path", "field": field, "file": file},
            got=got,
            expected=f"{expected}, as the trainer reads it",
            do="write the key out in config.json, once and with the value that the model was trained with",
        )

    text = file.read_text(encoding="utf-8")
    answer = as_transformers(text, FAMILIES[facts.architecture].MODEL_TYPES[0])
    if isinstance(answer, str):
        return [differs("all of them", answer, "the file")]
    try:
        transformers_facts = facts_of(answer | {"architectures": [facts.architecture]}, file)
    except ConfigError as error:
        return [differs(str(problem.about.get("field")), problem.got, problem.expected) for problem in error.problems]
    # The fingerprint is that of the file, and the trainer tells the sampler which tokens end a completion.
    names = [
        field.name for field in dataclasses.fields(ModelFacts) if field.name not in ("fingerprint", "eos_token_ids")
    ]
    pairs = [(name, getattr(transformers_facts, name), getattr(facts, name)) for name in names]
    return [differs(_KEYS.get(name, name), got, expected) for name, got, expected in pairs if got != expected]


@lru_cache(maxsize=16)
def as_transformers(text: str, model_type: str) -> dict[str, Any] | str:
    """Return a config.json as transformers reads it, with every key of its config class, or why it cannot be read."""
    command = [sys.executable, "-P", "-m", __name__, model_type]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer after {_SECONDS} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return json.loads(done.stdout)


def _main() -> None:
    # A module that is None cannot be imported: transformers then works without torch, which takes seconds to import.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers import CONFIG_MAPPING

    raw = json.load(sys.stdin)
    config = CONFIG_MAPPING[sys.argv[1]].from_dict(raw).to_dict()
    json.dump(config | {"model_type": raw["model_type"]}, sys.stdout)


if __name__ == "__main__":
    _main()
