"""Implements `moe-rl plan`: prints what `moe-rl train` would do with a config, and every problem. Starts nothing."""

from moe_rl.commands.train import add_plan_arguments as add_arguments
from moe_rl.commands.train import run

__all__ = ["add_arguments", "run"]
