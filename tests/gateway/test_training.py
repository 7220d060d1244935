"""Episodes that a run plays over a real engine, and one step of training on them, against `transformers`."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
import torch

from moe_rl.cli import main
from moe_rl.clock import Clock
from moe_rl.config.load import dump_config, load_config
from moe_rl.errors import EngineError, MoeRLError, RewardError, RouteValidationError, SamplerGone, TraceError
from moe_rl.gateway import episode_gateway
from moe_rl.gateway.asking import SamplingRule, SamplingWish
from moe_rl.gateway.episode_gateway import FAILURES, EpisodeGateway
from moe_rl.gateway.finishing import SessionKeeper
from moe_rl.gateway.session_sequences import runs_of
from moe_rl.gateway.sessions import Session
from moe_rl.models.hf import read_model
from moe_rl.replay.routes import microbatch_routes, read_routes, source_sum
from moe_rl.rollout.batches import episode_metrics
from moe_rl.rollout.episodes import Episodes
from moe_rl.rollout.kept import shards_of
from moe_rl.rollout.rollouts import OwnRollouts, Rollouts
from moe_rl.rollout.sampler import ServerLost
from moe_rl.tasks.environments.environment_pool import Episode
from moe_rl.tasks.prompts import load_task
from moe_rl.tasks.tokenizer import TextCodec, stop_tokens
from moe_rl.trace import TraceSpec, TraceStore
from moe_rl.types import Drawing, Prompt, VersionSpan
from tests.gateway.scripted import Scripted
from tests.gateway.test_clients import Slow
from tests.gateway.test_delivery import never_read
from tests.support.one_rank import alone

CONFIG = Path(__file__).parents[2] / "configs/tiny_moe_cpu.yaml"
TEMPERATURE = 0.1


def config_of(
    checkpoint, folder, *overrides, run="played_environments.branches", rows=({"question": "2+3?", "answer": 5},)
):
    """Write the rows, and return the config of a run that plays them."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "heldout.jsonl").write_text(json.dumps({"question": "2+3?", "answer": 5, "held": True}) + "\n")
    given = [
        f"run.runs_dir={folder}", f"model.path={checkpoint}", "task.rewards={}", "task.pass_reward=null",
        f"task.train=[{{name: sums, data: {folder}/rows.jsonl}}]",
        f"task.heldout=[{{name: sums, data: {folder}/heldout.jsonl}}]",
        f"task.environment={{run: {run}, seconds: 60, concurrent: 4}}", "gateway.renderer={name: qwen3}",
        f"rollout.prompts_per_step={len(rows)}", "rollout.group_size=2", f"rollout.temperature={TEMPERATURE}",
        "rollout.max_prompt_tokens=512", "rollout.max_completion_tokens=512", "rollout.dtype=float32",
        "train.microbatch_tokens=4096", "train.updates_per_step=1", "train.optimizer.warmup_steps=0",
        "parallel.expert=1", "eval.prompts=1", "report.samples_per_step=8",
    ]  # fmt: skip
    return load_config(CONFIG, [*given, *overrides])


