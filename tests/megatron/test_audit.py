"""`audit` on megatron-core's own RouterReplay and on transformers: faults that were reported in public are named, and
sound trainers stay silent."""

import numpy as np
import pytest
import torch

from moe_rl.errors import ReplayError
from moe_rl.replay.audit_report import FAULTS
from moe_rl.replay.choice import replay_topk
from moe_rl.replay.router_audit import audit, row_places

QUICK = {"a decoder built twice", "queues out of step under virtual stages", "batch-first rows", "capture off by one"}


def cases(of, quick):
    return [pytest.param(one, marks=[] if one in quick else pytest.mark.long) for one in of]


# The tables of the benchmark need megatron-core, which is imported behind the CPU back end.
PLANTED = [
    "a decoder built twice", "fused router", "queues out of step under virtual stages",
    "entries left by a forward-only pass", "the action of the forward pass in recomputations", "batch-first rows",
    "MTP layer numbers", "padding to expert 0", "wrong slice of context parallelism", "bytes for more than 256 experts",
    "zero-filled rows", "last writer on resume", "capture off by one", "rows shifted by the trainer",
    "dense layer not counted", "routes of the first microbatch for all", "routes of another sequence",
    "capacity factor", "an expert named twice", "replay never switched on",
]  # fmt: skip
LAYOUTS = [
    "plain", "recomputation", "dense layers", "virtual stages", "padding", "MTP", "context parallel", "many experts",
    "one sequence",
]  # fmt: skip


@pytest.mark.parametrize("name", cases(PLANTED, QUICK))
def test_a_fault_of_a_trainer_on_megatrons_replay_is_named(one_rank, name):
    from benchmarks.diagnosis_parts import own_replay

    assert [*own_replay.PLANTED] == PLANTED
    wanted, plant = own_replay.PLANTED[name]
    report = plant(0)
    assert report.names[:1] == [wanted], str(report)
    with pytest.raises(ReplayError) as error:
        report.refuse()
    assert error.value.message.fault == wanted


@pytest.mark.parametrize("name", cases(LAYOUTS, {"virtual stages", "padding"}))
def test_a_sound_trainer_on_megatrons_replay_stays_silent(one_rank, name):
    from benchmarks.diagnosis_parts import own_replay

    assert [*own_replay.LAYOUTS] == LAYOUTS
    report = own_replay.healthy(name)
    report.refuse()
    assert report.names == [] and report.wrong == report.skipped == 0
    assert report.replayed == report.forwards + report.recomputations and report.power > 0.9
    core = {claim.name: claim.status for claim in report.record.claims}
    assert {core[name] for name in ("layer", "shift", "no rows")} == {"proven"}


class TransformersTrainer:
    """Trains a Qwen3-MoE of transformers with `replay_topk` in its routers. broken: a fault of this trainer."""

    def __init__(self, broken=""):
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=97, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=16, num_experts_per_tok=2,
            mlp_only_layers=[0], initializer_range=0.3,
        )  # fmt: skip
        self.model = Qwen3MoeForCausalLM(config).train()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.broken, self.given = broken, None
        rng = np.random.default_rng(0)
        self.tokens = [rng.integers(0, 97, 40) for _ in range(8)]
        self.routes = [np.zeros((40, 2, 2), np.int64) for _ in self.tokens]
        self.places = [row_places(range(at, at + 4), [40] * 4, order="batch first") for at in (0, 4)]
        for column, layer in enumerate((1, 2)):
            gate = self.model.model.layers[layer].mlp.gate
            gate.forward = lambda hidden, gate=gate, column=column: self.route(gate, hidden, column)
        for places in self.places:
            with torch.no_grad():
                self.chosen = {}
                self.run(places)
            for column, ids in self.chosen.items():
                for row, (s, p) in enumerate(zip(*places, strict=True)):
                    self.routes[s][p, column] = ids[row]
        for one in self.routes:  # the noise of a sampler
            one[::7, :, 0] = (one[::7, :, 1] + 1) % 16

    def route(self, gate, hidden, column):
        logits = hidden.reshape(-1, 32) @ gate.weight.T
        if self.given is None or (self.broken == "not replayed" and column):
            weights, ids = replay_topk(logits, logits.topk(2)[1])
            self.chosen[column] = ids.numpy()
        else:
            weights, ids = replay_topk(logits, self.given[:, column])
        return logits, weights, ids

    def run(self, places):
        ids = torch.from_numpy(np.array([self.tokens[s][p] for s, p in zip(*places, strict=True)]).reshape(4, 40))
        return self.model(ids, use_cache=False).logits

    def step(self):
        watch = audit(self.model)
        assert watch.layers == [1, 2]
        with watch.step(self.tokens, self.routes, self.places, layers="dmm", recomputed=True) as step:
            for number, places in enumerate(self.places):
                step.forward(number)
                self.given = torch.from_numpy(np.stack([self.routes[s][p] for s, p in zip(*places, strict=True)]))
                loss = self.run(places).square().mean()
                if self.broken == "other microbatch":
                    self.given = torch.from_numpy(np.concatenate(self.routes[:4]))
                if self.broken != "not run":
                    loss.backward()
        watch.close()
        return step.report


@pytest.mark.parametrize(
    ("broken", "named"),
    [("", []), ("not replayed", ["not replayed"]), ("other microbatch", ["out of step"]), ("not run", ["not run"])],
)
def test_routers_of_transformers_are_read_with_their_recomputations(broken, named):
    report = TransformersTrainer(broken).step()
    assert report.names == named, str(report)
    assert report.forwards == 4 and report.recomputations == (0 if broken == "not run" else 4)


