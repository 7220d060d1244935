"""Reports what is installed, what that enables, and what else a config needs: `moe-rl doctor`."""
