import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from moe_rl.config.load import load_config
from moe_rl.config.reward_kinds import RemoteReward
from moe_rl.errors import ConfigError, RewardError
from moe_rl.tasks import verifier_process, worker_process
from moe_rl.tasks.reward_arguments import Columns
from moe_rl.tasks.verifiers import RewardItem, VerifierPool, check_failed_fraction
from moe_rl.types import Prompt, Verdict
from tests.support.refusals import refused

HEALTHY = RewardItem("", "healthy", {"answer": ""})


def faulty(fault: str, witness: Path) -> RewardItem:
    return RewardItem("", f"{fault} {witness}", {"answer": ""})


# What a healthy pool does


def test_scores_are_the_weighted_sum_in_order(make_pool):
    rewards = ("moe_rl.tasks.rewards.exact_match", "moe_rl.tasks.rewards.answer_format")
    with make_pool(*rewards, weights=dict(zip(rewards, (1.0, 0.125), strict=True)), workers=2) as pool:
        items = [
            RewardItem("", f"<answer>{i}</answer>" if i % 3 else "?", {"answer": str(i - i % 2)}) for i in range(50)
        ]
        verdicts = pool.score(items)
        assert pool.score([]) == []
    for i, verdict in enumerate(verdicts):
        parts = {"exact_match": float(bool(i % 3) and i % 2 == 0), "answer_format": float(bool(i % 3))}
        assert verdict == Verdict("scored", parts["exact_match"] + 0.125 * parts["answer_format"], parts)


def test_a_task_has_as_many_verifiers_as_it_says_unless_its_rewards_are_only_tried(monkeypatch):
    started = []
    monkeypatch.setattr(verifier_process.VerifierPlace, "start", started.append)
    task = load_config("configs/tiny_moe_cpu.yaml", ["task.verifier_workers=3"]).task
    VerifierPool.of(task).close()
    assert len(started) == 3
    VerifierPool.of(task, workers=1).close()
    assert len(started) == 4


def test_functions_get_the_arguments_they_name(make_pool):
    with make_pool("all_arguments", "optional", "no_arguments") as pool:
        [verdict] = pool.score([RewardItem("the prompt", "the completion", {"answer": "the answer"})])
    assert verdict.parts == {"all_arguments": 1.0, "optional": 3.0, "no_arguments": 0.25}  # `**kwargs` got the answer


def test_a_function_that_takes_everything_gets_all_columns(make_pool):
    rows = [{"answer": "2", "prompt": "p", "level": {"a": [1]}}, {"completion": "x"}]
    with make_pool("all_columns", "batch_all_columns", batch={"batch_all_columns": 2}) as pool:
        verdicts = pool.score([RewardItem("q", "c", row) for row in rows])
    # Under the name of a built-in argument, its value arrives.
    expected = [{"answer": "2", "prompt": "q", "level": {"a": [1]}}, {}]
    for verdict, others in zip(verdicts, expected, strict=True):
        told = float(len(json.dumps(others, sort_keys=True)))
        assert verdict.parts == {"all_columns": told, "batch_all_columns": told}


def test_a_function_may_ask_how_the_completion_ended(make_pool):
    with make_pool("how_it_ended") as pool:
        ended, cut = pool.score(
            [RewardItem("", "x", {"answer": ""}, "stop", 7), RewardItem("", "x", {"answer": ""}, "length", None)]
        )
    assert (ended.reward, cut.reward) == (7.0, -1.0)


def test_a_function_that_does_not_ask_cannot_find_the_answer(make_pool):
    # The second function is given the answers in the same process, before and after the first looks for them.
    with make_pool("nosy", "nosy_with_answer") as pool:
        verdicts = pool.score([RewardItem("", f"question {i}", {"answer": f"hidden {i}"}) for i in range(20)])
    assert [verdict.detail for verdict in verdicts] == [""] * 20
    assert all(verdict.parts == {"nosy": 1.0, "nosy_with_answer": 1.0} for verdict in verdicts)


