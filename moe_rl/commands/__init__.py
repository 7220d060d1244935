"""Implements the commands of `moe-rl`, one file each: `add_arguments(parser)`, and `run(options)` -> exit status."""
