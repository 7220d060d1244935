"""Tests the requests to the sampler, and dynamic sampling: which groups are sampled, trained on and discarded, and that
every prompt is accounted for."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.clock import Clock
from moe_rl.config.load import load_config
from moe_rl.config.prompt_sources import HeldoutSourceConfig
from moe_rl.errors import RewardError
from moe_rl.report.registry import check_eval
from moe_rl.rollout.batches import Batches, PromptGroup, digest_of, recorded
from moe_rl.rollout.kept import shard_name, shard_step
from moe_rl.rollout.rollouts import Rollouts, generate_request
from moe_rl.tasks.prompt_ledger import PromptLedger
from moe_rl.types import Completion, Prompt, RewardedTurn, RoutePart, RouteRef, Verdict, sampled_by
from moe_rl.vllm.sampling import Growing, ReportedSpan
from tests.support.task import task_of

CONFIG = "configs/tiny_moe_cpu.yaml"
PROMPTS, SIZE = 2, 3


class Verifiers:
    """Judges each prompt and completion with a function, in place of the verifiers of rollouts."""

    def __init__(self, rollouts, judge):
        rollouts.verifiers, rollouts.batches.item = self, lambda *one: one
        self.judge = judge

    def judging(self):
        return Judging(self.judge)


class Judging:
    def __init__(self, judge):
        self.judge, self.found = judge, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def add(self, number, item):
        self.found[number] = replace(self.judge(*item), of=getattr(item[1], "seal", ""))

    def calls(self):
        return []

    async def awaited(self):
        return [self.found[number] for number in range(len(self.found))]


class Engine:
    """Gives the completion with number n in its group n tokens, and remembers the requests and what it told."""

    def __init__(self, root):
        self.root, self.asked, self.told = root, {}, []

    places = (0,)

    async def counts(self):
        return {"witnessed": 5 * len(self.asked)}

    async def sample(self, place, requests, *, shard, leave, ended):
        assert leave is None, "it does not sample alone"
        assert shard not in self.asked
        self.asked[shard] = [r.key for r in requests]
        (self.root / f"{shard}.safetensors").write_bytes(b"x" * 10)
        routes = RouteRef("key", 5, (RoutePart(shard, ""),))
        tokens = [(7,) * (1 + int(r.key.partition("/c")[2] or 0)) for r in requests]
        completions = []
        for at, (r, t) in enumerate(zip(requests, tokens, strict=True)):
            versions = sampled_by(0, len(t))
            logprobs = np.zeros(len(t), np.float32)
            completions.append(
                Completion(r.key, r.prompt_token_ids, t, logprobs, "stop", versions, routes, drawing=r.drawing)
            )
            self.told.append(r.key)
            ended(at, completions[-1])
        return completions


class Rig:
    """Rank 0's half of a step without a model.

    Args:
        informative, failed: Numbers of groups in their step. In informative groups the reward of a completion is its
            number in the group; in other groups all rewards are 0.5.
    """

    def __init__(self, folder, rounds, *overrides, informative=(), failed=()):
        (folder / "trace").mkdir(parents=True, exist_ok=True)
        self.config = load_config(
            CONFIG,
            [
                f"rollout.prompts_per_step={PROMPTS}",
                f"rollout.group_size={SIZE}",
                f"rollout.dynamic_sampling_rounds={rounds}",
                "eval.prompts=1",
                "task.max_failed_fraction=1.0",
                *overrides,
            ],
        )
        self.engine = Engine(folder / "trace")
        facts = SimpleNamespace(eos_token_ids=(1,))
        store = SimpleNamespace(check_published=lambda shards: None)
        self.rollouts = Rollouts(self.config, facts, task_of(self.config), self.engine, None, folder, store)
        self.informative, self.failed = informative, failed
        Verifiers(self.rollouts, self.judge)

    def judge(self, prompt, completion):
        group, _, number = completion.key.rpartition("/c")
        group = int(group.rpartition("/p")[2])
        parts = {"exact_match": 0.0, "format": 0.0}
        reward = float(number) if group in self.informative else 0.5
        return Verdict("failed", None) if group in self.failed else Verdict("scored", reward, parts)

    def collect(self, step=1):
        async def collected():
            return await self.rollouts.judge(await self.rollouts.sample(step, Clock()), Clock())

        return asyncio.run(collected())


def groups_of(batch):
    return list(dict.fromkeys(batch.group_ids))


def test_a_completion_is_judged_before_the_next_one_has_ended(tmp_path):
    rig, known = Rig(tmp_path, 1), []

    def judge(prompt, completion):
        known.append((prompt.id, completion.key, len(rig.engine.told)))
        return Verdict("scored", 0.5, {"exact_match": 0.0, "format": 0.0})

    Verifiers(rig.rollouts, judge)
    rig.collect()
    ids = [prompt.id for prompt in rig.rollouts.source.at(0, PROMPTS) for _ in range(SIZE)]
    assert known == [(ids[at], key, at + 1) for at, key in enumerate(rig.engine.told)] and len(known) == 6


def test_without_it_every_group_is_trained_on(tmp_path):
    rig = Rig(tmp_path, 1, informative=[1])
    batch = rig.collect()
    assert batch.group_ids == [0, 0, 0, 1, 1, 1] and [s.reward for s in batch.sequences] == [0.5] * 3 + [0.0, 1.0, 2.0]
    assert not any(key in batch.metrics for key in ("group/sampled", "group/discarded", "group/lacking"))
    assert batch.metrics["group/zero_variance"] == 1 and batch.metrics["group/zero_variance_fraction"] == 0.5
    assert list(rig.engine.asked) == ["step000001"]
    rewards = {end: batch.metrics[f"reward/quantile/{end}"] for end in ("p05", "p25", "p50", "p75", "p95")}
    assert rewards == pytest.approx({"p05": 0.125, "p25": 0.5, "p50": 0.5, "p75": 0.875, "p95": 1.75})
    lengths = [len(s.token_ids) for s in batch.sequences]
    assert batch.metrics["rollout/completion_tokens_quantile/p95"] == pytest.approx(np.percentile(lengths, 95))


@pytest.mark.parametrize(("turns", "differ"), [([[1.0], [1.0, 1.0]], False), ([[1.0, 0.0], [0.0, 1.0]], True)])
def test_where_turns_have_rewards_only_these_tell_a_group_apart(turns, differ):
    """Episodes of more turns have larger sums."""
    pieces = [[SimpleNamespace(turns=[RewardedTurn(n, None, 1, one) for n, one in enumerate(own)])] for own in turns]
    group = PromptGroup(0, None, pieces, [], [], [sum(own) for own in turns])
    assert group.informative is differ


@pytest.mark.parametrize(
    ("informative", "failed", "rounds", "trained", "lacking"),
    [
        ([0, 1], [], 1, [0, 1], 0),  # the first round suffices
        ([1, 2, 3], [], 2, [1, 2], 0),  # one group more than needed
        ([5], [], 3, [5], 1),  # there are no more rounds
        ([], [], 3, [0, 1], 2),  # no group has differing rewards
        ([], [0, 2], 3, [1, 3], 2),  # verification failed for some groups
        ([0, 3], [0], 3, [3], 1),  # a group whose verification failed has no differing rewards
    ],
)
def test_it_samples_on_until_enough_groups_differ(tmp_path, informative, failed, rounds, trained, lacking):
    rig = Rig(tmp_path, 3, informative=informative, failed=failed)
    batch = rig.collect()
    assert groups_of(batch) == trained and len(batch.sequences) == SIZE * len(trained)
    assert [s.key for s in batch.sequences] == [f"s1/p{p}/c{c}" for p in trained for c in range(SIZE)]
    sampled = PROMPTS * rounds
    assert batch.metrics["group/sampled"] == sampled and batch.metrics["group/lacking"] == lacking
    assert batch.metrics["group/discarded"] == sampled - len(trained)
    assert batch.metrics["rollout/sequences"] == SIZE * sampled
    assert batch.metrics["trace/bytes"] == 10 * rounds
    # One shard per round; no two requests in a shard have the same key.
    assert list(rig.engine.asked) == ["step000001", "step000001-round2", "step000001-round3"][:rounds]
    keys = [key for asked in rig.engine.asked.values() for key in asked]
    assert len(set(keys)) == len(keys) == SIZE * sampled


def test_the_ledger_holds_what_was_discarded_too_and_a_resumed_run_goes_on_from_there(tmp_path):
    straight = Rig(tmp_path / "straight", 3, informative=[1, 3])
    for step in (1, 2, 3):
        straight.collect(step)
    ledger = straight.rollouts.ledger
    ledger.verify(straight.rollouts.source, steps=3)
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert [len(line["prompts"]) for line in lines] == [4, 4, 4]
    assert [line["cursors"] for line in lines] == [[[0, 4]], [[4, 4]], [[8, 4]]]

    broken = Rig(tmp_path / "broken", 3, informative=[1, 3])
    broken.collect(1)
    broken.collect(2)  # lost, because the checkpoint is of step 1
    resumed = broken.rollouts
    resumed.ledger = PromptLedger(resumed.ledger.path)
    assert resumed.ledger.rewind(1) == 1
    broken.engine.asked.clear()
    again = [broken.collect(step) for step in (2, 3)]
    resumed.ledger.verify(resumed.source, steps=3)
    assert resumed.ledger.path.read_bytes() == ledger.path.read_bytes()
    assert [s.prompt_token_ids for s in again[1].sequences] == [
        p.token_ids for p in straight.rollouts.source.at(8, 4)[1::2] for _ in range(SIZE)
    ]


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_killed_process_leaves_the_completions_of_a_step_and_the_next_one_judges_them(tmp_path, rounds):
    """The step was sampled ahead, so its weights are gone."""
    ahead = ["pipeline.mode=one_step_off", "rollout.sleep_level=0"]
    first = Rig(tmp_path, rounds, *ahead, informative=[1])
    whole = first.collect()
    line = first.rollouts.ledger.path.read_bytes()
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step000001.sampled"]

    second = Rig(tmp_path, rounds, *ahead, informative=[1])
    assert second.rollouts.ledger.rewind(0) == 1
    batch = asyncio.run(second.rollouts.take(1, Clock()))
    assert not second.engine.asked, "it sampled again"
    assert batch.metrics == whole.metrics and batch.digest == whole.digest and batch.group_ids == whole.group_ids
    assert [(s.key, s.token_ids, s.reward) for s in batch.sequences] == [
        (s.key, s.token_ids, s.reward) for s in whole.sequences
    ]
    assert second.rollouts.ledger.path.read_bytes() == line
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step000001.rollout"]


def test_a_step_is_judged_while_the_next_one_is_sampled(tmp_path):
    rig = Rig(tmp_path, 1, "pipeline.mode=one_step_off", "rollout.sleep_level=0")

    async def run():
        unjudged = [await rig.rollouts.sample(step, Clock()) for step in (1, 2)]
        return [await rig.rollouts.judge(one, Clock()) for one in unjudged]

    batches = asyncio.run(run())
    assert [batch.sequences[0].key for batch in batches] == ["s1/p0/c0", "s2/p0/c0"]
    assert list(rig.engine.asked) == ["step000001", "step000002"]
    rig.rollouts.ledger.verify(rig.rollouts.source, steps=2)


def test_nothing_verified_ends_the_run_after_the_last_round(tmp_path):
    rig = Rig(tmp_path, 2, failed=range(4))
    with pytest.raises(RewardError, match="no completion of a step could be verified"):
        rig.collect()
    assert len(rig.engine.asked) == 2


def test_the_overlong_penalty_is_in_the_reward_and_makes_a_difference(tmp_path):
    """Completions have 1, 2 and 3 tokens; the limit is 3, and the last 2 tokens are penalised."""
    overrides = ["rollout.max_completion_tokens=3", "task.overlong={cache_tokens: 2, penalty: 0.4}"]
    batch = Rig(tmp_path, 2, *overrides).collect()
    assert [s.reward for s in batch.sequences] == pytest.approx([0.5, 0.3, 0.1] * PROMPTS)
    assert batch.metrics["reward/overlong_penalty"] == pytest.approx(-0.2)
    assert batch.metrics["reward/mean"] == 0.5
    assert batch.metrics["group/zero_variance"] == 0 and batch.metrics["group/lacking"] == 0


def test_shards_are_told_apart_by_their_step():
    assert shard_name(7) == "step000007" and shard_name(7, 1) == "step000007-round2"
    assert [shard_step(shard_name(step, number)) for step in (7, 1234567) for number in (0, 1, 9)] == [7] * 3 + [
        1234567
    ] * 3
    by_server = [f"{shard_name(7, 1)}-server{server}{again}" for server in (0, 12) for again in ("", "-again1")]
    by_server += [f"{shard_name(7, number)}-again1-server0" for number in (0, 1)]
    by_stage = [f"{shard_name(7)}.pp1of2", f"{shard_name(7)}-server0.pp1of2"]
    assert [shard_step(name) for name in by_server + by_stage] == [7] * 8
    assert [shard_step(name) for name in ("eval-greedy-step000007", "step7", "step000007-r2", "canary")] == [None] * 4
    assert shard_step("step000007-server") is None


def test_tokens_are_removed_where_the_policy_is_sampled_and_not_where_it_is_greedy():
    rollouts = object.__new__(Rollouts)
    rollouts.episodes = None
    rollouts.config = SimpleNamespace(
        run=SimpleNamespace(seed=1),
        rollout=SimpleNamespace(request_seeds=True, max_completion_tokens=5, top_k=8, top_p=0.9, min_p=0.1, stop=()),
    )
    rollouts.stop_tokens = (1,)
    prompt = Prompt("p", "text", (4, 5), {"answer": "four", "unit": ["m", 2]})
    sampled, greedy = (rollouts.request(f"t{t}", prompt.token_ids, t) for t in (0.7, 0.0))
    assert (sampled.top_k, sampled.top_p, sampled.min_p) == (8, 0.9, 0.1)
    assert (greedy.top_k, greedy.top_p, greedy.min_p) == (0, 1.0, 0.0)


END, USER = 1, 0  # <|end|> of the shipped tokenizer, and a token that plays a second stop token


def judged(folder, override, tokens, finish, stop_reason=None):
    """Have a completion judged. Returns its request, what the verifiers get, the rollouts and the task's prompts."""
    rig = Rig(folder, 1, override)
    task, facts = task_of(rig.config), SimpleNamespace(eos_token_ids=(END,))
    rollouts = Rollouts(rig.config, facts, task, rig.engine, None, folder / "other", None)
    _, prompt = rollouts.heldout[0]
    asked = rollouts.request("s1/p0/c0", prompt.token_ids, 1.0)
    sampled = Growing()
    sampled.add(tokens, [-1.0] * len(tokens), finish, [ReportedSpan("0", 0, len(tokens))], stop_reason)
    item = rollouts.batches.item(prompt, sampled.completion(asked, {}))
    return asked, item, rollouts, task


