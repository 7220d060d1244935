"""The feed of groups in simulated time, with servers that sample token by token, slow verifiers and a trainer."""

import asyncio
import itertools
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.config.environment import EnvironmentConfig
from moe_rl.config.load import load_config
from moe_rl.errors import EngineError, PipelineError, RewardError, TraceError
from moe_rl.report.registry import find
from moe_rl.rollout.group_feed import GroupFeed
from moe_rl.rollout.group_files import GroupFiles
from moe_rl.rollout.kept import shard_group, shards_of
from moe_rl.rollout.rollouts import Rollouts
from moe_rl.rollout.sampler import ServerLost, nobody, sample_all
from moe_rl.rollout.trajectories import Trajectory
from moe_rl.tasks.prompts import PromptSource
from moe_rl.types import Completion, InsertedTokens, RoutePart, RouteRef, Verdict, VersionSpan, by_completion
from moe_rl.weights.update import Received, WeightUpdate
from tests.support.refusals import refused
from tests.support.simulated_time import run
from tests.support.task import task_of

LENGTHS = (1, 2, 3, 5, 20)  # of completions
STEPS, PROMPTS, SIZE, SLOTS, TOKENS = 6, 2, 3, 6, 24
OVERRIDES = {
    "run.steps": STEPS,
    "rollout.prompts_per_step": PROMPTS,
    "rollout.group_size": SIZE,
    "rollout.max_concurrent": SLOTS,
    "rollout.max_completion_tokens": TOKENS,
    "eval.prompts": 1,
    "pipeline.mode": "async",
    "pipeline.max_staleness": 2,
    "pipeline.segments": "first",
}
CONFIG = load_config("configs/tiny_moe_cpu.yaml", [f"{key}={value}" for key, value in OVERRIDES.items()])
TASK = task_of(CONFIG)


class Store:
    """The shards in a folder, by name."""

    def __init__(self, root):
        self.root = root
        root.mkdir(exist_ok=True)

    def shards(self):
        return sorted(path.stem for path in self.root.glob("*.safetensors"))

    def manifest(self):
        return SimpleNamespace(published=self.shards())

    def write(self, shard):
        with open(self.root / f"{shard}.safetensors", "xb") as file:
            file.write(b"x" * 10)

    def remove(self, *shards):
        for shard in shards:
            (self.root / f"{shard}.safetensors").unlink()

    def check_published(self, shards):
        if lost := set(shards) - set(self.shards()):
            raise TraceError(f"lost {lost}")