def test_256_items_take_little_processor_time(make_pool):
    rewards = ("moe_rl.tasks.rewards.exact_match", "moe_rl.tasks.rewards.answer_format")
    items = [RewardItem("p" * 200, "<answer>4</answer>", {"answer": "4"})] * 256
    me, seconds = psutil.Process(), []
    with make_pool(*rewards) as pool:
        pool.score(items[:1])  # starts the verifiers
        processes = [me, *me.children(recursive=True)]
        for _ in range(5):
            start = [process.cpu_times() for process in processes]
            assert all(verdict.reward == 2.0 for verdict in pool.score(items))
            took = zip(start, (process.cpu_times() for process in processes), strict=True)
            seconds.append(sum(sum(end[:2]) - sum(begin[:2]) for begin, end in took))
    assert min(seconds) < 0.2


def test_long_texts_pass_both_ways(make_pool):
    with make_pool("moe_rl.tasks.rewards.exact_match") as pool:
        text = "x\u20ac\0" * 1_000_000
        verdicts = pool.score(
            [RewardItem("", text, {"answer": text})] * 3 + [RewardItem("", "<answer>1</answer>", {"answer": "1"})]
        )
    assert [verdict.reward for verdict in verdicts] == [0.0, 0.0, 0.0, 1.0]


def test_the_worker_knows_nothing_of_torchrun(make_pool, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SECRET_TOKEN"):
        monkeypatch.setenv(name, "1")
    with make_pool("environment") as pool:
        [verdict] = pool.score([HEALTHY])
    assert verdict == Verdict("scored", 1.0, {"environment": 1.0})


def test_a_function_gets_every_argument_that_exists(make_pool):
    item = RewardItem(
        "p", "c", {"tests": [{"in": [1, None]}, 0.1], "big": 10**30, "prompt": "p"}, "stop", 7, (5, 6),
        ({"role": "user", "content": "p"},), "##",
    )  # fmt: skip
    with make_pool("everything") as pool:
        assert pool.score([item]) == [Verdict("scored", 1.0, {"everything": 1.0})]


def test_a_row_that_lacks_a_column_fails_alone(make_pool):
    with make_pool("needs_solution") as pool:
        verdicts = pool.score([RewardItem("", "x", {"solution": "x"}), RewardItem("", "x", {"answer": "x"})])
    assert [verdict.status for verdict in verdicts] == ["scored", "failed"]
    assert "solution" in verdicts[1].detail


# Async functions and batches


def test_an_async_function_scores_and_keeps_its_event_loop(make_pool):
    with make_pool("patient", "same_loop") as pool:
        assert [verdict.reward for verdict in pool.score([HEALTHY] * 4)] == [2.0] * 4


def test_a_fault_of_an_async_function_fails_its_item_alone(make_pool, tmp_path):
    faults = ["raise", "exit", "none", "os_exit", "loop"]
    with make_pool("patient", timeout=0.5) as pool:
        verdicts = pool.score([item for fault in faults for item in (HEALTHY, faulty(fault, tmp_path / fault))])
    assert {path.name for path in tmp_path.iterdir()} == {*faults}
    assert [verdict.status for verdict in verdicts] == ["scored", "failed"] * len(faults)


def test_batches_are_as_large_as_configured(make_pool):
    with make_pool("batch_sizes", "good", batch={"batch_sizes": 4}, workers=2) as pool:
        verdicts = pool.score([HEALTHY] * 10)
    assert [verdict.parts["batch_sizes"] for verdict in verdicts] == [4.0] * 8 + [2.0] * 2
    assert all(verdict.parts["good"] == 1.0 for verdict in verdicts)


def test_a_batch_gets_lists_of_everything(make_pool):
    items = [RewardItem("", "", {"answer": "a" * i}, completion_token_ids=(i,), messages=({},)) for i in range(5)]
    with make_pool("batch_rows", batch={"batch_rows": 3}) as pool:
        assert [verdict.reward for verdict in pool.score(items)] == [2.0 * i + 1.0 for i in range(5)]


def test_rows_with_an_optional_column_are_batched_by_themselves(make_pool):
    items = [RewardItem("", "healthy", {"scale": 7} if i % 2 else {}) for i in range(6)]
    with make_pool("batch_sizes", batch={"batch_sizes": 6}) as pool:
        assert [verdict.reward for verdict in pool.score(items)] == [3.0, 7.0] * 3


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 0, 1, 4, 2], [1, 5, 4, 3, 2, 0]])
def test_items_that_come_one_by_one_are_in_the_batches_of_their_numbers(make_pool, order, tmp_path):
    """Item 3 fails its batch, the second of two."""
    items = [faulty("raise", tmp_path / "raise") if at == 3 else HEALTHY for at in range(6)]
    with make_pool("good", "batch_sizes", batch={"batch_sizes": 2}) as pool:
        expected = [verdict.status for verdict in pool.score(items)]
        assert expected == ["scored"] * 2 + ["failed"] * 2 + ["scored"] * 2
        with pool.judging() as judging:
            for at in order:
                judging.add(at, items[at])
            assert [verdict.status for verdict in judging.verdicts()] == expected


