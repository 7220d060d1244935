"""Defines the section `task.rewards`, with one model for each kind: a key of another kind is an unknown key."""

from __future__ import annotations

import re
from keyword import iskeyword
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Tag
from pydantic_core import PydanticCustomError

from moe_rl.config.section import NotNegative, Reward, Seconds, Section, chosen_by, members

# First and longest wait in seconds between attempts at a remote verifier. Each wait is twice the wait before.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0
# Time that a machine under load may need to send and receive, besides the limits of the attempts themselves.
_SLACK_SECONDS = 5.0


def _post_address(url: str) -> str:
    """Refuse a text that is not a URL to post to, and a URL with a password, which the run folder would show."""
    try:
        parts = urlsplit(url)
        plain = bool(parts.hostname) and parts.port != 0 and parts.username is None and not parts.fragment
    except ValueError:
        plain = False
    if not plain or parts.scheme not in ("http", "https") or not re.fullmatch(r"[!-~]+", url):
        raise PydanticCustomError("url", "an http:// or https:// URL without user, password and fragment")
    return url


def _argument_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names) or not all(name.isidentifier() and not iskeyword(name) for name in names):
        raise PydanticCustomError("names", "names that a function's parameters can have, each once")
    return names


class RewardConfig(Section):
    """Defines the keys that all kinds share."""

    factory: ClassVar[str] = ""
    """Dotted path of a callable that takes `settings` and returns the reward function."""
    library: ClassVar[tuple[str, str] | None] = None
    """Module that the kind needs, and the extra of moe_rl that installs it."""
    argument_advice: ClassVar[tuple[str, ...]] = ()
    """Advice for an argument that the rows do not have. (): the arguments of the kind are fixed."""
    reads_answer: ClassVar[bool] = False
    """Whether it fails for an `answer` that it cannot read, whatever the completion is."""

    kind: str = "function"
    """Kind of the reward. Each kind has its own keys, in the tables below."""
    weight: Reward = 1.0
    """Weight in the reward of a completion, which is the weighted sum of all rewards."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the keys of this kind."""
        return {key: getattr(self, key) for key in type(self).model_fields if key not in RewardConfig.model_fields}

    @property
    def batch(self) -> int | None:
        """Return the largest number of completions in one call, as lists; None: one completion, no lists."""
        return None

    @property
    def limit_seconds(self) -> float | None:
        """Return the time limit of one call; None: task.verifier_timeout_seconds."""
        return None


class FunctionReward(RewardConfig):
    """Calls a Python function of yours. docs/howto/own_task.md lists the arguments that it may name."""

    argument_advice = ("rename the parameter", "give it a default")

    kind: Literal["function"] = "function"
    """Kind of the reward."""
    function: str
    """Dotted path of a function, plain or async, that returns a number. It gets the arguments that it names."""
    batch_size: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Largest number of completions in one call. Each argument is then a list with one item per completion, and the
    function returns a list of numbers. An exception object in that list fails only its own completion; an exception
    that is raised fails all of them. null: one completion per call, and no lists."""

    @property
    def batch(self) -> int | None:
        return self.batch_size


class AnswerReward(RewardConfig):
    """Defines the key of the kinds that look for an answer in the completion."""

    answer_in: Literal["completion", "tags", "box"] = "completion"
    """Place of the answer. completion: all of it. tags: inside the last `<answer>...</answer>`. box: inside the
    last `\\boxed{...}`."""


class ExactReward(AnswerReward):
    """Gives 1 if the answer of the completion is the text of the column `answer`, and 0 otherwise. White space at both
    ends does not count."""

    factory = "moe_rl.tasks.rewards.exact"
    reads_answer = True

    kind: Literal["exact"]
    """Kind of the reward."""


class NumericReward(AnswerReward):
    """Gives 1 if the answer of the completion is the number in the column `answer`, and 0 otherwise.
    docs/howto/own_task.md says which spellings are numbers."""

    factory = "moe_rl.tasks.rewards.numeric"
    reads_answer = True

    kind: Literal["numeric"]
    """Kind of the reward."""
    tolerance: NotNegative = 0.0
    """Largest difference to the right number that still counts as equal."""
    relative_tolerance: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """The same as a fraction of the right number. The larger of the two limits counts."""


class MathVerifyReward(RewardConfig):
    """Gives 1 if the completion's mathematical answer equals the LaTeX in the column `answer`, and 0 otherwise, as the
    library math-verify finds and compares them."""

    factory = "moe_rl.tasks.math_reward.math_verify"
    library = ("math_verify", "math")
    reads_answer = True

    kind: Literal["math_verify"]
    """Kind of the reward."""


class ReasoningGymReward(AnswerReward):
    """Gives the score of reasoning-gym's own scorer, for prompts of its generators. 1 is right; many scorers give a
    little for an answer that is almost right."""

    factory = "moe_rl.tasks.gym_reward.reasoning_gym"
    library = ("reasoning_gym", "tasks")

    kind: Literal["reasoning_gym"]
    """Kind of the reward."""


class RemoteReward(RewardConfig):
    """Asks a server to score each completion. If the server cannot be reached, the verification fails, which is not a
    reward of 0. docs/howto/own_task.md gives the protocol."""

    factory = "moe_rl.tasks.remote_reward.remote"
    argument_advice = ("correct the name in `arguments`",)

    kind: Literal["remote"]
    """Kind of the reward."""
    url: Annotated[str, AfterValidator(_post_address)]
    """Where each completion is sent by POST: http:// or https://, without user and password."""
    arguments: Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_argument_names)]
    """Names of the arguments that are sent, as a function would name them."""
    timeout_seconds: Seconds = 10.0
    """Time limit of one attempt."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Number of attempts. Another attempt follows a timeout, a lost connection, and the statuses 408, 429 and 5xx,
    after a wait of 0.5 seconds that doubles each time, up to 8."""
    concurrent_requests: Annotated[int, Field(ge=1, le=1024)] = 32
    """Number of requests that one verifier process sends at a time."""

    @property
    def waits(self) -> list[float]:
        """Return the seconds to wait before each attempt but the first."""
        return [min(_FIRST_WAIT * 2**number, _LONGEST_WAIT) for number in range(self.attempts - 1)]

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "arguments": list(self.arguments),
            "timeout_seconds": self.timeout_seconds,
            "waits": self.waits,
        }

    @property
    def batch(self) -> int | None:
        return self.concurrent_requests

    @property
    def limit_seconds(self) -> float | None:
        return self.attempts * self.timeout_seconds + sum(self.waits) + _SLACK_SECONDS


AnyReward = Annotated[
    Annotated[FunctionReward, Tag("function")]
    | Annotated[ExactReward, Tag("exact")]
    | Annotated[NumericReward, Tag("numeric")]
    | Annotated[MathVerifyReward, Tag("math_verify")]
    | Annotated[ReasoningGymReward, Tag("reasoning_gym")]
    | Annotated[RemoteReward, Tag("remote")],
    chosen_by("kind", "function"),
]
KINDS: dict[str, type[RewardConfig]] = members(AnyReward)
