"""Computes pass rates of held-out prompts, each with a confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from moe_rl.config.prompt_sources import HeldoutSourceConfig

_Z = 1.959964  # the normal distribution has 95% of its mass within this many standard deviations


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Records which completions of a held-out prompt passed. None means that verification failed.

    Attributes:
        greedy: the completion at temperature 0; empty if none was requested.
    """

    source: HeldoutSourceConfig
    level: str | None
    samples: Sequence[bool | None]
    greedy: Sequence[bool | None] = ()


def pass_at(k: int, samples: int, passed: int) -> float:
    """Estimate without bias the probability that at least one of k samples of a prompt passes.

    The estimate is the share of all choices of k among the samples in which one passes:
    1 - C(samples - passed, k) / C(samples, k), equation 1 of Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", arXiv 2107.03374. It needs k <= samples.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def interval(values: Sequence[float], samples: int) -> tuple[float, float]:
    """Return the ends of the 95% confidence interval of a mean over prompts.

    Samples of one prompt are correlated, so prompts are the clusters and the spread is over their values. It gives the
    effective sample size, for which the interval of Agresti and Coull (1998) is computed. Unlike mean +- 1.96 standard
    errors it has a width even if all prompts pass. It contains Wilson's interval, which is too short for a true rate
    near 0 or 1: with 30 prompts at a rate of 0.9946 it covers the rate 85 times in 100. With few prompts the normal
    quantile is widened to Student's by the first term of its expansion.

    Args:
        values: one in [0, 1] for each prompt.
        samples: upper bound on the independent trials in all values together.

    Returns:
        Two numbers in [0, 1]; NaN without a value.
    """
    prompts = len(values)
    if not prompts:
        return math.nan, math.nan
    mean = statistics.fmean(values)
    if math.isnan(mean):  # min and max below would ignore it
        return math.nan, math.nan
    error = statistics.variance(values) / prompts if prompts > 1 else 0.0
    alike = mean in (0.0, 1.0) or prompts == 1  # the spread is unknown: a prompt counts as one sample
    number = prompts if alike else min(samples, mean * (1 - mean) / error) if error else samples
    z = _Z * (1 + (_Z**2 + 1) / (4 * max(1, prompts - 1)))
    centre = (mean * number + z**2 / 2) / (number + z**2)
    half = z * math.sqrt(centre * (1 - centre) / (number + z**2))
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


@dataclass(slots=True)
class _Rate:
    """Collects the values of a metric: one for each prompt, from a number of independent trials, each of k samples."""

    values: list[float] = field(default_factory=list)
    samples: int = 0

    def add(self, passed: Sequence[bool | None], k: int = 1) -> None:
        """Add pass@k of a prompt, if enough of its samples could be verified. pass@1 is the share that passed."""
        known = [outcome for outcome in passed if outcome is not None]
        if len(known) >= k:
            self.values.append(pass_at(k, len(known), sum(known)))
            self.samples += len(known) // k


def eval_metrics(results: Sequence[PromptResult]) -> dict[str, float]:
    """Return the metrics of an evaluation: means over prompts, and the ends of their intervals.

    A metric is NaN if no completion could be verified.
    """
    rates: dict[str, _Rate] = {}
    several = len({result.source.name for result in results}) > 1
    for result in results:
        of_all = ["pass_rate", *([f"source/{result.source.name}"] if several else [])]
        for name in of_all if result.level is None else [*of_all, f"level/{result.level}"]:
            rates.setdefault(name, _Rate()).add(result.samples)
        if result.source.greedy:
            rates.setdefault("pass_rate_greedy", _Rate()).add(result.greedy)
        for k in result.source.pass_at:
            rates.setdefault(f"pass_at/{result.source.name}/{k}", _Rate()).add(result.samples, k)
    metrics: dict[str, float] = {}
    for name, rate in sorted(rates.items()):
        low, high = interval(rate.values, rate.samples)
        mean = statistics.fmean(rate.values) if rate.values else math.nan
        metrics |= {f"eval/{name}": mean, f"eval/low/{name}": low, f"eval/high/{name}": high}
    return metrics