def test_of_an_item_that_comes_again_the_last_one_counts(make_pool, tmp_path):
    """The first text of item 1 fails, and that of item 2 cannot be sent."""
    first = [HEALTHY, faulty("raise", tmp_path / "raise"), RewardItem("", "half a pair \ud800", {"answer": ""})]
    with make_pool("misbehave", "batch_sizes", batch={"batch_sizes": 2}) as pool, pool.judging() as judging:
        for at, item in [*enumerate(first), *enumerate([HEALTHY] * 3)]:
            judging.add(at, item)
        assert [verdict.parts["batch_sizes"] for verdict in judging.verdicts()] == [2.0, 2.0, 1.0]


def test_an_item_is_scored_before_the_next_one_is_there(make_pool, tmp_path):
    with make_pool("misbehave", "batch_sizes", batch={"batch_sizes": 2}) as pool, pool.judging() as judging:
        for at in range(2):
            judging.add(at, faulty("chatter", tmp_path / f"chatter{at}"))
            for _ in range(1000):
                if (tmp_path / f"chatter{at}").exists():
                    break
                time.sleep(0.01)
            else:
                pytest.fail("no verifier began")
        assert len(judging.verdicts()) == 2


def test_a_batch_that_fails_fails_its_own_items(make_pool, tmp_path):
    faults = ["raise", "exit", "os_exit", "segfault", "loop"]
    items = [item for fault in faults for item in (HEALTHY, HEALTHY, HEALTHY, faulty(fault, tmp_path / fault))]
    with make_pool("good", "batch_sizes", batch={"batch_sizes": 2}, timeout=0.5) as pool:
        verdicts = pool.score(items)
    assert {path.name for path in tmp_path.iterdir()} == {*faults}
    assert [verdict.status for verdict in verdicts] == (["scored"] * 2 + ["failed"] * 2) * len(faults)
    assert all(verdict.detail.startswith("batch_sizes: ") for verdict in verdicts if not verdict.scored)


def test_a_bad_item_in_a_list_fails_alone(make_pool):
    bad = ["error", "none", "nan", "str", "huge"]
    items = [RewardItem("", text) for one in bad for text in ("x", one, "y", "z")]
    with make_pool("batch_with_bad_items", batch={"batch_with_bad_items": 4}) as pool:
        verdicts = pool.score(items)
    assert [verdict.status for verdict in verdicts] == ["scored", "failed", "scored", "scored"] * len(bad)
    assert "planted" in verdicts[1].detail


def test_text_that_is_not_unicode_leaves_its_batch(make_pool):
    with make_pool("batch_sizes", batch={"batch_sizes": 4}) as pool:
        verdicts = pool.score([HEALTHY, RewardItem("", "half a pair \ud800"), HEALTHY, HEALTHY])
    assert [verdict.reward for verdict in verdicts] == [3.0, None, 3.0, 3.0]


def test_a_batch_without_one_number_per_item_fails(make_pool):
    answers = [answer for answer in ("short", "number", "text", "none", "long") for _ in range(2)]
    with make_pool("batch_answers", batch={"batch_answers": 2}) as pool:
        verdicts = pool.score([RewardItem("", answer) for answer in answers])
    assert [verdict.status for verdict in verdicts] == ["failed"] * len(answers)
    assert all("a list of 2 numbers" in verdict.detail for verdict in verdicts)


# Arguments that do not exist