@pytest.mark.parametrize(
    ("tokens", "seen"),
    [
        ((20, 23, 6, 6), "14"),
        ((20, 6, 23, 6, 6), "1#4"),  # only what is whole
        ((20, 6, 400, 6), "1"),  # the tokenizer does not know 400, and the sampler reads over it
        ((6, 6), ""),
    ],
)
def test_a_reward_sees_the_text_before_the_stop_string(tmp_path, tokens, seen):
    asked, item, _, _ = judged(tmp_path, "rollout.stop=['##']", tokens, "stop", "##")
    assert asked.stop == ("##",)
    assert (item.completion, item.finish_reason, item.stop_string, item.stop_token_id) == (seen, "stop", "##", None)
    assert item.completion_token_ids == tokens


@pytest.mark.parametrize(
    ("tokens", "finish", "seen", "stop"),
    [
        ((20, 23, 19, END), "stop", "140", END),
        ((20, 23, 19, USER), "stop", "140", USER),  # a chat turn ends with the second stop token
        ((USER, 20, END, 23, 19, USER), "stop", "<|pad|>1<|end|>40", USER),
        ((20, 23, 19, END, USER), "stop", "140<|end|>", USER),
        ((20, 23, 19), "length", "140", None),
        ((20, 23, 19, USER), "length", "140<|pad|>", None),  # cut off at the limit; no token is removed
        ((USER,), "stop", "", USER),
    ],
)
def test_a_reward_sees_the_text_without_the_stop_token_that_ended_it(tmp_path, tokens, finish, seen, stop):
    _, item, rollouts, task = judged(tmp_path, f"rollout.stop_token_ids=[{USER}]", tokens, finish)
    _, prompt = rollouts.heldout[0]
    assert (item.completion, item.finish_reason, item.stop_token_id) == (seen, finish, stop)
    assert rollouts.batches.codec.decode(item.completion_token_ids) == seen
    assert (item.columns, item.messages) == (prompt.columns, prompt.messages)
    assert {name: set(columns.lacking) for name, columns in task.columns().items()} == {
        "source sums of task.train": {"id", "prompt", "answer", "level"},
        "source sums of task.heldout": {"id", "prompt", "answer", "level"},
    }
    assert (item.prompt, item.columns) == (prompt.text, prompt.columns)


