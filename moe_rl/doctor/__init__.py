"""What is installed here, what that enables, and what a config lacks: `moe-rl doctor`."""
