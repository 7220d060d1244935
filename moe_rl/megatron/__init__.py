"""Holds all code that imports megatron-core. Without CUDA, the CPU backend must be installed before megatron-core is
imported."""

import torch

if not torch.cuda.is_available():
    from moe_rl.megatron import cpu

    cpu.install()

from moe_rl.megatron import adam  # noqa: E402 - it imports megatron-core

adam.install()