def test_an_argument_without_a_column_is_told_with_source_and_columns(make_pool):
    rows = [Prompt("a", "p", columns={"answer": "1"}), Prompt("b", "p", columns={"answer": "1", "solution": "2"})]
    with make_pool("needs_solution") as pool:
        where = {"key": "task.rewards.needs_solution", "argument": "solution", "fault": "no column"}
        with refused(ConfigError, **where, got=("train", "answer")):
            pool.check_arguments({"train": Columns.of(rows[:1])})
        with refused(ConfigError, **where, got=("heldout", "prompt a")):
            pool.check_arguments({"heldout": Columns.of(rows)})
        pool.check_arguments({"train": Columns.of(rows[1:])})


def test_the_parameters_of_every_kind_of_callable_are_known(make_pool, monkeypatch, tmp_path):
    source = """
import functools
def every(completion, *, prompt, times=3, **rest): ...
def nothing(): ...
def anything(*args): ...
def by_place(text="", /, completion="", level=0): ...
async def later(completion, answer): ...
class Made:
    def __init__(self, completion): ...
def misnamed(text): ...
def strict(completion, *, strict): ...
@functools.cache
def cached(x): ...
renamed = cached
"""
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("every", "nothing", "anything", "by_place", "later", "Made", "misnamed", "strict", "cached", "renamed")
    remote = RemoteReward(kind="remote", url="http://h:1/", arguments=("completion", "solution"))
    columns = Columns.of([Prompt("a", "p", columns={"answer": "1"})])
    pool = make_pool(*(f"mine.{name}" for name in names), kinds={"remote": remote})
    with pytest.raises(ConfigError) as caught:
        pool.check_arguments({"task.train": columns})
    lacking = {problem.about["key"]: problem.about["argument"] for problem in caught.value.problems}
    wrong = {"misnamed": "text", "strict": "strict", "cached": "x", "renamed": "x", "remote": "solution"}
    assert lacking == {f"task.rewards.{name}": argument for name, argument in wrong.items()}
    assert {problem.fault for problem in caught.value.problems} == {"no column"}


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"prompt": "p"}, False),  # the column that the prompt was made from
        ({"prompt": "q"}, True),
        ({"completion": "p"}, True),
        ({"messages": "p"}, False),  # which the function does not name
    ],
)
def test_a_column_with_the_name_of_a_built_in_argument(make_pool, columns, told):
    sources = {"train": Columns.of([Prompt("a", "p", columns=columns | {"answer": "1"})])}
    with make_pool("all_arguments") as pool:
        if told:
            with refused(ConfigError, argument=next(iter(columns)), fault="two meanings", got=("train",)):
                pool.check_arguments(sources)
        else:
            pool.check_arguments(sources)


def test_a_column_that_is_named_as_the_answer_has_one_meaning(make_pool):
    """Rows of supervised training have the right answer in the column `completion`."""
    prompts = [Prompt("a", "p", columns={"prompt": "p", "completion": "1", "answer": "1"})]
    with make_pool("all_arguments") as pool:
        pool.check_arguments({"train": Columns.of(prompts, ("prompt", "completion"))})
        with refused(ConfigError, argument="completion", fault="two meanings", got=("train",)):
            pool.check_arguments({"train": Columns.of(prompts, ("prompt", "answer"))})


def test_rewards_that_always_fail_are_told_before_the_start(make_pool):
    prompts = [Prompt(str(i), "p", columns={"solution": ""} if i % 2 else {}) for i in range(4)]
    with make_pool("needs_solution") as pool:
        pool.try_out(prompts, 0.1)
        pool.try_out([*prompts, prompts[0]], 0.6)
        with refused(RewardError, "solution", fault="too many", got="3 of 5", expected=("50%",)):
            pool.try_out([*prompts, prompts[0]], 0.1)


# Faults

CONTAINED = {  # the worker survives these
    "raise": "KeyError: 'planted'",
    "exit": "SystemExit",
    "unprintable": "_Unprintable",
    "big_file": "File too large (here a file may have at most 64 MiB)",
    "none": "returned NoneType",
    "nan": "returned nan",
    "inf": "returned -inf",
    "str": "returned str",
    "bool": "returned bool",
    "complex": "returned complex",
    "huge": "OverflowError",
    "astronomic": "misbehave: returned 1e+308, expected a finite number, at most 1e+12 in size",
}
DEADLY = {
    "os_exit": "died (exit code 0)",
    "segfault": "died (signal 11",
    "abort": "died (signal 6",
    "close_descriptors": "died",
    "hoard": "at most 4096 MiB of memory",  # the pool ends it
}
HANGING = ["loop", "c_sleep", "stop", "flood", "fork_and_hang"]


