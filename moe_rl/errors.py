"""Defines the exception tree and the form of its messages.

The tree has one root, so that commands turn every expected failure into one clear message. A message says what is
wrong, where, what was got, what was expected and what to do. An error takes these parts and keeps them as data:
`error.about` names the config key, file, rank or layer. Tests and callers read these parts and never the wording.

The parts survive pickling. Only the text crosses a process boundary by msgspec or by stderr.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from typing import Self, Unpack  # Python 3.11

_SHOWN = 5

Fact = Literal[
    "key",  # dotted config key
    "option",  # command-line option
    "argument",  # argument of a function
    "setting",  # of Megatron or vLLM
    "part",  # of the installation
    "given",  # the setting that makes another setting wrong, as "key is value"
    "override",  # a.b=c, as it was typed
    "field",  # of a file or reply
    "file",
    "folder",
    "other",  # folder compared with `folder`
    "line",  # in the file, from 1
    "row",  # of a table, from 0
    "host",
    "url",
    "call",  # method and path of a request to a server
    "server",  # its number
    "sampler",  # its name
    "pid",
    "log",  # file
    "run",  # what the replay pass is for: "step 3 update 0"
    "pass",  # number in a file of passes
    "step",
    "update",
    "version",  # of the weights
    "rank",
    "stage",  # of the pipeline
    "shard",
    "record",  # key of a record
    "request",  # key of a request or sequence
    "parent",  # key of the request that it continues
    "array",
    "sequence",  # number in a list
    "completion",  # number in a step
    "group",  # number of its prompt
    "session",  # its name
    "turn",  # of the session, from 0
    "set",  # of experts, number in a list
    "token",  # position in the sequence, the step or the chunk
    "tokens",  # range of positions
    "position",
    "slot",
    "block",
    "bytes",  # range in the file
    "layer",  # global number
    "layers",
    "expert",
    "microbatch",
    "tensor",
    "metric",
    "lr",  # learning rate of the last update
    "staleness",  # how many versions the weights that routed the oldest row lag the trainer's
    "power",  # of a test, 0 to 1
    "case",  # name of a proof's case
    "patch",
]
"""Names of the facts that a message can carry."""

About = Mapping[Fact, object]

_LEADING = ("key", "option", "argument", "setting", "part")
_BARE = ("given", "field", "file", "folder", "host", "url", "run", "sampler")
_NOTHING: dict[Fact, int | str] = {}


class Problem(str):
    """Holds the text of a message and keeps its parts as data.

    about: named facts, integers as int and everything else as text. fault: constant name of the fault, "" where the
    exception type and `about` identify it. got, expected: as text, "" if absent.
    """

    about: Mapping[Fact, int | str] = _NOTHING
    fault: str = ""
    got: str = ""
    expected: str = ""


class Parts(TypedDict, total=False):
    """The parts of a message besides its problem.

    Attributes:
        where: Named facts.
        fault: Constant name, for faults that share the exception type and `where`.
    """

    where: About
    got: object
    expected: object
    do: str
    fault: str


def describe(what: str, **parts: Unpack[Parts]) -> Problem:
    """Lay out one message: key: what (where): got X, expected Y. Do Z."""
    about = {name: _plain(value) for name, value in parts.get("where", {}).items()}
    got, expected, do = parts.get("got"), parts.get("expected"), parts.get("do", "")
    lead = "".join(f"{value}: " for name, value in about.items() if name in _LEADING)
    place = _place(about)
    text = f"{lead}{what} ({place})" if place else f"{lead}{what}"
    facts = []
    if got is not None:
        facts.append(f"got {got}")
    if expected is not None:
        facts.append(f"expected {expected}")
    if facts:
        text += ": " + ", ".join(facts)
    if do:
        text += f". {do[0].upper()}{do[1:]}"
    message = Problem(text)
    message.about, message.fault = about, parts.get("fault", "")
    message.got = "" if got is None else str(got)
    message.expected = "" if expected is None else str(expected)
    return message


def _plain(value: object) -> int | str:
    """Return an integer of any library as int, everything else as text."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return str(value)


def _place(about: About) -> str:
    """Return the text in parentheses: file:line, shard s0, layer 3."""
    text = ""
    for name, value in about.items():
        if name == "line":
            text += f":{value}"
        elif name not in _LEADING:
            text += (", " if text else "") + (f"{value}" if name in _BARE else f"{name} {value}")
    return text


def first_of(texts: Sequence[str], *, separator: str = "; ") -> str:
    """Join the first five texts for a message, and say how many more there are."""
    more = f"{separator}and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return separator.join(texts[:_SHOWN]) + more


def after_lr(lr: float | None) -> About:
    """Return the learning rate of the last update as a fact of a message; {} before the first update."""
    return {} if lr is None else {"lr": f"{lr:g}"}


def with_extra(name: str) -> str:
    """Say how to install moe_rl with an extra. No package index has moe_rl."""
    return f"run pip install '.[{name}]' in the folder of moe_rl's source"


