"""Defines a client's requests to the gateway and the replies, in any dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moe_rl.gateway.answer_grammar import Constraint
from moe_rl.gateway.rendering import Message, ParsedAnswer
from moe_rl.gateway.sessions import Turn
from moe_rl.types import Drawing


class BadRequest(Exception):
    """A request that the gateway does not answer. The text is for the client.

    Attributes:
        field: the faulty field of the body; "" for the whole body.
        status: HTTP status.
        code: names the fault for programs.
    """

    def __init__(self, text: str, field: str = "", *, status: int = 400, code: str = "invalid_value"):
        super().__init__(text)
        self.field, self.status, self.code = field, status, code

    @property
    def told(self) -> str:
        """Return the text with the field before it."""
        return f"{self.field}: {self}" if self.field else str(self)


@dataclass(frozen=True, slots=True)
class SamplingWish:
    """Holds a client's sampling parameters, as in types.GenerateRequest.

    Attributes:
        max_tokens: None: as many as there is room for.
        seed: None: derived from the session and the turn's number.
        samples: completions of the prompt.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    samples: int = 1
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """Sets the sampling parameters of all completions of a session, overriding the client's.

    Attributes:
        longest: maximum tokens of a completion. A client may request fewer.
    """

    drawing: Drawing
    longest: int

    def applied(self, wish: SamplingWish) -> SamplingWish:
        """Return a client's wish under this rule. Its seed is dropped: it would make all episodes of a group alike."""
        most = self.longest if wish.max_tokens is None else min(self.longest, wish.max_tokens)
        return replace(wish, **asdict(self.drawing), max_tokens=most, seed=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Holds the common fields of all requests for completions.

    Attributes:
        model: the name that the client used. Any is accepted, as there is one model.
        logprobs: whether the reply includes log-probabilities.
        stream, usage: whether the reply is a stream, and whether its end reports the number of tokens.
        names: the request's names of its fields and those of messages, where they differ from the ones here.
    """

    model: str
    sampling: SamplingWish
    names: Mapping[str, str] = field(default_factory=dict)
    logprobs: bool = False
    stream: bool = False
    usage: bool = False

    def named(self, name: str) -> str:
        """Return the request's name of a field."""
        return self.names.get(name, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWish(Wish):
    """Requests the next message of a chat.

    Attributes:
        tools: in OpenAI's form.
        places: the place of each message in the request.
        constraint: what the answer must be; None: anything.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    places: tuple[str, ...]
    constraint: Constraint | None = None

    def named(self, name: str) -> str:
        """Return the request's name of a field. `grammar` is the field that constrains the answer."""
        if name == "grammar" and self.constraint is not None and self.constraint.schema is None:
            return "tool_choice" if self.constraint.forced or self.constraint.barred else "tools"
        return Wish.named(self, name)

    def place(self, number: int | None, name: str) -> str:
        """Return the place of a message's field in the request; number None: that of a field of the request."""
        return self.named(name) if number is None else f"{self.places[number]}.{self.named(name)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWish(Wish):
    """Requests a continuation of a text or token ids. echo: whether the reply begins with the prompt."""

    prompt: str | tuple[int, ...]
    echo: bool = False


@dataclass(frozen=True, slots=True)
class SaidToken:
    """Holds one sampled token for a reply.

    Attributes:
        text: its text, with U+FFFD for a part of a character.
        bytes: the same as UTF-8, with the actual bytes of that part. The bytes of all tokens joined are the text.
    """

    text: str
    logprob: float
    bytes: bytes


@dataclass(frozen=True, slots=True)
class AgentReply:
    """Holds one completion for a client.

    Attributes:
        turn: number of the turn in the session.
        prompt_tokens: number of tokens of the whole prompt.
        answer: the message, for a chat.
        use_ids: ids of its tool calls.
        text: the text, otherwise.
        tokens: the sampled tokens, without the one that ended it; empty if not requested.
        stop: the stop string that ended it.
        echoed: number of characters of the prompt with which the text begins.
    """

    turn: Turn
    prompt_tokens: int
    answer: ParsedAnswer
    use_ids: tuple[str, ...]
    text: str
    tokens: Sequence[SaidToken]
    stop: str | None
    echoed: int = 0

    @property
    def truncated(self) -> bool:
        """Return whether it ended for lack of room."""
        return self.turn.finish_reason == "length"
