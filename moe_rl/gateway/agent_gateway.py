"""Answers agents: takes messages or text, samples and records a turn of their session, and replies.

    messages --- Dialogues ----> the turn that they continue
             --- ChatRenderer -> token ids: those of that turn, then the new messages
    request  --- AgentExchanges > the reply of an equal request, if it did not arrive
    token ids -- Session ------> place in the tree, limits
              -- TurnSampler --> completion, record in the trace store
    completion - ChatRenderer -> text, reasoning, tool calls

Routes never come here: a turn has only a reference to its record, and a reply not even that.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from moe_rl.errors import DataError, DiskError, RequestRefused, SessionError, TraceError
from moe_rl.gateway.answer_grammar import markers_of
from moe_rl.gateway.asking import AgentReply, BadRequest, ChatWish, SaidToken, SamplingRule, TextWish
from moe_rl.gateway.dialogues import Dialogues
from moe_rl.gateway.exchanges import AgentExchange, AgentExchanges, ClientCall
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.rendering import ChatRenderer, ParsedAnswer
from moe_rl.gateway.session_journal import ReceivedEntry, RepliesEntry, SessionJournals, TurnsEntry
from moe_rl.gateway.session_keys import OpenedSession, SessionBook, hash_key
from moe_rl.gateway.sessions import FinishedSession, PendingTurns, Session, SessionLimits, Turn
from moe_rl.gateway.shared_shard import SharedShard
from moe_rl.gateway.turn_sampler import TurnSampler
from moe_rl.rollout.sampler import nobody
from moe_rl.tasks.shown_messages import NotShown
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.types import Completion

# A client that hangs up with the reply unread does so within this time. Balancers reset idle connections much later.
_UNREAD_SECONDS = 5.0
# How many tokens a message shows from where two prompts diverge.
_TOLD = 12
# Bodies below this size are read and rendered in the event loop, within a fifth of a second. So concurrent requests of
# a session keep their order, from which their seeds derive.
_SMALL_BODY = 1 << 14
# Bodies of at least this size are read and rendered two at a time, so that smaller ones find a free thread.
_LARGE_BODY, _LARGE_AT_ONCE = 1 << 18, 2
_NOTHING_SAID = ParsedAnswer("", "", (), 0)


class AgentGateway:
    """Serves the sessions of one model.

    Attributes:
        model: its name in replies.
        book: the open sessions.
        shard: see the argument.
        counts: `repeated`: requests that got the undelivered reply of an equal one; `unstable`: turns
            whose messages continue a turn while their tokens do not, because the chat template now writes the earlier
            messages differently; `other_system`: requests that failed to continue a turn only because the system prompt
            differed; `unreadable` tool calls; `left`: requests aborted because their client went away; `reopened`
            sessions of a killed gateway; `not_reopened`: those whose journal or records are faulty.

    Args:
        journals: get each turn before its reply is returned. None: open sessions end with the gateway.
        stop_token_ids: tokens that end a completion besides those of the renderer.
        shard: gets the records of all turns; None: the caller sets each session's shard.
    """

    def __init__(
        self,
        model: str,
        renderer: ChatRenderer,
        codec: TextCodec,
        turns: TurnSampler,
        book: SessionBook,
        journals: SessionJournals | None,
        stop_token_ids: Sequence[int],
        shard: SharedShard | None = None,
    ):
        self.model, self.book, self.turns, self.shard = model, book, turns, shard
        self.counts: Counter[str] = Counter(
            unstable=0, other_system=0, unreadable=0, left=0, repeated=0, reopened=0, not_reopened=0
        )
        self._journals = journals
        self._renderer, self._codec = renderer, codec
        self._text_stops = tuple(stop_token_ids)
        self._chat_stops = tuple(dict.fromkeys((*renderer.stop_token_ids, *stop_token_ids)))
        self._dialogues: dict[str, Dialogues] = {}
        self._exchanges = AgentExchanges()
        self._rules: dict[str, SamplingRule] = {}
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)

    def open(
        self,
        group: str,
        limits: SessionLimits | None = None,
        *,
        name: str | None = None,
        rule: SamplingRule | None = None,
    ) -> OpenedSession:
        """Open a session of a group.

        Args:
            name: see SessionBook.open.
            rule: how its completions are sampled; None: with the client's parameters.

        Raises:
            SessionError: too many are open.
            DiskError: its journal cannot be written.
        """
        opened = self.book.open(group, now=_now(), limits=limits, name=name)
        opened.session.shard = None if self.shard is None else self.shard.name
        try:
            if self._journals is not None:
                self._journals.open(opened.session, hash_key(opened.key), time.time())
        except DiskError:
            self.book.close(opened.session)
            raise
        if rule is not None:
            self._rules[opened.session.name] = rule
        return opened

    def reopen(self, keeper: SessionKeeper) -> list[str]:
        """Reopen the sessions of a killed gateway, and number new ones after all that it opened. Returns what is wrong
        with those that cannot be reopened.

        Args:
            keeper: holds the finished sessions and checks the records of open ones.
        """
        problems, journals = [], self._journals
        assert journals is not None  # without journals there is nothing to reopen
        self.book.number_after([*keeper.names(), *journals.names()])
        for name in journals.names():
            if keeper.has(name):
                journals.remove(name)  # the gateway was killed just as the session was finished
                continue
            try:
                journaled = journals.read(name, now=time.time(), clock=_now())
                keeper.check_records(journaled.session)
                journals.go_on(journaled)
            except (DataError, SessionError, TraceError, DiskError) as error:
                self.counts["not_reopened"] += 1
                problems.append(f"session {name} cannot be reopened: {error}")
                continue
            self.counts["reopened"] += 1
            journaled.session.shard = None if self.shard is None else self.shard.name
            self.book.reopen(journaled.session, journaled.key_hash)
            self._dialogues[name] = Dialogues()
            self._dialogues[name].restore(journaled.replies)
            for request, turns in journaled.requests:
                self._exchanges.add(journaled.session, AgentExchange(request, turns))
        return problems

    def end(self, session: Session) -> FinishedSession:
        """End a session, so that it takes no more turns, and return it.

        Raises:
            SessionError: one of its requests is still being sampled, or the reply is being sent.
        """
        if session.busy:
            raise SessionError(
                "A session is still busy",
                where={"session": session.name},
                do="wait for its requests",
                fault="busy",
            )
        session.ended = True
        return session.finish()

    def abort(self, session: Session) -> None:
        """Abort the requests of a session, and refuse new ones. Its key becomes invalid."""
        session.ended = True
        self.book.close(session)
        self._exchanges.abort(session)

    def forget(self, session: Session) -> None:
        """Forget a session that has ended. Its key becomes invalid."""
        if self._journals is not None:
            self._journals.remove(session.name)
        self.book.close(session)
        self._dialogues.pop(session.name, None)
        self._exchanges.forget(session)
        self._rules.pop(session.name, None)

    async def answer(self, session: Session, wish: ChatWish | TextWish, call: ClientCall) -> AgentExchange:
        """Sample a client's request, or find the result of its equal earlier request.

        Returns the exchange with its replies: one per sample, or none if it was aborted. The caller sends them, and
        calls `sent` in any case.

        Raises:
            BadRequest: the messages or parameters cannot be served, a limit of the session is reached, or it has ended.
            EngineError: the sampler failed.
            DiskError: the journal cannot be written.
        """
        while (earlier := self._exchanges.repeated(session, call)) is not None:
            if earlier.replies is None:  # so it must be sampled again, and the agent never got the old reply
                self._tell_received(session, earlier.turns, received=False)
                break
            earlier.enter(call)
            try:
                if await asyncio.shield(earlier.replies):
                    self._reserve_again(session, earlier)
                    self.counts["repeated"] += 1
                    return earlier
            except BaseException:
                earlier.exit(call)
                raise
        if session.ended or self.book.named(session.name) is not session:  # it ended while the body was read
            raise BadRequest("the session has ended", code="session_limit")
        exchange = AgentExchange(call.request)
        self._exchanges.add(session, exchange)
        exchange.enter(call)
        replies: list[AgentReply] = []
        session.under_way += 1
        try:
            if isinstance(wish, ChatWish):
                replies = await self._chat(session, wish, exchange, call.size)
            else:
                replies = await self._complete(session, wish, exchange, call.size)
        finally:
            session.under_way -= 1
            self.counts["left"] += int(exchange.leave.is_set())
            assert exchange.replies is not None
            exchange.replies.set_result(replies)
            if not replies:
                self._release(session, exchange)
                self._exchanges.drop(session, exchange)
        return exchange

    async def off_loop[**P, R](self, size: int, work: Callable[P, R], *given: P.args, **more: P.kwargs) -> R:
        """Run work on a request, in a thread unless it is small, so that the event loop answers others meanwhile.

        size: the bytes of the request's body.
        """
        if size < _SMALL_BODY:
            return work(*given, **more)
        async with self._large if size >= _LARGE_BODY else nullcontext():
            return await asyncio.to_thread(work, *given, **more)

    def sent(self, session: Session, exchange: AgentExchange, call: ClientCall) -> None:
        """Note that the replies were sent completely, if the client is still there, or that nobody received them."""
        exchange.exit(call)
        if not call.gone:
            exchange.readers.add(call)
            self._tell_received(session, exchange.turns, received=True)
            call.on_leave(lambda: self._unread(session, exchange, call))
            asyncio.get_running_loop().call_later(_UNREAD_SECONDS, call.on_leave, nobody)
        if not (call.gone and exchange.waited_for):
            self._release(session, exchange)

    def _unread(self, session: Session, exchange: AgentExchange, call: ClientCall) -> None:
        """Note that a client left without reading the replies. Another may have read them."""
        exchange.readers.discard(call)
        if not exchange.readers:
            self._tell_received(session, exchange.turns, received=False)

    def _tell_received(self, session: Session, turns: Sequence[int], *, received: bool) -> None:
        news = [] if session.ended else session.tell_received(turns, received)
        if news and self._journals is not None:
            with suppress(DiskError):  # it is written with the next entry
                self._journals.add(session, ReceivedEntry(news, received))

    def _reserve_again(self, session: Session, exchange: AgentExchange) -> None:
        """Reserve again the limits that an exchange's turns use, if nobody has received them."""
        turns = [session.turns[number] for number in exchange.turns]
        if exchange.place is None and not any(turn.received for turn in turns):
            most = max(len(turn.token_ids) for turn in turns)
            exchange.place = self._begin(session, session.prompt(turns[0].number), len(turns), most)

    def _release(self, session: Session, exchange: AgentExchange) -> None:
        if exchange.place is not None:
            session.drop(exchange.place)
            exchange.place = None

    async def count(self, session: Session, wish: ChatWish, size: int) -> int:
        """Return the number of tokens of the prompt that a chat would have now. size: the bytes of the request's body.

        Raises BadRequest if the messages cannot be served.
        """
        self._refuse_unserved(wish)
        dialogues = self._dialogues.get(session.name, Dialogues())
        prompt, *_ = await self.off_loop(size, self._prompt, session, dialogues, wish)
        return len(prompt)

    def _refuse_unserved(self, wish: ChatWish) -> None:
        if wish.tools and not self._renderer.reads_tools:
            raise BadRequest(
                "this gateway's renderer finds no tool calls: set gateway.renderer to one of the model's family",
                "tools",
                code="unsupported_parameter",
            )
        most, parts = self.turns.bounds.max_model_len, len(wish.messages) + len(wish.tools)
        if parts > most:  # each has at least one token, and rendering this many takes seconds
            raise BadRequest(
                f"the chat has {parts} messages and tools, and the model takes {most} tokens in all",
                wish.named("messages"),
                code="context_length_exceeded",
            )

    async def _chat(self, session: Session, wish: ChatWish, exchange: AgentExchange, size: int) -> list[AgentReply]:
        self._refuse_unserved(wish)
        dialogues = self._dialogues.setdefault(session.name, Dialogues())
        prompt, continued, parted = await self.off_loop(size, self._prompt, session, dialogues, wish)
        wish = self._constrained(wish)
        if parted is not None:
            self._part(session, session.prompt(parted), prompt)
        replies = []
        new: dict[bytes, int] = {}
        for turn, completion in await self._turns(session, prompt, wish, self._chat_stops, exchange):
            self.counts["unstable"] += int(continued is not None and turn.parent != continued)
            answer = self._parsed(prompt, completion, wish)
            self.counts["unreadable"] += answer.unreadable
            use_ids = tuple(f"call_{secrets.token_hex(12)}" for _ in answer.uses)
            new |= dialogues.add(wish.messages, wish.tools, message_of(answer, use_ids), turn.number)
            tokens = self._tokens(completion) if wish.logprobs else ()
            replies.append(AgentReply(turn, len(prompt), answer, use_ids, "", tokens, completion.stop_string))
        if new and self._journals is not None:
            self._journals.add(session, RepliesEntry(new))
        return replies

    def _constrained(self, wish: ChatWish) -> ChatWish:
        """Return the wish with the grammar of its answer. Raises BadRequest if it cannot be followed."""
        if wish.constraint is None:
            return wish
        try:
            grammar = self._renderer.grammar.of(wish.constraint)
        except ValueError as error:
            raise BadRequest(str(error), wish.named("grammar"), code="unsupported_value") from None
        # vLLM ends an answer with an error where its grammar needs a stop token before the end.
        stops = {*self._text_stops, *wish.sampling.stop_token_ids} - {*self._renderer.stop_token_ids}
        if wrong := stops & markers_of(grammar):
            raise BadRequest(
                f"the answer's grammar needs token {min(wrong)}, a stop token here or in rollout.stop_token_ids",
                wish.named("stop_token_ids"),
                code="unsupported_value",
            )
        return replace(wish, sampling=replace(wish.sampling, grammar=grammar))

    def _parsed(self, prompt: tuple[int, ...], completion: Completion, wish: ChatWish) -> ParsedAnswer:
        """Parse a completion without the stop that ended it, unless the renderer reads that stop or it ends a call."""
        whole = self._renderer.parse(prompt, completion.token_ids, wish.tools)
        if completion.stop_string is None and completion.stop_token_id in (None, *self._renderer.stop_token_ids):
            return whole
        answer = self._renderer.parse(prompt, self._codec.before_stop(completion), wish.tools)
        return whole if len(whole.uses) > len(answer.uses) else answer

    async def _complete(self, session: Session, wish: TextWish, exchange: AgentExchange, size: int) -> list[AgentReply]:
        text = wish.prompt
        prompt = await self.off_loop(size, self._codec.encode, text) if isinstance(text, str) else text
        replies = []
        for turn, completion in await self._turns(session, prompt, wish, self._text_stops, exchange):
            echo = self._codec.decode(prompt) if wish.echo else ""
            said, stop = echo + self._codec.text(completion), completion.stop_string
            tokens = self._tokens(completion) if wish.logprobs else ()
            replies.append(AgentReply(turn, len(prompt), _NOTHING_SAID, (), said, tokens, stop, len(echo)))
        return replies

    def _prompt(
        self, session: Session, dialogues: Dialogues, wish: ChatWish
    ) -> tuple[tuple[int, ...], int | None, int | None]:
        """Return the token ids of a chat, the turn that its messages continue, and the turn that they would continue if
        the system prompt were the same. May run in a thread; changes nothing."""
        messages, tools = wish.messages, wish.tools
        try:
            if (prefix := dialogues.find(messages, tools)) is None:
                other = dialogues.find(messages, tools, any_system=True)
                return self._renderer.render(messages, tools), None, None if other is None else other[0]
            number, known = prefix
            completion = session.turns[number].token_ids
            extended = self._renderer.extend(session.prompt(number), completion, messages, tools, start=known)
            return extended or self._renderer.render(messages, tools, said=known), number, None
        except NotShown as error:
            raise BadRequest(str(error), wish.place(error.number, error.field), code="unsupported_value") from None
        except ValueError as error:
            raise BadRequest(str(error), wish.named("messages")) from None

    def _part(self, session: Session, before: tuple[int, ...], prompt: tuple[int, ...]) -> None:
        shorter = min(len(before), len(prompt))
        start = next((n for n in range(shorter) if before[n] != prompt[n]), shorter)
        was, now = (self._codec.decode(ids[start : start + _TOLD]) for ids in (before, prompt))
        self.counts["other_system"] += 1
        session.other_system += 1
        session.parting = (
            f"the system prompt differs from token {start} on, {now!r} after {was!r}, so the turn is a branch from the "
            "root. Keep text that changes with each request out of it"
        )

    async def _turns(
        self,
        session: Session,
        prompt: tuple[int, ...],
        asked: ChatWish | TextWish,
        stop_token_ids: Sequence[int],
        exchange: AgentExchange,
    ) -> list[tuple[Turn, Completion]]:
        """Sample a prompt, and add the turns to the session. Returns nothing if any of them was aborted."""
        wish, rule = asked.sampling, self._rules.get(session.name)
        if rule is not None:
            wish = rule.applied(wish)
        room = self.turns.room(prompt)
        if room < 1:
            raise BadRequest(
                f"the prompt has {len(prompt)} tokens, and the model takes {self.turns.bounds.max_model_len} in all",
                asked.named("messages"),
                code="context_length_exceeded",
            )
        wish = replace(wish, stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *wish.stop_token_ids))))
        most = room if wish.max_tokens is None else min(room, wish.max_tokens)
        place = exchange.place = self._begin(session, prompt, wish.samples, most)
        session.sampling += 1
        try:
            self.turns.check(place, wish)
            sampled, continues = await self.turns.sample(session, place, wish, exchange.leave)
        except RequestRefused as error:
            problem = error.message
            expected = f", expected {problem.expected}" if problem.expected else ""
            got = problem.got.removeprefix(f"{problem.fault} ")
            text = f"got {got}{expected}" if problem.fault else str(error)
            # Apart from its own record, the sampler itself refuses only a grammar.
            fault = problem.fault or ("grammar" if wish.grammar else "")
            raise BadRequest(text, asked.named(fault)) from None
        finally:
            session.sampling -= 1
            if self.shard is not None:
                self.shard.fresh = True
        # A completion that was aborted before its first token makes no turn.
        added = [(session.add(place, sample, continues=continues), sample) for sample in sampled if sample.token_ids]
        exchange.turns = [turn.number for turn, _ in added]
        if added and self._journals is not None:
            self._journals.add(session, TurnsEntry([turn for turn, _ in added], exchange.request))
        return [] if any(sample.finish_reason == "abort" for sample in sampled) else added

    def _begin(self, session: Session, prompt: tuple[int, ...], samples: int, most: int) -> PendingTurns:
        try:
            return session.begin(prompt, samples=samples, max_tokens=most, now=_now())
        except SessionError as error:
            raise BadRequest(str(error), code="session_limit") from None

    def _tokens(self, completion: Completion) -> list[SaidToken]:
        ids = completion.text_token_ids
        tokens = zip(ids, completion.logprobs.tolist(), self._codec.pieces(ids), strict=False)
        return [SaidToken(self._codec.decode([token]), logprob, piece) for token, logprob, piece in tokens]


def message_of(answer: ParsedAnswer, use_ids: Sequence[str]) -> dict[str, Any]:
    """Return the assistant's message in OpenAI's form."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.uses:
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": use.name, "arguments": use.arguments}}
            for name, use in zip(use_ids, answer.uses, strict=True)
        ]
    return message


def _now() -> float:
    return asyncio.get_running_loop().time()
