"""Lists the numbers of a step that plays episodes of an environment. `metrics.py` has their place among the others."""

from __future__ import annotations

from moe_rl.report.metric import Metric

# fmt: off
EPISODES = (
    Metric("episode/turns_mean", "turns", "neutral",
        "Mean number of turns of an episode. Each completion of the model is a turn.",
        "Falls to 1 where tools should be used: the model answers without them.",
        "when measured"),
    Metric("episode/turns_quantile/<name>", "turns", "neutral",
        "Turns than which 5, 25, 50, 75 and 95% of the episodes have fewer (p05 to p95).",
        "p95 at task.environment.turns: the limit ends episodes.",
        "when measured"),
    Metric("episode/branches_mean", "branches", "neutral",
        "Mean number of branches of an episode: histories that no turn continues.",
        "Far above 1 in a dialogue without parallel requests: something rewrites the history, such as a chat template "
        "that drops earlier thinking. Every branch computes its history again in training.",
        "when measured"),
    Metric("episode/sequences_mean", "sequences", "neutral",
        "Mean number of sequences that an episode is trained on as. It is the number of branches where the weights did "
        "not change within the episode.",
        "Far above episode/branches_mean: weights change often while episodes are played.",
        "when measured"),
    Metric("episode/inserted_fraction", "fraction", "neutral",
        "Fraction of the tokens behind the first sampled one that the model was given between its turns, such as the "
        "results of tools. They are forwarded with their recorded routes, and are in no loss.",
        "Near 1: training computes mostly what the model did not say.",
        "when measured"),
    Metric("episode/failed", "episodes", "must be 0",
        "Episodes without a reward, because the environment raised, hung, crashed or returned none. They are not "
        "trained on, and failed_episodes.log of the run folder has their tracebacks.",
        "Above 0: mend the environment. Above task.max_failed_fraction the run ends.",
        "when measured"),
)
# fmt: on