def test_every_request_has_a_randomness_of_its_own_and_a_resumed_run_the_same(tmp_path):
    config = load_config(CONFIG)
    keys = [f"s{step}/p{p}/c{c}" for step in (1, 2) for p in range(3) for c in range(4)]
    seeds = [generate_request(config, key, (1,), (0,), 1.0).seed for key in keys]
    assert len(set(seeds)) == len(keys)
    assert seeds == [generate_request(config, key, (9, 9), (0,), 0.5).seed for key in keys]
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": config.run.seed + 1})})
    assert not set(seeds) & {generate_request(other, key, (1,), (0,), 1.0).seed for key in keys}
    shared = load_config(CONFIG, ["rollout.request_seeds=false"])
    assert {generate_request(shared, key, (1,), (0,), 1.0).seed for key in keys} == {None}


def test_the_digest_is_of_the_tokens_and_of_the_logprobs_of_every_completion():
    def digest(tokens, logprobs):
        return digest_of(
            [Completion("k", (1,), tokens, np.array(logprobs, np.float32), "stop", sampled_by(0, 1), None)]
        )

    one = digest((2, 3), [-1.0, -2.0])
    assert one == digest((2, 3), [-1.0, -2.0])
    assert len({one, digest((2, 4), [-1.0, -2.0]), digest((2, 3), [-1.0, -2.0000002])}) == 3


