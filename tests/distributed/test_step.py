"""A training step when routes are missing or of older weights: refused, dropped, or routed natively, and counted. And
one on tokens that were drawn from a part of the vocabulary, which the trainer then renormalises over."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_rl.config.load import load_config
from moe_rl.models.hf import read_model
from moe_rl.objectives.advantages import advantages
from moe_rl.planning.balance import excess, load_of, pack_by_load, round_loads
from moe_rl.planning.expert_placement import place
from moe_rl.planning.packing import pack, split_groups
from moe_rl.planning.peaks import limit_problem, peaks
from moe_rl.proof.batch import LENGTHS, batch
from moe_rl.report.registry import METRICS, find
from tests.distributed.jobs.step import (
    judged,
    one,
    scores_of,
    scores_of_hidden,
    shared_logits,
    shared_vocabulary,
    supports_of,
)
from tests.distributed.usual import with_seeds

pytestmark = pytest.mark.timeout(900)
CONFIG = Path(__file__).parents[2] / "configs/tiny_moe_cpu.yaml"
LAYERS = 4
TOKENS = [prompt + completion - 1 for prompt, completion in LENGTHS]
NATIVE = ["replay.missing=native", "replay.max_fallback_fraction=0.2"]
STALE = ["pipeline.mode=one_step_off"]
MASK = ["rollout.top_k=7", "rollout.keep_sampling_mask=true"]
SMALL = ["train.microbatch_tokens=14", "train.updates_per_step=1"]
INTERLEAVED = ["parallel.expert=1", "parallel.pipeline=2", "parallel.virtual_pipeline=2"]
ENTROPY_COEF = 4.0
USUAL = ["whole", "by-load", "masked-tensor"]
# Natively routed, so that `transformers` computes the same, and the reference, of the same weights, too.
MASKED = [*MASK, "replay.mode=off", "train.updates_per_step=1", "objective.kl_coef=0.1"]
MASKED += [f"objective.entropy_coef={ENTROPY_COEF}"]
# In groups of two the std would take away all of a KL but the sign.
NO_KL = ["objective.advantage=reinforce_pp"]
KL_IN_REWARD = [*NO_KL, "objective.kl_in=reward", "objective.kl_coef=0.5", "objective.kl_estimator=k1"]
CORRECTED = [
    "objective.corrections=[{level: geometric, rule: reject, high: 1.5}]",
    "objective.off_policy_delta=0.5",
    "train.router_aux_loss=0.01",
]
CENTERED = ["objective.name=cispo", "objective.weight_cap=5", "objective.clip_low=null", "objective.clip_high=null"]
CENTERED += ["objective.old_logprobs=sampler", "objective.score_centering=3"]
CASES = {
    "whole": {},
    "r2": {"overrides": ["replay.mode=r2"]},
    "off": {"overrides": ["replay.mode=off"]},
    "unplanned": {"overrides": ["replay.plan=false"]},
    "recomputed": {"overrides": ["train.recompute=moe"]},
    "one-chunk": {"overrides": ["replay.overlap_chunks=1"]},
    "r2-two-chunks": {"overrides": ["replay.mode=r2", "replay.overlap_chunks=2", "train.recompute=moe"]},
    "r2-overlapped": {
        "overrides": ["replay.mode=r2", "train.dtype=bfloat16", "train.overlap_expert_parallel_comm=true"]
    },
    "by-length": {"overrides": SMALL},
    "by-load": {"overrides": [*SMALL, "train.packing=load"]},
    "by-load-missing-native": {"overrides": [*SMALL, *NATIVE, "train.packing=load"], "missing": [3], "short": [5]},
    "by-load-lost": {"overrides": [*SMALL, "train.packing=load"], "lost": [3]},
    "placed": {"overrides": [*SMALL, "placement.experts=traced"]},
    "placed-by-load": {"overrides": [*SMALL, "placement.experts=traced", "train.packing=load"]},
    "placed-off": {"overrides": [*SMALL, "placement.experts=traced", "replay.mode=off"]},
    "copied": {"overrides": [*SMALL, "placement.copies=1", "placement.least_copied_rows=1"]},
    "copied-apart": {
        "overrides": [*SMALL, "placement.copies=1", "placement.least_copied_rows=1", "placement.node_ranks=1"]
    },
    "too-many-rows": {"overrides": [*SMALL, "replay.max_rows=40"]},
    "r2-too-many-rows": {"overrides": ["replay.mode=r2", "replay.max_rows=40"]},
    "missing-refused": {"missing": [3]},
    "missing-native": {"overrides": NATIVE, "missing": [3], "short": [5]},
    "context": {"overrides": ["parallel.context=2"]},
    "context-r2": {"overrides": ["parallel.context=2", "replay.mode=r2"]},
    "context-missing-native": {"overrides": [*NATIVE, "parallel.context=2"], "missing": [3], "short": [5]},
    "missing-native-too-many": {"overrides": NATIVE, "missing": [1, 3, 4]},
    "missing-dropped": {"overrides": ["replay.missing=drop", "replay.max_fallback_fraction=0.2"], "missing": [3, 4]},
    "missing-dropped-too-many": {
        "overrides": ["replay.missing=drop", "replay.max_fallback_fraction=0.2"],
        "missing": [3, 4],
        "short": [5],
    },
    "kl-reward": {"overrides": KL_IN_REWARD},
    "context-kl-reward": {"overrides": [*KL_IN_REWARD, "parallel.context=2"]},
    "kl-loss": {"overrides": [*NO_KL, "objective.kl_coef=0.5"]},
    "interleaved-kl-loss": {"overrides": [*NO_KL, "objective.kl_coef=0.5", *INTERLEAVED]},
    "no-kl": {"overrides": NO_KL},
    "no-difference": {"reward": 0.3},
    "one-sequence": {"first": 1},
    "stale-refused": {"old": [2]},
    "stale-replayed": {"overrides": STALE, "old": [2, 5]},
    "stale-native": {
        "overrides": [*STALE, "replay.stale=native", "replay.max_fallback_fraction=0.2"],
        "old": [2, 5],
    },
    "stale-off": {"overrides": [*STALE, "replay.mode=off"], "old": [2, 5]},
    "corrected": {"overrides": CORRECTED},
    "centered": {"overrides": CENTERED, "heads": 3},
    "second-moment": {
        "overrides": ["objective.name=gspo_token", "objective.second_moment_limit=1e-9", "train.updates_per_step=1"]
    },
    "masked": {"overrides": MASKED},
    "masked-tensor": {"overrides": [*MASKED, "parallel.tensor=2"]},
    "masked-context": {"overrides": [*MASKED, "parallel.context=2"]},
    "masked-pipeline": {"overrides": [*MASKED, "parallel.expert=1", "parallel.pipeline=2"]},
    "masked-sampler": {"overrides": [*MASKED, "objective.old_logprobs=sampler"]},
    "unsupported": {"overrides": MASK, "unsupported": [3]},
    # every sequence is scored for the old policy in a pass of its own
    **{
        f"{case}-ahead": {"overrides": overrides, "ahead": True}
        for case, overrides in {
            "whole": [],
            "recomputed": ["train.recompute=moe"],
            "off": ["replay.mode=off"],
            "context": ["parallel.context=2"],
            "interleaved-kl-loss": [*NO_KL, "objective.kl_coef=0.5", *INTERLEAVED],
            "by-length": SMALL,
            "corrected": CORRECTED,
        }.items()
    },
    "uncounted": {"overrides": [*MASK, "parallel.expert=1", "parallel.pipeline=2"], "uncounted": [4]},
}


class Steps:
    """steps[case]: what both ranks have, after both were found to have the same. A case runs when it is asked for."""

    def __init__(self, run, folder):
        self.run, self.folder, self.seen = run, folder, {}

    def both(self, name):
        if name not in self.seen:
            self.seen[name] = self.run(name)
            first, second = self[name]
            assert first == second or not isinstance(first, dict)
        return self.seen[name]

    def __getitem__(self, name):
        return [metrics for metrics, _ in self.both(name)]

    def chunks(self, name):
        return [chunks for _, chunks in self.both(name)]


@pytest.fixture(scope="module")
def steps(on_ranks, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    return Steps(lambda name: on_ranks(2, one, name, CASES[name], checkpoint, folder), folder)


def test_whole_routes_leave_nothing_to_the_router(steps):
    metrics, _ = steps["whole"]
    assert metrics["routing/coverage"] == 1 and metrics["routing/consumed"] == metrics["routing/expected"] > 0
    fallbacks = ("applied_mismatch", "fallback_positions", "dropped_sequences", "stale_tokens")
    assert [metrics[f"routing/{name}"] for name in fallbacks] == [0, 0, 0, 0]
    layers = [metrics[f"routing/shadow_mismatch_layer/{layer:03d}"] for layer in range(LAYERS)]
    assert sum(layers) / LAYERS == pytest.approx(metrics["routing/shadow_mismatch"]) and min(layers) > 0.9


@pytest.mark.long
def test_steps_emit_every_metric_of_the_registry_that_is_theirs(steps):
    """Over all cases, and nothing that is not in it. No router chose these routes, so no alignment is tested: for its
    metrics see tests/end_to_end/test_brief.py."""
    emitted = {find(key).key for first, _ in map(steps.__getitem__, CASES) if isinstance(first, dict) for key in first}
    rooms = ("policy_kl", "policy", "routing", "placement", "objective", "correction", "optim")
    kl_in_reward = {"reward/kl_penalty", "group/zero_variance", "group/zero_variance_fraction"}
    aligned = {f"routing/alignment_{name}" for name in ("power", "evidence", "moved")} | {"routing/proven/<name>"}
    assert emitted == {key for key in METRICS if key.split("/")[0] in rooms} - aligned | kl_in_reward


def test_r2_measures_natively_and_replays_its_own_routes(steps):
    (r2, _), (off, _), (r3, _) = steps["r2"], steps["off"], steps["whole"]
    for name in ("policy_kl/k1", "policy_kl/k3", "routing/native_mismatch", "routing/native_token_mismatch"):
        assert r2[name] == off[name]
    assert r2["policy_kl/k3"] == r3["policy_kl/k3_native"] != r3["policy_kl/k3"]
    # two updates of equal size, and the pass before them: of both, in which r2 records, or of the second alone
    assert r2["routing/consumed"] == r2["routing/expected"] == 4 / 3 * r3["routing/expected"] > 0
    assert "routing/shadow_mismatch" not in r2 and "routing/native_mismatch_layer/003" in r2
    assert "routing/consumed" not in off
    # the first update's own choice is what was recorded
    assert r2["optim/grad_norm"] == pytest.approx(off["optim/grad_norm"], rel=1e-6)
    assert r3["optim/grad_norm"] != pytest.approx(off["optim/grad_norm"], rel=1e-2)


@pytest.mark.long
def test_a_step_is_the_same_with_plans_and_without(steps):
    (whole, _), (unplanned, _) = steps["whole"], steps["unplanned"]
    assert unplanned["routing/planned_fraction"] == 0
    assert (unplanned["routing/peak_rows"], whole["routing/peak_rows"] > 0) == (0, True)
    assert whole == {**unplanned, "routing/planned_fraction": 1, "routing/peak_rows": whole["routing/peak_rows"]}
    for name in ("r2", "recomputed", "r2-overlapped", "context", "stale-replayed"):
        assert steps[name][0]["routing/planned_fraction"] == 1, name
    # a microbatch in which some rank has rows without a route is dispatched Megatron's way on all; others are planned
    for name in ("missing-native", "context-missing-native", "stale-native"):
        assert 0 < steps[name][0]["routing/planned_fraction"] < 1, name


def test_a_step_overlaps_in_as_many_chunks_as_asked_for(steps):
    # old log-probabilities of the second update, or of both if r2 records in them, and natively routed ones
    before = {"whole": (0, [[0], []]), "one-chunk": (1, [[1], []]), "r2-two-chunks": (2, [[]])}
    for case, (chunks, passes) in before.items():
        # then the first update's at two temperatures, and two updates
        assert steps.chunks(case) == [[*passes, *[[chunks]] * 4]] * 2, case
    assert steps["one-chunk"] == steps["whole"]
    (r2, _), (plain, _) = steps["r2-two-chunks"], steps["r2"]
    assert r2["routing/planned_fraction"] == 1 and r2["routing/consumed"] == 1.5 * plain["routing/consumed"]
    assert r2["optim/grad_norm"] == pytest.approx(plain["optim/grad_norm"], rel=1e-5)


@pytest.mark.long
def test_microbatches_of_padding_are_part_of_a_step_and_change_nothing_in_it(steps):
    (filled, _), (whole, _) = steps["interleaved-kl-loss"], steps["kl-loss"]
    tokens = [[TOKENS[i] for i in chosen] for chosen in split_groups([n // 2 for n in range(len(TOKENS))], 2)]
    needed = [len(pack(one, ranks=1, microbatch_tokens=40)[0]) for one in tokens]
    assert needed == [2, 1]  # the second update has one of padding, which the reference model sees too
    # the pass for old logprobs of the second update, and both updates, of two microbatches each
    assert filled["routing/consumed"] == filled["routing/expected"] == 3 * LAYERS * 2
    assert filled["routing/planned_fraction"] == filled["routing/coverage"] == 1
    for key in ("objective/loss", "objective/kl_ref", "objective/clip_fraction", "optim/grad_norm", "policy_kl/k3"):
        assert filled[key] == pytest.approx(whole[key], rel=1e-5, abs=1e-9)
    for key in ("shadow_mismatch", "native_mismatch", "fallback_positions"):
        assert filled[f"routing/{key}"] == whole[f"routing/{key}"]


def test_the_routes_of_each_update_are_tested_before_it(on_ranks, checkpoint, tmp_path):
    """Without a pass for old log-probabilities each update tests its own; older updates have moved the weights."""
    for old, tests in (
        ("trainer", [(2, [0], "step 1 update 0")]),
        ("sampler", [(1, [0], "step 1 update 0"), (1, [1], "step 1 update 1")]),
    ):
        plan = {"overrides": [f"objective.old_logprobs={old}"]}
        assert on_ranks(2, judged, old, plan, checkpoint, tmp_path) == [tests, tests]


@pytest.mark.parametrize("replay", ["r3", "r2", "off"])
def test_routes_of_a_later_update_that_were_misread_are_named_before_any_pass(on_ranks, checkpoint, tmp_path, replay):
    """No rank reads all layers of a sequence, so only all together know its sum."""
    overrides = ["parallel.pipeline=2", "parallel.expert=1", "train.updates_per_step=2", f"replay.mode={replay}"]
    old = "trainer" if replay == "r2" else "sampler"
    plan = {"overrides": [*overrides, f"objective.old_logprobs={old}"], "misread": [len(LENGTHS) - 1]}
    for said, _ in on_ranks(2, one, replay, plan, checkpoint, tmp_path):
        assert said.startswith("ReplayError: the routes as they were read are not those that left the sampler's engine")
        assert "other sums for 1 of" in said and "[0 passes]" in said


@pytest.mark.parametrize("case", ["by-length", "by-load"])
def test_the_peak_of_a_step_is_what_plan_says_of_its_trace(steps, checkpoint, case):
    overrides = [f"model.path={checkpoint}", "train.microbatch_tokens=40", "train.dtype=float32"]
    overrides += CASES[case]["overrides"]
    config = load_config(CONFIG, overrides)
    metrics, _ = steps[case]
    found = peaks(config, read_model(checkpoint), 2, str(steps.folder / case / "trace"))
    assert found.batches == 1 and found.sequences == len(LENGTHS) and found.exact
    assert metrics["routing/peak_rows"] == found.rows.rank
    assert found.rows.even < found.rows.rank < found.rows.worst
    limited = [load_config(CONFIG, [*overrides, f"replay.max_rows={found.rows.rank - less}"]) for less in (0, 1)]
    assert limit_problem(found, limited[0]) is None and f"got {found.rows.rank}" in limit_problem(found, limited[1])


@pytest.mark.parametrize("kind", ["copied", "copied-apart"])
def test_copies_of_experts_even_out_a_step_and_change_nothing_else(steps, kind):
    (copied, _), (plain, _) = steps[kind], steps["by-length"]
    copied = dict(copied)
    assert 0 <= copied.pop("placement/excess_copied") < copied["routing/load_excess"] == plain["routing/load_excess"]
    assert copied["routing/peak_rows"] <= plain["routing/peak_rows"]
    rest = {key: value for key, value in plain.items() if key != "routing/peak_rows"}
    assert {key: copied[key] for key in rest} == pytest.approx(rest, rel=1e-5, abs=1e-7)
    assert copied["routing/planned_fraction"] == 1 and copied["routing/applied_mismatch"] == 0


def test_copies_of_a_step_are_others_where_each_rank_is_a_node(steps):
    assert steps["copied"][0]["placement/excess_copied"] < steps["copied-apart"][0]["placement/excess_copied"]


def test_more_rows_than_allowed_are_refused_on_all_ranks_before_a_pass_under_them(steps):
    peak = f"got {steps['by-length'][0]['routing/peak_rows']:.0f} (token, expert) pairs, expected at most 40"
    for rank in steps["too-many-rows"]:
        assert rank.startswith("ReplayError: the routes would give a rank too many rows") and peak in rank
        assert rank.endswith("[0 passes]")
    # r2 knows its routes when they are recorded: before the update
    assert all("(replay.max_rows)" in rank and rank.endswith("[1 passes]") for rank in steps["r2-too-many-rows"])


def test_the_ledger_expects_what_the_config_makes_run_again(steps):
    (whole, _), (recomputed, _), (r2, _) = steps["whole"], steps["recomputed"], steps["r2-overlapped"]
    first, second = (
        LAYERS * sum(map(len, pack([TOKENS[i] for i in chosen], ranks=2, microbatch_tokens=40)))
        for chosen in split_groups([number // 2 for number in range(len(TOKENS))], 2)
    )
    # the pass for old logprobs of the second update, under r2 of both; each update once, or twice
    for metrics, expected in (
        (whole, second + first + second),
        (recomputed, second + 2 * (first + second)),
        (r2, 2 * (first + second)),
    ):
        assert metrics["routing/consumed"] == metrics["routing/expected"] == expected
    assert recomputed["optim/grad_norm"] == whole["optim/grad_norm"]


@pytest.mark.parametrize(
    "case",
    [
        "whole",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in ("recomputed", "off", "context", "interleaved-kl-loss", "by-length", "corrected")
        ),
    ],
)
def test_the_first_update_scores_its_own_sequences_as_a_pass_before_it_does(steps, case):
    """Bit for bit: losses, gradients, and everything that is measured on the weights of the step's beginning."""
    (own, _), (ahead, _) = steps[case], steps[f"{case}-ahead"]
    counted = {"routing/consumed", "routing/expected"}
    # sums of other passes
    rounded = {"routing/shadow_margin", "routing/native_margin"}
    assert own.keys() == ahead.keys()
    exact = own.keys() - counted - rounded
    assert {key: own[key] for key in exact} == {key: ahead[key] for key in exact}
    if case != "off":
        assert own["routing/expected"] < ahead["routing/expected"]


