import os

import pytest

from moe_rl.errors import DataError, DiskError
from moe_rl.tasks.prompt_ledger import PromptLedger, StepPrompts
from moe_rl.tasks.prompts import PromptSet, PromptSource
from moe_rl.types import Prompt
from tests.support.refusals import refused, tells

STEPS, PER_STEP = 6, 4


@pytest.fixture
def source():
    return PromptSource([PromptSet("all", [Prompt(f"p{i}", "") for i in range(10)])], 7)


@pytest.fixture
def ledger(tmp_path, source):
    """Make a ledger of six steps with four prompts each: more than two epochs."""
    ledger = PromptLedger(tmp_path / "ledger.jsonl")
    run(ledger, source, 0, STEPS)
    return ledger


def run(ledger, source, first, last):
    for step in range(first, last):
        cursors = range(step * PER_STEP, (step + 1) * PER_STEP)
        ledger.record(step, cursors, ids(source.at(cursors[0], PER_STEP)), f"digest-{step}")


def ids(prompts):
    return [prompt.id for prompt in prompts]


def lines(ledger):
    return ledger.path.read_bytes().splitlines(keepends=True)


def test_a_whole_ledger_verifies(ledger, source):
    ledger.verify(source)
    ledger.verify(source, steps=STEPS)
    assert ledger.torn is None
    assert PromptLedger(ledger.path).path == ledger.path
    assert len(lines(ledger)) == STEPS


def test_an_empty_ledger_is_whole(tmp_path, source):
    ledger = PromptLedger(tmp_path / "ledger.jsonl")
    ledger.verify(source, steps=0)
    assert ledger.rewind(0) == 0 and ledger.torn is None and not ledger.path.exists()


@pytest.mark.parametrize("step", range(STEPS + 1))
def test_rewind_and_go_on_gives_the_same_ledger(ledger, source, step):
    whole = ledger.path.read_bytes()
    resumed = PromptLedger(ledger.path)
    assert resumed.rewind(step) == STEPS - step
    assert ledger.path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:step])
    resumed.verify(source, steps=step)
    run(resumed, source, step, STEPS)
    assert ledger.path.read_bytes() == whole
    assert os.listdir(ledger.path.parent) == [ledger.path.name]