def assert_one_failed(verdicts, detail):
    """Check that the third item failed, for this reason, and no other item."""
    failed = verdicts.pop(2)
    assert (failed.status, failed.reward, failed.parts) == ("failed", None, {})
    assert failed.detail.startswith("misbehave: ") and detail in failed.detail
    assert verdicts == [Verdict("scored", 2.0, {"good": 1.0, "misbehave": 1.0})] * 7


@pytest.mark.parametrize(("fault", "detail"), [*DEADLY.items(), *((f, "1.5 s") for f in HANGING)])
def test_a_fault_fails_its_item_and_no_other(make_pool, helpers, tmp_path, fault, detail):
    witness = tmp_path / "witness"
    # on a busy machine this is not enough for the faults that end by themselves
    with make_pool("good", "misbehave", timeout=1.5 if fault in HANGING else 30) as pool:
        [first] = pool.pids
        verdicts = pool.score([HEALTHY, HEALTHY, faulty(fault, witness), *[HEALTHY] * 5])
        assert witness.read_text() == str(first), "the fault did not fire, or twice"
        assert pool.pids != [first] and not helpers.group_members(first)
        [last] = pool.pids
    assert_one_failed(verdicts, detail)
    assert not helpers.group_members(last)


def test_a_fault_that_a_worker_survives_fails_its_item_and_no_other(make_pool, helpers, tmp_path):
    with make_pool("good", "misbehave", timeout=30) as pool:
        [pid] = pool.pids
        for fault, detail in CONTAINED.items():
            witness = tmp_path / fault
            verdicts = pool.score([HEALTHY, HEALTHY, faulty(fault, witness), *[HEALTHY] * 5])
            assert witness.read_text() == str(pid), f"{fault} did not fire, or twice"
            assert pool.pids == [pid], fault
            assert_one_failed(verdicts, detail)
    assert not helpers.group_members(pid)


def test_a_worker_that_has_filled_its_memory_fails_no_later_item(make_pool):
    with make_pool("keeps_memory") as pool:
        [pid] = pool.pids
        verdicts = pool.score([HEALTHY] * 5)
        assert pool.pids != [pid]
    assert [verdict.status for verdict in verdicts] == ["scored", "scored", "failed", "scored", "scored"]
    assert "at most 4096 MiB of memory" in verdicts[2].detail


def test_an_exception_in_a_list_may_tell_that_the_memory_is_full(make_pool):
    with make_pool("batch_with_bad_items", batch={"batch_with_bad_items": 2}) as pool:
        [pid] = pool.pids
        for text, replaced in (("error", False), ("memory", True)):
            verdicts = pool.score([HEALTHY, RewardItem("", text)])
            assert [verdict.status for verdict in verdicts] == ["scored", "failed"]
            assert (pool.pids != [pid]) is replaced


def test_the_segfault_is_explained_by_what_it_printed(make_pool, tmp_path):
    with make_pool("misbehave") as pool:
        [verdict] = pool.score([faulty("segfault", tmp_path / "witness")])
    assert "Segmentation fault" in verdict.detail and "in _segfault" in verdict.detail
    assert len(verdict.detail) < 4000


def test_chatter_does_not_disturb(make_pool, tmp_path):
    with make_pool("misbehave") as pool:
        verdicts = pool.score([faulty("chatter", tmp_path / "witness")] * 20)
    assert (tmp_path / "witness").exists()
    assert [verdict.reward for verdict in verdicts] == [1.0] * 20