@pytest.fixture
def opened(engine, settings, checkpoint, tmp_path, monkeypatch):
    """Opens the rollouts of a run whose engine is the shared one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "trace").symlink_to(settings.trace_root)
    started = []

    def open_rollouts(*overrides, **more) -> OwnRollouts:
        config = config_of(checkpoint, tmp_path, *overrides, **more)
        (tmp_path / "config.yaml").write_text(dump_config(config))
        facts, store = read_model(checkpoint), TraceStore(settings.trace_root)
        task = load_task(config, TextCodec(checkpoint, stop_tokens(config, facts)))
        player = EpisodeGateway(config, facts, engine.sampler, tmp_path)
        rollouts = Rollouts(config, facts, task, engine.sampler, None, tmp_path, store, player)
        started.append(OwnRollouts(rollouts).__enter__())
        return started[-1]

    yield open_rollouts
    for one in started:
        one.__exit__(None, None, None)
    for shard in TraceStore(settings.trace_root).shards():
        if shard.startswith("step0"):
            TraceStore(settings.trace_root).remove(shard)


@pytest.mark.timeout(300)
def test_a_dialogue_with_a_branch_is_trained_on_as_transformers_computes_it(opened, router, tmp_path):
    rollouts = opened()
    batch = rollouts.take(1, Clock())
    keeper = SessionKeeper(tmp_path / "rollouts", rollouts.kept.store)
    sessions = [Session.of(keeper.load(f"step000001-p0-c{member}")) for member in (0, 1)]
    for session in sessions:
        assert [turn.kind for turn in session.turns] == ["first", "continued", "continued", "forked"]
        assert [[turn.number for turn in run] for run in runs_of(session)] == [[0, 1, 2], [3]]
    assert [one.segment_of for one in batch.sequences] == ["step000001-p0-c0"] * 2 + ["step000001-p0-c1"] * 2
    assert shards_of(batch.sequences) == ["step000001"], "a shard for all turns of a step"
    said = [token for session in sessions for turn in session.turns for token in turn.token_ids]
    assert [token for one in batch.sequences for token in one.token_ids] == said
    given = sum(len(turn.input_ids) for session in sessions for turn in session.turns[1:3])
    assert batch.metrics["episode/turns_mean"] == 4 and batch.metrics["episode/branches_mean"] == 2
    assert batch.metrics["episode/inserted_fraction"] == given / (given + len(said))
    ended = alone("tests/gateway/train_once.py", tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    metrics = seen["metrics"]
    assert metrics["routing/coverage"] == 1 and metrics["routing/applied_mismatch"] == 0
    assert metrics["routing/consumed"] == metrics["routing/expected"] > 0
    for one in batch.sequences:
        computed = router(one.ids, temperature=TEMPERATURE)
        rows = (one.positions - 1)[one.positions <= computed.clear]
        # The solved output weights are large, and so is their rounding. The temperature divides by 0.1.
        for logprobs in (one.rollout_logprobs, seen["logprobs"][one.key]):
            np.testing.assert_allclose(logprobs[: len(rows)], computed.logprobs[rows], rtol=0, atol=5e-4)


@pytest.mark.timeout(300)
def test_episodes_whose_records_are_lost_with_a_server_are_played_again(opened, monkeypatch):
    rollouts, lost = opened(), []
    sampler = rollouts.engine.sampler
    publish = sampler.publish

    async def loses_the_first(shard):
        if lost:
            return await publish(shard)
        lost.append(shard)
        return lost

    monkeypatch.setattr(sampler, "publish", loses_the_first)
    monkeypatch.setattr(episode_gateway, "DYING_SECONDS", 0.0)
    batch = rollouts.take(1, Clock())
    assert lost == ["step000001"] and shards_of(batch.sequences) == ["step000001-again1"]
    assert rollouts.kept.store.shards().count("step000001") == 0
    assert rollouts.rollouts.player.gateway.turns.counts["sampled_again"] == batch.metrics["episode/turns_mean"] * 2
    assert [one.segment_of for one in batch.sequences] == ["step000001-p0-c0"] * 2 + ["step000001-p0-c1"] * 2
    rollouts.engine.run(publish("step000001"))


@pytest.mark.timeout(300)
def test_each_turn_has_an_advantage_where_each_has_a_reward(opened, tmp_path):
    """Four turns, of which the last is a branch behind the first. Both episodes of the group earn the same."""
    rollouts = opened(
        "task.environment.credit=turn", "objective.advantage=group_mean", run="played_environments.branches_by_turn"
    )
    batch = rollouts.take(1, Clock())
    assert [[turn.number for turn in one.turns] for one in batch.sequences] == [[0, 1, 2], [3]] * 2
    assert [[turn.reward for turn in one.turns] for one in batch.sequences] == [[1.0, 0.0, 2.0], [-1.0]] * 2
    ended = alone("tests/gateway/train_once.py", tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    # The mean is 0.5. Turn 0 is continued by all others, turn 1 by turn 2.
    for one in batch.sequences:
        assert seen["advantages"][one.key] == ([0.0, 1.0, 1.5] if len(one.turns) == 3 else [-1.5])
    assert seen["metrics"]["objective/zero_advantage_fraction"] == 0.25
    assert seen["metrics"]["routing/coverage"] == 1 and seen["metrics"]["optim/skipped"] == 0


@pytest.mark.timeout(300)
def test_an_episode_with_one_reward_fails_where_each_turn_needs_one(opened):
    rollouts = opened("task.environment.credit=turn", "task.max_failed_fraction=1.0")
    with pytest.raises(RewardError, match="returned one reward, expected a list"):
        rollouts.take(1, Clock())


def test_an_episode_that_fails_has_no_reward_and_is_told_with_its_traceback(opened, tmp_path):
    good, bad = {"question": "2+3?", "answer": 5}, {"question": "2+3?", "answer": 5, "fault": "raise"}
    rollouts = opened("task.max_failed_fraction=0.5", rows=[good, bad])
    batch = rollouts.take(1, Clock())
    assert (batch.metrics["episode/failed"], batch.metrics["reward/failed_verdicts"]) == (2, 2)
    assert len({one.segment_of for one in batch.sequences}) == 2
    told = (tmp_path / FAILURES).read_text()
    assert told.count("KeyError: 'planted'") >= 2 and told.count("in branches") == 2
    strict = opened("task.max_failed_fraction=0.4", rows=[good, bad])
    with pytest.raises(RewardError, match="2 of 4.*KeyError: 'planted'"):
        strict.take(2, Clock())


def test_an_episode_that_fits_into_no_microbatch_fails(opened, tmp_path):
    rollouts = opened("train.microbatch_tokens=1024", "task.max_failed_fraction=1.0")
    with pytest.raises(RewardError, match="does not fit into train.microbatch_tokens.*in 2 sequences, which credit"):
        rollouts.take(1, Clock())


@pytest.mark.timeout(300)
def test_an_episode_that_fits_into_no_microbatch_is_trained_on_by_its_branches(opened, tmp_path):
    rollouts = opened(
        "task.environment.credit=branch", "train.microbatch_tokens=1024", run="played_environments.branches_at_random"
    )
    batch = rollouts.take(1, Clock())
    assert batch.metrics["episode/failed"] == 0 and [one.alone for one in batch.sequences] == [True] * 4
    assert sum(one.forwarded for one in batch.sequences[:2]) > 1024
    ended = alone("tests/gateway/train_once.py", tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["microbatches"] > 1 and seen["metrics"]["optim/skipped"] == 0
    assert seen["metrics"]["routing/coverage"] == 1
    assert seen["metrics"]["routing/consumed"] == seen["metrics"]["routing/expected"] > 0


def test_held_out_rows_are_played_and_not_recorded(opened, tmp_path):
    rollouts = opened(
        "task.heldout.0.samples=2", "task.heldout.0.pass_at=[2]", "eval.prompts=1", run="played_environments.branches"
    )
    before = rollouts.kept.store.shards()
    rates = rollouts.evaluate(0)
    assert rates == rollouts.evaluate(1)
    # The greedy one says what the model has learnt by heart.
    assert rates["eval/pass_rate_greedy"] == 1.0 and "eval/pass_at/sums/2" in rates
    assert rollouts.kept.store.shards() == before and not list(tmp_path.glob("rollouts/*"))


def test_an_episode_is_the_same_whenever_it_is_played(opened):
    own = opened("rollout.temperature=1.0")
    (prompt,) = own.source.at(0, 1)
    asked = [own.rollouts.episodes.request(f"again-{at}", f"{at}", prompt, None) for at in range(3)]
    play = lambda these: own.engine.run(own.rollouts.player.play(these))  # noqa: E731
    first, second = play(asked), play(asked[::-1])[::-1]
    assert [[one.ids for one in each.sequences] for each in first] == [
        [one.ids for one in each.sequences] for each in second
    ]
    assert len({each.sequences[0].token_ids for each in first}) == 3, "the members of a group are alike"


def test_a_client_cannot_change_how_a_run_samples():
    rule = SamplingRule(Drawing(0.5, 7, 0.9, 0.1), longest=64)
    wish = rule.applied(SamplingWish(temperature=0.0, top_p=0.1, top_k=1, seed=3, max_tokens=100, stop=("x",)))
    assert wish == SamplingWish(0.5, 0.9, 7, 0.1, max_tokens=64, stop=("x",))
    assert rule.applied(SamplingWish(max_tokens=5)).max_tokens == 5
    assert rule.applied(SamplingWish()).max_tokens == 64


class FailingSampler:
    """Samples nothing: every call raises an error."""

    places = (0,)

    def __init__(self, error: MoeRLError):
        self.error = error

    async def sample(self, place, requests, *, shard, leave, keep_open):
        raise self.error

    async def publish(self, shard):
        raise self.error


@pytest.mark.parametrize("error", [SamplerGone("the engine died"), EngineError("no right record")])
def test_a_fault_of_the_sampler_ends_the_run_and_is_no_failed_episode(opened, error, tmp_path, checkpoint):
    rollouts = opened().rollouts
    config, facts = rollouts.config, read_model(checkpoint)
    asked = [rollouts.episodes.request("lost", "lost", *rollouts.source.at(0, 1), "lost")]

    async def run():
        player = EpisodeGateway(config, facts, FailingSampler(error), tmp_path)
        await player.open()
        for _ in range(2):  # it stays lost
            with pytest.raises(type(error), match=str(error)):
                await player.play(asked)
        with suppress(type(error)):
            await player.close()

    asyncio.run(run())
    assert not (tmp_path / FAILURES).exists()


class SlowToLeave:
    """Takes its time with a request whose client has left, as an engine does within a step."""

    places = (0,)

    def __init__(self):
        self.asked, self.under_way = asyncio.Event(), 0

    async def sample(self, place, requests, *, shard, leave, keep_open):
        self.under_way += 1
        self.asked.set()
        await leave.wait()
        await asyncio.sleep(0.5)
        self.under_way -= 1
        return []

    async def publish(self, shard):
        return []


def test_an_episode_that_is_given_up_ends_with_its_last_request(checkpoint, tmp_path, monkeypatch):
    """Until then its records have a reader."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config, facts = config_of(checkpoint, tmp_path), read_model(checkpoint)

    async def give_up():
        sampler = SlowToLeave()
        player = EpisodeGateway(config, facts, sampler, tmp_path)
        await player.open()
        prompt = Prompt("sums/0", "", (1,), {"question": "2+3?", "answer": 5})
        playing = asyncio.create_task(player.play([Episodes(config).request("g-c0", "c0", prompt, "g")]))
        await sampler.asked.wait()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        left, open_sessions = sampler.under_way, player.gateway.book.all()
        await player.close()
        return left, open_sessions

    left, open_sessions = asyncio.run(give_up())
    assert left == 0 and not list(open_sessions)