def test_every_bit_flip_is_noticed(ledger, source):
    whole = b"".join(lines(ledger)[:3])
    silent = []
    start, end = whole.index(b"\n") + 1, whole.rindex(b"\n", 0, -1) + 1
    assert end - start > 100
    for bit in range(8 * start, 8 * end):  # the middle line, its newline included
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        ledger.path.write_bytes(damaged)
        try:
            ledger.verify(source)
        except DataError as error:
            line = whole[: bit // 8].count(b"\n") + 1
            assert error.about["line"] == line
        else:
            silent.append(bit)
    assert silent == []
    ledger.path.write_bytes(whole)
    ledger.verify(source, steps=3)


def test_every_truncation_is_noticed(ledger, source):
    whole = b"".join(lines(ledger)[:2])
    for length in range(len(whole)):
        ledger.path.write_bytes(whole[:length])
        torn = length > 0 and whole[length - 1 : length] != b"\n"
        assert (ledger.torn is not None) == torn
        with refused(DataError, fault="torn" if torn else "number of steps"):
            ledger.verify(source, steps=STEPS)


FAULTS = {
    "duplicate": (lambda ls: [*ls[:3], ls[2], *ls[3:]], 4, "step"),
    "gap": (lambda ls: [*ls[:2], *ls[3:]], 3, "step"),
    "swap": (lambda ls: [ls[0], ls[2], ls[1], *ls[3:]], 2, "step"),
    "first lost": (lambda ls: ls[1:], 1, "step"),
    "blank line": (lambda ls: [*ls[:2], b"\n", *ls[2:]], 3, "damaged"),
    "half a line": (lambda ls: [*ls[:2], ls[2][:30] + b"\n", *ls[3:]], 3, "damaged"),
    "two lines in one": (lambda ls: [*ls[:2], ls[2][:-1] + ls[3], *ls[4:]], 3, "damaged"),
    "zeros": (lambda ls: [*ls[:2], b"\0" * 50 + b"\n", *ls[2:]], 3, "damaged"),
    "other spelling": (lambda ls: [ls[0].replace(b": ", b":"), *ls[1:]], 1, "damaged"),
    "not an object": (lambda ls: [b"[]\n", *ls[1:]], 1, "damaged"),
    "deep": (lambda ls: [b"[" * 100_000 + b"\n", *ls[1:]], 1, "damaged"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_ledger_names_its_first_wrong_line(ledger, source, name):
    change, line, fault = FAULTS[name]
    before = ledger.path.read_bytes()
    damaged = b"".join(change(lines(ledger)))
    assert damaged != before
    ledger.path.write_bytes(damaged)
    for refuse in (lambda: ledger.verify(source), lambda: PromptLedger(ledger.path).rewind(5)):
        with refused(DataError, fault=fault, file=ledger.path, line=line):
            refuse()
    assert ledger.path.read_bytes() == damaged  # a refused rewind has changed nothing


def test_lines_that_are_dropped_need_not_be_whole(ledger, source):
    ledger.path.write_bytes(b"".join([*lines(ledger)[:3], b"damaged\n", *lines(ledger)[4:]]))
    assert ledger.rewind(3) == 3
    ledger.verify(source, steps=3)


def test_prompts_that_the_source_did_not_give_are_named(tmp_path, source):
    ledger = PromptLedger(tmp_path / "ledger.jsonl")
    first, second = ids(source.at(0, 4)), ids(source.at(4, 4))
    ledger.record(0, range(4), first, "d")
    ledger.record(1, range(4, 8), [second[0], first[0], *second[2:]], "d")  # one prompt twice, one lost
    with refused(DataError, fault="prompt", line=2, got=first[0], expected=(second[1], "cursor 5")):
        ledger.verify(source)


def test_another_seed_is_another_ledger(ledger, source):
    other = PromptSource([PromptSet("all", [Prompt(f"p{i}", "") for i in range(10)])], 8)
    with refused(DataError, file=ledger.path, line=1):
        ledger.verify(other)


def test_the_earlier_of_two_faults_is_named(ledger, source):
    ls = lines(ledger)
    ledger.path.write_bytes(b"".join([*ls[:4], b"damaged\n", ls[5]]))
    other = PromptSource([PromptSet("all", [Prompt(f"p{i}", "") for i in range(10)])], 8)
    with refused(DataError, fault="prompt", line=1):
        ledger.verify(other)
    with refused(DataError, fault="damaged", line=5):
        ledger.verify(source)


def test_a_torn_line_is_refused_until_it_is_rewound(ledger, source):
    with open(ledger.path, "ab") as file:
        file.write(b'{"step": 6, "cur')
    reopened = PromptLedger(ledger.path)
    tells(reopened.torn, fault="torn", file=ledger.path, line=7, got=("16",))
    with refused(DataError, fault="torn", line=7):
        reopened.verify(source)
    with refused(DataError, fault="torn", line=7):
        run(reopened, source, STEPS, STEPS + 1)
    assert reopened.rewind(STEPS) == 1
    assert reopened.torn is None
    run(reopened, source, STEPS, STEPS + 1)
    reopened.verify(source, steps=STEPS + 1)


def test_a_crash_in_the_middle_of_an_append(ledger, source, monkeypatch):
    # A disk that takes half a line and then fails, as when it is full.
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with refused(DiskError, file=ledger.path, got=("No space",)):
        run(ledger, source, STEPS, STEPS + 1)
    monkeypatch.setattr(os, "fsync", real)
    with open(ledger.path, "r+b") as file:
        file.truncate(ledger.path.stat().st_size - 5)
    with refused(DataError, fault="torn"):  # it looks again at the file, instead of trusting its memory
        run(ledger, source, STEPS + 1, STEPS + 2)
    assert ledger.rewind(STEPS) == 1


def test_lost_lines_are_not_rewound_over(ledger):
    with refused(DataError, fault="lost", got=("6",), expected=("7",)):
        ledger.rewind(STEPS + 1)
    ledger.path.unlink()
    with refused(DataError, fault="lost", got=("0",)):
        ledger.rewind(1)
    with refused(ValueError, got=-1):
        ledger.rewind(-1)


@pytest.mark.parametrize(
    ("step", "cursor"), [(STEPS - 1, 20), (STEPS - 1, 24), (STEPS + 1, 24), (STEPS, 20), (STEPS, 25), (0, 0)]
)
@pytest.mark.parametrize("reopened", [False, True])
def test_a_step_that_does_not_follow_is_refused(ledger, step, cursor, reopened):
    before = ledger.path.read_bytes()
    with refused(DataError, fault="order", got=(f"step {step}", f"{cursor} to {cursor}"), expected=("6", "24")):
        (PromptLedger(ledger.path) if reopened else ledger).record(step, [cursor], ["x"], "d")
    assert ledger.path.read_bytes() == before


def test_a_recorded_line_is_synced_before_record_returns(tmp_path, monkeypatch):
    ledger = PromptLedger(tmp_path / "ledger.jsonl")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    ledger.record(0, [0], ["a"], "d")
    assert synced == [str(ledger.path), str(tmp_path)]
    ledger.record(1, [1], ["b"], "d")
    assert synced[2:] == [str(ledger.path)]
    synced.clear()
    ledger.rewind(1)
    assert synced == [str(ledger.path) + ".tmp", str(tmp_path)]


def test_a_failed_rewind_leaves_the_old_ledger(ledger, source, monkeypatch):
    fired = []

    def fail(*_):
        fired.append(1)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with refused(DiskError, file=ledger.path, got=("Input/output",)):
        ledger.rewind(2)
    monkeypatch.undo()
    assert fired
    ledger.verify(source, steps=STEPS)
    assert ledger.rewind(2) == 4


@pytest.mark.parametrize("cursor", [1, 3])
def test_a_whole_line_of_other_prompts_than_the_next_is_named(tmp_path, cursor):
    """The checksum of a line is valid even if the line skips a prompt or repeats one."""
    ledger = PromptLedger(tmp_path / "ledger.jsonl")
    ledger.record(0, [0, 1], ["a", "b"], "d")
    with open(ledger.path, "ab") as file:
        file.write(StepPrompts(1, [(cursor, 2)], ["c", "d"], [], "d").line() + b"\n")
    ledger.check(1)
    with pytest.raises(DataError, match="jsonl:2"):
        ledger.check(2)


def test_the_digest_is_of_the_steps_before_the_checkpoint_alone(ledger, source):
    before = ledger.digest(STEPS)
    run(ledger, source, STEPS, STEPS + 1)
    assert ledger.digest(STEPS) == before != ledger.digest(STEPS + 1)
    assert ledger.digest(STEPS - 1) != before


def by_arrival(ledger, source, lines):
    for step, (cursors, dropped) in enumerate(lines):
        ledger.record(step, cursors, [ids(source.at(cursor, 1))[0] for cursor in cursors], "d", dropped)


ARRIVALS = [([2, 0, 5], []), ([4, 6, 7], [(1, "stale")]), ([3], [(8, "ended")])]


def test_prompts_that_arrive_in_another_order_each_end_once(tmp_path, source):
    ledger = PromptLedger(tmp_path / "ledger.jsonl", in_order=False)
    by_arrival(ledger, source, ARRIVALS)
    assert [sorted(ledger.ended(steps).above) for steps in range(4)] == [[], [2, 5], [4, 5, 6, 7], []]
    assert [ledger.ended(steps).floor for steps in range(4)] == [0, 1, 3, 9]
    assert [at for at in range(10) if at not in ledger.ended(2)] == [3, 8, 9]
    reopened = PromptLedger(ledger.path, in_order=False)
    reopened.verify(source, steps=3)
    reopened.record(3, [9], ids(source.at(9, 1)), "d")
    reopened.verify(source, steps=4)
    with refused(DataError, fault="cursor", line=1):
        PromptLedger(ledger.path).verify(source)


@pytest.mark.parametrize("cursors, dropped", [([9, 2], []), ([9], [(1, "stale")]), ([9, 9], []), ([9], [(9, "stale")])])
def test_a_prompt_that_ends_a_second_time_is_refused(tmp_path, source, cursors, dropped):
    ledger = PromptLedger(tmp_path / "ledger.jsonl", in_order=False)
    by_arrival(ledger, source, ARRIVALS[:2])
    before = ledger.path.read_bytes()
    with refused(DataError, fault="order"):
        ledger.record(2, cursors, ["x"] * len(cursors), "d", dropped)
    assert ledger.path.read_bytes() == before
    with open(ledger.path, "ab") as file:
        file.write(StepPrompts(2, [(at, 1) for at in cursors], ["x"] * len(cursors), dropped, "d").line() + b"\n")
    with refused(DataError, fault="cursor", line=3):
        ledger.verify(source)


def test_a_prompt_that_never_ends_is_named(tmp_path, source):
    ledger = PromptLedger(tmp_path / "ledger.jsonl", in_order=False)
    by_arrival(ledger, source, ARRIVALS[:2])
    with refused(DataError, fault="end", got=("7",), expected=("3",)):
        ledger.verify(source)
