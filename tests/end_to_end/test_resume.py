"""A run goes on with other ranks than it had."""

import json
import shutil

import pytest
import yaml

from tests.end_to_end.conftest import Launch, rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_run_goes_on_with_another_layout(short_run, tmp_path):
    """After step 2 of 4 one rank takes over from two, with the same weights, the newest checkpoint being damaged."""
    folder = tmp_path / short_run.folder.name
    shutil.copytree(short_run.folder, folder)
    damaged = folder / "checkpoints/step-000004/__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run = Launch(tmp_path, "--resume", folder, "--step", 2, "parallel.expert=1", ranks=1)
    assert run.wait() == 0, run.text()[-4000:]
    assert "after step 2; steps repeated: 2. Step 3 is trained on the" in run.text()
    assert f"a newer checkpoint was renamed and is not used: {damaged.parent}.abandoned" in run.text()
    assert "the parallel layout changed: ranks 2 -> 1, expert 2 -> 1; " in run.text()
    assert "random generators are seeded again from run.seed" in run.text()
    assert yaml.safe_load((folder / "config.yaml").read_text())["parallel"]["expert"] == 1

    ours, theirs = rows(folder), rows(short_run.folder)
    done = next(at for at, row in enumerate(ours) if row["kind"] == "train" and row["step"] == 3)
    assert ours[:done] == theirs[:done] and len(ours) == len(theirs)
    third, as_before = ours[done], theirs[done]
    sampled = [name for name in third if name.startswith(("rollout/", "reward/", "trace/"))]
    assert len(sampled) > 5 and all(third[name] == as_before[name] for name in sampled)
    # What the trainer makes of it before its first update is the same too, but for the rounding of float32: for
    # microbatches of other sizes some CPUs add in another order.
    for name in ("policy_kl/k3", "policy_kl/k3_native", "routing/shadow_mismatch", "routing/native_mismatch"):
        assert third[name] == pytest.approx(as_before[name], rel=1e-5), name
    assert third["optim/updates"] == as_before["optim/updates"]
    assert third["optim/grad_norm"] == pytest.approx(as_before["optim/grad_norm"], rel=0.2)
    steps = [row for row in ours if row["kind"] == "train"]
    assert all(row["routing/applied_mismatch"] == 0 and row["routing/coverage"] == 1 for row in steps)
    # the sampler holds the new weights too
    assert 0 < steps[-1]["policy_kl/k3"] < 1e-3
    state = json.loads((folder / "checkpoints/step-000004/state.json").read_text())
    assert (state["layout"]["ranks"], state["layout"]["expert"]) == (1, 1)
