"""Provides the kind `reasoning_gym` of a reward: the scorer of the data set that generated the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moe_rl.tasks.rewards import find_answer

_Scorer = Callable[[str | None, dict[str, Any]], float]


def reasoning_gym(*, answer_in: str, options: Mapping[str, Mapping[str, Any]]) -> Callable[..., float]:
    """Return the reward function.

    Args:
        options: settings of the generators by task name, {} by default; some scorers use them.
    """
    from reasoning_gym import create_dataset  # an optional library, imported where a config asks for it
    from reasoning_gym.factory import DATASETS

    scorers: dict[str, _Scorer] = {}

    def gym_score(
        completion: str, question: str, answer: object, metadata: dict[str, Any], stop_string: str | None = None
    ) -> float:
        """Return the scorer's value for the completion's answer, between 0 and 1.

        Raises:
            ValueError: the row has no scorer, or the scorer does not give the row's own answer 1. Some scorers compare
                tuples, which JSON rows do not have: they would find every answer wrong.
        """
        task = str(metadata.get("source_dataset"))
        entry = {"question": question, "answer": answer, "metadata": metadata}
        if task not in scorers:
            if task not in DATASETS:
                raise ValueError(f"metadata.source_dataset is not a task of reasoning-gym: {task!r}")
            scorer = create_dataset(task, **options.get(task, {})).score_answer
            if isinstance(answer, str) and (own := scorer(answer, entry)) != 1:
                raise ValueError(f"the scorer of {task} gives the row's own answer {own:g}, expected 1")
            scorers[task] = scorer
        return float(scorers[task](find_answer(completion, answer_in, stop_string), entry))

    return gym_score