class Hangs:
    """Hangs, and is lost a while after the client of its request has left."""

    places = (0,)

    def __init__(self, seconds):
        self.asked, self.seconds = asyncio.Event(), seconds

    async def sample(self, place, requests, *, shard, leave, keep_open):
        self.asked.set()
        await leave.wait()
        await asyncio.sleep(self.seconds)
        raise ServerLost("planted: the server hangs")

    async def publish(self, shard):
        return []


def patience(monkeypatch, seconds):
    """Set how long an episode's last request may take to end, whatever the time-out of a server."""
    monkeypatch.setattr(episode_gateway, "_BUSY_SECONDS", seconds)
    monkeypatch.setattr(episode_gateway, "_BUSY_TIMEOUTS", 0)


class LeftConnected:
    """Ends each episode while a request of it is under way, on a connection that stays open, as a sandbox on another
    host does that outlives its episode."""

    def __init__(self, ends, path="completions", **body):
        self._ends, self._path, self._body = ends, path, body or {"prompt": "ab"}

    async def play(self, access, row):
        self._client = aiohttp.ClientSession()
        self._url = f"{access.base_url}/{self._path}"
        self._asking = asyncio.create_task(self._client.post(self._url, json=self._body))
        await self._ends()
        return Episode(None, "killed at its time limit")

    async def answers(self):
        """Return the answers to the request and to one after the episode."""
        async with self._client:
            return (await self._asking).status, (await self._client.post(self._url, json=self._body)).status

    def close(self):
        pass