def test_a_step_shows_what_its_recorders_counted():
    def shown(rows, waits):
        return {"rollout/witnessed_rows": rows, "rollout/write_waits": waits}

    before = {"witnessed": 5, "write_waits": 2}
    assert recorded(before, {"witnessed": 9, "write_waits": 3}) == shown(4, 1)
    assert recorded(before, {}) == shown(0, 0)  # a new engine
    drafts = {"drafts": 8, "accepted_drafts": 6}
    assert recorded({"drafts": 4, "accepted_drafts": 5}, drafts) == shown(0, 0) | {"rollout/draft_acceptance": 0.25}


@pytest.mark.parametrize("in_flight", [None, 2])
def test_steps_and_evaluations_take_groups_from_the_queue_that_the_config_asks_for(tmp_path, monkeypatch, in_flight):
    rig, asked = Rig(tmp_path, 1, f"rollout.in_flight={'null' if in_flight is None else in_flight}"), []

    def sample_all(sampler, requests, **how):
        asked.append(how["in_flight"])
        return sampler.sample(0, requests, shard=how["shard"], leave=None, ended=how["ended"])

    monkeypatch.setattr("moe_rl.rollout.rollouts.sample_all", sample_all)
    rig.collect()
    Verifiers(rig.rollouts, lambda prompt, completion: Verdict("scored", 1.0, {"exact_match": 1.0}))
    asyncio.run(rig.rollouts.evaluate(1))
    assert asked == [in_flight] * 3