def test_a_router_that_is_a_plain_function_is_named_by_its_layer():
    gate = torch.nn.Linear(8, 16, bias=False)
    rng = np.random.default_rng(1)
    tokens, routes = [np.arange(12)], [rng.permuted(np.tile(np.arange(16), (12, 1)), axis=1)[:, None, :2]]
    gate.top_k = 2
    fed = torch.from_numpy(np.ascontiguousarray(routes[0][:, 0]))
    watch = audit(gate, {0: gate}, read=lambda _, __, logits: (fed, logits))
    with watch.step(tokens, routes, [row_places([0], [12])]) as step:
        step.forward(0)
        gate(torch.randn(12, 8))
        fed = fed.roll(1, 0)
        step.forward(0)
        gate(torch.randn(12, 8))
    assert step.report.names[:2] == ["run twice", "rows shifted"] and step.report.replayed == 1
    with watch.step(tokens, routes, [row_places([0], [12])]) as step:
        pass
    assert step.report.names == ["not run"] and not step.report.record.faults, "the record is sound"
    watch.close()
    gate(torch.randn(3, 8))  # the hooks are gone


def test_a_record_without_its_last_row_is_named_and_ends_no_step():
    gate = torch.nn.Linear(8, 16, bias=False)
    gate.top_k = 2
    taken = np.random.default_rng(1).permuted(np.tile(np.arange(16), (24, 1)), axis=1)[:, None, :2]
    tokens, whole = [np.arange(12), np.arange(1, 13)], [taken[:12], taken[12:]]
    watch = audit(gate, {0: gate}, read=lambda _, __, logits: (torch.from_numpy(taken[:, 0].copy()), logits))
    for lacks in (0, 1):
        routes = [record[: len(record) - (number == lacks)] for number, record in enumerate(whole)]
        with watch.step(tokens, routes, [row_places([0, 1], [12, 12])]) as step:
            step.forward(0)
            gate(torch.randn(24, 8))
        assert step.report.names == ["rows"] and step.report.replayed == 1, str(step.report)


def test_a_router_that_sees_a_part_of_its_rows_is_named_and_not_compared():
    """Sequence parallelism: the audit was told all rows, and this rank's router sees half of them."""
    gate = torch.nn.Linear(8, 16, bias=False)
    gate.top_k = 2
    routes = [np.sort(np.random.default_rng(1).permuted(np.tile(np.arange(16), (12, 1)), axis=1)[:, None, :2])]
    fed = torch.from_numpy(np.ascontiguousarray(routes[0][:6, 0]))
    watch = audit(gate, {0: gate}, read=lambda _, __, logits: (fed, logits))
    found = []
    for places in (row_places([0], [12]), tuple(one[:6] for one in row_places([0], [12]))):
        with watch.step([np.arange(12)], routes, [places]) as step:
            step.forward(0)
            gate(torch.randn(6, 8))
        found.append([one.name for one in step.report.faults])
    assert found == [["row count"], []] and step.report.replayed == 1


def test_a_model_without_routers_and_a_record_of_other_layers_are_refused_before_the_step():
    with pytest.raises(ReplayError) as error:
        audit(torch.nn.Linear(2, 2))
    assert error.value.message.fault == "routers"
    trainer = TransformersTrainer()
    watch = audit(trainer.model)
    with pytest.raises(ReplayError) as error:
        watch.step(trainer.tokens, trainer.routes, trainer.places, layers="mmd")
    assert error.value.message.fault == "layers" and error.value.about["layer"] == 2


def test_rows_are_laid_out_as_routers_see_them():
    sequence, position = row_places([5, 6], [3, 2], order="sequence first", padded_to=3)
    assert sequence.tolist() == [5, 6, 5, 6, 5, -1] and position.tolist() == [0, 0, 1, 1, 2, 2]
    sequence, position = row_places([5, 6], [3, 2], order="packed", padded_to=7)
    assert sequence.tolist() == [5, 5, 5, 6, 6, -1, -1] and position.tolist() == [0, 1, 2, 0, 1, 0, 1]
    sequence, position = row_places([5], [7], context=(1, 2))
    assert sequence.tolist() == [5, 5, 5, 5] and position.tolist() == [2, 3, 4, 5]
    sequence, position = row_places([5], [7], context=(0, 2))
    assert sequence.tolist() == [5, 5, 5, -1] and position.tolist() == [0, 1, 6, 7]
    sequence, position = row_places([], [], padded_to=8, context=(0, 2))  # a microbatch that fills up a round
    assert sequence.tolist() == [-1] * 4 and position.tolist() == [0, 1, 2, 3]
    # the longest sequence of a grid cannot be cut into equal pieces either
    sequence, position = row_places([5, 6], [3, 5], order="sequence first", context=(0, 2))
    assert sequence.tolist() == [5, 6, 5, 6, -1, -1, -1, -1] and position.tolist() == [0, 0, 1, 1, 6, 6, 7, 7]
    with pytest.raises(ReplayError) as error:
        row_places([5], [7], order="batch_first")
    assert error.value.about["argument"] == "order"


def test_every_name_that_the_tables_use_is_explained(one_rank):
    from benchmarks.diagnosis_parts import own_replay

    assert {name for name, _ in own_replay.PLANTED.values()} <= {*FAULTS, "shift"}