@pytest.mark.parametrize("updated", [False, True])
def test_only_the_episode_fails_whose_request_outlives_it(checkpoint, tmp_path, monkeypatch, updated):
    """Also where new weights go in for longer than a request may take to end."""
    config, facts, sampler = config_of(checkpoint, tmp_path), read_model(checkpoint), SlowToLeave()
    patience(monkeypatch, 0.3 if updated else 20)

    async def run():
        async def ends():
            await sampler.asked.wait()
            if updated:
                player.hold()
                asyncio.get_running_loop().call_later(0.6, player.updated, 1)

        pool = LeftConnected(ends)
        monkeypatch.setattr(episode_gateway.EnvironmentPool, "of", lambda environment: pool)
        player = EpisodeGateway(config, facts, sampler, tmp_path)
        await player.open()
        prompt = Prompt("sums/0", "", (1,), {"question": "2+3?", "answer": 5})
        (played,) = await player.play([Episodes(config).request("g-c0", "c0", prompt, "g")])
        answers = await pool.answers()
        await player.close()
        return played.verdict, answers

    verdict, answers = asyncio.run(run())
    assert (verdict.detail, answers) == ("killed at its time limit", (503, 401))


def test_only_the_episode_fails_whose_server_hangs(checkpoint, tmp_path, monkeypatch):
    """The server is lost before anyone says that the request did not end."""
    config, facts = config_of(checkpoint, tmp_path, "run.peer_timeout_seconds=1"), read_model(checkpoint)
    monkeypatch.setattr(episode_gateway, "_BUSY_SECONDS", 0.1)

    async def run():
        sampler = Hangs(seconds=1.25 * config.run.peer_timeout_seconds)
        pool = LeftConnected(sampler.asked.wait)
        monkeypatch.setattr(episode_gateway.EnvironmentPool, "of", lambda environment: pool)
        player = EpisodeGateway(config, facts, sampler, tmp_path)
        await player.open()
        prompt = Prompt("sums/0", "", (1,), {"question": "2+3?", "answer": 5})
        (played,) = await player.play([Episodes(config).request("g-c0", "c0", prompt, "g")])
        await pool.answers()
        await player.close()
        return played.verdict.detail

    assert asyncio.run(run()) == "killed at its time limit"


