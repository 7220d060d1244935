"""Well-formed routes of other rows: the alignment test names the fault, and says how much it could see."""

import math

import numpy as np
import pytest
import torch

from moe_rl.replay.alignment import (
    FALSE_ALARM,
    AlignmentTest,
    Sample,
    divergence,
    misplaced_layers,
)
from moe_rl.replay.row_places import RowPlaces

LAYERS, TOP_K, EXPERTS = (1, 2, 4, 5), 2, 16


def witness_of(lengths, seed=0, *, layers=LAYERS, top_k=TOP_K, experts=EXPERTS, tokens=50):
    """Return a router's choice [L, T, K] for sequences of random tokens. It depends on token and layer, and a little on
    the previous token."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(len(layers), tokens, experts))
    chosen = []
    for length in lengths:
        ids = rng.integers(0, tokens, length)
        before = np.concatenate([ids[:1], ids[:-1]])
        scores = taste[:, ids] + 0.5 * taste[:, before]
        chosen.append(np.argsort(-scores, -1)[..., :top_k])
    return torch.from_numpy(np.concatenate(chosen, 1))


def disturbed(witness, share, seed=1, experts=EXPERTS):
    """Return a record of the same rows by an engine that chooses another expert at a share of the places."""
    rng = np.random.default_rng(seed)
    record = witness.numpy().copy()
    for layer, row in zip(*np.nonzero(rng.random(record.shape[:2]) < share), strict=True):
        record[layer, row, 0] = rng.choice([e for e in range(experts) if e not in record[layer, row]])
    return torch.from_numpy(record)


def verdict_of(record, witness, lengths, prompts=None, microbatches=1, families=None):
    """Test a pass over these sequences.

    Args:
        prompts: Number of tokens of each prompt; 4 by default.
        families: Number of each prompt; prompts of one family have the same tokens.
    """
    prompts = [4] * len(lengths) if prompts is None else prompts
    families = range(len(lengths)) if families is None else families
    tokens = [np.r_[[f] * p, range(n - p)] for n, p, f in zip(lengths, prompts, families, strict=True)]
    ends, device = np.cumsum([0, *lengths]), torch.device("cpu")
    places, names, rows = [], [], []
    for cut in np.array_split(np.arange(len(lengths)), microbatches):
        rows.append(slice(ends[cut[0]], ends[cut[-1] + 1]))
        mine, recorded = [tokens[i] for i in cut], np.ones(rows[-1].stop - rows[-1].start, bool)
        places.append(RowPlaces.of(mine, [prompts[i] for i in cut], recorded, slice(None)))
        names.append([f"s{i}" for i in cut])
    test = AlignmentTest(LAYERS, places, device)
    for number, here in enumerate(rows):
        for at, layer in enumerate(LAYERS):
            test.observe(number, layer, record[at, here], witness[at, here])
        assert test.verdict(EXPERTS) is None  # a pass may bring some of the microbatches
        test.compared(number, (record[:, here, :, None] == witness[:, here, None, :]).sum((2, 3)), names[number])
    return test.verdict(EXPERTS)


LENGTHS = [40] * 20
WITNESS = witness_of(LENGTHS)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.04, 0.4])
def test_routes_of_their_own_rows_pass(share, microbatches):
    found = verdict_of(disturbed(WITNESS, share), WITNESS, LENGTHS, microbatches=microbatches)
    assert not found.faults
    assert found.power > (0.89 if share < 0.1 else 0.5)  # prompts of 4 rows are too short to detect a fault
    assert 0 < found.margin < 1


def late(record, rows):
    return torch.roll(record, rows, 1)


def with_layer(record, at, rows):
    changed = record.clone()
    changed[at] = rows
    return changed


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda r: late(r, 1), ["layers 1, 2, 4, 5 have rows 1 token too late"]),
        (lambda r: late(r, 2), ["layers 1, 2, 4, 5 have rows 2 tokens too late"]),
        (lambda r: late(r, -1), ["layers 1, 2, 4, 5 have rows 1 token too early"]),
        (lambda r: with_layer(r, 1, torch.arange(TOP_K)), ["layer 2 has the same experts for every token"]),
        (lambda r: with_layer(r, 2, r[3]), ["layer 4 has the rows of layer 5"]),
        (lambda r: r[[0, 2, 1, 3]], ["layer 2 has the rows of layer 4", "layer 4 has the rows of layer 2"]),
        (lambda r: late(r[[1, 0, 2, 3]], 1), ["layer 1 has the rows of layer 2 1 token too late"]),
        (lambda r: r[:, torch.randperm(800, generator=torch.Generator().manual_seed(3))], ["nothing that was tried"]),
    ],
)
def test_a_layer_with_other_rows_is_named_with_what_they_are(fault, words):
    found = verdict_of(fault(disturbed(WITNESS, 0.04)), WITNESS, LENGTHS)
    text = "; ".join(found.faults)
    assert all(word in text for word in words), text
    sound = {layer for layer in LAYERS if not any(f.layer == layer for f in found.layers)}
    assert len(sound) == {1: 3, 2: 2}.get(len(found.layers), 0), found.layers


def test_rows_of_two_sequences_of_equal_length_swapped():
    lengths = [16] * 40
    witness = witness_of(lengths)
    record = disturbed(witness, 0.04)
    record[:, [*range(16, 32), *range(80, 96)]] = record[:, [*range(80, 96), *range(16, 32)]]
    found = verdict_of(record, witness, lengths)
    assert not found.layers
    assert [text.split(":")[0] for text in found.sequences] == [
        "s1 has other rows at tokens 4 to 15",
        "s5 has other rows at tokens 4 to 15",
    ]


def test_a_wrong_piece_of_a_long_sequence_is_named():
    lengths = [300] * 4
    witness = witness_of(lengths)
    record = disturbed(witness, 0.04)
    record[:, 300 + 128 : 300 + 192] = record[:, 600 + 128 : 600 + 192]
    found = verdict_of(record, witness, lengths, prompts=[0] * 4)
    assert [text.split(":")[0] for text in found.sequences] == ["s1 has other rows at tokens 128 to 191"]


def test_where_the_witness_is_weak_nothing_is_refused_and_the_power_says_so():
    short = [6]
    witness = witness_of(short)
    assert verdict_of(witness, witness, short).power == 0
    assert not verdict_of(late(witness, 1), witness, short).faults
    # These routers send every token to the same experts, so no shift can be detected.
    flat = torch.arange(TOP_K).expand(len(LAYERS), sum(LENGTHS), TOP_K).clone()
    found = verdict_of(late(flat, 1), flat, LENGTHS)
    assert found.power == 0 and not found.faults
    # One constant layer does not reduce the power of the other layers.
    mixed = with_layer(WITNESS, 0, torch.arange(TOP_K))
    found = verdict_of(mixed, mixed, LENGTHS)
    assert found.power == pytest.approx(0.75, abs=0.01) and not found.faults


def test_where_all_rows_agree_less_than_unrelated_ones_layers_are_named_and_no_piece():
    pair = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (len(LAYERS), sum(LENGTHS), 1)))
    record, witness = (2 * one + torch.arange(TOP_K) for one in (1 - pair, pair))
    with np.errstate(all="raise"):
        found = verdict_of(record, witness, LENGTHS)
    assert [one.layer for one in found.layers] == [*LAYERS] and found.power == 0
    assert not any("has other rows at tokens" in text for text in found.sequences)


def test_nothing_recorded_is_nothing_seen():
    places = RowPlaces.of([np.arange(3)], [1], np.zeros(3, bool), slice(None))
    test = AlignmentTest(LAYERS, [places], torch.device("cpu"))
    choice = torch.zeros(3, TOP_K, dtype=torch.int64)
    for layer in LAYERS:
        test.observe(0, layer, choice, choice)
    test.compared(0, torch.zeros(len(LAYERS), 0, dtype=torch.int64), ["s0"])
    found = test.verdict(EXPERTS)
    assert (found.faults, found.power, found.margin) == ([], 0.0, math.inf)


def test_a_rank_sees_some_rows_of_a_sequence():
    """As under context and sequence parallelism."""
    tokens, rows = [np.arange(5), np.arange(70)], np.array([0, 1, 4, 6, 74])
    places = RowPlaces.of(tokens, [2, 3], np.ones(75, bool), rows)
    assert places.position.tolist() == [0, 1, 4, 1, 69]
    assert [places.pieces[i] for i in places.piece] == [(0, 0, 1), (0, 0, 1), (0, 2, 4), (1, 0, 2), (1, 67, 69)]


def siblings(groups, group_size, prompt, completion, seed=0):
    """Make groups of completions of the same prompt. Returns the witness, and the lengths, prompts and families."""
    rng = np.random.default_rng(seed)
    taste, tokens, families = rng.normal(size=(len(LAYERS), 30, EXPERTS)), [], []
    place = rng.normal(size=(len(LAYERS), prompt + completion, EXPERTS))
    for family in range(groups):
        asked = rng.integers(0, 30, prompt)
        for _ in range(group_size):
            tokens.append(np.r_[asked, rng.integers(0, 30, completion)])
            families.append(family)
    # Scores depend on the token and on its place, so rows at the same place are alike.
    scores = [taste[:, ids] + 0.7 * place for ids in tokens]
    witness = torch.from_numpy(np.argsort(-np.concatenate(scores, 1), -1)[..., :TOP_K].copy())
    return witness, [prompt + completion] * len(tokens), [prompt] * len(tokens), families


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("side", ["completions", "prompts"])
def test_every_short_completion_or_prompt_is_anothers(side, microbatches):
    """No single piece is long enough for a verdict, and half of all rows are right. Siblings may be in other
    microbatches."""
    witness, lengths, prompts, families = siblings(40, 4, prompt=5, completion=5)
    record = disturbed(witness, 0.02)
    assert not verdict_of(record, witness, lengths, prompts, microbatches, families).faults
    rows = torch.arange(1600).view(40, 4, 2, 5)  # axes: group, sibling, prompt or completion, token
    if side == "completions":
        rows[:, :, 1] = rows[:, [1, 0, 3, 2], 1]
    else:
        rows[:, :, 0] = rows[:, :, 0].roll(1, 0)
    found = verdict_of(record[:, rows.flatten()], witness, lengths, prompts, microbatches, families)
    assert not found.layers
    assert found.sequences[0].startswith(f"{side} have the rows of other {side}: "), found.faults


def test_a_single_sequence_tells_a_swapped_layer():
    """The canary compares single sequences like this."""
    witness = witness_of([200])
    record = disturbed(witness, 0.04)
    found, power, margin = misplaced_layers([Sample.of_sequence(record, witness)], LAYERS, EXPERTS)
    assert not found and power == 1 and margin > 0.5
    found, *_ = misplaced_layers([Sample.of_sequence(record[[1, 0, 2, 3]], witness)], LAYERS, EXPERTS)
    assert [(one.layer, one.match) for one in found] == [(1, "the rows of layer 2"), (2, "the rows of layer 1")]


def test_the_bound_is_chernoffs():
    """Compares with the exact tail of the binomial distribution: the bound is never below it, and close to it."""
    for n, wins in ((20, 18), (100, 80), (40, 40)):
        exact = sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n
        bound = math.exp(-n * divergence(wins / n, 0.5))
        assert exact <= bound * (1 + 1e-12) and bound < 30 * exact


@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm(seed):
    """Runs healthy passes of many shapes, with engines that agree up to little. At FALSE_ALARM, none of so few passes
    may fail."""
    rng = np.random.default_rng(seed)
    assert FALSE_ALARM * 20 < 1e-3
    lengths = rng.integers(1, 60, rng.integers(1, 60)).tolist()
    prompts = [int(rng.integers(0, length + 1)) for length in lengths]
    witness = witness_of(lengths, seed, tokens=int(rng.integers(2, 60)))
    record = disturbed(witness, rng.choice([0.0, 0.03, 0.3]), seed)
    assert not verdict_of(record, witness, lengths, prompts, microbatches=min(2, len(lengths))).faults
