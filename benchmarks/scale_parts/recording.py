"""Steps an engine that records: how much the step loop has to do when requests finish.

The recorder is real, vLLM is a stand-in: it gives the scheduler's decisions, and random routes as the routers' choice.
Requests that finish have the greatest length. One finishes in every 40th step, as with 20,000 tokens a second and
sequences of half that length; at the end several are cut in the same step.

Times are processor seconds of the step loop's thread, as the clock on a busy machine shows other processes. They do not
contain waits for the interpreter's lock, which the writing thread holds for short times.
"""

from __future__ import annotations

import tempfile
import time
from types import SimpleNamespace

import numpy as np
import torch
from routes import random_routes
from scale_parts.target import Target

from moe_rl.vllm import recorder as module

BLOCK = 16
STEP_SECONDS = 0.0064
STEPS_TO_A_FINISH = 40
FINISHES = 15
TOGETHER = 16
RUNNING = 112
"""Requests that only run on. With those that are cut together an engine has 128."""


def measured(target: Target) -> dict[str, float]:
    """Return milliseconds that the hook before a step takes above its median: the 99th percentile over steps in which
    requests finish one by one, and the worst of the steps in which and after which several do."""
    with tempfile.TemporaryDirectory() as root:
        engine, seconds = Engine(root, target), []
        for number in range(FINISHES):
            key = f"one{number}"
            engine.start([key])
            seconds += [engine.step() for _ in range(STEPS_TO_A_FINISH - 1)]
            seconds.append(engine.step(finished=[key]))
        keys = [f"many{number}" for number in range(TOGETHER)]
        engine.start(keys)
        together = max(engine.step(finished=keys), *(engine.step() for _ in range(2 * TOGETHER)))
        published = engine.recorder.publish("shard", dict.fromkeys(keys, engine.token_ids))
        refs = published if isinstance(published, dict) else published.result()  # earlier code publishes at once
        assert len(refs) == TOGETHER
    usual, high = np.percentile(seconds, [50, 99])
    return {
        "recording_stall_ms_p99": 1e3 * float(high - usual),
        f"recording_stall_ms_{TOGETHER}_together": 1e3 * float(together - usual),
    }


class Engine:
    """Stands for vLLM's worker and runner as the recorder sees them. Every request has fixed blocks."""

    def __init__(self, root: str, target: Target):
        facts, spec = target.facts, target.spec
        self._layers, self._rows = spec.moe_layers, target.longest
        self._chunk = self._rows // 4
        self._shape = (len(self._layers), facts.top_k)
        self._blocks = -(-(self._rows + 1) // BLOCK)
        pool = random_routes(self._chunk, len(self._layers), facts.num_experts, facts.top_k, exponent=0.6)
        self._pool = torch.from_numpy(pool.astype(np.int32))
        self.token_ids = np.arange(self._rows, dtype=np.int32)
        self._slots = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=torch.zeros(self._chunk, dtype=torch.int64)))
        self._runner = SimpleNamespace(
            max_num_tokens=self._chunk,
            kv_cache_config=None,
            get_model=lambda: None,
            input_ids=SimpleNamespace(gpu=torch.zeros(self._chunk, dtype=torch.int32)),
            positions=torch.zeros(self._chunk, dtype=torch.int64),
            input_batch=SimpleNamespace(block_table=[self._slots], req_ids=[]),
        )
        model = SimpleNamespace(
            get_num_experts=lambda: facts.num_experts,
            get_num_experts_per_tok=lambda: facts.top_k,
            get_total_num_hidden_layers=lambda: facts.layers,
        )
        config = SimpleNamespace(speculative_config=None)
        worker = SimpleNamespace(model_runner=self._runner, device="cpu", model_config=model, vllm_config=config)
        places = TOGETHER + RUNNING
        module.Capture = self._capture
        module._pipeline = lambda layers: (0, 1, layers)
        module._attention_group = lambda config: (0, places * self._blocks, BLOCK)
        self.recorder = module.Recorder(worker, {"trace_root": root, "model_fingerprint": "scale"})
        self.recorder.sinks.open("shard")
        self._running = {f"running{number}": 0 for number in range(RUNNING)}
        self._place = {key: TOGETHER + number for number, key in enumerate(self._running)}
        self.step(new=[*self._running])

    def _capture(self, model, *, max_tokens, top_k, device):
        buffer = torch.zeros(max_tokens, *self._shape, dtype=torch.int32)
        return SimpleNamespace(layers=self._layers, modules={}, buffer=buffer, clear=lambda tokens: None)

    def start(self, keys: list[str]) -> None:
        """Compute requests in chunks, up to their greatest length."""
        for number, key in enumerate(keys):
            self._place[key], self._running[key] = number, 0
            for at in range(0, self._rows, self._chunk):
                self.step(new=[key] if not at else [], only=key, tokens=self._chunk)
            del self._running[key]

    def step(self, *, new=(), finished=(), only=None, tokens=1) -> float:
        """Forward some tokens of the running requests, or of one of them. Returns seconds of the hook before the
        pass."""
        took = {only: tokens} if only else dict.fromkeys(self._running, 1)
        cached = [key for key in took if key not in new]
        scheduled = SimpleNamespace(
            preempted_req_ids=(),
            finished_req_ids=set(finished),
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=key,
                    block_ids=(self._table(key).tolist(),),
                    num_computed_tokens=0,
                    prompt_token_ids=self.token_ids[:1],
                    sampling_params=SimpleNamespace(
                        extra_args={"moe_rl_key": key, "moe_rl_sink": "shard"}, temperature=1.0
                    ),
                )
                for key in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached,
                new_block_ids=[None] * len(cached),
                num_computed_tokens=[self._running[key] for key in cached],
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens=took,
            total_num_scheduled_tokens=sum(took.values()),
            kv_cache_block_copies=[],
            scheduled_spec_decode_tokens={},
        )
        began, busy = time.perf_counter(), time.thread_time()
        self.recorder.before_step(scheduled)
        seconds = time.thread_time() - busy
        positions = [np.arange(self._running[key], self._running[key] + n) for key, n in took.items()]
        blocks = np.concatenate([self._table(key)[at // BLOCK] for key, at in zip(took, positions, strict=True)])
        at = np.concatenate(positions)
        count = len(at)
        self.recorder._capture.buffer[:count] = self._pool[:count]
        self._runner.positions[:count] = torch.from_numpy(at)
        self._runner.input_ids.gpu[:count] = torch.from_numpy(self.token_ids[at])
        self._slots.slot_mapping.gpu[:count] = torch.from_numpy(blocks * BLOCK + at % BLOCK)
        self.recorder.after_forward(scheduled)
        for key, n in took.items():
            self._running[key] += n
        if not only:
            time.sleep(max(0.0, began + STEP_SECONDS - time.perf_counter()))  # the device computes
        return seconds

    def _table(self, key: str) -> np.ndarray:
        return np.arange(self._blocks) + self._place[key] * self._blocks