def test_a_chat_that_is_rendered_for_long_ends_no_run(checkpoint, tmp_path, monkeypatch):
    """The sampler never sees it, as its episode is over."""
    config, facts = config_of(checkpoint, tmp_path), read_model(checkpoint)
    patience(monkeypatch, 0.3)

    async def run():
        async def ends():
            while not slow.began:
                await asyncio.sleep(0.01)

        pool = LeftConnected(ends, "chat/completions", messages=[{"role": "user", "content": "hi " * 10_000}])
        monkeypatch.setattr(episode_gateway.EnvironmentPool, "of", lambda environment: pool)
        player = EpisodeGateway(config, facts, SlowToLeave(), tmp_path)
        player.gateway._renderer = slow = Slow(player.gateway._renderer)
        await player.open()
        prompt = Prompt("sums/0", "", (1,), {"question": "2+3?", "answer": 5})
        (played,) = await player.play([Episodes(config).request("g-c0", "c0", prompt, "g")])
        slow.others.set()
        answers = await pool.answers()
        await player.close()
        return played.verdict, answers

    verdict, answers = asyncio.run(run())
    assert (verdict.detail, answers) == ("killed at its time limit", (400, 401))


def test_a_client_that_never_reads_its_reply_ends_no_run(checkpoint, tmp_path, monkeypatch):
    """Its episode is over, and the sampler works for nobody."""
    config, facts = config_of(checkpoint, tmp_path, "task.environment.tokens=200000"), read_model(checkpoint)
    patience(monkeypatch, 1)

    class NeverReads:
        async def play(self, access, row):
            (session,) = player.gateway.book.all()
            self._connection = await never_read(SimpleNamespace(url=access.url[: access.url.index("/s/")]),
                                                SimpleNamespace(key=access.key, session=session))  # fmt: skip
            return Episode(0.5)

        def close(self):
            self._connection.close()

    async def run():
        nonlocal player
        sampler = Scripted(TextCodec(checkpoint, ()), *["x" * 30_000] * 3, "hello<|im_end|>")
        player = EpisodeGateway(config, facts, sampler, tmp_path)
        await player.open()
        prompt = Prompt("sums/0", "", (1,), {"question": "2+3?", "answer": 5})
        (played,) = await player.play([Episodes(config).request("g-c0", "c0", prompt, None)])
        await player.close()
        return played

    player: EpisodeGateway
    monkeypatch.setattr(episode_gateway.EnvironmentPool, "of", lambda environment: NeverReads())
    played = asyncio.run(run())
    assert (played.verdict.reward, played.turns, played.undelivered) == (0.5, 3, 1)


