"""`moe-rl explain`: which verdict planted evidence gets, and that near ties and older weights are no difference."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_rl.cli import main
from moe_rl.proof.choices import choice_scores, regret
from moe_rl.proof.reference import IndependentModel
from moe_rl.report import evidence_folder
from moe_rl.report.evidence_folder import ABSENT, Evidence, KeptRows, KeptWeights
from tests.support.families import write_checkpoint

FACTS = {
    "step": 2,
    "what": "alignment",
    "error": "ReplayError",
    "message": "planted",
    "version": 1,
    "updates": 0,
    "lr": 1e-3,
    "staleness": 0,
    "power": 0.9,
    "temperature": 1.0,
    "truncated": False,
    "trainer_dtype": "float32",
    "sampler_dtype": "float32",
    "sampler_weights": "exact",
}


@pytest.fixture(scope="module", params=["glm-groups", pytest.param("gpt-oss", marks=pytest.mark.long)])
def models(request, tmp_path_factory):
    """The folder of a model, and of one whose attention differs."""
    folder = tmp_path_factory.mktemp("models")
    sound, other = write_checkpoint(request.param, folder / "sound"), folder / "other"
    shutil.copytree(sound, other)
    tensors = load_file(other / "model.safetensors")
    for name in tensors:
        if "q_proj.weight" in name:
            tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return sound, other


def seen(folder, runs):
    """What an engine with these weights makes of the runs: its choice [T, L, K] and log-probabilities [T]."""
    model, found = IndependentModel(folder), []
    for tokens in runs:
        with torch.no_grad():
            logits = model(tokens[:-1])
        following = torch.from_numpy(tokens[1:].astype(np.int64))
        logprobs = logits.log_softmax(-1).gather(1, following[:, None])[:, 0].numpy()
        scores = [choice_scores(model.facts, one, b) for one, b in zip(model.routers, model.biases, strict=True)]
        found.append((np.stack([best(model.facts, one) for one in scores], 1).astype(np.uint16), logprobs))
    return found


def best(facts, scores):
    """The best choice [T, K] of a router with groups or without."""
    groups = scores.unflatten(1, (facts.groups, -1))
    kept = groups.topk(2, -1).values.sum(-1).topk(facts.top_groups, -1).indices
    left = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, kept, False)
    allowed = groups.masked_fill(left[..., None], -torch.inf).flatten(1) if facts.groups > 1 else scores
    return allowed.topk(facts.top_k, -1).indices.numpy()


class Planted:
    """A run whose evidence is two sequences, as two engines with the same weights saw them."""

    def __init__(self, run, models):
        self.run, (self.sound, self.other) = run, models
        (run / "config.yaml").write_text("")
        rng = np.random.default_rng(0)
        self.runs = [rng.integers(2, 160, length).astype(np.int32) for length in (24, 17)]
        self.rows = [{"tokens": tokens} for tokens in self.runs]
        self.evidence = Evidence(**FACTS)
        self.evidence.sequences.extend(KeptRows(f"s{at}", ((1, len(one) - 1),)) for at, one in enumerate(self.runs))
        self.engine("record", "sampler_logprobs", self.sound)
        self.engine("chosen", "trainer_logprobs", self.sound)

    def engine(self, routes, logprobs, folder):
        for rows, (chosen, scores) in zip(self.rows, seen(folder, self.runs), strict=True):
            rows |= {routes: chosen, logprobs: scores}

    def explained(self, capsys, status=0, weights=None, **changes):
        """What the command finds with these changes to the evidence."""
        weights = [KeptWeights(1, str(self.sound), True)] if weights is None else weights
        hidden = evidence_folder.begin(self.run, evidence_folder.name_of(2, "alignment"))
        arrays = {f"{at}/{name}": array for at, rows in enumerate(self.rows) for name, array in rows.items()}
        evidence_folder.write(hidden, dataclasses.replace(self.evidence, weights=weights, **changes), arrays)
        evidence_folder.publish(hidden, 1 << 30)
        file = self.run / "found.json"
        assert main(["explain", str(self.run), "--json", str(file)]) == status
        found = json.loads(file.read_text())
        assert f"verdict: {found['verdict']}" in capsys.readouterr().out
        return found


@pytest.fixture
def planted(tmp_path, models):
    return Planted(tmp_path, models)


@pytest.mark.parametrize("damage", ["cut", "without a tensor"])
def test_damaged_weights_are_named(planted, tmp_path, capsys, damage):
    folder = tmp_path / "weights"
    shutil.copytree(planted.sound, folder)
    file = folder / "model.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        tensors = load_file(file)
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(FileNotFoundError):  # no findings are written
        planted.explained(capsys, status=2, weights=[KeptWeights(1, str(folder), True)])
    said = "weights cannot be read" if damage == "cut" else "got model.layers.1.self_attn.q_proj.weight"
    assert said in capsys.readouterr().err


def test_where_both_engines_are_right_the_check_was_wrong(planted, capsys):
    assert planted.explained(capsys, what="collapse")["verdict"] == "training"
    found = planted.explained(capsys)
    assert found["verdict"] == "check"
    (sampler,) = found["sampler"]
    assert sampler["choices"] == (23 + 16) * planted.rows[0]["record"].shape[1] and sampler["differ"] == 0
    assert sampler["nats"] < 1e-5 < sampler["allowed"]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_a_near_tie_of_the_engines_precision_is_no_difference(planted, capsys, dtype):
    """The third engine's own rounding in that precision says what is near."""
    model = IndependentModel(planted.sound, dtype=getattr(torch, dtype))
    for rows, tokens in zip(planted.rows, planted.runs, strict=True):
        with torch.no_grad():
            logits = model(tokens[:-1]).float()
        pairs = zip(model.routers, model.biases, strict=True)
        chosen = [best(model.facts, choice_scores(model.facts, one, bias)) for one, bias in pairs]
        rows["record"] = np.stack(chosen, 1).astype(np.uint16)
        following = torch.from_numpy(tokens[1:].astype(np.int64))
        rows["sampler_logprobs"] = logits.log_softmax(-1).gather(1, following[:, None])[:, 0].numpy()
    found = planted.explained(capsys, sampler_dtype=dtype)
    assert found["verdict"] == "check" and found["sampler"][0]["differ"] == 0