class Servers:
    """Samplers that take a second for each token of a request. A completion's length depends on its key alone."""

    def __init__(self, store, places=2, slowest=0):
        self.store, self.places, self.slowest = store, list(range(places)), slowest
        self.version, self.running, self.paused = 0, asyncio.Event(), False
        self.running.set()
        self.asked, self.most, self.failure = [], dict.fromkeys(self.places, 0), None
        self.lost = {place: asyncio.Event() for place in self.places}
        self.load = dict.fromkeys(self.places, 0)

    async def sample(self, place, requests, *, shard, leave, ended=nobody):
        self.load[place] += len(requests)
        self.most[place] = max(self.most[place], self.load[place])

        async def one(at, request):
            completion = await self.one(request, shard, leave)
            self.load[place] -= 1
            if completion.finish_reason != "abort":
                ended(at, completion)
            return completion

        works = [asyncio.create_task(one(*each)) for each in enumerate(requests)]
        lost = asyncio.create_task(self.lost[place].wait())
        try:
            sampled = asyncio.gather(*works)
            await asyncio.wait([sampled, lost], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                sampled.cancel()
                raise ServerLost("a server is lost", tokens=10)
            if self.failure is not None:
                raise self.failure
            completions = await sampled
            self.store.check_published(part.shard for one in requests if one.parent for part in one.parent.parts)
            self.store.write(shard)
            return completions
        finally:
            lost.cancel()

    async def one(self, request, shard, leave):
        self.asked.append(request)
        base = "/".join(request.key.split("/")[:2])
        draw = Random(base)
        length = self.slowest if base == "g0/c0" and self.slowest else draw.choice(LENGTHS)
        length -= TOKENS - request.max_tokens
        versions = []
        while len(versions) < length and not leave.is_set():
            await self.running.wait()
            await asyncio.sleep(1.0)
            if self.running.is_set():  # a step that began before the pause does not count
                versions.append(self.version)
        spans = [VersionSpan(versions.count(version), version) for version in dict.fromkeys(versions)]
        rows = len(request.prompt_token_ids) + len(versions) - 1
        return Completion(
            request.key,
            request.prompt_token_ids,
            (7,) * len(versions),
            np.full(len(versions), -1.0, np.float32),
            "stop" if len(versions) >= length else "abort",
            tuple(spans),
            RouteRef(request.key, rows, (RoutePart(shard, ""),)) if versions else None,
            drawing=request.drawing,
        )

    def fail(self, place):
        self.places.remove(place)
        self.lost[place].set()

    def come_back(self, place):
        self.places.append(place)
        self.lost[place].clear()

    async def pause(self):
        self.running.clear()

    async def take_weights(self, update):
        assert not self.running.is_set(), "weights go in while requests run"
        await asyncio.sleep(0.5)
        if update.final:
            self.version = update.version

    async def resume(self):
        self.running.set()

    async def counts(self):
        return {"witnessed": 5 * len(self.asked)}


class Verifiers:
    """Takes a long-tailed time. fails, same: numbers of judged groups whose verification fails, whose rewards are
    equal."""

    def __init__(self, fails=(), same=()):
        self.draw, self.fails, self.same, self.judged = Random(1), fails, same, 0

    async def judge(self, items):
        await asyncio.sleep(self.draw.choice((0.1, 0.3, 5.0)))
        self.judged += 1
        failed = self.fails is None or self.judged in self.fails
        parts = {"exact_match": 0.0, "format": 0.0}
        return [
            Verdict("failed", None, detail="hung", of=item.seal)
            if failed
            else Verdict("scored", 0.0 if self.judged in self.same else float(n), parts, of=item.seal)
            for n, item in enumerate(items)
        ]


def with_keys(config, section, **keys):
    return config.model_copy(update={section: getattr(config, section).model_copy(update=keys)})


class Rig:
    """A run whose weights are version numbers. It may be begun again in the same folder."""

    def __init__(
        self, folder, config=CONFIG, *, done=0, places=2, slowest=0, fails=(), same=(), player=None, **pipeline
    ):
        folder.mkdir(exist_ok=True)
        config = with_keys(config, "pipeline", **pipeline)
        self.folder, self.config, self.done = folder, config, done
        self.store = Store(folder / "trace")
        facts = SimpleNamespace(eos_token_ids=(1,))
        self.verifiers = Verifiers(fails, same)
        self.servers = Servers(self.store, places, slowest)
        self.servers.version = done
        self.player = None if player is None else player(self.servers)
        given = self.servers, self.verifiers, folder, self.store, self.player
        self.rollouts = Rollouts(config, facts, TASK, *given)
        self.rollouts.ledger.rewind(done)
        self.files = GroupFiles(folder / "groups", self.rollouts.kept, self.rollouts.ledger)
        self.feed = GroupFeed(self.rollouts, self.files, step=done + 1, version=done)
        self.batches = {}

    async def train(self, until=STEPS, seconds=3.0):
        """Take steps and train, each as long as the last; send the weights in two parts."""
        for step in range(self.done + 1, until + 1):
            self.batches[step] = await self.feed.take(step)
            for _ in range(6):  # groups are dropped meanwhile
                self.files.unneeded({1, step - 1, step})()
                await asyncio.sleep(seconds / 6)
            for final in (False, True):
                await self.feed.update(WeightUpdate(step, step - 1, int(final), final, True, [], Received()))
            self.done = step

    def groups_on_disk(self):
        return sorted(int(path.stem) for path in (self.folder / "groups").glob("*.group"))


class Player:
    """Plays episodes of two turns with a result between them. A turn takes a second or some. One in five fails."""

    def __init__(self, servers):
        self.servers, self.draw, self.names, self.killed, self.lost_tokens = servers, Random(2), [], 0, 0

    async def play(self, asked):
        return await asyncio.gather(*map(self.one, asked))

    async def one(self, asked):
        self.names.append(asked.name)
        spans = []
        try:
            for _ in range(2):
                await asyncio.sleep(self.draw.choice((0.5, 1.0, 6.0)))
                spans.append(VersionSpan(1, self.servers.version))
        except asyncio.CancelledError:
            self.killed += 1
            raise
        shard = f"{asked.name}-1"
        self.servers.store.write(shard)
        routes = RouteRef(f"{asked.name}/1/0", 5, (RoutePart(shard, "0" * 16),), 0, "0" * 16)
        said = Completion(routes.key, (5, 6), (7, 8), np.zeros(2, np.float32), "stop", tuple(spans), routes,
                          inserted=(InsertedTokens(1, (9, 10)),))  # fmt: skip
        failed = len(self.names) % 5 == 0
        verdict = Verdict("failed", None, detail="hung") if failed else Verdict("scored", self.draw.random())
        return Trajectory(asked.name, [said], verdict, 2, 0, 1, "d").sealed()


class Failing(Player):
    """All episodes of one group in five fail."""

    async def play(self, asked):
        played = await super().play(asked)
        fails = int(asked[0].name.partition("-")[0].removeprefix("group")) % 5 == 3
        return [replace(one, verdict=Verdict("failed", None)).sealed() for one in played] if fails else played


ENVIRONMENT = {"environment": EnvironmentConfig(run="my.run"), "rewards": {}, "pass_reward": None}
EPISODES = with_keys(CONFIG, "task", **ENVIRONMENT, max_failed_fraction=0.9)


@pytest.mark.parametrize("stopped", [False, True])
def test_groups_of_episodes_are_played_while_it_trains_and_after_a_stop(tmp_path, stopped):
    async def main():
        rig = Rig(tmp_path, EPISODES, player=Player)
        await rig.feed.begin()
        if stopped:
            await rig.train(2)
            await rig.feed.stop()
            assert rig.player.killed, "nothing was played just then"
            left, names = rig.groups_on_disk(), rig.player.names
            rig = Rig(tmp_path, EPISODES, done=2, player=Player)
            await rig.feed.begin()
            assert not set(names) & set(rig.player.names), "a shard is written twice"
            assert not {int(name.split("-")[0][5:]) for name in rig.player.names} & set(left), "played again"
        await rig.train()
        return rig

    rig = run(main())
    check_of_all_runs(rig, 2)
    metrics = [rig.batches[step].metrics for step in sorted(rig.batches)]
    assert all(m["episode/turns_mean"] == 2 and m["episode/inserted_fraction"] == 0.5 for m in metrics)
    assert sum(m["episode/failed"] for m in metrics) > 0 and max(m["pipeline/versions_max"] for m in metrics) == 2
    for batch in rig.batches.values():
        assert all(one.segment_of == one.key.removesuffix("/1/0") for one in batch.sequences)


def test_what_lost_servers_had_sampled_of_episodes_is_counted_once(tmp_path):
    async def main():
        rig = Rig(tmp_path, EPISODES, player=Player)
        await rig.feed.begin()
        for step, lost in ((1, 7), (2, 0), (3, 5)):
            rig.player.lost_tokens += lost
            await rig.train(step)
        return rig

    batches = run(main()).batches
    assert [batches[step].metrics.get("pipeline/wasted_tokens/lost", 0) for step in (1, 2, 3)] == [7, 0, 5]


def check_of_all_runs(rig, staleness):
    """What holds for every run that came to its end."""
    ledger, source = rig.rollouts.ledger, rig.rollouts.source
    ledger.verify(source, steps=STEPS)  # every prompt ended once
    for step in range(1, STEPS + 1):
        line, batch = ledger.find(step - 1), rig.rollouts.kept.load(step) if step > STEPS - 2 else rig.batches.get(step)
        if batch is None:
            continue
        assert line.completions == batch.digest and len(line.prompts) == PROMPTS
        assert [key for key in batch.metrics if find(key) is None] == []
        assert all(0 <= step - 1 - one.oldest_version <= staleness for one in batch.sequences)
        assert batch.metrics["pipeline/staleness_max"] <= staleness
    assert rig.groups_on_disk() == []


def test_a_run_goes_on_while_it_trains(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        await rig.feed.begin()
        await rig.train()
        most = set(rig.servers.most.values())  # the last free slot may begin a group
        assert min(most) >= SLOTS and max(most) < SLOTS + SIZE, "servers are not kept full"
        return rig

    rig = run(main())
    check_of_all_runs(rig, 2)
    keys = [one.key for one in rig.servers.asked]
    assert len(set(keys)) == len(keys), "sampled twice"
    metrics = [rig.batches[step].metrics for step in range(1, STEPS + 1)]
    assert max(m["pipeline/staleness_max"] for m in metrics) == 2 and metrics[0]["pipeline/staleness_max"] == 0
    assert all(
        m["pipeline/staleness"] == m["pipeline/staleness_in_flight"] + m["pipeline/staleness_queued"] for m in metrics
    )
    # weights go in while requests run: some completions are from several versions, on KV of the first
    assert max(m["pipeline/versions_max"] for m in metrics) > 1 and max(m["pipeline/kv_age"] for m in metrics) > 0
    assert all(m["pipeline/prefilled_again"] == 0 for m in metrics)
    assert all(0 <= m["pipeline/sampler_idle_fraction"] <= 1 for m in metrics)
    assert sum(m["rollout/witnessed_rows"] for m in metrics) == 5 * len(keys)
    # shards stay as long as a kept step trained on them, and no longer
    kept = {shard for step in (1, STEPS - 1, STEPS) for shard in shards_of(rig.rollouts.kept.load(step).sequences)}
    assert set(rig.store.shards()) == kept and rig.rollouts.kept.steps() == [1, STEPS - 1, STEPS]


@pytest.mark.parametrize(("exact", "budget"), [(False, 2048), (True, 2048), (True, 2 * (TOKENS + 24))])
def test_recomputed_kv_is_never_older_than_the_token(tmp_path, exact, budget):
    config = with_keys(CONFIG, "train", microbatch_tokens=budget)

    async def main():
        rig = Rig(tmp_path, config, kv="recompute", segments="exact" if exact else "first")
        await rig.feed.begin()
        await rig.train()
        return rig

    rig = run(main())
    check_of_all_runs(rig, 2)
    metrics = [rig.batches[step].metrics for step in range(1, STEPS + 1)]
    assert all(m["pipeline/kv_age"] == 0 for m in metrics)
    assert max(m["pipeline/prefilled_again"] for m in metrics) > 0
    assert max(m["pipeline/versions_max"] for m in metrics) > 1
    asked = {one.key: one for one in rig.servers.asked}
    later = [one for one in asked.values() if one.key.count("/") == 2]
    assert later
    for one in later:
        base, _, number = one.key.rpartition("/")
        before = asked[base if number == "1" else f"{base}/{int(number) - 1}"]
        more = len(one.prompt_token_ids) - len(before.prompt_token_ids)
        assert one.prompt_token_ids == before.prompt_token_ids + (7,) * more
        assert one.max_tokens == before.max_tokens - more > 0
        if exact:
            assert one.parent is None
        else:  # all rows but that of the last token are in the record that it continues
            assert (one.parent.key, one.parent.rows) == (before.key, len(one.prompt_token_ids) - 1)
    for batch in rig.batches.values():
        whole = {}
        for one in batch.sequences:
            assert one.key == one.routes.key, "routes are bound to their key"
            whole.setdefault("/".join(one.completion.split("/")[:2]), []).append(one)
            assert exact or not one.segment_of
            assert not exact or len(one.versions) == 1
        for key, parts in whole.items():
            length = min(TOKENS, Random(key).choice(LENGTHS))
            assert sum(len(part.token_ids) for part in parts) == length
            assert len({part.reward for part in parts}) == 1
            assert not exact or sum(part.forwarded for part in parts) <= budget
            for part, next_ in itertools.pairwise(parts):
                assert next_.prompt_token_ids == part.prompt_token_ids + part.token_ids
    assert not exact or any(one.segment_of for batch in rig.batches.values() for one in batch.sequences)


def test_groups_of_a_lost_server_go_on_elsewhere(tmp_path):
    async def main():
        rig = Rig(tmp_path, kv="recompute")
        await rig.feed.begin()
        training = asyncio.create_task(rig.train())
        await asyncio.sleep(4.5)  # after the first update, so that some groups have a piece
        rig.servers.fail(0)
        await training
        return rig

    rig = run(main())
    check_of_all_runs(rig, 2)
    assert {group.place for group in rig.feed.groups} <= {1}
    lost = [batch.metrics["pipeline/wasted_tokens/lost"] for batch in rig.batches.values()
            if "pipeline/wasted_tokens/lost" in batch.metrics]  # fmt: skip
    assert len(lost) == 1 and lost[0] > 0 and lost[0] % 10 == 0, "each of its groups lost 10 tokens"


async def lost_and_back(rig):
    await asyncio.sleep(4.5)
    rig.servers.fail(0)
    await asyncio.sleep(1)
    rig.servers.come_back(0)


def test_a_server_that_came_back_samples_again_from_the_next_update_on(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        await rig.feed.begin()
        training = asyncio.create_task(rig.train())
        await lost_and_back(rig)
        rig.servers.most[0], version = 0, rig.servers.version
        while rig.servers.version == version:
            assert not rig.servers.most[0], "it may have older weights"
            await asyncio.sleep(0.1)
        await training
        return rig.servers.most[0]

    assert run(main()) > 0


def test_a_call_from_before_a_server_was_lost_does_not_lose_it_again(tmp_path):
    """A call that is silent learns of the loss when its time is up. By then the server may sample again."""

    async def main():
        rig = Rig(tmp_path, slowest=TOKENS)
        sample, ends, held = rig.servers.sample, asyncio.Event(), []

        async def late(place, requests, **options):
            silent = place == 0 and not held
            if silent:
                held.append(requests)
            try:
                return await sample(place, requests, **options)
            except ServerLost:
                if silent:
                    await ends.wait()
                raise

        rig.servers.sample = late
        await rig.feed.begin()
        training = asyncio.create_task(rig.train())
        await lost_and_back(rig)
        version = rig.servers.version
        while rig.servers.version == version:
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        silent = rig.feed.groups.all("sampling")
        ends.set()
        await asyncio.sleep(0.1)
        assert 0 in rig.feed.groups._slots, "the server is lost again"
        assert any(group.cursor == 0 for group in silent), "the silent call had ended before"
        await training
        return rig

    check_of_all_runs(run(main()), 2)


def test_a_stopped_pool_goes_on_where_it_was(tmp_path):
    async def first():
        rig = Rig(tmp_path)
        await rig.feed.begin()
        await rig.train(until=2, seconds=0.5)
        await asyncio.sleep(1.2)
        await rig.feed.stop()
        return rig

    async def second():
        rig = Rig(tmp_path, done=2)
        left = {group.cursor: group.state for group in rig.feed.groups}
        await rig.feed.begin()
        await rig.train()
        return rig, left

    before = run(first())
    on_disk = before.groups_on_disk()
    rig, left = run(second())
    assert sorted(left) == on_disk
    assert set(left.values()) == {"waiting", "judging", "ready"}
    check_of_all_runs(rig, 2)
    assert not {one.key for one in before.servers.asked} & {one.key for one in rig.servers.asked}, "sampled twice"
    assert any(one.parent is not None for one in rig.servers.asked)


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.5), ("top_k", 7), ("top_p", 0.9), ("min_p", 0.1)])
def test_a_stopped_pool_does_not_go_on_with_other_sampling_parameters(tmp_path, name, value):
    """The pieces of a completion are one distribution's, and the trainer computes with that of the config."""

    async def stopped():
        rig = Rig(tmp_path, slowest=TOKENS)
        await rig.feed.begin()
        await rig.train(until=1)
        await rig.feed.stop()

    async def resumed():
        rig = Rig(tmp_path, with_keys(CONFIG, "rollout", **{name: value}), done=1, slowest=TOKENS)
        await rig.feed.begin()
        await rig.train(until=2)

    run(stopped())
    with refused(PipelineError, name, f"{value:g}", "temperature 1, top_k 0", fault="drawing", key="rollout"):
        run(resumed())