@pytest.fixture(scope="module")
def counts(checkpoint):
    """Pairs [S, L, E] of each sequence for each expert."""
    _, routes = batch(read_model(checkpoint))
    return np.array([[np.bincount(one[:, layer].ravel(), minlength=16) for layer in range(LAYERS)] for one in routes])


@pytest.fixture(scope="module")
def loads(counts):
    """Pairs [S, L, 2] of each sequence for either rank."""
    return load_of(counts, 2)


def test_packing_by_load_does_what_it_plans_and_changes_no_gradient(steps, loads):
    (by_length, _), (by_load, _) = steps["by-length"], steps["by-load"]
    _, report = pack_by_load(TOKENS, loads, ranks=2, microbatch_tokens=14)
    # What was planned from the trace is what the ranks then measure on the rows that they dispatch.
    assert by_length["routing/load_excess"] == pytest.approx(report.by_length, rel=1e-9)
    assert by_load["routing/load_excess"] == pytest.approx(report.planned, rel=1e-9)
    assert report.planned < report.by_length
    assert by_load["routing/packed_by_length"] == 0 and by_length["routing/packed_by_length"] == 1
    for key in ("objective/loss", "optim/grad_norm", "policy_kl/k3"):
        assert by_load[key] == pytest.approx(by_length[key], rel=1e-5, abs=1e-9)


