"""Compares the exported weights with what the trainer holds: every well-formed fault is named, and a correct export
passes."""

import re
import shutil
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_rl.errors import WeightSyncError
from moe_rl.weights.digest import tensor_digests
from tests.support.families import write_checkpoint
from tests.support.wrong_exports import FAULTS, START, plant
from tests.weights.taking import Taker, sender_of

FAMILIES = ("qwen-mixed", "deepseek", "gpt-oss")
QWEN_OR_LONG = [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES[1:])]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: write_checkpoint(name, tmp_path_factory.mktemp(name)) for name in (*FAMILIES, "qwen-tied")}


@pytest.fixture
def begun(one_rank, checkpoints, tmp_path):
    """Return begun(model), which gives a new policy from its checkpoint, its batch, a sender and a receiver."""
    from moe_rl.megatron.policy import Policy
    from moe_rl.models.hf import read_model
    from moe_rl.proof.cases import Case
    from moe_rl.proof.trial import Trial

    made = []

    def begin(name, dtype="bfloat16", **changes):
        folder, case = checkpoints[name], Case(1, {}, {"dtype": dtype} | changes)
        facts = read_model(folder)
        policy = Policy(facts, case.train_config, case.parallel_config, folder, temperature=1.0)
        made.append(policy)
        way = sender_of(policy, tmp_path / "parts", "shared_memory", dtype=dtype, weight_bucket_mib=0.2)
        taker, trial = Taker(folder, dtype), Trial(facts, case, policy)
        return SimpleNamespace(folder=folder, facts=facts, policy=policy, sender=way, taker=taker, trial=trial)

    yield begin
    for policy in made:
        policy.release()


def trained(run, dtype=torch.bfloat16, folder=None):
    from moe_rl.megatron.hf_files import Trained

    return Trained(folder or run.folder, run.facts, dtype)


@pytest.mark.parametrize("name", [*QWEN_OR_LONG, "qwen-tied"])
def test_the_right_export_passes_and_is_what_the_sampler_gets(begun, name):
    run = begun(name)
    assert run.sender.check_start(trained(run)) == len(load_file(run.folder / "model.safetensors"))
    for version in (1, 2):
        run.trial.update(run.trial.tables)
        run.sender.send(run.taker, version)
    exported = dict(run.policy.export(torch.bfloat16, dense=True, experts=True))
    assert tensor_digests(exported.items()) == tensor_digests(run.taker.weights.items())


def test_what_is_done_beside_an_update_is_done_while_the_sampler_loads_it(begun, monkeypatch):
    run, loads, done = begun("qwen-mixed"), Event(), Event()
    update_weights = run.taker.update_weights

    def loading(update):
        if update.final:
            loads.set()
            assert done.wait(10)
        update_weights(update)

    def beside():
        assert loads.wait(10) and run.taker.intake.holding().version == 0
        done.set()

    monkeypatch.setattr(run.taker, "update_weights", loading)
    run.sender.send(run.taker, 1, beside=beside)
    assert done.is_set() and run.taker.intake.holding().version == 1


@pytest.mark.parametrize("name", QWEN_OR_LONG)
def test_every_wrong_export_is_named_before_the_update_is_final(begun, name, monkeypatch):
    run = begun(name)
    run.sender.check_start(trained(run))
    export_rounds, version = run.policy.export_rounds, 0
    for fault in FAULTS.values():
        if name == "deepseek" and "k_proj" in fault.says[0]:
            continue  # this model has one matrix for both
        fired = plant(run.policy, fault, at=0 if fault.start else 1)
        if not fault.start:  # this fault needs an update before the current one
            run.trial.update(run.trial.tables)
            run.sender.send(run.taker, version := version + 1)
        run.trial.update(run.trial.tables)
        with pytest.raises(WeightSyncError, match="the exported weights are not what the trainer holds") as refused:
            run.sender.send(run.taker, version + 1)
        assert fired and run.taker.intake.holding().version == version
        for said in (rf"\(version {version + 1}\)", *fault.says):
            assert re.search(said, str(refused.value)), str(refused.value)
        if name != "gpt-oss":  # a model whose tensors hold many parts
            assert f"{len(fired)} of {len(run.policy.parts)} parts" in str(refused.value)
        run.policy.export_rounds = export_rounds
    # The control: without the comparison, the sampler accepts the fault.
    fired = plant(run.policy, FAULTS["two experts permuted"], at=0)
    monkeypatch.setattr("moe_rl.weights.conservation.difference", lambda *_: "")
    run.sender.send(run.taker, version + 1)
    assert fired and run.taker.intake.holding().version == version + 1


@pytest.mark.parametrize("name", QWEN_OR_LONG)
def test_what_is_no_longer_the_checkpoint_is_named_at_the_start(begun, name):
    run = begun(name)
    export_rounds = run.policy.export_rounds
    for what, fault in (FAULTS | START).items():
        if not fault.start or (name == "deepseek" and ("keys" in what or what in START)):
            continue  # this model has one matrix for both, and no square one
        fired = plant(run.policy, fault, at=0)
        with pytest.raises(WeightSyncError, match="before its first update are not the checkpoint.s") as refused:
            run.sender.check_start(trained(run))
        assert fired and all(f"{tensor}: " in str(refused.value) for tensor in fired[:3])
        if what in START:
            assert re.search(fault.says[0], str(refused.value))
        elif name != "gpt-oss" and what != "one expert zeroed":
            assert f"it is the checkpoint's {fired[1]}" in str(refused.value)
        run.policy.export_rounds = export_rounds
    run.sender.check_start(trained(run))