@pytest.mark.parametrize("checkpoint", [0, 1, 2])
def test_a_killed_pool_takes_over_what_is_on_disk(tmp_path, checkpoint):
    async def first():
        rig = Rig(tmp_path)
        await rig.feed.begin()
        await rig.train(until=2)
        await asyncio.sleep(2.2)
        return rig

    async def second():
        rig = Rig(tmp_path, done=checkpoint)
        ready = [group.cursor for group in rig.feed.groups]
        await rig.feed.begin()
        await rig.train()
        return rig, ready

    before = run(first())
    assert before.groups_on_disk()
    rig, ready = run(second())
    check_of_all_runs(rig, 2)
    assert not {one.key.split("/")[0] for one in rig.servers.asked} & {f"g{cursor}" for cursor in ready}
    assert ready or checkpoint < 2


def test_a_group_of_an_older_text_of_its_prompt_is_sampled_again(tmp_path, monkeypatch):
    """--accept lets the text of a row change whose id stays."""

    async def first():
        rig = Rig(tmp_path)
        await rig.feed.begin()
        await rig.train(until=2)
        await rig.feed.stop()
        return [group.cursor for group in rig.feed.groups if group.pieces and any(group.pieces)]

    def changed(source, cursor, count, real=PromptSource.at):
        return [replace(prompt, token_ids=(*prompt.token_ids, 9)) for prompt in real(source, cursor, count)]

    sampled = run(first())
    monkeypatch.setattr(PromptSource, "at", changed)

    async def resumed():
        return Rig(tmp_path, done=2).feed

    feed = run(resumed())
    assert sampled and len(feed.unusable) == len(sampled) and "an older text of its prompt" in feed.unusable[0]
    assert not {group.cursor for group in feed.groups} & set(sampled)


