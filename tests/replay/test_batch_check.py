"""`check_batch` and `moe-rl check-replay`: each claim about a batch of arrays is proven, weak or refused."""

import json

import numpy as np
import pytest

from moe_rl.cli import main
from moe_rl.errors import RouteValidationError
from moe_rl.replay.batch_check import FORM, check_batch
from moe_rl.replay.claims import CORE
from tests.replay.test_alignment import EXPERTS, LAYERS, TOP_K, Pass

HEALTHY = Pass()
PROMPTS, TOKENS = HEALTHY.prompts, HEALTHY.tokens


def by_sequence(flat):
    """Cut [L, N, ...] into [T, L, ...] of each sequence."""
    return np.split(np.moveaxis(flat, 0, 1), HEALTHY.starts[1:-1])


SCORES = by_sequence(HEALTHY.scores)
NATIVE = [np.argsort(-one, -1)[..., :TOP_K] for one in SCORES]


def routes():
    return [one.astype(np.uint8) for one in by_sequence(HEALTHY.record)]


def check(found, **given):
    given = {"scores": SCORES, "prompts": PROMPTS} | given
    return check_batch(TOKENS, found, layers="mmmm", num_experts=EXPERTS, **given)


def status(report):
    return {one.name: one.status for one in report.claims}


def refused(report):
    return {one.name for one in report.claims if one.status == "refused"}


def test_a_sound_batch_is_proven_with_scores_and_with_bare_ids():
    full = check(routes())
    assert not full.faults and {status(full)[name] for name in (*FORM, *CORE, "single ids")} == {"proven"}
    bare = check(routes(), scores=None, native_topk=NATIVE)
    assert not bare.faults and {status(bare)[name] for name in (*FORM, *CORE)} == {"proven"}
    assert {status(bare)[name] for name in ("single ids", "some rows", "labels")} == {"weak"}
    full.refuse()


def test_without_a_witness_only_the_form_is_proven():
    report = check(routes(), scores=None)
    assert {status(report)[name] for name in FORM} == {"proven"} and status(report)["alignment"] == "weak"


def test_layers_without_experts_may_be_sent_and_are_not_looked_at():
    sent = [np.concatenate([np.zeros_like(one[:, :1]), one], 1) for one in routes()]
    report = check_batch(TOKENS, sent, layers="d,m*4", num_experts=EXPERTS, scores=SCORES, prompts=PROMPTS)
    assert not report.faults and status(report)["layer"] == "proven"
    for mixed in ([*sent[:1], *routes()[1:]], [*routes()[:1], *sent[1:]]):
        report = check_batch(TOKENS, mixed, layers="d,m*4", num_experts=EXPERTS, scores=SCORES, prompts=PROMPTS)
        assert not report.faults and status(report)["layer"] == "proven"


def test_a_row_that_the_witness_repeats_too_is_no_suspicion():
    found, native, at = routes(), [one.copy() for one in NATIVE], 20
    assert TOKENS[0][at] != TOKENS[0][at - 1]
    found[0][at] = found[0][at - 1]  # stuck, as far as the form shows
    seen = [np.ones(len(one), bool) for one in found]
    assert status(check(found, scores=None, native_topk=native))["repeated"] == "weak"
    seen[0][at] = False  # another rank has this row, and judges it
    assert status(check(found, scores=None, native_topk=native, seen=seen))["repeated"] == "proven"
    native[0][at] = found[0][at]
    assert status(check(found, scores=None, native_topk=native))["repeated"] == "proven"


def twice(one):
    one[:, 0, 0] = one[:, 0, 1]
    return one


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        (twice, "ids"),
        (lambda one: one + np.uint8(EXPERTS - 1), "ids"),
        (lambda one: one[:-1], "rows"),
        (lambda one: np.concatenate([one, one[-1:]]), "rows"),
        (lambda one: one[:, :3], "layers"),
        (lambda one: one[..., :3], "layers"),
        (lambda one: np.zeros_like(one), "unwritten"),
        (lambda one: np.where(np.arange(len(one))[:, None, None] > 20, 0, one), "unwritten"),
        (lambda one: np.repeat(one[:1], len(one), 0), "constant"),
        (lambda one: one[:, [0, 0, 2, 3]], "constant"),
        (lambda one: np.roll(one, 1, 0), "shift"),
        (lambda one: np.roll(one, 1, 1), "layer"),
        (lambda one: one[::-1].copy(), "layer"),
    ],
    ids=["twice", "no expert", "row lost", "row more", "layer lost", "top-k lost", "zeros", "zero rows", "constant",
         "copied layer", "shift", "layer map", "reversed"],
)  # fmt: skip
def test_a_wrong_batch_is_refused_by_the_claim_that_is_about_it(change, claim):
    report = check([change(one) for one in routes()], top_k=TOP_K)
    assert claim in refused(report), str(report)
    with pytest.raises(RouteValidationError, match=claim):
        report.refuse()