@pytest.mark.long
def test_placed_experts_are_loaded_as_planned_and_change_no_gradient(steps, counts):
    order, report = place(counts.sum(0)[None], 2)
    loads = load_of(np.take_along_axis(counts, order[None], 2), 2)
    packed = pack(TOKENS, ranks=2, microbatch_tokens=14)
    _, by_load = pack_by_load(TOKENS, loads, ranks=2, microbatch_tokens=14)
    assert report.after < 0.2 * report.before
    for name, excess_of in (
        ("placed", excess(round_loads(packed, loads, exchange=2))[0]),
        ("placed-by-load", by_load.planned),
    ):
        (placed, _), (natural, _) = steps[name], steps["by-length"]
        assert placed["placement/excess_before"] == pytest.approx(report.before, rel=1e-9)
        assert placed["placement/excess_after"] == pytest.approx(report.after, rel=1e-9, abs=1e-12)
        assert placed["placement/experts_moved"] == report.moved
        # What was planned from the trace is what the ranks then measure on the rows that they dispatch.
        assert placed["routing/load_excess"] == pytest.approx(excess_of, rel=1e-9)
        assert placed["routing/load_excess"] < natural["routing/load_excess"]
        assert placed["routing/applied_mismatch"] == 0 and placed["routing/planned_fraction"] == 1
        assert placed["routing/consumed"] == placed["routing/expected"]
        for key in ("objective/loss", "optim/grad_norm", "policy_kl/k3"):
            assert placed[key] == pytest.approx(natural[key], rel=1e-5, abs=1e-9)
    # The trainer's own routes go to placed experts as well.
    assert steps["placed-off"][0]["placement/experts_moved"] == report.moved
    assert steps["placed-off"][0]["policy_kl/k3"] == pytest.approx(steps["off"][0]["policy_kl/k3"], rel=1e-5)