def test_an_evaluation_leaves_no_routes(tmp_path, monkeypatch):
    rig, asked = Rig(tmp_path, 1), []
    sample = rig.engine.sample
    monkeypatch.setattr(
        rig.engine, "sample", lambda place, requests, **how: asked.extend(requests) or sample(place, requests, **how)
    )
    Verifiers(rig.rollouts, lambda prompt, completion: Verdict("scored", 1.0, {"exact_match": 1.0}))
    assert asyncio.run(rig.rollouts.evaluate(1))["eval/pass_rate"] == 1.0
    assert [request.record for request in asked] == [False, False]
    Verifiers(rig.rollouts, rig.judge)
    rig.collect()
    assert all(request.record for request in asked[2:]) and len(asked) > 2


class Evaluating:
    """Evaluates prompts whose text says which of their samples pass, greedy ones last."""

    def __init__(self, *heldout):
        rollouts = object.__new__(Rollouts)
        rollouts.episodes = None
        rollouts.config = SimpleNamespace(
            run=SimpleNamespace(seed=1),
            rollout=SimpleNamespace(
                request_seeds=True,
                temperature=0.5,
                max_completion_tokens=5,
                top_k=7,
                top_p=0.8,
                min_p=0.0,
                stop=(),
                in_flight=None,
            ),
            task=SimpleNamespace(environment=None, pass_reward="right"),
            pipeline=SimpleNamespace(by_group=False),
        )
        rollouts.stop_tokens, rollouts.heldout = (), heldout
        rollouts.batches = Batches(rollouts.config, None, None)
        rollouts.sampler = SimpleNamespace(sample=self.sample, places=(0,))
        Verifiers(rollouts, lambda p, one: Verdict("scored", 1.0, {"right": float(p.text[self.place(one.key)])}))
        self.asked, self.rates = [], None
        self.rates = asyncio.run(rollouts.evaluate(3))
        check_eval(self.rates)

    async def sample(self, place, requests, *, shard, leave, ended):
        self.asked += requests
        for at, one in enumerate(requests):
            ended(at, one)
        return requests

    @staticmethod
    def place(key):
        return -1 if "greedy" in key else int(key.rpartition("/c")[2]) if "/c" in key else 0