def test_completions_in_too_many_pieces_for_a_smaller_microbatch_are_sampled_again(tmp_path):
    """A resumed run may have smaller microbatches. Unfinished completions would grow by another piece."""
    pieces, budget = {"kv": "recompute", "segments": "exact", "max_staleness": 4}, 2 * (TOKENS + 6)

    async def first():
        rig = Rig(tmp_path, **pieces)
        await rig.feed.begin()
        await rig.train(until=3, seconds=1.0)
        await rig.feed.stop()
        return [group.cursor for group in rig.feed.groups if any(group.pieces)]

    async def second():
        rig = Rig(tmp_path, with_keys(CONFIG, "train", microbatch_tokens=budget), done=3, **pieces)
        held = {group.cursor for group in rig.feed.groups}
        await rig.feed.begin()
        await rig.train()
        return rig, held

    left = run(first())
    rig, held = run(second())
    check_of_all_runs(rig, 4)
    assert len(rig.feed.unusable) + len(held) == len(left) and held < set(left)
    assert all("do not fit into a microbatch" in told for told in rig.feed.unusable)
    for batch in rig.batches.values():
        for parts in by_completion(batch.sequences):
            assert sum(batch.sequences[part].forwarded for part in parts) <= budget


@pytest.mark.parametrize("credit", ["trajectory", "branch"])
def test_episodes_too_long_for_a_smaller_microbatch_are_played_again(tmp_path, credit):
    config = with_keys(EPISODES, "task", environment=EnvironmentConfig(run="my.run", credit=credit))

    async def first():
        rig = Rig(tmp_path, config, player=Player)
        await rig.feed.begin()
        await rig.train(until=2)
        await rig.feed.stop()
        return [group.cursor for group in rig.feed.groups if group.trajectories]

    async def resumed(tokens):
        return Rig(tmp_path, with_keys(config, "train", microbatch_tokens=tokens), done=2, player=Player).feed

    left = run(first())
    whole, smaller = run(resumed(5)), run(resumed(4))
    assert left and not whole.unusable and [group.cursor for group in whole.groups] == left
    assert [group.cursor for group in smaller.groups] == (left if credit == "branch" else [])
    assert len(smaller.unusable) == (0 if credit == "branch" else len(left))