def test_a_file_that_changed_and_names_that_do_not_fit_are_named(begun, tmp_path):
    run = begun("qwen-mixed")
    shutil.copytree(run.folder, tmp_path / "other")
    tensors = load_file(run.folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.7.down_proj.weight"
    tensors[name][3, 5] += 1
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    other = trained(run, folder=tmp_path / "other")
    with pytest.raises(WeightSyncError, match=rf"{name}: 1 of {tensors[name].numel()} elements, the first at \[3, 5\]"):
        run.sender.check_start(other)
    ours = trained(run)
    ours.names.remove(name)
    ours.names.append("model.layers.0.mlp.extra")
    with pytest.raises(
        WeightSyncError, match=r"not exported: model\.layers\.0\.mlp\.extra; exported and not in the "
    ) as told:
        run.sender.check_start(ours)
    assert f"not in the checkpoint: {name}" in str(told.value)


def test_a_float32_trainer_is_held_against_the_checkpoint_in_the_precision_that_it_has(begun):
    run = begun("qwen-mixed", "float32")
    run.sender.check_start(trained(run, torch.float32))
    with pytest.raises(WeightSyncError, match="are not the checkpoint.s"):
        run.sender.check_start(trained(run, torch.bfloat16))


def untouched(run, experts):
    """Make routes that never use one of the last experts."""
    rng = np.random.default_rng(3)
    chosen = [
        rng.random((*routes.shape[:2], experts)).argsort(-1)[..., : routes.shape[2]] for routes in run.trial.routes
    ]
    run.trial.force([one.astype(np.uint8) for one in chosen])


def test_the_digests_that_changed_are_those_of_what_the_update_changed(begun):
    """Experts without tokens have no gradient, and Adam without moments and decay does not change them."""
    run = begun("qwen-mixed", "float32")
    untouched(run, 12)
    seen = []
    for _ in range(2):
        exported = run.policy.export(torch.float32, dense=True, experts=True)
        seen.append((tensor_digests(exported), run.policy.content(torch.float32, updated=bool(seen)).table))
        if len(seen) == 1:
            run.trial.update(run.trial.tables)
    (before, held_before), (after, held_after) = seen
    exported = {name for name in after if after[name] != before[name]}
    names = list(run.policy.parts)
    trained = {names[at] for at in (held_before != held_after).any(0).nonzero().flatten().tolist()}
    idle = {name for name in after if (found := re.search(r"experts\.(\d+)\.", name)) and int(found[1]) >= 12}
    assert exported == trained == set(after) - idle and len(idle) == 4 * 3 * 3


@pytest.mark.parametrize("sharded", [True, False])
def test_weights_that_the_optimizer_wrote_and_the_model_did_not_get_are_named(begun, sharded, monkeypatch):
    run = begun("qwen-mixed", distributed_optimizer=sharded)
    run.trial.update(run.trial.tables)
    run.sender.send(run.taker, 1)
    chunk = run.policy.chunks[0]
    name = "decoder.layers.1.mlp.router.weight"
    router = next(p for full, p in chunk.named_parameters() if full.endswith(name))
    old = router.detach().clone()
    run.trial.update(run.trial.tables)
    assert not torch.equal(router, old)
    router.data.copy_(old)
    with pytest.raises(
        WeightSyncError, match=r"other weights than its optimizer wrote: got 1 parts: layer 1, mlp\.gate"
    ):
        run.sender.send(run.taker, 2)
    monkeypatch.setattr("moe_rl.megatron.live_weights._refuse", lambda *_, **__: None)
    run.sender.send(run.taker, 2)  # the witness: what the sampler got is what the trainer computes with


def test_what_lies_where_is_looked_at_again_when_it_has_changed(begun):
    """A router that is replaced by a new parameter, and two experts whose slots are exchanged, are both seen."""
    run = begun("qwen-mixed", "float32")
    names = list(run.policy.parts)

    def changed(before):
        table = run.policy.content(torch.float32, updated=False).table
        return table, {names[at] for at in (table != before).any(0).nonzero().flatten().tolist()}

    first = run.policy.content(torch.float32, updated=False).table
    assert changed(first)[1] == set()
    layer = next(layer for layer in run.policy.chunks[0].module.decoder.layers if layer.is_moe_layer)
    front = f"model.layers.{layer.layer_number - 1}.mlp"
    layer.mlp.router.weight = torch.nn.Parameter(layer.mlp.router.weight.detach() + 1)
    second, found = changed(first)
    assert found == {f"{front}.gate.weight"}
    order = layer.mlp.token_dispatcher.order.copy()
    order[[0, 1]] = order[[1, 0]]
    layer.mlp.token_dispatcher.place(order)
    assert changed(second)[1] == {
        f"{front}.experts.{expert}.{one}_proj.weight" for expert in (0, 1) for one in ("gate", "up", "down")
    }