def test_the_routes_of_another_sequence_are_refused():
    mixed = routes()
    mixed[1::2], mixed[::2] = mixed[::2], mixed[1::2]
    assert refused(check(mixed)) & {"completions", "layer"}
    copied = routes()
    copied[3] = copied[6]
    report = check(copied, scores=None)
    assert refused(report) == {"copied"} and "6" in report.faults[0] and "3" in report.faults[0]
    assert TOKENS[3][-1] != TOKENS[6][-1]
    short = [array[:-1] if number in (3, 6) else array for number, array in enumerate(copied)]
    assert refused(check(short, scores=None)) == {"rows", "copied"}


def test_the_witness_of_one_rank_sees_its_own_rows_only():
    half = [np.arange(len(one)) % 2 == 0 for one in TOKENS]
    unseen = [
        np.where(keep[:, None, None], one, -1e9).astype(np.float32) for keep, one in zip(half, SCORES, strict=True)
    ]
    assert not check(routes(), scores=unseen, seen=half).faults


def test_sequences_without_rows_are_sound_and_prove_nothing():
    nothing = np.zeros((0, len(LAYERS), TOP_K), np.uint8)
    for found, tokens in (([], []), ([nothing], [[]])):
        report = check_batch(tokens, found, found, num_experts=EXPERTS)
        assert not report.faults and status(report)["alignment"] == "weak"
    beside = check_batch(
        [[], *TOKENS, []], [nothing, *routes(), nothing], [nothing, *NATIVE, nothing], num_experts=EXPERTS
    )
    assert not beside.faults and {status(beside)[name] for name in ("layer", "shift", "no rows")} == {"proven"}


def test_rows_that_the_witness_does_not_have_may_hold_anything():
    seen = [np.arange(len(one)) % 4 < 3 for one in NATIVE]
    native = [np.where(mask[:, None, None], one, -1) for mask, one in zip(seen, NATIVE, strict=True)]
    report = check(routes(), scores=None, native_topk=native, seen=seen)
    assert not report.faults and status(report)["layer"] == "proven"
    with pytest.raises(RouteValidationError) as error:
        check(routes(), scores=None, native_topk=native)
    assert error.value.about == {"argument": "native_topk", "sequence": "0"}


def test_arguments_that_do_not_belong_together_are_refused():
    with pytest.raises(RouteValidationError) as error:
        check(routes(), prompts=[1])
    assert error.value.about == {"argument": "prompts"}
    with pytest.raises(RouteValidationError) as error:
        check(routes(), scores=[*SCORES[:2], SCORES[2][:, :3], *SCORES[3:]])
    assert error.value.about == {"argument": "scores", "sequence": "2"}


def dump(path, **changes):
    arrays = {
        "token_ids": np.concatenate(TOKENS),
        "lengths": np.array([len(one) for one in TOKENS]),
        "routes": np.concatenate(routes()),
        "native_topk": np.concatenate(NATIVE),
        "prompts": np.array(PROMPTS),
    }
    np.savez(path, **{name: one for name, one in (arrays | changes).items() if one is not None})
    return path


def test_a_dump_is_checked_from_the_command_line(tmp_path, capsys):
    file = dump(tmp_path / "batch.npz")
    assert main(["check-replay", str(file), "--experts", "32", "--json", str(tmp_path / "out")]) == 0
    claims = json.loads((tmp_path / "out").read_text())["claims"]
    assert {one["name"]: one["status"] for one in claims}["shift"] == "proven" and "proven" in capsys.readouterr().out
    shifted = dump(tmp_path / "shifted.npz", routes=np.roll(np.concatenate(routes()), 1, 0))
    assert main(["check-replay", str(shifted), "--experts", "32"]) == 1
    assert "token too" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"routes": None}, "routes"), ({"lengths": np.array([1.5])}, "lengths"), ({"prompts": np.array([1])}, "prompts"),
     ({"native_topk": np.zeros((3, 4, 4), np.int64)}, "native_topk")],
)  # fmt: skip
def test_a_dump_that_cannot_be_read_says_which_array_is_wrong(tmp_path, capsys, changes, said):
    assert main(["check-replay", str(dump(tmp_path / "batch.npz", **changes)), "--experts", "32"]) == 2
    assert said in capsys.readouterr().err
    (tmp_path / "text").write_text("no arrays")
    assert main(["check-replay", str(tmp_path / "text"), "--experts", "32"]) == 2
    assert len(LAYERS) == 4