RECORDS = {
    "rows of the other sequence": lambda rows: [
        np.resize(one, other.shape) for one, other in zip(rows[::-1], rows, strict=True)
    ],
    "a token late": lambda rows: [np.roll(one, 1, 0) for one in rows],
    "two layers exchanged": lambda rows: [one[:, [1, 0, *range(2, one.shape[1])]] for one in rows],
    "the last row a copy": lambda rows: [np.concatenate([one[:-1], one[-2:-1]]) for one in rows],
    "an expert twice": lambda rows: [np.concatenate([one[..., :1], one[..., :1], one[..., 2:]], -1) for one in rows],
    "ids that are none": lambda rows: [one + 16 for one in rows],
}


USUAL = ["rows of the other sequence"]


@pytest.mark.parametrize(
    "fault", [one if one in USUAL else pytest.param(one, marks=pytest.mark.long) for one in RECORDS]
)
def test_a_record_that_does_not_fit_its_engine_is_the_recorders_fault(planted, capsys, fault):
    before = [rows["record"] for rows in planted.rows]
    for rows, record in zip(planted.rows, RECORDS[fault](before), strict=True):
        rows["record"] = record
    found = planted.explained(capsys)
    assert found["verdict"] == "recorder" and found["sampler"][0]["differ"] > 0
    assert found["trainer"]["differ"] == 0


@pytest.mark.long
def test_one_expert_of_a_layer_that_is_wrong_everywhere_is_found_there(planted, capsys):
    layer = 2
    for rows in planted.rows:
        record = rows["record"][:, layer].astype(np.int64)
        for row in record:
            row[0] = next(e for e in range(16) if e not in row)
        rows["record"][:, layer] = record
    found = planted.explained(capsys)
    assert found["verdict"] == "recorder"
    shares = list(found["sampler"][0]["by_layer"].values())
    assert shares[layer] > 0.9 and not any(shares[:layer])  # later layers see what these experts would have done


def test_a_sampler_with_other_weights_is_told_from_its_recorder(planted, capsys):
    planted.engine("record", "sampler_logprobs", planted.other)
    assert planted.explained(capsys)["verdict"] == "weights"


@pytest.mark.long
def test_weights_that_neither_engine_has_are_told(planted, capsys):
    weights = [KeptWeights(1, str(planted.other), True)]
    assert planted.explained(capsys, weights=weights)["verdict"] == "weights"


@pytest.mark.long
def test_a_trainer_with_other_weights_than_it_exports_is_told(planted, capsys):
    planted.engine("chosen", "trainer_logprobs", planted.other)
    assert planted.explained(capsys)["verdict"] == "trainer"


@pytest.mark.long
def test_a_trainer_that_was_to_replay_another_record_is_told(planted, capsys):
    for rows in planted.rows:
        rows["applied"] = np.roll(rows["record"], 1, 0)
    found = planted.explained(capsys)
    assert found["verdict"] == "trainer" and found["replayed_others"] > 0


