"""Well-formed routes of other rows: the alignment test names the fault, and says for each claim what it could see."""

import itertools
import json
import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import alarms
from benchmarks.alarm_parts.faults import FAULTS as FAULTS_OF_THE_ZOO
from benchmarks.alarm_parts.faults import is_fault
from benchmarks.alarm_parts.models import FAMILIES, RATES, STALENESS, Setting, rollouts, settings
from benchmarks.alarm_parts.zoo import NAMED, Shape, healthy
from moe_rl.errors import NonFiniteError, ReplayError
from moe_rl.replay.alignment import Alignment, AlignmentTest
from moe_rl.replay.claims import ALPHA, CLAIMS, CORE, FAR, PASSES, Bets, History, judge, log_e
from moe_rl.replay.layer_claims import LayerSample, layer_tests
from moe_rl.replay.regret import BLOCK_ROWS, FINE_ROWS, whole_layers
from moe_rl.replay.row_places import SAMPLED_ROWS, PassRows, RowPlaces, pairs, windows
from tests.support.refusals import refused as refuses

LAYERS, TOP_K, EXPERTS = (1, 2, 4, 5), 4, 32
SIBLINGS, PROMPT, COMPLETION = 2, 10, 20
# tokens: size of the vocabulary; shared: tokens of a completion that its siblings have too; repeat: what texts repeat.
SHAPE = {"layers": 4, "top_k": TOP_K, "experts": EXPERTS, "tokens": 60, "groups": 16, "siblings": SIBLINGS,
         "completion": COMPLETION, "shared": 0, "noise": 0.02, "lag": 0, "drift": 0.3, "repeat": None}  # fmt: skip


class Pass:
    """Holds a healthy pass: tokens of each sequence, prompt lengths, lags [N], scores [L, N, E] and records [L, N, K].

    Scores depend on the token, the tokens before it and the layer. The record is the choice by scores with a little
    noise; older weights move the scores of a token, in every row alike.
    """

    def __init__(self, seed=0, **given):
        """For the numbers that may be given see `SHAPE`."""
        shape = SimpleNamespace(**SHAPE | given)
        rng = np.random.default_rng(seed)
        self.tokens, self.prompts = [], []
        for _ in range(shape.groups):
            asked, common = (rng.integers(0, shape.tokens, count) for count in (PROMPT, shape.shared))
            for _ in range(shape.siblings):
                answer = np.r_[common, rng.integers(0, shape.tokens, shape.completion - shape.shared)]
                ids = np.r_[asked, answer]
                self.tokens.append(ids if shape.repeat is None else np.resize(shape.repeat, len(ids)))
                self.prompts.append(PROMPT)
        taste, move = rng.normal(size=(2, shape.layers, shape.tokens, shape.experts))
        parts = []
        for ids in self.tokens:
            before = np.r_[ids[:1], ids[:-1]]
            parts.append(taste[:, ids] + 0.5 * taste[:, before] + 0.3 * np.cumsum(taste[:, ids], 1) / 10)
        self.scores = np.concatenate(parts, 1).astype(np.float32)
        sampler = self.scores + shape.noise * rng.normal(size=self.scores.shape)
        if shape.lag:
            sampler += shape.drift * move[:, np.concatenate(self.tokens)]
        self.lag = np.full(self.scores.shape[1], shape.lag)
        self.record = np.argsort(-sampler, -1)[..., : shape.top_k]
        self.layers = LAYERS[: shape.layers] if shape.layers <= len(LAYERS) else range(shape.layers)

    def test(self, record=None, microbatches=1, history=None, moves=0.0):
        """Judge the pass, or the pass with another record."""
        record = self.record if record is None else record
        ends = np.cumsum([0, *map(len, self.tokens)])
        cuts = np.array_split(np.arange(len(self.tokens)), microbatches)
        rows = [slice(ends[cut[0]], ends[cut[-1] + 1]) for cut in cuts]
        places = [
            RowPlaces.of(
                [self.tokens[i] for i in cut],
                [self.prompts[i] for i in cut],
                np.ones(here.stop - here.start, bool),
                slice(None),
                self.lag[here],
            )
            for cut, here in zip(cuts, rows, strict=True)
        ]
        test = AlignmentTest(self.layers, places, torch.device("cpu"), history=history, moves=moves)
        for number, (cut, here) in enumerate(zip(cuts, rows, strict=True)):
            for at, layer in enumerate(self.layers):
                scores = torch.from_numpy(np.ascontiguousarray(self.scores[at, here]))
                native = scores.topk(record.shape[2])[1]
                test.observe(number, layer, torch.from_numpy(np.ascontiguousarray(record[at, here])), native, scores)
            assert test.verdict() is None  # a pass may bring some of the microbatches
            test.compared(number, [f"s{i}" for i in cut])
        return test.verdict()

    @property
    def starts(self):
        return np.cumsum([0, *map(len, self.tokens)])