def what_lacks(user: str, error: ImportError | SyntaxError, extra: str) -> str:
    """Say why a part of the package cannot be imported; "" if nothing is missing, so that the import itself is wrong.

    Args:
        user: the part, as in "moe-rl train".
        extra: the extra that brings what it needs.
    """
    if sys.version_info < (3, 12) and (extra in ("train", "serve") or not isinstance(error, ModuleNotFoundError)):
        return f"{user} needs Python 3.12, got {sys.version.split()[0]}"
    missing = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or missing in ("", "moe_rl"):
        return ""
    if missing == "vllm":  # no other extra has it: its builds for GPUs and for CPUs exclude each other
        return f"{user} needs vllm, which is not installed ({with_extra('gpu')}; without a GPU '.[cpu]')"
    return f"{user} needs {missing}, which is not installed ({with_extra(extra)})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean NAME?" with the closest known name, for a message; "" if none is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


class MoeRLError(Exception):
    """Serves as root of everything moe_rl raises on purpose. Tools print it as one message and exit 2.

    everywhere: whether every rank raises an error here: this one, or one that says why another rank raised it. The
    ranks may then continue together.
    kind: type of the error, or of that of another rank, if this one says why that rank raised it.
    """

    everywhere = False
    kind = "MoeRLError"

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__

    def __init__(self, what: str = "", **parts: Unpack[Parts]):
        """what: a whole message, or the problem if there are parts: see `describe`."""
        super().__init__(describe(what, **parts) if parts else what)

    def by_all(self) -> Self:
        """Set `everywhere`: every rank raises this error, because all compared the same values. Return it."""
        self.everywhere = True
        return self

    @property
    def message(self) -> Problem:
        """Return the message with its parts; it has none if the error was raised with a plain text."""
        text = self.args[0] if self.args else ""
        return text if isinstance(text, Problem) else Problem(text)

    @property
    def about(self) -> Mapping[Fact, int | str]:
        """Return named facts of the message, such as {"shard": "s0", "record": "r1"}."""
        return self.message.about


class _Problems(MoeRLError):
    """Carries every problem found, not only the first.

    `message` and `about` are those of the first problem. Each item of `problems` has its own `about`.
    """

    def __init__(self, problems: Sequence[str] | str, **parts: Unpack[Parts]):
        texts = [describe(problems, **parts) if parts else problems] if isinstance(problems, str) else problems
        self.problems = [problem if isinstance(problem, Problem) else Problem(problem) for problem in texts]
        super().__init__("\n".join(self.problems))

    @property
    def message(self) -> Problem:
        """Return the first problem."""
        return self.problems[0] if self.problems else Problem()


class ConfigError(_Problems, ValueError):
    """The config, or the files it names, cannot be run."""


class DataError(_Problems, ValueError):
    """A prompt file or a kept rollout is damaged or lacks a part."""


class ArgumentError(ValueError):
    """A function was called with a wrong argument: a fault of the caller, which no command turns into a message."""

    def __init__(self, what: str, **parts: Unpack[Parts]):
        super().__init__(describe(what, **parts) if parts else what)


class DiskError(MoeRLError):
    """A file could not be written. The message names it, says whether the disk is full, and how much is free."""


class TraceError(MoeRLError):
    """A routing trace is missing, damaged or misused. The message names shard and record."""


class TraceDiskError(TraceError, DiskError):
    """A shard could not be written, and no part of it is left."""


class RouteValidationError(TraceError, ValueError):
    """Routes may not be trained on. The message names request, token and layer."""


class SupportError(TraceError, ValueError):
    """A recorded sampling support may not be trained on. The message names request and token."""


class ReplayError(MoeRLError):
    """Replay was not exact: a route was missed or repeated, or another route was dispatched."""


class EngineError(_Problems):
    """The sampler refused a request, answered wrongly or died. The message names the process and its log."""


class RequestRefused(EngineError):
    """A working sampler cannot do this call: the request, or the record of it, is at fault. No other server could."""


def is_refusal(error: Exception) -> bool:
    """Return whether an error means that a call is at fault, and not the process that answers it or its disk."""
    return isinstance(error, RequestRefused | TraceError) and not isinstance(error, DiskError)


class SessionError(MoeRLError):
    """A session has reached a limit, or its turns and their records do not fit together. The message names the session,
    and the turn."""


class PipelineError(MoeRLError):
    """The pool of groups broke one of its own rules. The message names the group."""


class SamplerGone(EngineError):
    """A sampler died, hangs, or lost the run's weights, and the run cannot continue without it. Tools exit 3."""


class WeightSyncError(EngineError):
    """The sampler does not hold what the trainer sent, or the trainer would send other weights than it trains."""


class PatchError(_Problems):
    """The installed vLLM is not the version, or not in the state, that a patch series needs."""


class RewardError(MoeRLError):
    """Too many verifications failed (raised, hung or died) to continue."""


class NonFiniteError(MoeRLError):
    """The trainer computes non-finite values: update after update was skipped, or router scores are NaN."""


class CollapseError(MoeRLError):
    """The run is lost: its metrics show that no further step can recover it. Tools exit 4."""


class CheckpointError(MoeRLError):
    """A checkpoint is missing, incomplete, damaged or from another run."""


class Stopped(MoeRLError):
    """The run ended before its last step, on request or because its time was up. A checkpoint holds its work. Tools
    exit 5."""
