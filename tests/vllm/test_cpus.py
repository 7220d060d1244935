"""Tests the patched vLLM on CPUs with and without AMX: which back end it uses, and who asks for AMX tiles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]

# Runs in a process of its own, because it loads vLLM's platform repeatedly. The answers to "does this CPU have AMX" and
# "does the kernel grant it" are faked, so that every kind of CPU is tested on every CPU; "real" asks the real machine.
SCRIPT = """
import ctypes, importlib, json, types
import torch, vllm.platforms.cpu as cpu

real = {name: getattr(torch.cpu, name) for name in ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_init_amx")}

def load(has, granted):
    asked = []
    torch.cpu._is_amx_tile_supported = torch.cpu._is_amx_fp16_supported = lambda: has
    torch.cpu._init_amx = lambda: asked.append(1) or granted
    importlib.reload(cpu)
    return asked

def chosen(dtype, selected=None):
    config = types.SimpleNamespace(use_sparse=False, use_mla=True, dtype=dtype, kv_cache_dtype="auto")
    return cpu.CpuPlatform.get_attn_backend_cls(selected, config).rpartition(".")[2]

def state(has, granted):
    asked = load(has, granted)
    return {
        "asked": len(asked),
        "tiles": torch.cpu._is_amx_tile_supported(), "float16": torch.cpu._is_amx_fp16_supported(),
        **{str(dtype): chosen(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
    }

answer = {"granted": state(True, True), "refused": state(True, False), "none": state(False, True)}
for name, function in real.items():
    setattr(torch.cpu, name, function)
importlib.reload(cpu)
mask = ctypes.c_ulong()
libc = ctypes.CDLL(None, use_errno=True)
arch_prctl, get_permission = 158, 0x1022
libc.syscall(arch_prctl, get_permission, ctypes.byref(mask))
answer["real"] = {"tiles": torch.cpu._is_amx_tile_supported(), "permission": bool(mask.value >> 18 & 1)}
print("ANSWER", json.dumps(answer))
"""


@pytest.fixture(scope="module")
def told() -> tuple[dict, str]:
    """Return what SCRIPT found, and everything that it printed."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return json.loads(line.removeprefix("ANSWER ")), done.stdout + done.stderr


def test_amx_is_for_bfloat16(told):
    found = told[0]["granted"]
    assert found["torch.bfloat16"] == "AMXMLABackend"
    assert found["torch.float32"] == found["torch.float16"] == "CPUMLABackend"
    assert found["tiles"] and found["float16"]
    assert found["asked"] == 1


def test_without_amx_nothing_is_asked_for(told):
    found = told[0]["none"]
    assert found["asked"] == 0
    assert not found["tiles"]
    assert {name for dtype, name in found.items() if dtype.startswith("torch.")} == {"CPUMLABackend"}


def test_a_refused_permission_is_told_and_amx_not_used(told):
    found, printed = told
    assert found["refused"]["asked"] == 1
    assert not found["refused"]["tiles"] and not found["refused"]["float16"]
    assert found["refused"]["torch.bfloat16"] == "CPUMLABackend"
    assert printed.count("The kernel refuses AMX tiles") == 1


def test_a_cpu_with_amx_grants_the_tiles(told):
    if "amx_tile" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AMX")
    assert told[0]["real"] == {"tiles": True, "permission": True}


def test_a_cpu_without_amx_is_left_alone(told):
    if "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has AMX")
    assert told[0]["real"] == {"tiles": False, "permission": False}


CONFIGURED = """
import json, sys
import torch
torch.cpu._is_amx_tile_supported = lambda: True
torch.cpu._init_amx = lambda: True
from vllm.engine.arg_utils import EngineArgs
found = {}
for dtype in ("float32", "bfloat16"):
    config = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, dtype=dtype).create_engine_config()
    found[dtype] = [config.cache_config.block_size, bool(config.cache_config.enable_prefix_caching)]
print("ANSWER", json.dumps(found))
"""


def test_the_configuration_fits_the_back_end(tmp_path):
    """CPU_MLA takes blocks of 16 tokens and no prefix caching, AMX_MLA others."""
    from tests.rollout.test_families import make_checkpoint

    model = make_checkpoint("moonlight", tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURED, str(model)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert json.loads(line.removeprefix("ANSWER ")) == {"float32": [16, False], "bfloat16": [128, True]}


UPDATED = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
import torch, vllm
torch.cpu._is_amx_tile_supported = lambda: True
torch.cpu._init_amx = lambda: True
from moe_rl.vllm.worker import CONTROL
from moe_rl.weights.receiver import BACKEND

llm = vllm.LLM(
    model=sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, block_size=32, enforce_eager=True,
    kv_cache_memory_bytes=16 << 20, worker_extension_cls=CONTROL, weight_transfer_config={"backend": BACKEND},
)

def packed(worker):
    layers = [layer for layer in worker.model_runner.get_model().modules() if type(layer).__name__ == "MLAAttention"]
    return [weight.clone() for layer in layers for weight in (layer.impl._w_uk_packed, layer.impl._w_uv_packed)]

(before,) = llm.collective_rpc(packed)
answers = []
for update in sys.argv[2:]:
    answers += llm.collective_rpc("moe_rl_update_weights", args=(update.encode(),))
(after,) = llm.collective_rpc(packed)
doubled = [bool((new == 2 * old).all() and old.any()) for old, new in zip(before, after, strict=True)]
print("ANSWER", json.dumps({"refused": [answer["refused"] for answer in answers], "doubled": doubled}), flush=True)
os._exit(0)
"""


def test_the_amx_back_end_takes_updates(tmp_path):
    """Only packs weights and samples nothing, which needs no AMX."""
    from safetensors.torch import load_file

    from moe_rl.weights.update import encode
    from tests.rollout.test_families import make_checkpoint
    from tests.weights.sending import by_disk

    model = make_checkpoint("moonlight", tmp_path / "model")
    sent = {name: (2 * tensor).bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    updates = [by_disk(tmp_path, sent, version=1), by_disk(tmp_path, sent, version=2, replaces=1, changed=False)]
    command = [sys.executable, "-c", UPDATED, str(model), *(encode(update).decode() for update in updates)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "no attribute 'convert_weight_packed'" in done.stderr:
        pytest.skip("vLLM's library for this CPU, which lacks AVX512-BF16, has no kernels that pack for AMX")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    answer = json.loads(line.removeprefix("ANSWER "))
    assert not any(answer["refused"])
    assert answer["doubled"] == [True] * 8