HEALTHY = Pass()


def status(found):
    return {claim.name: claim.status for claim in found.claims}


def refused(found):
    return {claim.name for claim in found.claims if claim.status == "refused"}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_routes_of_their_own_rows_pass_and_every_claim_says_what_it_saw(microbatches):
    found = HEALTHY.test(microbatches=microbatches)
    assert [claim.name for claim in found.claims] == [*CLAIMS] and not found.faults
    assert {status(found)[name] for name in CORE} == {"proven"}
    assert found.power == 1 and -1000 < found.evidence < -10


def test_two_passes_prove_together_what_both_prove():
    found = HEALTHY.test()
    weak = replace(found, claims=(replace(found.claims[0], status="weak", power=0.5), *found.claims[1:]), moved=0.25)
    for joined in (found.joined(weak), weak.joined(found)):
        assert status(joined) == status(found) | {found.claims[0].name: "weak"}
        assert joined.claims[0].power == 0.5 and joined.moved == 0.25 and joined.evidence == found.evidence
    assert found.joined(None) is found


def layer_of(record, at, rows):
    changed = record.copy()
    changed[at] = rows
    return changed


def one_id(one, rng, layers=slice(None)):
    """Replace one id of each row by another one."""
    changed = one.record.copy()
    part = changed[layers]
    rank = rng.random((*part.shape[:2], EXPERTS))
    np.put_along_axis(rank, part, 2.0, 2)  # experts that the row has come last
    np.put_along_axis(part, rng.integers(0, TOP_K, (*part.shape[:2], 1)), rank.argmin(2, keepdims=True), 2)
    return changed


def siblings_exchanged(one, rng):
    record, starts = one.record.copy(), one.starts
    for at in range(0, len(one.tokens), SIBLINGS):
        a, b = starts[at] + PROMPT, starts[at + 1] + PROMPT
        record[:, a : a + COMPLETION], record[:, b : b + COMPLETION] = (
            one.record[:, b : b + COMPLETION],
            one.record[:, a : a + COMPLETION],
        )
    return record


def prompts_exchanged(one, rng, siblings=SIBLINGS):
    record, starts = one.record.copy(), one.starts
    for at in range(len(one.tokens)):
        other = (at + siblings) % len(one.tokens)
        record[:, starts[at] : starts[at] + PROMPT] = one.record[:, starts[other] : starts[other] + PROMPT]
    return record


def last_prompt_rows_copied(one, rng):
    record = one.record.copy()
    at = one.starts[:-1] + PROMPT - 1
    record[:, at] = record[:, at - 1]
    return record


def ten_percent(one, rng):
    record = one.record.copy()
    rows = np.flatnonzero(rng.random(record.shape[1]) < 0.1)
    record[2, rows] = record[2, rng.permutation(record.shape[1])[: len(rows)]]
    return record


def exchanged(one, rng):
    record = one.record.copy()
    layer = record[1]
    one_expert, other = np.argsort(-np.bincount(layer.ravel(), minlength=EXPERTS))[:2]
    record[1] = np.where(layer == one_expert, other, np.where(layer == other, one_expert, layer))
    return record


def an_expert_in_every_row(one, rng):
    record = one.record.copy()
    rare = int(np.argmin(np.bincount(record[3].ravel(), minlength=EXPERTS)))
    for row in record[3]:
        if rare not in row:
            row[0] = rare
    return record