def test_a_damaged_group_is_sampled_again(tmp_path):
    async def first():
        rig = Rig(tmp_path)
        await rig.feed.begin()
        await rig.train(until=2)
        await asyncio.sleep(2.2)

    async def second():
        rig = Rig(tmp_path, done=2)
        await rig.feed.begin()
        await rig.train()
        return rig

    run(first())
    damaged, lost, *_ = sorted((tmp_path / "groups").glob("*.group"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for shard in (tmp_path / "trace").glob(f"group{lost.stem}-*"):
        shard.unlink()
    rig = run(second())
    check_of_all_runs(rig, 2)
    assert len(rig.feed.unusable) == 2
    again = {int(one.key.split("/")[0][1:]) for one in rig.servers.asked}
    assert {int(damaged.stem), int(lost.stem)} <= again


def test_a_failed_group_is_replaced_and_a_run_of_them_ends_the_run(tmp_path):
    async def main(fails, *overrides):
        config = CONFIG if not overrides else load_config("configs/tiny_moe_cpu.yaml", list(overrides))
        rig = Rig(tmp_path / str(fails), config, fails=fails)
        await rig.feed.begin()
        await rig.train()
        return rig

    lenient = [*(f"{k}={v}" for k, v in OVERRIDES.items()), "task.max_failed_fraction=0.75"]
    rig = run(main((2, 3), *lenient))
    check_of_all_runs(rig, 2)
    dropped = [reason for step in range(STEPS) for _, reason in rig.rollouts.ledger.find(step).dropped]
    assert dropped == ["failed"] * 2
    metrics = [batch.metrics for batch in rig.batches.values()]
    assert sum(m.get("pipeline/dropped/failed", 0) for m in metrics) == 2
    assert sum(m["reward/failed_verdicts"] for m in metrics) == 2 * SIZE
    assert sum(m.get("pipeline/wasted_tokens/failed", 0) for m in metrics) > 0
    with refused(RewardError):
        run(main(None, *lenient[:-1], "task.max_failed_fraction=1.0"))


SAMPLED_AGAIN = with_keys(CONFIG, "rollout", dynamic_sampling_rounds=2)
LENIENT = with_keys(CONFIG, "task", max_failed_fraction=0.9)
DROPS = {  # what drops groups: reason, config, keys of the pipeline and of the rig
    "failed": ("failed", LENIENT, {"fails": range(2, 40, 3)}),
    "equal rewards": ("uninformative", SAMPLED_AGAIN, {"same": range(2, 40, 3)}),
    "late": ("stale", CONFIG, {"late": "drop", "max_staleness": 1, "slowest": TOKENS}),
    "late, in pieces": ("stale", CONFIG, {"late": "drop", "max_staleness": 1, "slowest": TOKENS, "kv": "recompute"}),
    "spare": ("surplus", CONFIG, {"oversample": 2.0, "kv": "recompute", "max_staleness": 1}),
    "failed episodes": ("failed", EPISODES, {"player": Failing}),
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("drop", DROPS)
def test_files_of_a_dropped_group_stay_until_their_last_user_is_done(tmp_path, drop, stopped):
    """The rig deletes what it may six times a step. A step measures what was dropped since the last one, and a request
    of a dropped group may still write a record that continues an earlier one."""
    reason, config, keys = DROPS[drop]

    async def main():
        rig = Rig(tmp_path, config, **keys)
        await rig.feed.begin()
        if stopped:
            await rig.train(2)
            await rig.feed.stop()
            rig = Rig(tmp_path, config, done=2, **keys)
            await rig.feed.begin()
        await rig.train()
        await asyncio.sleep(2 * TOKENS)
        rig.files.unneeded({1, STEPS - 1, STEPS})()
        return rig

    rig = run(main())
    check_of_all_runs(rig, 2)
    reasons = {why for step in range(STEPS) for _, why in rig.rollouts.ledger.find(step).dropped}
    assert reason in reasons
    metrics = [batch.metrics for batch in rig.batches.values()]
    sampled = sum(m["rollout/sequences"] for m in metrics) / SIZE
    refused = sum(m.get(f"pipeline/dropped/{why}", 0) for m in metrics for why in ("failed", "uninformative"))
    assert sampled == len(metrics) * PROMPTS + refused, "a step measures what was dropped since the last one"
    kept = {shard for step in (1, STEPS - 1, STEPS) for shard in shards_of(rig.rollouts.kept.load(step).sequences)}
    assert {shard_group(name)[0] for name in rig.store.shards()} == {shard_group(name)[0] for name in kept}


def test_a_step_does_not_wait_for_a_spare_group(tmp_path):
    async def main(spare):
        rig = Rig(tmp_path / str(spare), slowest=TOKENS, oversample=spare / PROMPTS, max_staleness=1)
        await rig.feed.begin()
        for step in (1, 2):  # no room is left for what began with version 0
            await rig.feed.take(step)
        return asyncio.get_running_loop().time()

    waited, spared = run(main(0)), run(main(2))
    assert spared < TOKENS <= waited


def test_other_requests_are_sampled_beside_the_groups_also_when_a_server_is_lost(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        await rig.feed.begin()
        training = asyncio.create_task(rig.train())
        requests = [rig.rollouts.request(f"e{n}", (n % 3,), 1.0) for n in range(12)]
        sampling = asyncio.create_task(sample_all(rig.feed.sampler, requests, shard="eval", leave=asyncio.Event()))
        await asyncio.sleep(2.5)
        rig.servers.fail(0)
        completions = await sampling
        await training
        return rig, [one.key for one in requests], [one.key for one in completions]

    rig, asked, got = run(main())
    assert got == asked
    check_of_all_runs(rig, 2)


def test_a_long_completion_holds_no_slot_but_its_own(tmp_path):
    async def main():
        rig = Rig(tmp_path, places=1, slowest=TOKENS, max_staleness=8)
        await rig.feed.begin()
        for _ in range(TOKENS - 2):
            await asyncio.sleep(1.01)
            assert rig.servers.load[0] >= SLOTS, "a slot waits for a group to end"
            assert rig.feed.groups.busy == 1.0
        (first,) = (group for group in rig.feed.groups if group.cursor == 0)
        assert (first.state, first.requests) == ("sampling", 1)

    run(main())


def test_a_failure_of_the_sampler_ends_the_wait(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        rig.servers.failure = EngineError("it refused")
        await rig.feed.begin()
        await rig.train()

    with pytest.raises(EngineError, match="it refused"):
        run(main())


def test_a_request_without_a_token_is_not_asked_again_for_ever(tmp_path):
    async def main():
        rig = Rig(tmp_path)
        rig.servers.one = empty
        await rig.feed.begin()
        await rig.train()

    async def empty(request, shard, leave):
        return Completion(request.key, request.prompt_token_ids, (), np.empty(0, np.float32), "stop", (), None)

    with refused(EngineError, request={f"g{n}/c0" for n in range(6)}):
        run(main())


def test_a_completion_that_is_older_than_its_group_is_refused(tmp_path):
    async def main():
        rig = Rig(tmp_path, done=0)
        await rig.feed.begin()
        await rig.train(until=3)
        rig.servers.version = 0  # a server that lost its update
        await rig.train()

    with refused(PipelineError, got="weight version 0") as caught:
        run(main())
    assert "request" in caught.value.about
