"""`moe_rl.audit` and `check_batch` stay silent on healthy steps in every layout of the proof, on megatron-core's own
RouterReplay, and prove nearly every claim."""

import pytest
from safetensors.torch import load_file, save_file

from moe_rl.proof.batch import make_checkpoint
from moe_rl.proof.cases import LAYOUTS, Case
from tests.distributed.jobs import own_replay

pytestmark = pytest.mark.timeout(900)

# Routers that tell rows from their neighbours: attention changes little, and tokens differ more.
SCALES = {"o_proj": 0.1, "embed_tokens": 3.0, "down_proj": 0.3}
# Rows of a stage of two layers have too few experts to tell a repeated row from chance, or one wrong id in all rows.
FEW_IDS = [case for case in LAYOUTS if case.parallel.get("pipeline") == 4]
USUAL: list[Case] = []  # quick tests audit one rank: tests/megatron/test_audit.py


@pytest.fixture(scope="module")
def distinct(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("distinct"), layers=8, experts=32)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        for part, scale in SCALES.items():
            tensors[name] *= scale if part in name else 1.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def audited(on_ranks, case, checkpoint):
    """Return the claims of a healthy step, each with its status. The audit names nothing and sees every run."""
    claims = []
    for found in on_ranks(case.ranks, own_replay.run, case, checkpoint):
        assert found["names"] == [] and found["runs"] == found["expected"], found["text"]
        assert found["replayed"] == sum(found["runs"]) and found["power"] > 0.8, found["text"]
        claims += [one for one in found["claims"] if not (case in FEW_IDS and one[0] in ("stuck rows", "single ids"))]
    return claims


@pytest.mark.parametrize(
    "case", [case for case in LAYOUTS if case.ranks < 4], ids=lambda case: f"{case.ranks}: {case.name}"
)
def test_the_audit_of_a_healthy_step_is_silent(on_ranks, distinct, case):
    claims = audited(on_ranks, case, distinct)
    weak = [name for name, status in claims if status != "proven"]
    assert len(weak) <= 0.05 * len(claims), weak


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_99_of_100_claims_are_proven_in_all_layouts_together(on_ranks, distinct):
    weak, number = [], 0
    for case in LAYOUTS:
        claims = audited(on_ranks, case, distinct)
        number += len(claims)
        weak += [(case.name, name) for name, status in claims if status != "proven"]
    assert number > 2000 and len(weak) <= 0.01 * number, weak