def test_hangs_do_not_starve_healthy_items(make_pool, tmp_path):
    hangs = [faulty(("loop", "c_sleep", "stop")[i % 3], tmp_path / f"witness-{i}") for i in range(6)]
    items = [item for hang in hangs for item in (HEALTHY, hang, *[HEALTHY] * 10)]
    with make_pool("misbehave", timeout=1.5, workers=2) as pool:
        verdicts = pool.score(items)
        afterwards = pool.score([HEALTHY] * 20)
    begun = sorted(witness.stat().st_mtime for witness in tmp_path.iterdir())
    assert len(begun) == 6
    assert [verdict.scored for verdict in verdicts] == [item is HEALTHY for item in items]
    assert all(verdict.scored for verdict in afterwards)
    assert any(after - before < 1.5 for before, after in pairwise(begun)), "one hangs after the other"


def test_every_item_hangs_or_dies(make_pool, tmp_path):
    faults = [("loop", "os_exit")[i % 2] for i in range(6)]
    with make_pool("misbehave", timeout=0.8, workers=2) as pool:
        verdicts = pool.score([faulty(fault, tmp_path / f"witness-{i}") for i, fault in enumerate(faults)])
    assert len(list(tmp_path.iterdir())) == 6
    assert ["0.8 s" in verdict.detail for verdict in verdicts] == [fault == "loop" for fault in faults]
    with refused(RewardError, fault="too many", got="6 of 6", expected=("10%",)):
        check_failed_fraction(verdicts, 0.1)


def test_a_forked_child_does_not_answer(make_pool, tmp_path):
    with make_pool("misbehave") as pool:
        verdicts = pool.score([faulty("fork_and_return", tmp_path / "witness")] * 5 + [HEALTHY] * 5)
    assert (tmp_path / "witness").exists()
    assert [verdict.reward for verdict in verdicts] == [1.0] * 10


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_hurt_in_idleness_costs_no_item(make_pool, helpers, harm):
    with make_pool("good", timeout=2.0) as pool:
        [pid] = pool.pids
        os.kill(pid, harm)
        hurt = "Z" if harm is signal.SIGKILL else "T"
        assert helpers.wait_until(lambda: helpers.state(pid) == hurt)
        verdicts = pool.score([HEALTHY] * 5)
        assert pool.pids != [pid]
    assert [verdict.reward for verdict in verdicts] == [1.0] * 5


def test_a_late_death_between_scores_costs_no_item(make_pool, helpers, tmp_path):
    with make_pool("misbehave") as pool:
        [pid] = pool.pids
        [verdict] = pool.score([faulty("late_death", tmp_path / "witness")])
        assert helpers.wait_until(lambda: not helpers.alive(pid))
        verdicts = pool.score([HEALTHY] * 5)
    assert (tmp_path / "witness").exists()
    assert [v.reward for v in (verdict, *verdicts)] == [1.0] * 6


def test_an_answer_that_lay_there_in_time_counts(make_pool, monkeypatch, tmp_path):
    # This process looks at its workers late: what they sent lies there, and the deadlines have passed.
    with make_pool("misbehave", timeout=0.4, workers=2) as pool:
        before = pool.pids
        late = []
        receive = worker_process.WorkerProcess.receive

        def receive_late(process, deadline):
            if process.pid in before:
                time.sleep(0.8)
                late.append(time.monotonic() > deadline)
            return receive(process, deadline)

        monkeypatch.setattr(worker_process.WorkerProcess, "receive", receive_late)
        verdicts = pool.score([faulty("os_exit", tmp_path / "exit"), faulty("nap", tmp_path / "nap")])
        assert late == [True] * 4  # each call's beginning and its end
        [left] = set(before) & set(pool.pids)
    [dead] = set(before) - {left}
    assert (tmp_path / "exit").read_text() == str(dead) and (tmp_path / "nap").read_text() == str(left)
    assert [verdict.status for verdict in verdicts] == ["failed", "scored"]
    assert "died (exit code 0)" in verdicts[0].detail


def test_wall_clock_jumps_do_not_matter(make_pool, monkeypatch):
    with make_pool("good") as pool:
        jumps = []

        def clock():
            jumps.append(1)
            return 0.0 if len(jumps) % 2 else 4e9  # a year that a gateway beside can write

        monkeypatch.setattr(time, "time", clock)
        time.time()
        verdicts = pool.score([HEALTHY] * 50)
    assert jumps and all(verdict.scored for verdict in verdicts)


