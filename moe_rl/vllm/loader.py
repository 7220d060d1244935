"""Loads checkpoints into vLLM that its default loader cannot load. Importing this module registers the loader.

The files of a model with tied embeddings hold only the embedding. vLLM ties only Qwen3-MoE among our models; for the
others it creates a separate output matrix, finds no values for it, and does not start. Some files also have buffers
that are computed from config.json; vLLM skips the usual ones, and does not start with others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from moe_rl.models.weight_files import is_derived
from moe_rl.models.weight_table import EMBEDDING, HEAD

FORMAT = "moe_rl"


@register_model_loader(FORMAT)
class CheckpointLoader(DefaultModelLoader):
    """Skips derived buffers, and loads a tied embedding a second time as the output matrix. vLLM skips that if both are
    one parameter."""

    def __init__(self, load_config: LoadConfig):
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        # vLLM has set this to False if the files have an output matrix.
        tied = getattr(model_config.hf_config, "tie_word_embeddings", False)
        for name, tensor in super().get_all_weights(model_config, model):
            if is_derived(name):
                continue
            yield name, tensor
            if tied and name == EMBEDDING:
                yield HEAD, tensor
