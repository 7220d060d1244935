"""Tests engines under stress and engines that die. Each engine is first used normally and then given one fault."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import moe_rl
from moe_rl.errors import EngineError, SamplerGone
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import Blocking
from moe_rl.vllm import patches
from tests.support.processes import alive, state, wait_until
from tests.weights.sending import by_disk

pytestmark = pytest.mark.long

CANARY = np.random.default_rng(9).integers(0, 512, 64).tolist()


def start(settings, folder: Path, **changes) -> Blocking:
    own = {"trace_root": folder / "trace", "log_path": folder / "engine.log", **changes}
    return Blocking(VllmEngine(replace(settings, **own)))


def reload_same(engine, checkpoint, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of the canary before and after loading the same weights."""
    before = engine.score([CANARY])[0].logprobs[0]
    engine.update_weights(by_disk(folder, load_file(checkpoint / "model.safetensors"), version=1))
    return before, engine.score([CANARY])[0].logprobs[0]


@pytest.fixture(scope="module")
def cramped(settings, tmp_path_factory):
    """An engine with a KV cache for 512 tokens and a short timeout."""
    folder = tmp_path_factory.mktemp("cramped")
    changes = {"kv_cache_mib": 1, "max_model_len": 192, "silence_seconds": 8.0}
    with start(settings, folder, **changes) as engine:
        yield engine


def test_preempted_requests_are_recorded_right(cramped, settings, reference, requests_of):
    from moe_rl.trace import TraceStore

    folder = cramped.sampler._settings.log_path.parent
    completions = cramped.generate(requests_of(5, 2, prompt=60, max_tokens=100), shard="tight")
    for completion in completions:
        tokens = completion.prompt_token_ids + completion.token_ids
        record = TraceStore(folder / "trace").read(completion.routes)
        assert record.token_ids.tolist() == list(tokens[:-1])
        reference(tokens).check(completion.key, record.routes, completion.logprobs, atol=1e-5)
    # Witness: requests were preempted.
    (line,) = [line for line in (folder / "engine.log").read_text().splitlines() if line.startswith("shard tight: ")]
    assert int(re.search(r"(\d+) preemptions", line)[1]) > 3


def test_a_stopped_engine_is_named_and_ended(cramped):
    os.kill(cramped.sampler.pid, signal.SIGSTOP)
    assert wait_until(lambda: state(cramped.sampler.pid) == "T", 5)
    began = time.monotonic()
    with pytest.raises(
        SamplerGone, match=rf"hangs \(pid {cramped.sampler.pid}, log .*engine.log\): got no sign of life for 8 s"
    ):
        cramped.score([CANARY])[0].logprobs[0]
    assert 8 <= time.monotonic() - began < 13
    assert not cramped.sampler.alive()
    assert not alive(cramped.sampler.pid)


@pytest.fixture(scope="module")
def bfloat16(settings, tmp_path_factory):
    with start(settings, tmp_path_factory.mktemp("bfloat16"), dtype="bfloat16", kv_cache_mib=16) as engine:
        yield engine


def test_same_weights_leave_every_bit_in_bfloat16(bfloat16, checkpoint, tmp_path):
    before, after = reload_same(bfloat16, checkpoint, tmp_path)
    np.testing.assert_array_equal(before, after)


def test_an_engine_killed_while_idle_is_named(bfloat16):
    os.kill(bfloat16.sampler.pid, signal.SIGKILL)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(
            SamplerGone, match=rf"died \(pid {bfloat16.sampler.pid}, log .*engine.log\): got signal SIGKILL"
        ):
            bfloat16.score([CANARY])[0].logprobs[0]
    assert time.monotonic() - began < 5
    assert not bfloat16.sampler.alive()
    assert not alive(bfloat16.sampler.pid)
    bfloat16.close()
    bfloat16.close()


@pytest.fixture(scope="module")
def unrepaired(settings, tmp_path_factory):
    """An engine that loads vLLM's own, unpatched file where patch 0002 belongs; the installed vLLM stays as it is."""
    folder = tmp_path_factory.mktemp("unrepaired")
    name = "model_executor/layers/fused_moe/unquantized_fused_moe_method.py"
    state = patches.check()
    mini = folder / "vllm"
    for path in ("_version.py", *state.files):
        (mini / path).parent.mkdir(parents=True, exist_ok=True)
        (mini / path).write_bytes((state.root / path).read_bytes())
    patches.revert(mini)
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import importlib.util, sys
            class Pristine:
                def find_spec(name, path, target=None):
                    if name == "vllm.{name.removesuffix(".py").replace("/", ".")}":
                        print("pristine file loaded", flush=True)
                        return importlib.util.spec_from_file_location(name, {str(mini / name)!r})
            sys.meta_path.insert(0, Pristine)
        """)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder))
        engine = start(settings, folder)
    with engine:
        yield engine


def test_without_the_reload_patch_the_same_weights_are_silently_other_ones(unrepaired, checkpoint, tmp_path):
    assert "pristine file loaded" in unrepaired.sampler._settings.log_path.read_text()
    before, after = reload_same(unrepaired, checkpoint, tmp_path)
    assert np.abs(before - after).mean() > 1e-2


def test_an_engine_killed_while_sampling_is_named(unrepaired, requests_of):
    killed = []

    def kill():
        killed.append(time.monotonic())
        os.kill(unrepaired.sampler.pid, signal.SIGKILL)

    timer = threading.Timer(1.5, kill)
    timer.start()
    with pytest.raises(
        SamplerGone, match=rf"died \(pid {unrepaired.sampler.pid}, log .*engine.log\): got signal SIGKILL"
    ):
        for at in range(100):
            unrepaired.generate(requests_of(16, 16, max_tokens=120), shard=f"long-{at}")
    assert time.monotonic() - killed[0] < 5
    # Witness: it was at work; nothing half done is readable.
    folder = unrepaired.sampler._settings.trace_root
    assert [path.name for path in folder.iterdir() if path.name.startswith(f".long-{at}")]
    assert f"long-{at}" not in {path.stem for path in folder.iterdir()}
    assert not alive(unrepaired.sampler.pid)


def test_the_engine_does_not_outlive_its_trainer(settings, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(
        textwrap.dedent(f"""
            import time
            from pathlib import Path
            from moe_rl.rollout.engine import VllmEngine
            from moe_rl.vllm.wire import EngineSettings
            engine = VllmEngine(EngineSettings(Path({str(settings.model_path)!r}), "float32", 128, 8, 4, None, "",
                Path({str(tmp_path / "engine.log")!r}), 240.0, 0))
            print(engine.pid, flush=True)
            time.sleep(600)
        """)
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    path = [str(Path(moe_rl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment) as trainer:
        pid = int(trainer.stdout.readline().split()[0])
        assert alive(pid)
        trainer.kill()
    assert wait_until(lambda: not alive(pid), 5)


def test_an_engine_that_cannot_start_says_why(settings, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(EngineError, match=r"(?s)could not start \(pid \d+, log .*engine.log\).*nonsense") as raised:
        start(settings, tmp_path, model_path=tmp_path / "model")
    assert "  | " in str(raised.value) and not isinstance(raised.value, SamplerGone)
    assert not alive(int(str(raised.value).split("pid ")[1].split(",")[0]))


def test_an_engine_that_is_late_is_ended(settings, tmp_path):
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=r"was not ready in time \(pid \d+, log .*\): got no sign of life for 0.5 s"
    ) as late:
        start(settings, tmp_path, startup_timeout_seconds=0.5)
    assert time.monotonic() - began < 5
    assert not alive(int(str(late.value).split("pid ")[1].split(",")[0]))
