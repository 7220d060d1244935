"""Tests the recorder, driven by hand, in cases that real vLLM on a CPU rarely or never produces.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.errors import EngineError, ReplayError, TraceDiskError, TraceError
from moe_rl.replay.routes import microbatch_routes, read_routes, source_sum
from moe_rl.trace import TraceStore, signed
from moe_rl.trace.source_sum import rows_of, total
from moe_rl.trace.spans import versions_of_rows
from moe_rl.types import Provenance, Sequence, sampled_by
from moe_rl.vllm import recorder as module
from moe_rl.vllm import slot_journal
from moe_rl.vllm.hooks import attach_recorder, refuse_layout
from moe_rl.vllm.recorder import Recorder
from tests.support.refusals import refused

LAYERS, EXPERTS, TOP_K, BLOCK = (1, 3), 8, 2, 4


class FakeCapture:
    """Holds the capture buffer, without a model to bind it to."""

    layers = LAYERS

    def __init__(self, model, *, max_tokens, top_k, device):
        self.modules = {}
        self.buffer = torch.full((max_tokens, len(LAYERS), top_k), -1, dtype=torch.int32, device=device)

    def clear(self, tokens: int) -> None:
        self.buffer[:tokens].fill_(-1)


class LateEvent:
    """Stands for a copy that arrives only when told to, or when waited for."""

    def __init__(self, waits: list):
        self.arrived, self._waits = False, waits

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self._waits.append(self)
        self.arrived = True


class Engine:
    """Stands for vLLM's worker and runner as the recorder sees them. Routes depend on token, position and pass."""

    def __init__(
        self,
        root,
        monkeypatch,
        *,
        blocks: int = 16,
        speculates: bool = False,
        device: str | torch.device = "cpu",
    ):
        zeros = partial(torch.zeros, 64, device=device)
        self.tables = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=zeros(dtype=torch.int64)))
        self.runner = SimpleNamespace(
            max_num_tokens=64,
            kv_cache_config=None,
            get_model=lambda: None,
            input_ids=SimpleNamespace(gpu=zeros(dtype=torch.int32)),
            positions=zeros(dtype=torch.int64),
            input_batch=SimpleNamespace(block_table=[self.tables], req_ids=[]),
        )
        model = SimpleNamespace(
            get_num_experts=lambda: EXPERTS,
            get_num_experts_per_tok=lambda: TOP_K,
            get_total_num_hidden_layers=lambda: 5,
        )
        config = SimpleNamespace(speculative_config=object() if speculates else None)
        worker = SimpleNamespace(model_runner=self.runner, device=device, model_config=model, vllm_config=config)
        monkeypatch.setattr(module, "Capture", FakeCapture)
        monkeypatch.setattr(module, "_pipeline", lambda layers: (0, 1, layers))
        monkeypatch.setattr(module, "_attention_group", lambda config: (0, blocks, BLOCK))
        self.recorder = Recorder(worker, {"trace_root": str(root), "model_fingerprint": "fake"})
        self.store = TraceStore(root)
        self.passes = 0

    def step(
        self, *, new=(), cached=(), resumed=(), finished=(), preempted=(), copies=(), silent=None, spoil=None,
        shift=0, hooks=("before", "after"), drafts=(),
    ) -> None:  # fmt: skip
        """Run one step.

        Args:
            new: (id, key, blocks, computed, tokens) of each new request.
            cached, resumed: (id, blocks, computed, tokens, table); `table` is the request's whole block table, which
                says where its tokens go.
            silent: a layer that reports nothing.
            spoil: an expert id to report instead.
            shift: added to every slot.
            hooks: the hooks that are called.
            drafts: id -> drafted tokens among those forwarded.
        """
        forwarded, slots, positions = [], [], []
        for table, computed, tokens in [(b, c, t) for _, _, b, c, t in new] + [(b, c, t) for *_, c, t, b in cached]:
            forwarded += tokens
            at = np.arange(computed, computed + len(tokens))
            positions += at.tolist()
            slots += (np.asarray(table)[at // BLOCK] * BLOCK + at % BLOCK + shift).tolist()
        count = len(forwarded)
        scheduled = SimpleNamespace(
            preempted_req_ids=set(preempted),
            finished_req_ids=set(finished),
            scheduled_new_reqs=[self._new(*one) for one in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request for request, *_ in cached],
                new_block_ids=[blocks and (blocks,) for _, blocks, *_ in cached],
                num_computed_tokens=[computed for _, _, computed, _, _ in cached],
                resumed_req_ids=set(resumed),
            ),
            num_scheduled_tokens={r[0]: len(r[4]) for r in new} | {r[0]: len(r[3]) for r in cached},
            total_num_scheduled_tokens=count,
            kv_cache_block_copies=list(copies),
            scheduled_spec_decode_tokens=dict(drafts),
        )
        if "before" in hooks:
            self.recorder.before_step(scheduled)
        routes = torch.from_numpy(self.routes(forwarded, positions, self.passes))
        if spoil is not None:
            routes[-1, :, 0] = spoil
        for column, layer in enumerate(LAYERS):
            if layer != silent and count:
                self.recorder._capture.buffer[:count, column].copy_(routes[:, column])
        self.runner.input_ids.gpu[:count].copy_(torch.tensor(forwarded, dtype=torch.int32))
        self.runner.positions[:count].copy_(torch.tensor(positions))
        self.tables.slot_mapping.gpu[:count].copy_(torch.tensor(slots))
        if "after" in hooks:
            self.recorder.after_forward(scheduled)
        self.passes += 1

    @staticmethod
    def _new(request, key, blocks, computed, tokens):
        extra = key if isinstance(key, dict) else key and {"moe_rl_key": key, "moe_rl_sink": "shard"}
        return SimpleNamespace(
            req_id=request,
            block_ids=(blocks,),
            num_computed_tokens=computed,
            prompt_token_ids=None,
            sampling_params=SimpleNamespace(extra_args=extra, temperature=1.0),
        )

    @staticmethod
    def routes(tokens, positions, passes) -> np.ndarray:
        """Return routes [T, L, K] int32 with distinct experts in a row, different in every pass."""
        first = np.asarray(tokens, np.int32) + 3 * np.asarray(positions, np.int32) + 5 * passes
        chosen = [np.stack([(first + layer) % 8, (first + layer + 3) % 8], -1) for layer in LAYERS]
        return np.stack(chosen, 1).astype(np.int32)

    def check(self, key: str, tokens, routes, *, versions=None) -> None:
        """Publish the open shard and compare the record of `key`."""
        (ref,) = self.recorder.publish("shard", {key: tokens}).result().values()
        self.compare(key, ref, tokens, routes, versions)

    def compare(self, key, ref, tokens, routes, versions=None) -> None:
        assert (ref.key, ref.rows, ref.start) == (key, len(tokens), 0)
        record = self.store.read(ref)
        made = versions_of_rows(record.spans)
        assert ref.source_sum == total(key, rows_of(routes, LAYERS, tokens, versions=made))
        np.testing.assert_array_equal(record.routes, np.sort(routes, -1))
        assert record.token_ids.tolist() == list(tokens)
        assert record.spec.moe_layers == LAYERS and record.spec.layer_map == "dmdmd"
        if versions is not None:
            assert [version for span in record.spans for version in [span.weight_version] * span.rows] == versions


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return Engine(tmp_path / "trace", monkeypatch)


def test_prefix_chunks_and_a_surplus_row(fake):
    """b finds a's first block in the cache; a is prefilled in two chunks; b forwards one token too many."""
    a, b = [11, 12, 13, 14, 15, 16, 17], [11, 12, 13, 14, 25]
    fake.recorder.sinks.open("shard")
    fake.step(new=[("a", "key/a", [5, 2], 0, a[:6])])
    fake.step(cached=[("a", None, 6, a[6:], [5, 2])], new=[("b", "key/b", [5, 9], 4, b[4:])])
    fake.step(cached=[("b", None, 5, [99], [5, 9])])
    # The blocks of both requests get new owners in the same step in which their end is reported.
    fake.step(new=[("c", None, [5, 2], 0, [1] * 8)], finished=["a", "b"])
    refs = fake.recorder.publish("shard", {"key/a": a, "key/b": b}).result()
    first, second = fake.routes(a, range(7), 0), fake.routes(a, range(7), 1)
    fake.compare("key/a", refs["key/a"], a, np.concatenate([first[:6], second[6:]]))
    fake.compare("key/b", refs["key/b"], b, np.concatenate([first[:4], fake.routes(b, range(5), 1)[4:]]))
    assert fake.store.shards() == ["shard"]
    spans = fake.store.read(refs["key/b"]).spans
    assert spans[0].provenance is Provenance.CACHED and spans[0].rows == 4


def test_a_block_may_be_shared_in_the_step_it_is_given_out(fake):
    """a, already running, gets block 2 and fills it; b, new in this step, hits that block. vLLM decides in this
    order."""
    a = [11, 12, 13, 14, 15, 16, 17, 18]
    fake.step(new=[("old", None, [2, 5], 0, [1] * 8)])
    fake.step(new=[("a", "a", [1], 0, a[:4])], finished=["old"])
    fake.step(cached=[("a", [2], 4, a[4:], [1, 2])], new=[("b", "b", [1, 2, 3], 8, [29])])
    fake.step(finished=["a", "b"])
    b = [*a, 29]
    refs = fake.recorder.publish("shard", {"a": a, "b": b}).result()
    routes = np.concatenate([fake.routes(a, range(8), 1)[:4], fake.routes(a, range(8), 2)[4:]])
    fake.compare("a", refs["a"], a, routes)
    fake.compare("b", refs["b"], b, np.concatenate([routes, fake.routes(b, range(9), 2)[8:]]))


def test_a_preempted_request_keeps_the_rows_that_decided_its_tokens(fake):
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    fake.recorder.sinks.open("shard")
    fake.step(new=[("a", "a", [1, 2], 0, tokens[:5])])
    fake.step(cached=[("a", None, 5, tokens[5:6], [1, 2])])
    fake.recorder.weight_version = 7  # an update before it is computed again
    fake.step(new=[("b", None, [1, 2], 0, [7] * 8)], preempted=["a"])
    # Preempted again while only part of it had been forwarded for the second time.
    fake.step(cached=[("a", [3], 0, tokens[:4], [3])], resumed=["a"])
    fake.step(new=[("c", None, [3], 0, [7] * 4)], preempted=["a"])
    fake.step(cached=[("a", [4, 6], 0, tokens[:7], [4, 6])], resumed=["a"])
    fake.step(cached=[("a", [8], 7, tokens[7:], [4, 6, 8])])
    fake.step(finished=["a"])
    passes = [fake.routes(tokens, range(10), at) for at in range(7)]
    decided = np.concatenate([passes[0][:5], passes[1][5:6], passes[5][6:7], passes[6][7:]])
    fake.check("a", tokens, decided, versions=[0] * 6 + [7] * 4)
    assert fake.recorder.stats["preemptions"] == 2
    assert fake.recorder.stats["rewritten"] == 6, "later tokens attended to keys of version 7 for these"


def test_a_cached_prefix_of_older_weights_is_refused(fake):
    """Block 1 was computed by version 0. "b" shares it under version 7, as its own prompt and as rows of its parent."""
    tokens = [11, 12, 13, 14, 15, 16]
    fake.step(new=[("a", "a", [1, 2], 0, tokens)])
    fake.step(new=[("early", "early", [1, 3], 4, [17])], finished=["a"])
    fake.recorder.weight_version = 7
    fake.step(cached=[("early", None, 5, [18], [1, 3])])
    fake.step(finished=["early"])
    early = [*tokens[:4], 17, 18]
    refs = fake.recorder.publish("shard", {"a": tokens, "early": early}).result()
    assert [(s.rows, s.weight_version) for s in fake.store.read(refs["early"]).spans] == [(4, 0), (1, 0), (1, 7)]

    (part,) = refs["a"].parts
    parent = {"moe_rl_parent": ["a", 6, refs["a"].source_sum, part.shard, part.digest]}
    later = [*tokens, 19]
    for key, more in (("b", {}), ("c", parent)):
        fake.step(new=[(key, {"moe_rl_key": key, "moe_rl_sink": "late"} | more, [1, 4], 4, later[4:])])
        fake.step(finished=[key])
    with refused(EngineError, request="b", got=("weight version 0, 4 rows", "expected weight version 7")):
        fake.recorder.publish("late", {"b": later}).result()
    kept = fake.store.read(fake.recorder.publish("late", {"c": later}).result()["c"])
    assert [(span.rows, span.weight_version) for span in kept.spans] == [(6, 0), (1, 7)]


def test_a_request_may_end_while_it_is_preempted(fake):
    fake.step(new=[("a", "a", [1], 0, [8, 9, 10])])
    fake.step(new=[("b", None, [1], 0, [7] * 4)], preempted=["a"])
    fake.step(finished=["a"])
    fake.check("a", [8, 9, 10], fake.routes([8, 9, 10], range(3), 0))


def test_rejected_drafts_are_written_over(tmp_path, monkeypatch):
    """Two of three drafts are rejected: their rows stay until the right tokens reach their positions."""
    fake = Engine(tmp_path / "trace", monkeypatch, speculates=True)
    fake.step(new=[("a", "a", [1, 2], 0, [8, 9])])
    fake.step(cached=[("a", None, 2, [10, 50, 51, 52], [1, 2])], drafts={"a": [50, 51, 52]})
    fake.step(cached=[("a", None, 4, [12, 13], [1, 2])])
    assert (fake.recorder.stats["drafts"], fake.recorder.stats["accepted_drafts"]) == (3, 1)
    fake.step(finished=["a"])
    tokens = [8, 9, 10, 50, 12, 13]
    passes = [fake.routes(tokens, range(6), at) for at in range(3)]
    fake.check("a", tokens, np.concatenate([passes[0][:2], passes[1][2:4], passes[2][4:]]))


def test_rejected_drafts_are_not_kept_over_a_preemption(tmp_path, monkeypatch):
    """A preemption follows a step with rejected drafts; vLLM has not reported the rejection when the rows are saved."""
    fake = Engine(tmp_path / "trace", monkeypatch, speculates=True)
    fake.step(new=[("a", "a", [1, 2], 0, [8, 9])])
    fake.step(cached=[("a", None, 2, [10, 50, 51], [1, 2])], drafts={"a": [50, 51]})
    fake.step(new=[("b", None, [1, 2], 0, [7] * 8)], preempted=["a"])
    tokens = [8, 9, 10, 11, 12]
    fake.step(cached=[("a", [3, 4], 0, tokens[:4], [3, 4])], resumed=["a"])
    fake.step(cached=[("a", None, 4, tokens[4:], [3, 4])])
    fake.step(finished=["a"])
    passes = [fake.routes(tokens, range(5), at) for at in range(5)]
    fake.check("a", tokens, np.concatenate([passes[0][:2], passes[1][2:3], passes[3][3:4], passes[4][4:]]))


def test_a_block_copied_for_a_partial_hit(fake):
    a = [11, 12, 13, 14, 15, 16]
    fake.step(new=[("a", "a", [5, 2], 0, a)])
    fake.step(new=[("b", "b", [5, 7], 5, [26])], copies=[(2, 7)])
    fake.step(finished=["a", "b"])
    b = [*a[:5], 26]
    refs = fake.recorder.publish("shard", {"a": a, "b": b}).result()
    routes = np.concatenate([fake.routes(a, range(6), 0)[:5], fake.routes(b, range(6), 1)[5:]])
    fake.compare("b", refs["b"], b, routes)


def test_late_copies_are_waited_for_in_order(fake, monkeypatch):
    """As on an accelerator, the copy of a step arrives after its blocks went to another request."""
    events, waits = [], []

    def to_host(tensors):
        events.append(LateEvent(waits))
        return [tensor.clone() for tensor in tensors], events[-1]

    monkeypatch.setattr(module, "to_host", to_host)
    a, b = [11, 12, 13, 14], [21, 22, 23, 24]
    fake.step(new=[("a", "a", [5], 0, a)])
    fake.step(new=[("b", "b", [5], 0, b)], finished=["a"])
    fake.step(finished=["b"])
    assert not waits and not fake.recorder.sinks._open, "nothing has arrived, nothing was waited for"
    events[0].arrived = True
    fake.step(new=[("c", None, [6], 0, [1])])
    shard = fake.recorder.sinks._open["shard"]
    shard.wait()
    assert list(shard.records) == ["a"]
    refs = fake.recorder.publish("shard", {"a": a, "b": b}).result()
    assert waits == [events[1], events[2]]
    fake.compare("a", refs["a"], a, fake.routes(a, range(4), 0))
    fake.compare("b", refs["b"], b, fake.routes(b, range(4), 1))


def test_the_last_block_of_a_request_is_read_before_it_gets_another_owner(fake, monkeypatch):
    """The copy of an earlier step is under way when the request gets that block, and ends with the request."""
    events = []

    def to_host(tensors):
        events.append(LateEvent([]))
        return [tensor.clone() for tensor in tensors], events[-1]

    monkeypatch.setattr(module, "to_host", to_host)
    a = [11, 12, 13, 14, 15]
    fake.step(new=[("a", "a", [5], 0, a[:4])])
    fake.step(cached=[("a", [6], 4, a[4:], [5, 6])])
    events[0].arrived = True
    fake.step(new=[("b", None, [6], 0, [1])], finished=["a"])
    assert fake.recorder.publish("shard", {"a": a}).result()["a"].rows == 5


@pytest.mark.parametrize("has_time", [False, True])
def test_a_step_takes_the_rows_of_one_finished_request_and_of_more_for_a_while(fake, monkeypatch, has_time):
    """The other rows are taken in later steps, and at once where their blocks get new owners, always in order."""
    monkeypatch.setattr(slot_journal, "_TAKING_SECONDS", 1e9 if has_time else 0.0)
    added, tokens = [], {key: [number, 10 + number, 20 + number] for number, key in enumerate("abcde")}

    def add(sinks, request, ask, rows, aux, real=module.Sinks.add):
        added.append(ask.key)
        real(sinks, request, ask, rows, aux)

    monkeypatch.setattr(module.Sinks, "add", add)
    fake.step(new=[(key, key, [number], 0, ids) for number, (key, ids) in enumerate(tokens.items())])
    fake.step(finished=[*tokens])
    assert added == [*tokens] if has_time else ["a"]
    fake.step(new=[("f", None, [2], 0, [1])])  # gets the block of c
    assert added == [*tokens] if has_time else ["a", "b", "c", "d"]  # d is the one of this step
    refs = fake.recorder.publish("shard", tokens).result()
    assert added == [*tokens] and [ref.key for ref in fake.store.records("shard")] == [*tokens]
    for key, ids in tokens.items():
        fake.compare(key, refs[key], ids, fake.routes(ids, range(3), 0))


@pytest.mark.parametrize("late", [False, True], ids=["copied", "copies under way"])
@pytest.mark.parametrize("call", ["open", "abandon"])
def test_rows_that_are_still_to_be_taken_do_not_enter_a_shard_begun_anew(fake, monkeypatch, call, late):
    if late:
        monkeypatch.setattr(module, "to_host", lambda tensors: ([t.clone() for t in tensors], LateEvent([])))
    tokens = {"a": [1, 2], "b": [3, 4], "c": [5, 6]}
    for _ in range(2):  # of the same keys, as after a call that failed
        fake.step(new=[(key, key, [number], 0, ids) for number, (key, ids) in enumerate(tokens.items())])
        fake.step(finished=[*tokens])
        getattr(fake.recorder, call)("shard")
    with refused(EngineError, fault="nothing" if call == "abandon" else "not recorded"):
        fake.recorder.publish("shard", tokens).result()
    assert not fake.store.shards()


def test_copies_under_way_are_bounded(fake, monkeypatch):
    waits = []
    monkeypatch.setattr(module, "to_host", lambda tensors: ([t.clone() for t in tensors], LateEvent(waits)))
    for at in range(10):
        fake.step(new=[(f"r{at}", None, [at], 0, [1])])
    assert len(waits) == fake.recorder.stats["waits"] == 10 - 1 - 4
    assert fake.recorder._journal.copies == 5


def test_a_layer_that_reports_nothing_is_an_error_naming_it(fake):
    fake.step(new=[("a", "a", [1], 0, [8, 9])])
    with refused(EngineError, fault="no expert", layer=3, token=0):
        fake.step(cached=[("a", None, 2, [10], [1])], silent=3)
        fake.step()


@pytest.mark.parametrize("wrong", [8, 255, 256, 1 << 20, -1])
def test_an_expert_out_of_range_is_an_error_and_never_wraps(fake, wrong):
    with refused(EngineError, layer=1, token=1, got=wrong, expected="0 to 7"):
        fake.step(new=[("a", "a", [1], 0, [8, 9])], spoil=wrong)
        fake.step()


def test_a_dropped_step_is_an_error(fake):
    fake.step(new=[("a", "a", [1], 0, [8, 9])], hooks=("before",))
    with refused(EngineError, fault="step lost"):
        fake.step(cached=[("a", None, 2, [10], [1])])


def test_a_step_that_nobody_announced_is_missed(fake):
    """Both hooks are skipped for a step: its token is missing although its slot is in the request's block."""
    fake.step(new=[("a", "a", [1], 0, [8, 9])])
    fake.step(cached=[("a", None, 2, [10], [1])], hooks=())
    fake.step(cached=[("a", None, 3, [11], [1])])
    fake.step(finished=["a"])
    with refused(EngineError, fault="nothing", got=("position 2",)):
        fake.recorder.publish("shard", {"a": [8, 9, 10, 11]}).result()


def test_a_duplicated_step_is_an_error(fake):
    fake.step(new=[("a", "a", [1], 0, [8, 9])])
    with refused(EngineError, fault="step twice"):
        fake.step(cached=[("a", None, 1, [9], [1])], hooks=("after",))
    with refused(EngineError, fault="twice"):
        fake.step(cached=[("a", None, 1, [9], [1])])
        fake.step()


def test_a_wrong_offset_is_an_error(fake):
    with refused(EngineError, fault="slots"):
        fake.step(new=[("a", "a", [1], 0, [8, 9])], shift=1)
        fake.step()


def test_a_reused_block_is_refused_for_its_request_alone(fake):
    """The scheduler gives a block away while its owner is still running: a bug elsewhere that shows here."""
    fake.step(new=[("a", "a", [1], 0, [8, 9]), ("b", "b", [2], 0, [8, 9])])
    fake.step(new=[("c", None, [1], 0, [8, 9])])
    fake.step(finished=["a", "b"])
    with refused(EngineError, fault="not recorded", request="a", shard="shard", got=("position 0, block 1",)):
        fake.recorder.publish("shard", {"a": [8, 9], "b": [8, 9]}).result()


def test_other_tokens_than_the_sampler_returned_are_an_error(fake):
    for wanted, message in (
        ([8, 9, 10, 11], "did not record every forwarded token .request a.*got 3 rows, expected 4"),
        ([8, 7, 10], "another token than it returned .request a, position 1.*got 9, expected 7"),
    ):
        fake.step(new=[("a", "a", [1], 0, [8, 9, 10])])
        fake.step(finished=["a"])
        with pytest.raises(EngineError, match=message):
            fake.recorder.publish("shard", {"a": wanted}).result()
        assert fake.store.shards() == []
        fake.recorder.sinks.abandon("shard")
    fake.step(new=[("a", "a", [1], 0, [8, 9, 10])])
    fake.step(finished=["a"])
    with refused(EngineError, fault="not recorded", request="b"):
        fake.recorder.publish("shard", {"a": [8, 9, 10], "b": [1]}).result()
    assert list(fake.recorder.publish("shard", {"a": [8, 9, 10]}).result()) == ["a"], (
        "a wrong claim costs the others nothing"
    )
    with refused(EngineError, fault="nothing"):
        fake.recorder.publish("other", {"never-sampled": [1]}).result()


@pytest.mark.parametrize(
    "asks, reason",
    [
        ({"moe_rl_key": "a"}, "cannot be recorded.*moe_rl_key and moe_rl_sink"),
        ({"moe_rl_key": "a", "moe_rl_sink": "shard", "moe_rl_kye": 1}, "cannot be recorded.*moe_rl_kye"),
        ({"moe_rl_key": "a b", "moe_rl_sink": "shard"}, "record key"),
        ({"moe_rl_key": "a", "moe_rl_sink": "../shard"}, "shard name"),
        ({"moe_rl_key": "a", "moe_rl_sink": "shard", "moe_rl_samples": 2}, "does not name one of the samples"),
        ({"moe_rl_key": "a", "moe_rl_sink": "shard", "moe_rl_start": -1}, "moe_rl_start.*got -1"),
        ({"moe_rl_key": "a", "moe_rl_sink": "shard", "moe_rl_parent": "x"}, "not a valid reference to a record"),
        (
            {
                "moe_rl_key": "a",
                "moe_rl_sink": "shard",
                "moe_rl_parent": ["b", 1, "0" * 16, "other", "00"],
                "moe_rl_start": 1,
            },
            "moe_rl_parent or moe_rl_start",
        ),
        (
            {"moe_rl_key": "a", "moe_rl_sink": "shard", "moe_rl_parent": ["b", 1, "0" * 16, "other", "00"]},
            "cannot be opened",
        ),
        (
            {"moe_rl_key": "a", "moe_rl_sink": "shard", "moe_rl_parent": ["b", 1, "", "other", "00"]},
            "has no checksum from",
        ),
    ],
)
def test_a_request_that_asks_for_the_impossible_is_told_when_its_routes_are_wanted(fake, asks, reason):
    """The request is sampled anyway: a client's mistake must not end an engine that others use."""
    fake.step(new=[("a", asks, [1], 0, [8, 9, 10]), ("b", "b", [2], 0, [8, 9, 10])])
    fake.step(finished=["a", "b"])
    sink = asks.get("moe_rl_sink", "None")
    with pytest.raises(EngineError, match=reason):
        fake.recorder.publish(sink, {asks["moe_rl_key"]: [8, 9, 10]}).result()
    if sink != "shard":
        fake.check("b", [8, 9, 10], fake.routes([8, 9, 10], range(3), 0))


def test_a_shard_that_exists_is_refused(fake):
    fake.recorder.sinks.open("shard")
    fake.recorder.publish("shard", {}).result()
    with refused(TraceError, fault="exists"):
        fake.recorder.sinks.open("shard")


def vllm_config(**changes) -> SimpleNamespace:
    parallel = {
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "use_ubatching": False,
    }
    other = {"kv_transfer_config": None, "additional_config": {}, "speculative_config": None}
    scheduler = SimpleNamespace(async_scheduling=changes.pop("async_scheduling", True))
    return SimpleNamespace(
        scheduler_config=scheduler,
        parallel_config=SimpleNamespace(**(parallel | {k: v for k, v in changes.items() if k in parallel})),
        **(other | {k: v for k, v in changes.items() if k in other}),
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data_parallel_size": 2}, "each other's tokens.*one engine per"),
        ({"decode_context_parallel_size": 2}, "context-parallel.*sizes to 1"),
        ({"prefill_context_parallel_size": 2}, "context-parallel.*sizes to 1"),
        ({"use_ubatching": True}, "micro-batch.*enable_dbo"),
        ({"kv_transfer_config": object()}, "KV connector.*kv_transfer_config"),
        ({"speculative_config": object()}, "which are accepted.*async_scheduling to false"),
    ],
)
def test_layouts_that_would_record_wrongly_are_refused(changes, message):
    refuse_layout(vllm_config(), uses_v2_runner=False)
    refuse_layout(vllm_config(speculative_config=object(), async_scheduling=False), uses_v2_runner=False)
    with pytest.raises(EngineError, match=message):
        refuse_layout(vllm_config(**changes), uses_v2_runner=False)
    with pytest.raises(EngineError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        refuse_layout(vllm_config(), uses_v2_runner=True)


def test_a_worker_that_nobody_could_ask_for_routes_is_refused():
    """Tests an LLM(additional_config={"moe_rl": ...}) without our worker extension."""
    worker = SimpleNamespace(vllm_config=vllm_config(additional_config={"moe_rl": {"trace_root": "routes"}}))
    with refused(EngineError, "moe_rl.record", argument="additional_config"):
        attach_recorder(worker)


@pytest.mark.parametrize("additional", [{}, {"other": 1}, None, "opaque"])
def test_an_engine_that_does_not_ask_gets_no_recorder(additional):
    worker = SimpleNamespace(vllm_config=vllm_config(additional_config=additional))
    attach_recorder(worker)
    assert not hasattr(worker, "moe_rl_recorder")


def test_a_shard_whose_disk_is_full_is_told_as_that_whatever_is_asked_for(fake, monkeypatch):
    """Requests that end later must report the full disk, not the closed shard that resulted from it."""
    real, fired = os.pwrite, []

    def full(descriptor, data, at):
        if fired:
            return real(descriptor, data, at)
        fired.append(at)
        raise OSError(28, "No space left on device")

    fake.recorder.sinks.open("shard")
    fake.step(new=[("a", "key/a", [5], 0, [1, 2]), ("b", "key/b", [6], 0, [3, 4])])
    monkeypatch.setattr(os, "pwrite", full)
    fake.step(finished=["a", "b"])
    for _ in range(2):
        with refused(TraceDiskError, fault="ENOSPC", shard="shard", got=("No space left",)):
            fake.recorder.publish("shard", {"key/b": [3, 4]}).result()
    assert fired
    fake.recorder.sinks.abandon("shard")
    with refused(EngineError, fault="nothing"):
        fake.recorder.publish("shard", {}).result()


def test_the_sum_is_of_the_rows_that_the_reference_names(fake):
    """b stores only its last rows. c continues a and computes some of a's rows again; a's version is stored."""
    a, b = [11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25]
    fake.step(new=[("a", "a", [5, 2], 0, a)])
    fake.step(new=[("b", {"moe_rl_key": "b", "moe_rl_sink": "shard", "moe_rl_start": 2}, [3, 4], 0, [*b, 99])])
    fake.step(finished=["a", "b"])
    refs = fake.recorder.publish("shard", {"a": a, "b": b}).result()
    late = fake.routes(b, range(5), 1)[2:]
    assert (refs["b"].start, refs["b"].rows) == (2, 3)
    assert refs["b"] == signed(refs["b"], late, LAYERS, b[2:]) and len(refs["b"].source_sum) == 16
    np.testing.assert_array_equal(fake.store.read(refs["b"]).routes, np.sort(late, -1))
    (part,) = refs["a"].parts
    asks = {
        "moe_rl_key": "c",
        "moe_rl_sink": "turn2",
        "moe_rl_parent": ["a", 7, refs["a"].source_sum, part.shard, part.digest],
    }
    c = [*a, 18, 19]
    fake.step(new=[("c", asks, [5, 2, 9], 4, c[4:])])
    fake.step(finished=["c"])
    (ref,) = fake.recorder.publish("turn2", {"c": c}).result().values()
    fake.compare("c", ref, c, np.concatenate([fake.routes(a, range(7), 0), fake.routes(c, range(9), 3)[7:]]))


@pytest.fixture
def replayed(fake):
    """Sample two requests of equal length with a fault, and pass what was published to the trainer."""

    def run(plant=lambda fake: None):
        a, b = [11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]
        fake.step(new=[("a", "a", [5, 2], 0, a[:4]), ("b", "b", [3, 4], 0, b[:4])])
        fake.step(cached=[("a", None, 4, a[4:], [5, 2]), ("b", None, 4, b[4:], [3, 4])])
        plant(fake)
        fake.step(finished=["a", "b"])
        refs = fake.recorder.publish("shard", {"a": a, "b": b}).result()
        spec, sequences, nothing = fake.recorder.spec, [], np.zeros(1, np.float32)
        for key, tokens in (("a", a), ("b", b)):
            sequences.append(Sequence(key, tuple(tokens), (0,), nothing, 1.0, sampled_by(0, 1), refs[key]))
        fed = [np.asarray(a), np.asarray(b)]
        here = [np.ones(6, bool)] * 2
        parts = read_routes(fake.store, sequences, spec, layers=LAYERS, fed=fed, here=here, weight_version=0)
        return microbatch_routes(
            parts, spec, layers=LAYERS, names=["a", "b"], fed=fed, source=[source_sum(s) for s in sequences],
            padded_tokens=16, rows=slice(0, 16), expert_parallel=1, device=torch.device("cpu"),
        )  # fmt: skip

    return run


def test_what_left_the_buffer_is_what_is_replayed(replayed):
    assert replayed().replayed_tokens == 12


def test_a_sleep_of_level_2_loses_nothing_that_is_recorded(tmp_path, monkeypatch):
    """vLLM attaches the recorder inside its memory pool of weights. Level 2 unmaps it; waking maps fresh pages."""
    before = {id(one) for one in tensors()}
    fake = Engine(tmp_path / "trace", monkeypatch)
    in_the_pool = [one for one in tensors() if id(one) not in before]
    assert any(one is fake.recorder._capture.buffer for one in in_the_pool)
    a = [11, 12, 13, 14, 15]
    fake.step(new=[("before", None, [3, 4], 0, a)])
    for one in in_the_pool:
        one.fill_(77)
    fake.step(new=[("after", "after", [5, 2], 0, a)])
    fake.step(finished=["before", "after"])
    fake.check("after", a, fake.routes(a, range(5), 1))


def tensors():
    return [one for one in gc.get_objects() if type(one) is torch.Tensor]


def exchange(*columns):
    """Exchange two columns of the first rows of both requests in the mirror of the KV cache."""

    def plant(fake):
        for column in columns:
            array = getattr(fake.recorder._slots, column)
            array[[5 * BLOCK, 3 * BLOCK]] = array[[3 * BLOCK, 5 * BLOCK]]

    return plant


def shift(fake):
    """Shift the rows in the mirror by one."""
    fake.recorder._slots._routes[5 * BLOCK : 6 * BLOCK] = np.roll(
        fake.recorder._slots._routes[5 * BLOCK :][:BLOCK], 1, 0
    )


def permute(fake):
    fake.recorder._slots._routes[:] = fake.recorder._slots._routes[:, ::-1].copy()


def in_the_sink(*columns):
    """Add the rows of one request under the other request's key and tokens."""

    def plant(fake):
        sinks, held = fake.recorder.sinks, []
        add = sinks.add

        def exchanged(request, ask, rows, aux):
            held.append((request, ask, rows, aux))
            if len(held) == 2:
                (request, ask, mine, aux), (others_request, others_ask, others, others_aux) = held
                add(request, ask, replace(mine, **{c: getattr(others, c) for c in columns}), aux)
                changed = replace(others, **{c: getattr(mine, c) for c in columns})
                add(others_request, others_ask, changed, others_aux)

        sinks.add = exchanged

    return plant


@pytest.mark.parametrize(
    "plant, names",
    [
        (exchange("_routes"), "2 of 2 sequences: a; b"),
        (exchange("_routes", "_sums"), "2 of 2 sequences: a; b"),
        (exchange("_sums"), "2 of 2 sequences: a; b"),
        (shift, "1 of 2 sequences: a"),
        (permute, "2 of 2 sequences: a; b"),
        (in_the_sink("routes"), "2 of 2 sequences: a; b"),
        (in_the_sink("routes", "sums"), "2 of 2 sequences: a; b"),
    ],
    ids=["slots", "slots with sums", "sums", "shift", "layers", "sink", "sink with sums"],
)
def test_rows_that_are_exchanged_behind_the_buffer_are_refused(replayed, plant, names):
    with refused(ReplayError, fault="read", got=(names,)):
        replayed(plant)


def test_whole_records_that_are_exchanged_in_the_sink_are_refused_by_their_tokens(replayed):
    with refused(EngineError, fault="another token", request="a", position=0):
        replayed(in_the_sink("routes", "sums", "token_ids"))


def test_a_request_that_still_runs_gets_no_record_if_nobody_awaits_it(fake):
    """Its client left before its first token. vLLM tells the end of a before the publication, and that of b after."""
    tokens = [8, 9, 10]
    fake.step(new=[("a", "a", [1], 0, tokens), ("b", "b", [2], 0, tokens), ("c", "c", [3], 0, tokens)])
    fake.step(finished=["a"])
    assert fake.recorder.publish("shard", {"a": [], "b": []}, [], True).result() == {}
    fake.step(finished=["b", "c"])
    assert [*fake.recorder.publish("shard", {"c": tokens}, [], True).result()] == ["c"]
    assert not fake.recorder.sinks._open["shard"].records
