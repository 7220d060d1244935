"""`moe-rl serve`: vLLM's own server, recording."""

from moe_rl.vllm.serve import add_arguments, run

__all__ = ["add_arguments", "run"]