def test_a_systems_text_that_changes_is_a_metric_of_the_run(checkpoint, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = config_of(checkpoint, tmp_path, run="played_environments.dated")

    async def play():
        sampler = Scripted(TextCodec(checkpoint, ()), "hello<|im_end|>")
        player = EpisodeGateway(config, read_model(checkpoint), sampler, tmp_path)
        await player.open()
        prompt = Prompt("sums/0", "", (1,), {"question": "2+3?", "answer": 5})
        asked = [Episodes(config).request(f"g-c{n}", f"c{n}", prompt, None) for n in range(2)]
        try:
            return await player.play(asked)
        finally:
            await player.close()

    both = asyncio.run(play())
    assert [(one.verdict.reward, one.turns, one.branches) for one in both] == [(1.0, 2, 2)] * 2
    assert episode_metrics(both)["episode/other_system"] == 2
    assert episode_metrics([replace(one, other_system=0) for one in both])["episode/other_system"] == 0


@pytest.fixture
def played(opened):
    """The sequences of two episodes, and what reads their routes as training does."""
    own = opened()
    rollouts, sequences = own.rollouts, own.take(1, Clock()).sequences
    spec = TraceSpec.of(read_model(rollouts.config.model.path))

    def read(sequence):
        fed = np.array(sequence.ids[:-1])
        places, more = [np.ones(len(fed), bool)], {"layers": spec.moe_layers, "weight_version": 0}
        routes = read_routes(rollouts.store, [sequence], spec, fed=[fed], here=places, **more)
        microbatch_routes(
            routes, spec, layers=spec.moe_layers, names=[sequence.key], fed=[fed], source=[source_sum(sequence)],
            padded_tokens=len(fed), rows=slice(None), expert_parallel=1, device=torch.device("cpu"),
        )  # fmt: skip

    for one in sequences:
        read(one)
    return sequences, read


def other_token(ids):
    return (ids[0] ^ 1, *ids[1:])


FAULTS = {
    "another branch": lambda one, other: replace(one, routes=other.routes),
    "the record of another branch under this name": lambda one, other: replace(
        one, routes=replace(other.routes, key=one.key, rows=one.forwarded)
    ),
    "missing rows": lambda one, _: replace(one, routes=replace(one.routes, rows=one.forwarded - 3)),
    "a changed token": lambda one, _: replace(one, token_ids=other_token(one.token_ids)),
    "a changed result": lambda one, _: replace(
        one, inserted=(replace(one.inserted[0], token_ids=other_token(one.inserted[0].token_ids)), *one.inserted[1:])
    ),
    "a result elsewhere": lambda one, _: replace(
        one, inserted=(replace(one.inserted[0], after=one.inserted[0].after + 1), *one.inserted[1:])
    ),
    "results out of order": lambda one, _: replace(one, inserted=one.inserted[::-1]),
    "a result that was said": lambda one, _: replace(
        one, inserted=(replace(one.inserted[0], after=len(one.token_ids)),)
    ),
    "other weights": lambda one, _: replace(one, versions=(VersionSpan(len(one.token_ids), 1),)),
}


def test_a_wrong_sequence_of_an_episode_is_refused_by_name(played):
    (one, other, *_), read = played
    assert one.segment_of == other.segment_of and one.inserted
    for fault, change in FAULTS.items():
        with pytest.raises((RouteValidationError, TraceError)) as refused:
            read(change(one, other))
        assert one.key in str(refused.value), fault


def test_the_turns_of_an_episode_are_shown(opened, tmp_path, checkpoint, capsys, monkeypatch):
    opened().take(1, Clock())
    assert main(["show", str(tmp_path), "--session", "step000001-p0-c0"]) == 0
    told = capsys.readouterr().out
    assert "session step000001-p0-c0 of sums/0: 4 turns, 2 branches" in told
    assert "turn 0, first:" in told and "turn 3, forked, after turn 0:" in told and told.count("  said  ") == 4
    assert "step 1: reward 1, trained on as 2 sequences" in told and '"name": "add"' in told
    monkeypatch.chdir(tmp_path / "rollouts")
    assert main(["show", "step000001-p0-c0.session"]) == 0 and capsys.readouterr().out == told
    alone = tmp_path / "elsewhere/sessions/step000001-p0-c0.session"
    alone.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "rollouts/step000001-p0-c0.session", alone)
    assert main(["show", str(alone)]) == 2
    assert "--model FOLDER" in capsys.readouterr().err
    assert main(["show", str(alone), "--model", str(checkpoint)]) == 0
    assert told.partition("turn 0")[2] == capsys.readouterr().out.partition("turn 0")[2]
    assert main(["show", str(tmp_path), "--session", "no-such"]) == 2