def test_text_that_is_not_unicode_fails_alone(make_pool):
    with make_pool("good") as pool:
        verdicts = pool.score([HEALTHY, RewardItem("", "half a pair \ud800", {"answer": ""}), HEALTHY])
    assert [verdict.status for verdict in verdicts] == ["scored", "failed", "scored"]
    assert "surrogates" in verdicts[1].detail


def test_a_weighted_sum_that_is_too_large_is_no_reward(make_pool):
    with make_pool("good", "optional", weights={"good": 6e11, "optional": 6e11}) as pool:
        [verdict] = pool.score([HEALTHY])
    assert verdict.status == "failed" and verdict.reward is None
    assert (
        "the weighted sum of the rewards is 2400000000000.0, expected a finite number, at most 1e+12" in verdict.detail
    )


# Several calls at once


def test_a_group_is_judged_while_another_one_hangs(make_pool, tmp_path):
    slow, ended = [faulty("loop", tmp_path / "loop"), HEALTHY], []

    async def judged(pool, name, items):
        verdicts = await pool.judge(items)
        ended.append(name)
        return verdicts

    async def both(pool):
        first = asyncio.create_task(judged(pool, "slow", slow))
        while not (tmp_path / "loop").exists():
            await asyncio.sleep(0.01)
        quick = [await judged(pool, "quick", [HEALTHY] * 2) for _ in range(3)]
        return await first, quick

    with make_pool("misbehave", timeout=2.0, workers=2) as pool:
        verdicts, quick = asyncio.run(both(pool))
    assert ended == ["quick"] * 3 + ["slow"]
    assert [verdict.scored for verdict in verdicts] == [False, True]
    assert [verdict.reward for group in quick for verdict in group] == [1.0] * 6


def test_calls_of_a_group_that_is_given_up_are_not_made(make_pool, tmp_path):
    begun, later = tmp_path / "begun", tmp_path / "later"

    async def give_up(pool):
        group = asyncio.create_task(pool.judge([faulty("loop", begun), faulty("chatter", later)]))
        while not begun.exists():
            await asyncio.sleep(0.01)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        return await pool.judge([HEALTHY])

    with make_pool("misbehave", timeout=0.5) as pool:
        [verdict] = asyncio.run(give_up(pool))
    assert verdict.reward == 1.0 and not later.exists()


# Nothing is left behind


def test_close_takes_what_verifiers_left_running(make_pool, helpers, tmp_path):
    with make_pool("misbehave") as pool:
        [pid] = pool.pids
        [verdict] = pool.score([faulty("leave_child", tmp_path / "witness")])
        assert verdict.scored and len(helpers.group_members(pid)) == 2
    assert helpers.wait_until(lambda: not helpers.group_members(pid))  # the kernel takes a moment to end the killed
    with refused(RewardError, fault="closed"):
        pool.score([HEALTHY])


