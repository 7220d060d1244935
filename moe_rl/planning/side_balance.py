"""Computes which ratio of samplers to trainers keeps both sides busy, from the speed of each.

A speed is in completion tokens per second of one GPU. For the trainers it counts all the time that they work on a step,
so that a step of C tokens takes C / (speed x GPUs) seconds on either side. Without GPUs, an engine and a rank count as
one each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_rl.config.schema import Config


@dataclass(frozen=True, slots=True)
class Speeds:
    """Holds the speed of each side in completion tokens per second of one GPU. source: where the numbers are from."""

    sampled: float
    trained: float
    source: str


@dataclass(frozen=True, slots=True)
class SideBalance:
    """Says how well the planned samplers and trainers match.

    Attributes:
        samplers, trainers: planned GPUs of each side.
        ratio: GPUs that sample for each GPU that trains, with which both sides take equally long for a step.
        engines: smallest number of engines with which the planned trainers never wait.
        idle_overlapped: share of the time in which samplers and trainers wait, if both work at once.
        idle_in_turns: the same, if each waits for the other.
    """

    speeds: Speeds
    samplers: int
    trainers: int
    gpus_per_engine: int
    ratio: float
    engines: int
    idle_overlapped: tuple[float, float]
    idle_in_turns: tuple[float, float]


def sampling_gpus(engines: int | None, gpus_per_engine: int | None, started: int) -> tuple[int, int]:
    """Return how many GPUs sample, and how many one engine has. Without a cluster, each of the `started` engines or
    servers counts as one GPU."""
    gpus = gpus_per_engine or 1
    return (engines or started) * gpus, gpus


def side_balance(config: Config, trainers: int, speeds: Speeds) -> SideBalance:
    """Compare the samplers of a config with this number of GPUs that train."""
    cluster = config.cluster
    engines, gpus_per_engine = (cluster.engines, cluster.gpus_per_engine) if cluster is not None else (None, None)
    samplers, gpus = sampling_gpus(engines, gpus_per_engine, max(config.rollout.engines, len(config.rollout.servers)))
    ratio = speeds.trained / speeds.sampled
    sampling, training = 1 / (speeds.sampled * samplers), 1 / (speeds.trained * trainers)  # seconds of a token
    longest, total = max(sampling, training), sampling + training
    return SideBalance(
        speeds=speeds,
        samplers=samplers,
        trainers=trainers,
        gpus_per_engine=gpus,
        ratio=ratio,
        engines=math.ceil(round(trainers * ratio / gpus, 9)),
        idle_overlapped=(1 - sampling / longest, 1 - training / longest),
        idle_in_turns=(training / total, sampling / total),
    )
