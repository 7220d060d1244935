"""Runs the pool of a run that plays episodes, `python -m moe_rl.gateway.episode_pool FD PARENT_PID`."""

from moe_rl.gateway.episode_gateway import EpisodeGateway
from moe_rl.rollout import pool

if __name__ == "__main__":
    pool.main(EpisodeGateway)