@pytest.mark.parametrize(("name", "ranks"), [("whole", 2), ("context", 1)])
def test_the_load_is_counted_over_updates_and_over_parts_of_sequences(steps, loads, name, ranks):
    rounds = []
    for chosen in split_groups([number // 2 for number in range(len(TOKENS))], 2):
        plan = pack([TOKENS[i] for i in chosen], ranks=ranks, microbatch_tokens=40)
        rounds.append(round_loads(plan, loads[chosen], exchange=ranks))
    assert steps[name][0]["routing/load_excess"] == pytest.approx(excess(np.concatenate(rounds))[0], rel=1e-9)


@pytest.mark.long
def test_packing_by_load_knows_nothing_of_tokens_without_routes(steps):
    native, _ = steps["by-load-missing-native"]
    assert native["routing/fallback_positions"] > 0 and native["routing/load_excess"] > 0
    counted, told = steps["by-load-lost"][1], steps["by-load-lost"][0]
    assert counted.startswith("TraceError") and "s3" in counted  # the rank that counts it
    assert told.startswith("ReplayError: another rank refused") and "got rank 1" in told


@pytest.mark.long
def test_the_second_moment_limit_masks_what_the_loss_would_push_further_away(steps):
    """The sampler's logprobs are far from those of the trainer, so that hardly any square is below this limit."""
    metrics, _ = steps["second-moment"]
    assert metrics["objective/second_moment"] > 1e-3
    assert 0.2 < metrics["correction/zero_token_fraction"] < 0.8  # the tokens that come closer are kept
    assert metrics["correction/zero_token_fraction"] == 1 - metrics["correction/weight_mean"]


def test_missing_routes_are_refused_by_default(steps):
    for rank in steps["missing-refused"]:
        assert "ReplayError" in rank and "request s3" in rank
        assert "got 1 of 13 sequences, 9 tokens of this one, expected at most 0.00%" in rank


def test_missing_routes_are_left_to_the_router_within_the_bound(steps):
    metrics, _ = steps["missing-native"]
    native = LAYERS * (TOKENS[3] + 2)
    assert metrics["routing/fallback_positions"] == native
    assert metrics["routing/coverage"] == 1 - native / (LAYERS * sum(TOKENS))
    assert metrics["routing/applied_mismatch"] == 0 and metrics["routing/consumed"] == metrics["routing/expected"]
    # only what is recorded is compared
    assert metrics["routing/shadow_mismatch"] > 0.9


@pytest.mark.long
def test_ranks_that_share_every_sequence_count_each_token_once(steps):
    for name in ("context", "context-r2", "context-missing-native"):
        alike = {"context": "whole", "context-r2": "r2"}.get(name, "missing-native")
        (shared, _), (alone, _) = steps[name], steps[alike]
        # both ranks have a part of every microbatch: more of them in all
        counts = ("routing/consumed", "routing/expected", "routing/planned_fraction")
        assert shared[counts[0]] == shared[counts[1]] > alone[counts[0]]
        # and other sequences in each
        other = (*counts, "routing/load_excess", "routing/peak_rows")
        rest = {key: value for key, value in alone.items() if key not in other}
        assert {key: shared[key] for key in rest} == pytest.approx(rest, rel=1e-5, abs=1e-7), name


@pytest.mark.long
def test_a_kl_in_the_reward_counts_every_sequence_once(steps):
    """However the sequences, or their tokens, are shared out. The estimates are of random routes against the model's
    own: far from 0."""
    (cut, _), (shared, _), (in_loss, _) = steps["kl-reward"], steps["context-kl-reward"], steps["kl-loss"]
    for name in ("objective/kl_ref", "reward/kl_penalty", "optim/grad_norm", "objective/loss"):
        # k1 is of either sign: rounding of single tokens is compared with what is left of their sum
        assert shared[name] == pytest.approx(cut[name], rel=1e-5, abs=2e-6), name
    assert abs(cut["objective/kl_ref"]) > 1e-2
    # 13 sequences, half of whose KL is taken off; the mean over tokens is another number than the sum
    assert cut["reward/kl_penalty"] != pytest.approx(-0.5 * cut["objective/kl_ref"], rel=0.1)
    norms = [metrics["optim/grad_norm"] for metrics in (cut, in_loss, steps["no-kl"][0])]
    assert all(a == b or a != pytest.approx(b, rel=1e-3) for a in norms for b in norms) and len(set(norms)) == 3
    assert "reward/kl_penalty" not in in_loss and in_loss["objective/kl_ref"] > 0


def test_a_step_with_nothing_to_learn_is_a_step(steps):
    """No reward differs; or there are fewer sequences than ranks, and nobody to compare with."""
    for name in ("no-difference", "one-sequence"):
        metrics, _ = steps[name]
        assert metrics["objective/zero_advantage_fraction"] == 1 and metrics["optim/grad_norm"] == 0
        assert metrics["optim/skipped"] == 0
        assert metrics["optim/updates"] == {"no-difference": 2, "one-sequence": 1}[name]
        # what is measured is measured all the same
        assert metrics["policy_kl/k3"] > 0 and metrics["routing/consumed"] == metrics["routing/expected"] > 0
    assert steps["whole"][0]["objective/zero_advantage_fraction"] == 1 / 13  # the last has no other in its group


def test_above_the_bound_every_rank_refuses_before_any_pass(steps):
    native, total = LAYERS * sum(TOKENS[i] for i in (1, 3, 4)), LAYERS * sum(TOKENS)
    for rank in steps["missing-native-too-many"]:
        assert rank.startswith("ReplayError: too much of a step would be routed natively")
        assert f"got {native} of {total} (token, layer) positions" in rank
    for rank in steps["missing-dropped-too-many"]:
        assert "ReplayError" in rank and "request s3" in rank
        assert "got 3 of 13 sequences, 9 tokens of this one, expected at most 20.00%" in rank


def test_sequences_without_routes_are_dropped_and_counted(steps):
    metrics, _ = steps["missing-dropped"]
    assert metrics["routing/dropped_sequences"] == 2 and metrics["routing/coverage"] == 1
    assert metrics["routing/fallback_positions"] == 0
    assert metrics["optim/grad_norm"] != steps["whole"][0]["optim/grad_norm"]


def test_routes_of_older_weights(steps):
    message = (
        "routes were sampled with weights that are too old or too new (request s2, tokens 0 to 5): got weight version 4"
    )
    # one rank has the sequence; the other learns from it why neither begins
    told = steps["stale-refused"]
    assert all(message in rank for rank in told)
    (other,) = [n for n, rank in enumerate(told) if "another rank refused the recorded routes of its sequences" in rank]
    assert f"got rank {1 - other}: " in told[other]
    prompts = sum(LENGTHS[i][0] - 1 for i in (2, 5))
    replayed, native, whole = (steps[name][0] for name in ("stale-replayed", "stale-native", "whole"))
    assert replayed["routing/stale_tokens"] == native["routing/stale_tokens"] == prompts
    assert replayed["routing/coverage"] == 1 and replayed["optim/grad_norm"] == whole["optim/grad_norm"]
    # The rows of these prompts are one version old; all tokens are of the trainer's own version.
    by_lag = {key: value for key, value in replayed.items() if "_lag/" in key}
    assert by_lag.keys() == {
        "policy_kl/k3_lag/0",
        "policy_kl/tokens_lag/0",
        *(f"routing/shadow_mismatch_lag/{lag}" for lag in (0, 1)),
    }
    old, new = (by_lag[f"routing/shadow_mismatch_lag/{lag}"] for lag in (1, 0))
    share = prompts / sum(TOKENS)
    assert share * old + (1 - share) * new == pytest.approx(replayed["routing/shadow_mismatch"], rel=1e-9)
    assert by_lag["policy_kl/k3_lag/0"] == pytest.approx(replayed["policy_kl/k3"], rel=1e-9)
    assert not any("_lag/" in key for key in whole)
    assert native["routing/fallback_positions"] == LAYERS * prompts
    assert native["optim/grad_norm"] != whole["optim/grad_norm"]


def test_two_halves_of_the_vocabulary_are_one(on_ranks):
    ranks = on_ranks(2, shared_vocabulary)
    for name, dtype, tolerance in (("float32", torch.float32, 2e-6), ("float64", torch.float64, 1e-12)):
        whole = scores_of(*shared_logits(dtype))
        for n, alone in enumerate(whole):
            first, second = (rank[name][n] for rank in ranks)
            assert all(torch.equal(*values) for values in zip(first[:-1], second[:-1], strict=True))
            for ours, theirs in zip([*first[:-1], torch.cat([first[-1], second[-1]], 1)], alone, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        assert (whole[0][0] - whole[1][0]).abs().max() > 1 and (whole[0][1] - whole[1][1]).abs().max() > 0.1
    for rank in ranks:
        for chunked, at_once in zip(rank["chunks"], rank["float32"], strict=True):
            assert all(torch.equal(*values) for values in zip(chunked, at_once, strict=True))
    # In chunks on both ranks, against all logits at once on one.
    (values, *ours), (same, *theirs) = (rank["hidden"] for rank in ranks)
    assert torch.equal(values, same)
    found = values, ours[0] + theirs[0], torch.cat([ours[1], theirs[1]])
    for got, expected in zip(found, scores_of_hidden(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def by_transformers(checkpoint):
    """Mean entropy and k1 of the natively routed batch over the supports and over everything; and over the supports
    the norm of the gradient of GSPO's loss, where no ratio has moved, with and without the entropy bonus."""
    from transformers import Qwen3MoeForCausalLM

    facts = read_model(checkpoint)
    sequences, _ = batch(facts)
    supports = supports_of(sequences, facts.vocab)
    rewards, lengths = [s.reward for s in sequences], [len(s.token_ids) for s in sequences]
    of_batch = advantages("group_std", rewards, [number // 2 for number in range(len(rewards))], lengths)
    advantage_of = dict(zip((s.key for s in sequences), of_batch, strict=True))
    model, tokens = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), sum(c for _, c in LENGTHS)

    def scores(sequence, restricted):
        ids = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
        logits = model(ids, use_cache=False).logits[0, len(sequence.prompt_token_ids) - 1 : -1].double()
        for at, token in enumerate(sequence.token_ids):
            of_token = supports[sequence.key][at] if restricted else []
            chosen = logits[at, of_token] if of_token else logits[at]
            p = chosen.exp() / chosen.exp().sum()
            yield p[of_token.index(token) if of_token else token].log(), -(p * p.log()).sum()

    def measure(restricted):
        pairs = [(s, at, *values) for s in sequences for at, values in enumerate(scores(s, restricted))]
        surprise = [float(s.rollout_logprobs[at]) - float(logprob.detach()) for s, at, logprob, _ in pairs]
        loss = -sum(advantage_of[s.key] / len(s.token_ids) * logprob for s, _, logprob, _ in pairs) / len(sequences)
        entropy = sum(entropy for *_, entropy in pairs) / tokens
        return entropy, math.fsum(surprise) / tokens, loss

    with torch.no_grad():
        everything = [float(value) for value in measure(restricted=False)[:2]]
    entropy, k1, loss = measure(restricted=True)
    norms = []
    for total in (loss, loss - ENTROPY_COEF * entropy):
        gradients = torch.autograd.grad(total, [*model.parameters()], retain_graph=True, allow_unused=True)
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients if g is not None)))
    return {"entropy": (float(entropy.detach()), everything[0]), "k1": (k1, everything[1]), "norms": norms}


@pytest.mark.parametrize("case", [with_seeds(case, usual=case in USUAL) for case in CASES if case.startswith("masked")])
def test_the_trainer_renormalises_over_what_was_drawn_from(steps, by_transformers, case):
    """In every pass: the old logprobs, the update, and the reference, which otherwise would not be at distance 0."""
    (metrics, _), expected = steps[case], by_transformers
    assert metrics["policy/entropy"] == pytest.approx(expected["entropy"][0], rel=1e-5)
    assert metrics["policy_kl/k1"] == pytest.approx(expected["k1"][0], rel=1e-5)
    assert metrics["objective/kl_ref"] == pytest.approx(0, abs=1e-9)
    if case != "masked-sampler":  # whose ratios are far from 1, and clipped
        assert metrics["optim/grad_norm"] == pytest.approx(expected["norms"][1], rel=1e-5)
    assert abs(expected["norms"][1] / expected["norms"][0] - 1) > 0.05, "the bonus is no part of the gradient"


def test_without_the_mask_the_trainer_is_far_away(steps, by_transformers):
    (off, _), (kept, everything) = steps["off"], by_transformers["entropy"]
    assert off["policy/entropy"] == pytest.approx(everything, rel=1e-5) and everything > kept + 1
    kept, everything = by_transformers["k1"]
    assert off["policy_kl/k1"] == pytest.approx(everything, rel=1e-5) and everything > kept + 1


def test_a_support_that_cannot_be_right_is_refused_before_any_pass(steps):
    for case, message in (
        ("unsupported", "(request s3, token 5): got"),
        ("uncounted", "(request s4): got an entry for 2 tokens, expected 3"),
    ):
        mine = [rank.startswith("SupportError: ") and message in rank for rank in steps[case]]
        assert sorted(mine) == [False, True], steps[case]
        assert (
            f"another rank refused the recorded routes of its sequences: got rank {mine.index(True)}"
            in (steps[case][mine.index(False)])
        )
