"""Writes a tiny policy as a folder of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeForCausalLM


def save_policy(policy: Qwen3MoeForCausalLM, config: dict[str, Any], tokenizer: Any, out: Path) -> None:
    """Write the Hugging Face folder: bf16 tensors under the published per-expert names, configs, tokenizer and its
    chat template.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in policy.state_dict().items():
        value = value.detach().to(torch.bfloat16)
        # transformers stacks the experts of a layer: gate_up_proj [E, 2I, H], down_proj [E, H, I].
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for expert, fused in enumerate(value):
                gate, up = fused.chunk(2)
                tensors[f"{stem}{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{stem}{expert}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            for expert, weight in enumerate(value):
                tensors[f"{stem}{expert}.down_proj.weight"] = weight.contiguous()
        else:
            tensors[name] = value.contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {name: config[name] for name in ("eos_token_id", "pad_token_id")})
    # The older name of the class, which every transformers since 4 knows.
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    if tokenizer.chat_template:
        (out / "chat_template.jinja").write_text(tokenizer.chat_template + "\n", encoding="ascii")


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")
