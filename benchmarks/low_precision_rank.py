"""Trains as `moe-rl train` does, and keeps Adam's two moments in bfloat16.

It does on a CPU what TransformerEngine's FusedAdam does on a GPU with `exp_avg_dtype` and `exp_avg_sq_dtype` bfloat16:
an update computes with float32 moments, and stores them rounded to the nearest bfloat16.
"""

import argparse
import sys

import torch

from moe_rl.commands import train
from moe_rl.megatron.adam import FusedAdam

_update = FusedAdam._update


@torch.no_grad()
def _rounded(self: FusedAdam, group: dict, params: list[torch.Tensor]) -> None:
    _update(self, group, params)
    for p in params:
        for moment in self.state[p].values():
            moment.copy_(moment.bfloat16())


# megatron-core may start helper processes that import this file again.
if __name__ == "__main__":
    FusedAdam._update = _rounded  # type: ignore[method-assign]
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    sys.exit(train.run(parser.parse_args()))
