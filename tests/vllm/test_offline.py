"""Tests that an offline LLM in a plain script, without a `__main__` guard, records the same routes as a run's
engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest

from moe_rl.errors import ConfigError, EngineError
from moe_rl.models.hf import read_model
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import Blocking
from moe_rl.trace import TraceStore
from moe_rl.types import GenerateRequest
from moe_rl.vllm.offline import RecordingLLM, record
from moe_rl.vllm.wire import EngineSettings
from tests.support.refusals import refused

POLICY = Path("assets/tiny_moe/policy")
# Token ids of "12+34=" and of "7+8=", with the seed of each.
PROMPTS = {(20, 21, 14, 22, 23, 32): 3, (26, 14, 27, 32): 4}
SCRIPT = f"""
import sys
import numpy as np
from vllm import SamplingParams
from moe_rl.vllm.offline import record

with record("{POLICY}", trace_root=sys.argv[1], dtype="float32", max_model_len=64, block_size=32,
            kv_cache_memory_bytes=64 << 20, enforce_eager=True) as llm:
    prompts = {{{", ".join(f"{prompt}: {seed}" for prompt, seed in PROMPTS.items())}}}
    params = [SamplingParams(max_tokens=8, seed=seed, stop_token_ids=[1], ignore_eos=True) for seed in prompts.values()]
    found = llm.generate(list(prompts), params, shard="ids")
    (text,) = llm.generate(["12+34="], params[0])
    several = llm.generate(list(prompts)[:1], SamplingParams(max_tokens=4, n=2, seed=5))
    assert [one.ref.key.rpartition("/0/")[2] for one in several] == ["0", "1"] and text.ref.key != several[0].ref.key
    assert several[0].prompt_token_ids == text.prompt_token_ids == list(prompts)[0]
    assert all(len(one.routes) == len(one.prompt_token_ids) + len(one.output.token_ids) - 1 for one in several)
    np.testing.assert_array_equal(text.routes, found[0].routes)
    whole = found[0].output.text
    (ended,) = llm.generate(list(prompts)[:1], SamplingParams(max_tokens=8, seed=3, stop=whole[1], ignore_eos=True))
    assert (ended.output.stop_reason, ended.output.text) == (whole[1], whole[: whole.index(whole[1])])
    assert len(ended.routes) == len(ended.prompt_token_ids) + len(ended.output.token_ids) - 1 < len(found[0].routes)
    np.testing.assert_array_equal(ended.routes, found[0].routes[: len(ended.routes)])
    arrays = {{f"routes{{at}}": one.routes for at, one in enumerate(found)}}
    arrays |= {{f"tokens{{at}}": one.output.token_ids for at, one in enumerate(found)}}
np.savez(sys.argv[2], layers=found[0].layers, **arrays)
"""


@pytest.mark.parametrize("given", [{}, {"gpu_memory_utilization": 0.1}, {"kv_cache_memory_bytes": 64 << 20}])
def test_a_kv_cache_that_nobody_sizes_is_small_on_a_cpu(given):
    """vLLM would take most of the machine's memory, and end with a long traceback if that is not free."""
    import vllm

    with patch.object(vllm, "LLM", side_effect=InterruptedError) as llm, pytest.raises(InterruptedError):
        record(POLICY, **given)
    started = llm.call_args.kwargs
    assert started.get("kv_cache_memory_bytes") == (1 << 30 if not given else given.get("kv_cache_memory_bytes"))
    assert given.items() <= started.items()


@pytest.mark.parametrize("asked", [None, True])
def test_drafts_are_scheduled_synchronously_if_the_caller_says_nothing(asked):
    import vllm

    given = {"speculative_config": {"method": "ngram"}} | ({} if asked is None else {"async_scheduling": asked})
    with patch.object(vllm, "LLM", side_effect=InterruptedError) as llm, pytest.raises(InterruptedError):
        record(POLICY, **given)
    assert llm.call_args.kwargs["async_scheduling"] is bool(asked)  # with True the worker refuses to record


@pytest.mark.parametrize("prompts", ["What is 2 + 3?", [20, 21, 14], [{"prompt_token_ids": [20, 21]}]])
def test_a_single_prompt_is_no_list_of_prompts(prompts):
    """A text would be sampled letter by letter."""
    llm = RecordingLLM(Mock(), Mock(), None, None, None)
    with refused(EngineError, argument="prompts"):
        llm.generate(prompts, Mock(n=1))
    llm.llm.generate.assert_not_called()


@pytest.mark.long
def test_an_offline_llm_records_what_the_engine_of_a_run_does(tmp_path):
    script = tmp_path / "my_script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "mine"), str(tmp_path / "arrays.npz")]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]

    facts = read_model(POLICY)
    settings = EngineSettings(
        model_path=POLICY,
        dtype="float32",
        max_model_len=64,
        max_concurrent=16,
        kv_cache_mib=64,
        trace_root=tmp_path / "trace",
        model_fingerprint=facts.fingerprint,
        log_path=tmp_path / "engine.log",
        startup_timeout_seconds=600.0,
        seed=0,
    )
    requests = [GenerateRequest(str(seed), prompt, seed, 8, 1.0, (1,)) for prompt, seed in PROMPTS.items()]
    with Blocking(VllmEngine(settings)) as engine:
        completions = engine.generate(requests, shard="ids")
    theirs = TraceStore(tmp_path / "trace")
    assert TraceStore(tmp_path / "mine").shards()
    with np.load(tmp_path / "arrays.npz") as arrays:
        assert tuple(arrays["layers"]) == facts.moe_layers
        for at, completion in enumerate(completions):
            assert tuple(arrays[f"tokens{at}"]) == completion.token_ids
            assert arrays[f"routes{at}"].shape[1:] == (len(facts.moe_layers), facts.top_k)
            np.testing.assert_array_equal(arrays[f"routes{at}"], theirs.read(completion.routes).routes)


@pytest.mark.parametrize(
    ("model", "given", "error", "facts"),
    [
        (POLICY, {"worker_cls": "a.B"}, EngineError, {"argument": "worker_cls"}),
        (POLICY, {"capture": "native"}, EngineError, {"argument": "capture", "got": "native"}),
        ("nowhere", {}, ConfigError, {"key": "model.path", "folder": "nowhere"}),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_vllm_starts(model, given, error, facts):
    with refused(error, **facts):
        record(model, **given)
