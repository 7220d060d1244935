"""Everything that imports megatron-core. Without CUDA the host backend has to be in place before the first such import."""

import torch

if not torch.cuda.is_available():
    from moe_rl.megatron import cpu

    cpu.install()