def late(one, rng, rows=1):
    return np.roll(one.record, rows, 1)


def a_layer_late(one, rng):
    return layer_of(one.record, 1, np.roll(one.record[1], 1, 0))


def shuffled(one, rng):
    return one.record[:, rng.permutation(one.record.shape[1])]


FAULTS = {
    "late": (late, "shift", "layers 1, 2, 4, 5 have rows 1 token too late"),
    "two late": (partial(late, rows=2), "shift", "layers 1, 2, 4, 5 have rows 2 tokens too late"),
    "early": (partial(late, rows=-1), "shift", "layers 1, 2, 4, 5 have rows 1 token too early"),
    "one layer late": (a_layer_late, "shift", "layer 2 has rows 1 token too late"),
    "constant": (lambda one, _: layer_of(one.record, 1, np.arange(TOP_K)), "no rows", "layer 2 has rows that match"),
    "another layer": (
        lambda one, _: layer_of(one.record, 2, one.record[3]),
        "layer",
        "has the rows of layer 5: regret 0.0",
    ),
    "two layers": (lambda one, _: one.record[[0, 2, 1, 3]], "layer", "layer 2 has the rows of layer 4"),
    "a layer, late": (
        lambda one, _: np.roll(one.record[[1, 0, 2, 3]], 1, 1),
        "layer",
        "rows of layer 2 1 token too late",
    ),
    "shuffled": (shuffled, "no rows", "layers 1, 2, 4, 5 have rows that match nothing that was tried"),
    "siblings": (siblings_exchanged, "completions", "completions have the rows of other completions"),
    "prompts": (prompts_exchanged, "prompts", "prompts have the rows of other prompts"),
    "last prompt row": (last_prompt_rows_copied, "last prompt row", "the row before in their last prompt row"),
    "one id": (one_id, "single ids", "1 of 4 recorded experts are wrong in every row"),
    "one id of a layer": (
        partial(one_id, layers=slice(2, 3)),
        "single ids",
        "layer 4: 1 of 4 recorded experts are wrong",
    ),
    "an expert everywhere": (an_expert_in_every_row, "single ids", "layer 5 has an expert in every row"),
    "some rows": (ten_percent, "some rows", "layer 4 has some rows that match nothing"),
    "labels": (exchanged, "labels", "are exchanged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_the_claim_that_is_about_it(fault):
    plant, claim, words = FAULTS[fault]
    large = Pass(3, groups=40)
    record = plant(large, np.random.default_rng(1))
    assert (record != large.record).any()
    found = large.test(record)
    assert claim in refused(found)
    assert words in "; ".join(found.faults), found.faults
    before = large.test()
    assert not before.faults and status(before)[claim] == "proven"  # it knew that it would see this


def test_a_record_that_names_an_expert_twice_is_an_error_of_the_caller():
    record = HEALTHY.record.copy()
    record[2, :, 1] = record[2, :, 0]
    with pytest.raises(ReplayError, match=r"names an expert twice \(layer 4, token 0\).*4 different experts"):
        HEALTHY.test(record)


# One in a row that is kept in every layer, and one in another row, in a layer of whole rows.
@pytest.mark.parametrize(("bad", "layer", "fine"), [(np.nan, 1, True), (np.inf, 0, False)])
def test_a_score_that_is_not_finite_proves_nothing_but_is_named(bad, layer, fine):
    one = Pass(6, layers=6, groups=9, siblings=1, completion=300)
    count = one.record.shape[1]
    rows = np.union1d(windows(count, FINE_ROWS), windows(count, SAMPLED_ROWS))
    at = int(rows[900] if fine else np.setdiff1d(np.arange(count), rows)[500])
    one.scores[layer, at, int(one.scores[layer, at].argmin())] = bad
    sequence = int(np.searchsorted(one.starts, at, side="right")) - 1
    with refuses(NonFiniteError, layer=layer, request=f"s{sequence}", token=int(at - one.starts[sequence])):
        one.test()


def test_stuck_rows_and_other_pieces_are_named_with_their_sequence():
    long = Pass(5, groups=6, siblings=1, completion=300)
    record, starts = long.record.copy(), long.starts
    record[:, starts[1] + 100 : starts[1] + 132] = record[:, starts[1] + 100 : starts[1] + 101]
    found = long.test(record)
    assert refused(found) == {"stuck rows"} and found.faults == ["s1 repeats a row"]
    record = long.record.copy()
    record[:, starts[2] + 138 : starts[2] + 202] = record[:, starts[4] + 138 : starts[4] + 202]
    found = long.test(record)
    assert refused(found) == {"pieces"}
    assert [text.split(":")[0] for text in found.faults] == ["s2 has other rows at tokens 138 to 201"]
    assert status(long.test())["pieces"] == "proven"


def test_a_long_pass_is_seen_by_a_part_of_its_rows_and_layers():
    """All rows are measured in four layers, a block of microbatches at a time, and 2,304 rows in every layer."""
    long = Pass(6, layers=12, groups=30, siblings=1, completion=300)
    assert long.record.shape[1] > 2 * BLOCK_ROWS
    found = long.test(microbatches=10)
    assert not found.faults and {status(found)[name] for name in (*CORE, "pieces", "stuck rows")} == {"proven"}
    record, starts = long.record.copy(), long.starts
    record[:, starts[20] + 138 : starts[20] + 202] = record[:, starts[4] + 138 : starts[4] + 202]
    found = long.test(record, microbatches=10)
    assert refused(found) == {"pieces"}
    assert [text.split(":")[0] for text in found.faults] == ["s20 has other rows at tokens 138 to 201"]
    layers = [*range(12)]
    for at in layers:  # a layer that is not among the four
        if at not in whole_layers(layers, TOP_K):
            found = long.test(layer_of(long.record, at, one_id(long, np.random.default_rng(1))[at]), microbatches=10)
            assert refused(found) == {"single ids"}
            assert found.faults == [f"layer {at}: 1 of {TOP_K} recorded experts are wrong in every row"]
            break


@pytest.mark.parametrize(
    "shape",
    [
        {"shared": 16},
        {"groups": 1, "siblings": 32, "shared": 10},
        {"repeat": [3]},
        {"repeat": [3, 8]},
        {"repeat": [5] * 25 + [1, 2, 3, 4, 5]},
        {"noise": 0.3},
        {"lag": 2, "drift": 0.6},
        {"layers": 1, "top_k": 1, "experts": 8, "noise": 0.5},
        {"layers": 2, "top_k": 2, "experts": 8},
    ],
)
def test_healthy_passes_that_are_hard_to_tell_apart_are_not_refused(shape):
    for seed, microbatches in ((0, 1), (1, 4)):
        one = Pass(seed, **{"groups": 8, "siblings": 4} | shape)
        found = one.test(microbatches=microbatches)
        assert not found.faults, (seed, found.faults)


def test_an_almost_constant_record_does_not_belong_to_a_layer_that_it_fits_worse():
    """Biases decide, so it gains nothing on its own rows. On those of other layers it may, by chance."""
    shape = Shape(layers=48, experts=8, top_k=1, text="random", siblings=1, prompt_tokens=4, completion_tokens=40,
                  vocabulary=5000, shared=0.1, bias=2.0, trained=True, averaging=True, sharp=0.8, noise=1e-4,
                  trainer_noise=0.0, drift=0.3, offset=0.3, microbatches=4, cells=600_000)  # fmt: skip
    history = History()
    for step in range(4):
        assert healthy(shape, 5041, step).judge(history=history).faults == []


def test_a_busy_expert_in_every_row_is_refused():
    """The router chooses it for 22% of the rows, and nearly for others."""
    one = healthy(NAMED["tiny_moe_cpu"], 246)
    record = FAULTS_OF_THE_ZOO["an expert in every row"][1](one, np.random.default_rng([1968, 1]))
    assert one.judge(record).faults == ["layer 4 has an expert in every row"]


def test_routes_of_weights_that_moved_far_are_not_refused_as_unrelated_but_weak():
    """Scores moved by fifty times their size, so the record is unrelated to its rows."""
    one = Pass(0, tokens=300, lag=2, drift=50.0)
    unrelated = ("prompts", "completions", "no rows", "pieces", "single ids", "some rows")
    assert "no rows" in refused(one.test(moves=FAR / 2))
    found = one.test(moves=0.6 * FAR)
    assert not found.faults and found.moved == 1.2 * FAR
    assert {status(found)[name] for name in unrelated} == {"weak"}
    fresh = HEALTHY.test(moves=FAR)
    assert fresh.moved == 0 and {status(fresh)[name] for name in CORE} == {"proven"}


def test_the_zoo_has_older_weights_where_it_says_so():
    for name, lags in (("staleness 2, high rate", {1}), ("lags 0, 1, 2 mixed", {0, 1, 2}), ("tiny_moe_cpu", {0})):
        one = healthy(NAMED[name], 0)
        changed = (np.sort(one.record) != np.sort(one.witness)).any((0, 2))
        assert {*one.lag.tolist()} == lags
        assert all(changed[one.lag == lag].mean() > 0.8 for lag in lags - {0})
    one = healthy(NAMED["updates in flight"], 0)
    assert {*one.lag.tolist()} == {0, 1, 2}  # of the keys: those of new weights move less
    apart = (np.sort(one.record) != np.sort(one.witness)).mean((0, 2))
    oldest = [number for number, start in enumerate(one.starts[:-1]) if one.lag[start] == 2]
    first, last = (np.mean([apart[one.starts[i + end] + place] for i in oldest]) for end, place in ((0, 0), (1, -1)))
    assert first > last > 0


def test_each_step_of_a_chain_has_its_own_texts_and_the_model_of_the_others():
    one, two = (healthy(NAMED["tiny_moe_cpu"], 3, step) for step in (0, 1))
    assert not np.array_equal(np.concatenate(one.tokens), np.concatenate(two.tokens))
    passes = (one, two, healthy(NAMED["tiny_moe_cpu"], 4))
    load, later, other = (np.bincount(each.record[0].ravel(), minlength=32) / each.record[0].size for each in passes)
    assert 3 * np.abs(load - later).sum() < np.abs(load - other).sum()


def test_few_settings_have_many_families_and_rates_and_all_have_every_pair():
    assert {(one.rate, one.staleness) for one in settings()} == {*itertools.product(RATES, STALENESS)}
    assert len({(one.family, one.rate, one.trained) for one in settings()}) == 2 * len(FAMILIES) * len(RATES)
    for count in range(1, 13):
        some = settings()[:count]
        assert len({one.family for one in some}) == min(count, len(FAMILIES))
        assert len({one.rate for one in some}) == min(count, len(RATES))


def test_the_passes_of_a_chain_share_shape_model_and_history(monkeypatch):
    made, histories = [], []

    class Healthy:
        shape, lag = None, np.zeros(1)
        varied, canary = staticmethod(lambda: True), staticmethod(lambda: [])

        def judge(self, history):
            histories.append(history)
            return Alignment()

    monkeypatch.setattr(alarms, "healthy", lambda *of: made.append(of) or Healthy())
    count = alarms._Count()
    for seed in range(2 * alarms.CHAIN):
        count.synthetic(seed, plant=False)
    first, second = made[: alarms.CHAIN], made[alarms.CHAIN :]
    for chain, of in enumerate((first, second)):
        assert len({shape for shape, *_ in of}) == 1
        assert [(seed, step) for _, seed, step in of] == [(chain, step) for step in range(alarms.CHAIN)]
    assert [one is histories[0] for one in histories] == [True] * alarms.CHAIN + [False] * alarms.CHAIN
    assert len({id(one) for one in histories}) == 2 and count.result()["healthy_passes"] == len(made)
    assert count.guards["canary"]["checks"] == 2  # one in a chain


@pytest.mark.long
def test_a_model_that_eight_large_updates_moved_is_not_refused():
    one = next(rollouts(Setting("glm-plain", rate=1e-2, staleness=8, trained=False), 1))
    assert not one.judge().faults
    one.moves = 0.0
    assert [text.partition(":")[0] for text in one.judge().faults] == [
        "layer 2 has rows that match nothing that was tried"
    ]


@pytest.mark.long
def test_rows_of_other_groups_of_experts_are_no_sound_rows():
    """After an update at a rate of 1e-2 most rows have experts of other groups. Rows beside them were refused."""
    one = next(rollouts(Setting("glm-groups", rate=1e-2, staleness=1, trained=True), seed=19))
    found = one.judge()
    assert not found.faults and status(found)["some rows"] == "weak"


def test_where_nothing_can_be_told_apart_the_claims_are_weak():
    few = Pass(0, groups=1, siblings=1, completion=4).test()
    seen = status(few)
    assert seen.pop("stuck rows") == "proven"  # 13 equal rows in turn are enough
    assert {*seen.values()} == {"weak"} and few.power == 0
    one_token = Pass(0, repeat=[3]).test()
    assert status(one_token)["shift"] == "weak" and not one_token.faults
    late = Pass(0, repeat=[3])
    assert not late.test(np.roll(late.record, 1, 1)).faults


def test_nothing_recorded_is_nothing_seen():
    places = RowPlaces.of([np.arange(3)], [1], np.zeros(3, bool), slice(None))
    test = AlignmentTest(LAYERS, [places], torch.device("cpu"))
    choice, scores = torch.zeros(3, TOP_K, dtype=torch.int64), torch.zeros(3, EXPERTS)
    for layer in LAYERS:
        test.observe(0, layer, choice, choice, scores)
    test.compared(0, ["s0"])
    found = test.verdict()
    assert (found.faults, found.power, found.evidence) == ([], 0.0, -math.inf)


def test_a_fault_that_stays_is_refused_though_one_pass_is_too_small():
    small = [Pass(seed, groups=3, siblings=1) for seed in range(PASSES)]
    history = History()
    assert not any(one.test(history=history).faults for one in small)
    history = History()
    wrong = [prompts_exchanged(one, None, siblings=1) for one in small]
    faults = [refused(one.test(record, history=history)) for one, record in zip(small, wrong, strict=True)]
    assert "prompts" not in faults[0] and "prompts" in faults[-1]


def test_records_that_suddenly_fit_far_worse_than_in_the_last_steps_are_refused():
    """Half of them belong to other rows; a test of a single pass does not say so."""
    history, one = History(), Pass(3, groups=3, siblings=2)
    for seed in range(3):
        assert not Pass(seed, groups=3, siblings=2).test(history=history).faults
    record = one.record.copy()
    record[:, : record.shape[1] // 2] = np.roll(one.record, 37, 1)[:, : record.shape[1] // 2]
    found = one.test(record, history=history)
    assert any(
        text.startswith("records fit their rows far worse than in the last steps: regret") for text in found.faults
    )
    assert not any(text.startswith("records fit") for text in one.test(record).faults)
    assert not one.test(history=history).faults


def test_a_refused_pass_is_no_evidence_against_those_after_it():
    history = History()
    assert "shift" in refused(HEALTHY.test(np.roll(HEALTHY.record, 1, 1), history=history))
    assert not HEALTHY.test(history=history).faults


def test_what_is_logged_of_a_pass_does_not_depend_on_the_passes_before():
    """A run that is resumed has no history, and logs what it would have logged."""
    history = History()
    for seed in range(2):
        one = Pass(seed, groups=3, siblings=1)
        assert one.test(history=history) == one.test()


def test_a_pass_with_other_tests_starts_its_history_anew():
    history = History()
    two, three = (torch.ones(count, dtype=torch.float64) for count in (2, 3))
    assert history.largest("layer", two).tolist() == [1, 1]
    assert history.largest("layer", two).tolist() == [2, 2]
    assert history.largest("layer", three).tolist() == [1, 1, 1]
    assert history.largest("layer", -three).tolist() == [0, 0, 0]


def test_a_rank_sees_some_rows_of_a_sequence():
    """As under context and sequence parallelism."""
    tokens, rows = [np.arange(5), np.arange(70)], np.array([0, 1, 4, 6, 74])
    places = RowPlaces.of(tokens, [2, 3], np.ones(75, bool), rows)
    assert places.position.tolist() == [0, 1, 4, 1, 69] and places.token.tolist() == [0, 1, 4, 1, 69]
    assert [places.pieces[i] for i in places.piece] == [(0, 0, 1), (0, 0, 1), (0, 2, 4), (1, 0, 2), (1, 67, 69)]
    assert places.prefix[1] == places.prefix[3] and len({*places.prefix.tolist()}) == 4
    seen = PassRows.of([places])
    assert seen.before.tolist() == [0, 0, 2, 3, 4]


def test_pairs_are_rows_at_the_same_place_behind_the_first_difference():
    tokens = [np.array(ids) for ids in ([1, 2, 3, 4, 5], [1, 2, 3, 9, 5], [7, 2, 3, 4], [8, 2, 6])]
    cuts = ((slice(0, 1), 5), (slice(1, 4), 12))
    places = [RowPlaces.of(tokens[cut], [2] * len(tokens[cut]), np.ones(n, bool), slice(None)) for cut, n in cuts]
    rows = PassRows.of(places)
    for name, found in pairs(rows).items():
        here, there = ([(int(rows.sequence[i]), int(rows.position[i])) for i in side] for side in found)
        assert [at for _, at in here] == [at for _, at in there], name
        if name == "completions":  # of the same prompt, from the fourth token on
            assert {*here} == {(0, 3), (0, 4), (1 << 32, 3), (1 << 32, 4)}
        else:
            assert len(here) == 6 and len({sequence for sequence, _ in here}) == 3


def test_a_single_sequence_tells_a_swapped_layer():
    """The canary compares single sequences like this, without the scores."""
    one = Pass(groups=1, siblings=1, completion=200)
    choice = np.argsort(-one.scores, -1)[..., :TOP_K]
    rows = one.record.shape[1]
    places = RowPlaces.of([np.arange(rows)], [rows], np.ones(rows, bool), slice(None))

    def claims(record):
        sample = LayerSample.of_choice(record, choice, EXPERTS, places)
        return [judge(tests, History()) for tests in layer_tests(sample, LAYERS, fresh=True)]

    assert [claim.status for claim in claims(one.record)] == ["proven", "proven"]
    found = claims(np.ascontiguousarray(one.record[[1, 0, 2, 3]]))[0].found
    assert [text.split(":")[0] for text in found] == [
        "layer 1 has the rows of layer 2",
        "layer 2 has the rows of layer 1",
    ]


def test_the_evidence_is_an_e_value():
    """Its mean over values without a preference is 1, so it exceeds 1 / alpha with a probability below alpha."""
    every = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=4)), dtype=torch.float64).T
    assert float(torch.exp(log_e(every)).mean()) == pytest.approx(1, rel=1e-12)
    needed = math.log(len(CLAIMS) * PASSES * 5 / ALPHA)
    for size, expected in ((needed - 1e-9, "weak"), (needed, "refused")):
        record = torch.full((5,), size, dtype=torch.float64)
        assert judge(Bets("layer", record, record[:0], str, 5), History()).status == expected


def test_a_planted_fault_of_near_ties_alone_is_none():
    record = np.arange(24).reshape(2, 3, 4)
    tie = record.copy()
    tie[:, 0, 0] = 50  # one id in twelve
    assert is_fault(record, np.roll(record, 1, 1))
    assert not is_fault(record, tie) and not is_fault(record, record[..., ::-1])


def test_the_count_of_alarms_begins_with_nothing_and_goes_on_from_its_file(tmp_path, monkeypatch):
    file = tmp_path / "alarms.json"
    for passes in (0, 1, 2):
        given = ["--json", str(file), "--passes", str(passes), "--rollouts", "0", "--runs", "0", "--faults", "0"]
        monkeypatch.setattr(sys, "argv", ["alarms", *given])
        monkeypatch.setattr(alarms, "NAMED", {"small": Shape(layers=2, prompts=2, siblings=2)})
        alarms.main()
        assert json.loads(file.read_text())["healthy_passes"] == passes
    monkeypatch.setattr(alarms, "healthy", None)  # nothing is left to do
    alarms.main()
