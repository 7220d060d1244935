"""Reports what is installed, what that enables, and what a config needs in addition: `moe-rl doctor`."""