def test_a_checksum_is_settled_by_the_record_in_the_trace(planted, capsys):
    assert planted.explained(capsys, what="checksum")["verdict"] == "trainer"
    whole = [dataclasses.replace(one, intact=True) for one in planted.evidence.sequences]
    assert planted.explained(capsys, what="checksum", sequences=whole)["verdict"] == "trainer"
    cut = [whole[0], dataclasses.replace(whole[1], intact=False)]
    found = planted.explained(capsys, what="checksum", sequences=cut)
    assert found["verdict"] == "recorder" and found["damaged"] == ["s1"]


@pytest.mark.parametrize(
    "what, error, verdict",
    [
        ("not once", "ReplayError", "trainer"),
        ("delivered twice", "ReplayError", "trainer"),
        ("plan", "ReplayError", "trainer"),
        ("not taken once", "ReplayError", "trainer"),
        ("expert twice", "RouteValidationError", "recorder"),
        ("equal pair", "RouteValidationError", "check"),
        ("canary", "WeightSyncError", "check"),
        ("lag 0", "PipelineError", "check"),
    ],
)
def test_a_check_that_compares_bits_is_never_the_one_that_was_wrong(planted, capsys, what, error, verdict):
    assert planted.explained(capsys, what=what, error=error)["verdict"] == verdict


def test_a_trainer_that_cannot_run_the_tokens_again_is_the_one_that_was_wrong(planted, capsys):
    """Unless a check judged by statistics: what the trainer computes could then be right."""
    for rows in planted.rows:
        del rows["chosen"], rows["trainer_logprobs"]
    assert planted.explained(capsys, what="not taken once")["verdict"] == "trainer"
    found = planted.explained(capsys, status=1, what="alignment")
    assert found["verdict"] == "undecided" and "own results" in found["why"]
    planted.engine("record", "sampler_logprobs", planted.other)  # the sampler is no witness
    assert planted.explained(capsys, status=1, what="not taken once")["verdict"] == "undecided"


@pytest.mark.long
def test_router_logits_of_the_sampler_against_its_record_are_the_recorders_fault(planted, capsys):
    model = IndependentModel(planted.sound)
    for rows, tokens in zip(planted.rows, planted.runs, strict=True):
        with torch.no_grad():
            model(tokens[:-1])
        rows["sampler_logits"] = torch.stack(model.routers, 1).float().numpy()
        rows["sampler_logits"][::2] = np.nan
    assert planted.explained(capsys)["own_logits"] == 0
    planted.rows[0]["record"] = np.roll(planted.rows[0]["record"], 1, 0)
    found = planted.explained(capsys)
    assert found["verdict"] == "recorder" and found["own_logits"] > 0


def test_rows_of_older_weights_are_judged_by_these(planted, capsys):
    """The sampler had version 0 and the trainer version 1: the check took drift for a fault."""
    planted.engine("record", "sampler_logprobs", planted.other)
    planted.evidence.sequences[:] = [
        KeptRows(one.key, ((0, one.versions[0][1]),)) for one in planted.evidence.sequences
    ]
    weights = [KeptWeights(1, str(planted.sound), True), KeptWeights(0, str(planted.other), True)]
    found = planted.explained(capsys, weights=weights, staleness=1)
    assert found["verdict"] == "check" and found["moved"] > 0.05
    found = planted.explained(capsys, status=1, weights=weights[:1], staleness=1)
    assert found["verdict"] == "undecided" and found["missing"] == [0]


def test_what_is_not_kept_leaves_it_undecided(planted, capsys):
    assert planted.explained(capsys, status=1, weights=[])["verdict"] == "undecided"
    for rows in planted.rows:
        rows["record"] = np.full_like(rows["record"], ABSENT)
        del rows["sampler_logprobs"]
    assert planted.explained(capsys, status=1)["verdict"] == "undecided"


@pytest.mark.parametrize("make", [False, True])
def test_a_run_without_evidence_is_refused(tmp_path, capsys, make):
    if make:
        (tmp_path / "config.yaml").write_text("")
    assert main(["explain", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_a_choice_is_as_far_from_the_best_as_scores_would_have_to_move(models):
    """Two of four groups count; a group's score is the sum of its two best."""
    model = IndependentModel(models[0])
    if model.facts.groups == 1:
        pytest.skip("a family without groups")
    scores = torch.zeros(1, 16)
    scores[0, [0, 1, 2, 4, 5, 8, 9]] = torch.tensor([1.0, 0.9, 0.5, 0.8, 0.7, 0.75, 0.7])
    near = [
        ([0, 1, 4, 5], 0.0),  # the best: groups 0 and 1
        ([0, 1, 8, 9], 0.05),  # group 2 has 1.45 instead of 1.5
        ([0, 1, 2, 4], 0.2),  # 0.5 instead of 0.7
        ([0, 4, 8, 12], torch.inf),  # four groups
    ]
    for chosen, margin in near:
        assert regret(model.facts, scores, torch.tensor([chosen])).item() == pytest.approx(margin, abs=1e-6)
