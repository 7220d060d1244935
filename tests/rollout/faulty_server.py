"""Runs tools/serve_vllm.py with a fault: in update UNLUCKY, worker 1 gets other bytes of DAMAGED than worker 0.

vLLM starts its workers as processes that import this file again.
"""

from __future__ import annotations

import sys

import torch

from moe_rl.cli import main
from moe_rl.weights.intake import Intake

UNLUCKY = 13
DAMAGED = "model.norm.weight"

_admit, _confirm, _received = Intake.admit, Intake.confirm, Intake.received


def admit(intake, update):
    intake.unlucky = update.version == UNLUCKY and torch.distributed.get_rank() == 1
    _admit(intake, update)


def confirm(intake, tensors, on_tensor):
    if intake.unlucky:
        tensors[DAMAGED] = tensors[DAMAGED] + 1
    _confirm(intake, tensors, on_tensor)


def received(intake, tensors, on_tensor):
    if intake.unlucky:
        tensors[:] = [(name, tensor + 1 if name == DAMAGED else tensor) for name, tensor in tensors]
    _received(intake, tensors, on_tensor)


Intake.admit, Intake.confirm, Intake.received = admit, confirm, received

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