@pytest.fixture
def interruptible():
    """A shell makes background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_exception_leaves_no_process_and_no_descriptor(make_pool, helpers, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), make_pool("misbehave", timeout=600.0, workers=2) as pool:
        pids = pool.pids
        # Raised in the middle of score(), while a verifier hangs. Python drops an interrupt that comes in a finalizer.
        main, ended = threading.main_thread().ident, threading.Event()

        def interrupt():
            helpers.wait_until((tmp_path / "witness").exists)
            signal.pthread_kill(main, signal.SIGINT)
            while not ended.wait(30):
                signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        pool.score([faulty("loop", tmp_path / "witness"), HEALTHY])
    ended.set()
    assert (tmp_path / "witness").exists() and len(pids) == 2
    assert not any(helpers.group_members(pid) for pid in pids)
    assert len(os.listdir("/proc/self/fd")) == before


def test_restarts_leak_no_descriptor(make_pool, tmp_path):
    with make_pool("misbehave") as pool:
        before = len(os.listdir("/proc/self/fd"))
        verdicts = pool.score([faulty("os_exit", tmp_path / "witness")] * 5)
        assert len(os.listdir("/proc/self/fd")) == before
    assert [verdict.status for verdict in verdicts] == ["failed"] * 5


PARENT = """
import sys
from moe_rl.config.reward_kinds import FunctionReward
from moe_rl.tasks.verifiers import RewardItem, VerifierPool
sys.path.insert(0, sys.argv[1])
pool = VerifierPool({"r": FunctionReward(function="bad_rewards.misbehave")}, timeout_seconds=1000, workers=2)
print(*pool.pids, flush=True)
pool.score([RewardItem("", f"{sys.argv[2]} {sys.argv[3]}", {"answer": ""})] if sys.argv[2] != "idle" else [])
input()
"""


@pytest.mark.parametrize("state", ["idle", "c_sleep", "loop"])
def test_workers_die_with_their_parent(helpers, tmp_path, state):
    witness = tmp_path / "witness"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(Path(__file__).parent), state, str(witness)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(sys.modules["moe_rl"].__file__).parents[1])},
    )
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if state != "idle":
            assert helpers.wait_until(witness.exists), "no worker was busy when its parent died"
        assert all(helpers.alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.communicate()
    assert helpers.wait_until(lambda: not any(helpers.alive(pid) for pid in pids), 5.0)


# Bad configs


@pytest.mark.parametrize(
    ("function", "piece"),
    [
        ("positional", "parameter 'completion'"),
        ("not_callable", "int"),
        ("absent", "absent"),
        ("bad_import.f", "RuntimeError: planted at import"),
        ("bad_import_exit.g", "7"),
        ("no_such_module.h", "no_such_module"),
        ("moe_rl.tasks.rewards.deeper.h", "moe_rl.tasks.rewards.deeper"),
        ("bad-syntax.h", "dotted"),
    ],
)
def test_a_bad_function_is_refused_by_config_key(make_pool, helpers, function, piece):
    name = function.rpartition(".")[2]
    with refused(ConfigError, piece, key=f"task.rewards.{name}.function") as caught:
        make_pool("good", function)
    assert len(caught.value.problems) == 1
    processes = [process.info for process in psutil.process_iter(["ppid", "cmdline"])]
    mine = [process["cmdline"] or [] for process in processes if process["ppid"] == os.getpid()]
    assert not [command for command in mine if "moe_rl.tasks.verifier_worker" in command]


def test_all_bad_functions_are_named_at_once(make_pool):
    with pytest.raises(ConfigError) as caught:
        make_pool("positional", "good", "not_callable")
    assert [problem.about["key"] for problem in caught.value.problems] == [
        "task.rewards.positional.function",
        "task.rewards.not_callable.function",
    ]


def test_the_parent_imports_no_user_code(make_pool):
    with make_pool("good") as pool:
        assert pool.score([HEALTHY])[0].scored
    assert "bad_rewards" not in sys.modules


def test_functions_that_vanish_end_the_run(make_pool, monkeypatch, tmp_path):
    (tmp_path / "fleeting.py").write_text("import os\ndef die(completion): os._exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with make_pool("fleeting.die") as pool:
        (tmp_path / "fleeting.py").unlink()
        with refused(RewardError, fault="no worker", got=("fleeting",)):
            pool.score([HEALTHY] * 2)
        assert pool.pids == []


def test_all_calls_fail_when_no_worker_starts_any_more(make_pool, monkeypatch, tmp_path):
    (tmp_path / "fleeting.py").write_text("import os\ndef die(completion): os._exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def judge(pool):
        return await asyncio.gather(*(pool.judge([HEALTHY] * 2) for _ in range(3)), return_exceptions=True)

    with make_pool("fleeting.die") as pool:
        (tmp_path / "fleeting.py").unlink()
        errors = asyncio.run(judge(pool))
    faults = [error.message.fault for error in errors if isinstance(error, RewardError)]
    assert faults == ["no worker", "closed", "closed"]


@pytest.mark.parametrize(
    ("failed", "limit", "ends"), [(1, 0.1, False), (2, 0.1, True), (0, 0.0, False), (1, 0.0, True)]
)
def test_failed_fraction(failed, limit, ends):
    verdicts = [Verdict("failed", None, detail="exact_match: hung")] * failed + [Verdict("scored", 0.0)] * (10 - failed)
    if ends:
        with refused(RewardError, f"{failed} x exact_match: hung", fault="too many"):
            check_failed_fraction(verdicts, limit)
    else:
        check_failed_fraction(verdicts, limit)
    check_failed_fraction([], limit)
