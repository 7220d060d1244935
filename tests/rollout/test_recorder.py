"""The recorder driven by hand: what real vLLM on a CPU does rarely, or never, but may do elsewhere.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_rl.errors import EngineError, TraceError
from moe_rl.rollout import recorder as module
from moe_rl.rollout.hooks import attach_recorder, refuse_layout
from moe_rl.rollout.recorder import Recorder
from moe_rl.trace.store import TraceStore, token_digest

LAYERS, EXPERTS, TOP_K, BLOCK = (1, 3), 8, 2, 4


class Router:
    def set_capture_fn(self, capture) -> None:
        self.capture = capture


class Engine:
    """As much of vLLM's worker and runner as the recorder looks at. Routes depend on token, position and pass."""

    def __init__(self, root, blocks: int = 16):
        self.routers = [Router() for _ in LAYERS]
        self.runner = SimpleNamespace(
            max_num_tokens=64,
            kv_cache_config=None,
            get_model=lambda: None,
            input_ids=SimpleNamespace(gpu=torch.zeros(64, dtype=torch.int32)),
            execute_model_state=SimpleNamespace(slot_mappings={}),
        )
        config = SimpleNamespace(get_num_experts=lambda: EXPERTS, get_num_experts_per_tok=lambda: TOP_K)
        worker = SimpleNamespace(model_runner=self.runner, device="cpu", model_config=config)
        with pytest.MonkeyPatch.context() as patched:
            layers = {
                number: SimpleNamespace(router=router) for number, router in zip(LAYERS, self.routers, strict=True)
            }
            patched.setattr(module, "_moe_layers", lambda model: layers)
            self.recorder = Recorder(worker, {"trace_root": str(root), "model_fingerprint": "fake"})
        self.slots = blocks * BLOCK
        self.passes = 0

    def step(self, *, new=(), cached=(), resumed=(), finished=(), preempted=(), silent=None, spoil=None) -> None:
        """One step. new: (id, key, blocks, computed, tokens). cached, resumed: (id, blocks, computed, tokens, table).

        table: the whole block table of a cached request, to know where its tokens go. silent: a layer that reports
        nothing. spoil: an expert id to report instead.
        """
        forwarded, slots, positions = [], [], []
        for table, computed, tokens in [(b, c, t) for _, _, b, c, t in new] + [(b, c, t) for *_, c, t, b in cached]:
            forwarded += tokens
            at = np.arange(computed, computed + len(tokens))
            positions += at.tolist()
            slots += (np.asarray(table)[at // BLOCK] * BLOCK + at % BLOCK).tolist()
        count = len(forwarded)
        scheduled = SimpleNamespace(
            preempted_req_ids=set(preempted),
            finished_req_ids=set(finished),
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request,
                    block_ids=(blocks,),
                    num_computed_tokens=computed,
                    sampling_params=SimpleNamespace(extra_args=key and {"moe_rl_key": key}),
                )
                for request, key, blocks, computed, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request for request, *_ in cached],
                new_block_ids=[blocks and (blocks,) for _, blocks, *_ in cached],
                num_computed_tokens=[computed for _, _, computed, _, _ in cached],
                resumed_req_ids=set(resumed),
            ),
            num_scheduled_tokens={r[0]: len(r[4]) for r in new} | {r[0]: len(r[3]) for r in cached},
            total_num_scheduled_tokens=count,
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, "_attention_group", lambda config: (0, "attention", BLOCK, self.slots))
            self.recorder.before_step(scheduled)
        routes = self.routes(forwarded, positions, self.passes)
        for column, router in enumerate(self.routers):
            if LAYERS[column] != silent and count:
                ids = torch.from_numpy(routes[:, column].copy())
                if spoil is not None:
                    ids[-1, 0] = spoil
                router.capture(ids)
        self.runner.input_ids.gpu[:count] = torch.tensor(forwarded, dtype=torch.int32)
        self.runner.execute_model_state.slot_mappings = {"attention": torch.tensor(slots, dtype=torch.int64)}
        self.recorder.after_forward(scheduled)
        self.passes += 1

    @staticmethod
    def routes(tokens, positions, passes) -> np.ndarray:
        """[T, L, K] int32 with distinct experts in a row, other ones in every pass."""
        first = np.asarray(tokens, np.int32) + 3 * np.asarray(positions, np.int32) + 5 * passes
        chosen = [np.stack([(first + layer) % 8, (first + layer + 3) % 8], -1) for layer in LAYERS]
        return np.stack(chosen, 1).astype(np.int32)


@pytest.fixture
def fake(tmp_path):
    return Engine(tmp_path / "trace")


def check(fake, tmp_path, refs, key, tokens, routes) -> None:
    record = TraceStore(tmp_path / "trace").read(refs[key])
    np.testing.assert_array_equal(record.routes, routes)
    assert record.token_digest == token_digest(np.asarray(tokens, np.int32))
    assert record.weight_version == 6
    assert record.spec.moe_layers == LAYERS


