"""Starts processes by forking one that has imported torch and has no threads; see `multiprocessing`'s forkserver."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
# A worker of the tests has one such server, which imports these once.
FORKS.set_forkserver_preload(["tests.train.peer_processes", "moe_rl.weights.shared_memory"])