def heldout(name, **settings):
    return HeldoutSourceConfig(name=name, data=f"{name}.jsonl", **settings)


def test_levels_and_sources_have_pass_rates_of_their_own():
    sums, words = heldout("sums"), heldout("words", greedy=False)
    ours = [(sums, Prompt("sums/0", "10", level="easy")), (sums, Prompt("sums/1", "01", level="hard"))]
    both = Evaluating(*ours, (words, Prompt("words/0", "00")))
    rates = {key: rate for key, rate in both.rates.items() if "/low/" not in key and "/high/" not in key}
    assert rates == pytest.approx(
        {
            "eval/pass_rate": 1 / 3,
            "eval/pass_rate_greedy": 0.5,
            "eval/source/sums": 0.5,
            "eval/source/words": 0.0,
            "eval/level/easy": 1.0,
            "eval/level/hard": 0.0,
        }
    )
    assert all(
        both.rates[f"eval/low/{key[5:]}"] <= rate <= both.rates[f"eval/high/{key[5:]}"] for key, rate in rates.items()
    )
    assert not any("/source/" in key for key in Evaluating(*ours).rates)


def test_each_source_is_sampled_as_it_says():
    """The keys of the first samples, and so the seeds, are those of a source with one."""
    many = heldout("many", samples=3, temperature=1.5, top_p=0.9, pass_at=[1, 2])
    once, greedy = heldout("once", greedy=False), heldout("greedy", temperature=0)
    prompts = ((many, Prompt("many/0", "0110")), (once, Prompt("once/0", "1")), (greedy, Prompt("greedy/0", "1")))
    found = Evaluating(*prompts)
    assert [(one.key, one.temperature, one.top_p) for one in found.asked] == [
        ("eval/sampled/p0", 1.5, 0.9),
        ("eval/sampled/p0/c1", 1.5, 0.9),
        ("eval/sampled/p0/c2", 1.5, 0.9),
        ("eval/sampled/p1", 0.5, 0.8),
        ("eval/greedy/p0", 0.0, 1.0),
        ("eval/greedy/p2", 0.0, 1.0),
    ]
    assert len({one.seed for one in found.asked}) == 6 and not any(one.record for one in found.asked)
    names = ("pass_at/many/1", "pass_at/many/2", "source/many", "source/greedy", "pass_rate_greedy", "pass_rate")
    assert [found.rates[f"eval/{name}"] for name in names] == pytest.approx([2 / 3, 1, 2 / 3, 1, 0.5, 8 / 9])
