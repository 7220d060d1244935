"""Plays the episodes of a run through the run's own gateway and sampler.

    episode's process --- HTTP on this host ---> gateway, in an event loop --- token ids ---> sampler of the run
    all sessions of a call have ended -> their shard is published at each place
        -> each session is checked against the trace store and kept -> sequences to train on

A lost server's part of the shard is recovered from its file. An episode whose records are lost is played again.

Every session has its own key. The gateway listens on the loopback interface, unless task.environment.host names an
address that other hosts reach.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_rl.config.schema import Config
from moe_rl.disk import writing
from moe_rl.errors import EngineError, MoeRLError, SessionError
from moe_rl.gateway.agent_gateway import AgentGateway
from moe_rl.gateway.asking import SamplingRule
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.listening import GatewayListener
from moe_rl.gateway.rendering import ChatRenderer
from moe_rl.gateway.session_sequences import sequences_of
from moe_rl.gateway.sessions import FinishedSession, Session, SessionLimits
from moe_rl.gateway.shared_shard import DYING_SECONDS
from moe_rl.gateway.standalone import gateway_over
from moe_rl.gateway.web import GatewayApp
from moe_rl.models.facts import ModelFacts
from moe_rl.rollout.sampler import Sampler
from moe_rl.rollout.trajectories import EpisodeRequest, Trajectory
from moe_rl.tasks.environments.agent_session import SessionAccess
from moe_rl.tasks.environments.environment_pool import EnvironmentPool, Episode
from moe_rl.trace import TraceStore
from moe_rl.trace.recovery import recover_shard
from moe_rl.types import Verdict
from moe_rl.vllm.api_server import bound_socket, url_of

FAILURES = "failed_episodes.log"
# How long an aborted request may take to end, besides the time in which weights go in: these seconds, and this many
# times run.peer_timeout_seconds. A server that hangs meanwhile is noticed before, after at most 1.5 times that.
_BUSY_SECONDS, _BUSY_TIMEOUTS, _LOOK_SECONDS = 30.0, 2.5, 0.02


@dataclass(frozen=True, slots=True)
class _Ended:
    """Holds an episode that has ended."""

    asked: EpisodeRequest
    session: Session
    finished: FinishedSession
    episode: Episode


class EpisodeGateway:
    """Plays episodes in the event loop in which it is opened: an EpisodePlayer.

    Whoever sends the sampler new weights while episodes are played must call `hold` before and `updated` after. Between
    episodes that is not needed: the first turn reports the version.

    Args:
        config: with task.environment.
        sampler: the run's sampler.
        run_dir: has the trace store. It gets the sessions, next to the rollouts, and tracebacks of failed episodes.
    """

    def __init__(self, config: Config, facts: ModelFacts, sampler: Sampler, run_dir: Path):
        assert config.task.environment is not None
        self._config, self._environment, self._failures = config, config.task.environment, run_dir / FAILURES
        renderer = ChatRenderer(config.model.path, config.gateway.renderer, config.gateway.differs_in, config.run.date)
        self.gateway: AgentGateway = gateway_over(
            sampler, config, facts, renderer, None, None, version=0, reads_text=True
        )
        self._sampler, self._trace = sampler, run_dir / "trace"
        self._keeper = SessionKeeper(run_dir / "rollouts", TraceStore(self._trace))
        self._socket = bound_socket(self._environment.host, self._environment.port)
        longest = config.gateway.max_body_mib << 20
        app = GatewayApp(self.gateway, self._keeper, secrets.token_urlsafe(32), longest=longest, failed=self._fail)
        self._listener = GatewayListener(app.asgi, self._socket)
        self._pool = EnvironmentPool.of(self._environment)

    async def open(self) -> None:
        """Begin to listen."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._places = asyncio.Semaphore(self._environment.concurrent)
        self._serving = asyncio.create_task(self._listener.serve())
        while not self._listener.listens:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """End all episodes and the gateway."""
        await asyncio.to_thread(self._pool.close)
        self._listener.stop()
        await self._serving

    async def play(self, asked: Sequence[EpisodeRequest]) -> list[Trajectory]:
        """Play episodes side by side, see EpisodePlayer.play."""
        trajectories: dict[int, Trajectory] = {}
        for again in itertools.count():
            lacking = [index for index in range(len(asked)) if index not in trajectories]
            if not lacking:
                break
            shard = asked[0].shard and asked[0].shard + (f"-again{again}" if again else "")
            try:
                ended = await self._together([replace(asked[index], shard=shard) for index in lacking])
            except BaseException:
                if shard is not None:
                    with suppress(MoeRLError):
                        await self._sampler.publish(shard)  # so that the feed can delete it
                raise
            lost = [] if shard is None else await self._sampler.publish(shard)  # the names that lost servers gave it
            for name in lost:
                await asyncio.to_thread(recover_shard, self._trace, name, DYING_SECONDS)
            kept = await asyncio.gather(*(asyncio.to_thread(self._keep, episode, lost) for episode in ended))
            for index, episode, is_kept in zip(lacking, ended, kept, strict=True):
                if is_kept:
                    trajectories[index] = self._trajectory(episode)
        return [trajectories[index] for index in range(len(asked))]

    def _keep(self, ended: _Ended, lost: Sequence[str]) -> bool:
        """Check and keep a session. Returns False if records of it were lost with a server."""
        turns = ended.finished.turns
        if ended.asked.shard is None or not turns:
            return True
        try:
            self._keeper.keep(ended.finished)
        except SessionError as error:
            shards = {part.shard.partition(".pp")[0] for turn in turns if turn.routes for part in turn.routes.parts}
            if error.message.fault != "no record" or shards.isdisjoint(lost):
                raise
            self.gateway.turns.counts.update(
                sampled_again=len(turns), lost_tokens=sum(len(turn.token_ids) for turn in turns)
            )
            return False
        return True

    async def _together(self, asked: Sequence[EpisodeRequest]) -> list[_Ended]:
        """Play episodes side by side until all have ended."""
        played = [asyncio.create_task(self._played(request)) for request in asked]
        waiting: set[asyncio.Future[Any]] = {*played, self._failed}
        try:
            while not all(task.done() for task in played):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    future.result()  # raises errors that end the run
            return [task.result() for task in played]
        finally:
            for task in played:
                task.cancel()
            await asyncio.gather(*played, return_exceptions=True)

    @property
    def lost_tokens(self) -> int:
        """Return how many tokens lost servers had sampled, see EpisodePlayer."""
        return self.gateway.turns.counts["lost_tokens"]

    def hold(self) -> None:
        """Let no turn begin until `updated`, see EpisodePlayer."""
        self.gateway.turns.hold()

    def updated(self, version: int) -> None:
        """Go on with weights of this version, see EpisodePlayer."""
        self.gateway.turns.updated(version)

    def _fail(self, error: MoeRLError) -> None:
        """End all running episodes: the sampler failed, not an environment."""
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _played(self, asked: EpisodeRequest) -> _Ended:
        async with self._places:
            session, access = self._open(asked)
            try:
                episode = await self._pool.play(access, asked.prompt.columns)
            finally:
                # An agent in a sandbox of another host may stay connected.
                self.gateway.abort(session)
                # Even if the episode is given up: a request still being sampled continues the records of its turns.
                await self._settle(session)
                self.gateway.forget(session)
            return _Ended(asked, session, session.finish(), episode)

    def _open(self, asked: EpisodeRequest) -> tuple[Session, SessionAccess]:
        environment, longest = self._environment, self._config.rollout.max_completion_tokens
        rule = SamplingRule(asked.drawing, longest)
        limits = SessionLimits(environment.tokens, environment.turns, math.inf)  # the pool ends it in time
        opened = self.gateway.open(asked.prompt.id, limits, name=asked.name, rule=rule)
        opened.session.seed = asked.seed
        opened.session.shard = asked.shard
        url = f"{url_of(*self._socket.getsockname()[:2])}/s/{opened.key}"
        return opened.session, SessionAccess(
            asked.name, url, f"{url}/v1", opened.key, environment.turns, environment.tokens
        )

    async def _settle(self, session: Session) -> None:
        """Wait until no request of a session, which were aborted, is sampled any more. A client that reads no reply may
        stay as long as it likes."""
        patience = _BUSY_SECONDS + _BUSY_TIMEOUTS * self._config.run.peer_timeout_seconds
        try:
            async with asyncio.timeout(patience) as limit:
                while session.sampling:
                    if self.gateway.turns.held:  # a sampler that is paused for new weights ends no request
                        limit.reschedule(asyncio.get_running_loop().time() + patience)
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            what = "A request did not end though it was aborted"
            raise EngineError(what, where={"session": session.name}, got=f"{patience:g} s", fault="busy") from None

    def _trajectory(self, ended: _Ended) -> Trajectory:
        asked, session, finished, episode = ended.asked, ended.session, ended.finished, ended.episode
        turns = len(session.received)
        credit = self._environment.credit
        by_turn = credit == "turn"
        verdict = _verdict(episode, turns, by_turn=by_turn)
        rewards = episode.rewards if by_turn and verdict.scored and isinstance(episode.rewards, tuple) else ()
        sequences = sequences_of(finished, rewards)
        undelivered, branches = len(session.turns) - turns, len(session.branches())
        played = Trajectory(
            asked.name, sequences, verdict, turns, undelivered, branches, finished.digest, session.other_system
        )
        most = self._config.train.microbatch_tokens
        # The config is refused where a sequence alone may not fit.
        if asked.shard is not None and not played.fits(credit, most):
            size = f"{played.forwarded} tokens in {len(sequences)} sequences, which credit: branch trains on apart"
            failed = _failed(f"does not fit into train.microbatch_tokens = {most} (task.environment.credit): {size}")
            played = replace(played, verdict=failed)
        if not played.verdict.scored:
            self._tell(asked, played.verdict, episode)
        return played.sealed()

    def _tell(self, asked: EpisodeRequest, verdict: Verdict, episode: Episode) -> None:
        """Log why an episode failed, with its traceback."""
        head = f"{asked.name}, prompt {asked.prompt.id}: {verdict.detail}\n"
        what = "the tracebacks of failed episodes could not be written"
        with writing(what, self._failures), self._failures.open("a", encoding="utf-8") as file:
            file.write(head + (f"{episode.traceback.rstrip()}\n" if episode.traceback else ""))


def _verdict(episode: Episode, turns: int, *, by_turn: bool) -> Verdict:
    rewards = episode.rewards
    if rewards is None:
        return _failed(episode.problem)
    if not turns:
        return _failed("ended before it received a turn of the model")
    if not isinstance(rewards, tuple):
        if by_turn:
            return _failed("returned one reward, expected a list with one for each turn (task.environment.credit)")
        return Verdict("scored", rewards, {"episode": rewards})
    if len(rewards) != turns:
        return _failed(f"returned {len(rewards)} rewards, expected one for each of {turns} turns that it received")
    return Verdict("scored", math.fsum(rewards), {f"turn {turn}": reward for turn, reward in enumerate(rewards)})


def _failed(detail: str) -> Verdict:
    return Verdict("failed", None, detail=detail)


if __name__ == "__main__":  # the pool of a run that plays episodes, `python -m moe_rl.gateway.episode_gateway FD PID`
    from moe_rl.rollout import pool

    pool.main(EpisodeGateway)