def test_prefix_chunks_and_a_surplus_row(fake, tmp_path):
    """b finds a's first block in the cache; a is prefilled in two chunks; both forward one token too many."""
    a, b = [11, 12, 13, 14, 15, 16, 17], [11, 12, 13, 14, 25]
    fake.recorder.begin("shard", 6)
    fake.step(new=[("a", "key/a", [5, 2], 0, a[:6])])
    fake.step(cached=[("a", None, 6, a[6:], [5, 2])], new=[("b", "key/b", [5, 9], 4, b[4:])])
    fake.step(cached=[("b", None, 5, [99], [5, 9])])
    # The blocks of a are someone else's in the very step in which its end is told.
    fake.step(new=[("c", None, [5, 2], 0, [1] * 8)], finished=["a", "b"])
    refs = fake.recorder.finish({"key/a": 7, "key/b": 5})
    first, second = fake.routes(a, range(7), 0), fake.routes(a, range(7), 1)
    check(fake, tmp_path, refs, "key/a", a, np.concatenate([first[:6], second[6:]]))
    check(fake, tmp_path, refs, "key/b", b, np.concatenate([first[:4], fake.routes(b, range(5), 1)[4:]]))
    assert TraceStore(tmp_path / "trace").shards() == ["shard"]


def test_a_preempted_request_keeps_the_rows_that_decided_its_tokens(fake, tmp_path):
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    fake.recorder.begin("shard", 6)
    fake.step(new=[("a", "a", [1, 2], 0, tokens[:5])])
    fake.step(cached=[("a", None, 5, tokens[5:6], [1, 2])])
    fake.step(new=[("b", None, [1, 2], 0, [7] * 8)], preempted=["a"])
    # Preempted again while only part of it had been forwarded for the second time.
    fake.step(cached=[("a", [3], 0, tokens[:4], [3])], resumed=["a"])
    fake.step(new=[("c", None, [3], 0, [7] * 4)], preempted=["a"])
    fake.step(cached=[("a", [4, 6], 0, tokens[:7], [4, 6])], resumed=["a"])
    fake.step(cached=[("a", [8], 7, tokens[7:], [4, 6, 8])])
    fake.step(finished=["a"])
    refs = fake.recorder.finish({"a": 10})
    passes = [fake.routes(tokens, range(10), at) for at in range(7)]
    decided = np.concatenate([passes[0][:5], passes[1][5:6], passes[5][6:7], passes[6][7:]])
    check(fake, tmp_path, refs, "a", tokens, decided)
    assert fake.recorder.preemptions == 2


def test_a_request_may_end_while_it_is_preempted(fake, tmp_path):
    fake.recorder.begin("shard", 6)
    fake.step(new=[("a", "a", [1], 0, [8, 9, 10])])
    fake.step(new=[("b", None, [1], 0, [7] * 4)], preempted=["a"])
    fake.step(finished=["a"])
    check(fake, tmp_path, fake.recorder.finish({"a": 3}), "a", [8, 9, 10], fake.routes([8, 9, 10], range(3), 0))


def test_a_layer_that_reports_nothing_is_an_error_naming_it(fake):
    fake.recorder.begin("shard", 6)
    fake.step(new=[("a", "a", [1], 0, [8, 9])])
    with pytest.raises(EngineError, match="reported no expert.*layer 3, token 0"):
        fake.step(cached=[("a", None, 2, [10], [1])], silent=3)


@pytest.mark.parametrize("wrong", [8, 255, 256, 1 << 20, -1])
def test_an_expert_out_of_range_is_an_error_and_never_wraps(fake, wrong):
    fake.recorder.begin("shard", 6)
    with pytest.raises(EngineError, match=rf"layer 1, token 1 of the step\): got {wrong}, expected 0 to 7"):
        fake.step(new=[("a", "a", [1], 0, [8, 9])], spoil=wrong)


def test_missing_rows_are_an_error_naming_the_request(fake, tmp_path):
    for key, rows in (("a", 4), ("never-sampled", 1)):
        fake.recorder.begin("shard", 6)
        fake.step(new=[("a", "a", [1], 0, [8, 9, 10])])
        fake.step(finished=["a"])
        with pytest.raises(EngineError, match=f"did not record every forwarded token .request {key}.*expected {rows}"):
            fake.recorder.finish({key: rows})
        assert TraceStore(tmp_path / "trace").shards() == []
        assert list((tmp_path / "trace").iterdir()) == []


def test_a_shard_that_exists_is_refused(fake):
    fake.recorder.begin("shard", 6)
    fake.recorder.finish({})
    with pytest.raises(TraceError, match="shard exists already"):
        fake.recorder.begin("shard", 6)
    with pytest.raises(EngineError, match="no shard was begun"):
        fake.recorder.finish({})


def vllm_config(**changes) -> SimpleNamespace:
    parallel = {"world_size": 1, "data_parallel_size": 1, "use_ubatching": False}
    other = {"kv_transfer_config": None, "additional_config": {}}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel | {k: v for k, v in changes.items() if k in parallel})),
        **(other | {k: v for k, v in changes.items() if k in other}),
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"world_size": 2}, "several workers.*size 1"),
        ({"data_parallel_size": 2}, "several workers.*size 1"),
        ({"use_ubatching": True}, "micro-batch.*enable_dbo"),
        ({"kv_transfer_config": object()}, "KV connector.*kv_transfer_config"),
    ],
)
def test_layouts_that_would_record_wrongly_are_refused(changes, message):
    refuse_layout(vllm_config(), uses_v2_runner=False)
    with pytest.raises(EngineError, match=message):
        refuse_layout(vllm_config(**changes), uses_v2_runner=False)
    with pytest.raises(EngineError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        refuse_layout(vllm_config(), uses_v2_runner=True)


@pytest.mark.parametrize("additional", [{}, {"other": 1}, None, "opaque"])
def test_an_engine_that_does_not_ask_gets_no_recorder(additional):
    worker = SimpleNamespace(vllm_config=vllm_config(additional_config=additional))
    attach_recorder(worker)
    assert not hasattr(worker, "moe_rl_recorder")
