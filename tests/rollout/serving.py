"""Starts a recording server in a process of its own for tests, and checks its completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from safetensors.torch import load_file

from moe_rl.rollout.server import VllmServer
from moe_rl.trace import TraceStore, validate
from moe_rl.types import GenerateRequest
from moe_rl.vllm.control import read_token
from moe_rl.weights.digest import info_of
from moe_rl.weights.shared_disk import write_part
from moe_rl.weights.update import Files, WeightUpdate
from tests.support.independent import Independent

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "serve_vllm.py"
INTERPRETED = ROOT / "tests" / "support" / "interpreted_triton"
# A request of this length goes on for seconds, so a test can do its part meanwhile.
MAX_LEN = 4096
START_SECONDS = 600


@dataclass
class Running:
    """Holds the server's process, its announcement, its log, its temporary folder, and connections."""

    process: subprocess.Popen
    ready: dict
    log: Path
    temporary: Path
    web: httpx.Client

    @property
    def url(self) -> str:
        return self.ready["url"]

    @property
    def token(self) -> str:
        return read_token(Path(self.ready["token_file"]))

    @property
    def store(self) -> TraceStore:
        return TraceStore(Path(self.ready["trace_root"]))

    def client(self, **settings) -> VllmServer:
        return VllmServer(self.url, Path(self.ready["token_file"]), **settings)

    def http(self, method: str, path: str, *, token: str | None = None, **more) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        return self.web.request(method, path, headers=headers, **more)

    def control(self, path: str, body: object) -> httpx.Response:
        return self.http("POST", f"/moe_rl/{path}", token=self.token, json=body)

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.ready["pid"])
        return [main, *main.children(recursive=True)]


@contextmanager
def serving(
    checkpoint: Path,
    folder: Path,
    *further: str,
    tool: Path = TOOL,
    capture: str = "patch",
    support: bool = False,
) -> Iterator[Running]:
    """Start a server and yield it; store, token and log are in `folder`. It is killed at the end."""
    ours = ["--model", str(checkpoint), "--trace-root", str(folder / "trace"), "--token-file", str(folder / "token")]
    ours += ["--support"] if support else []
    ours += ["--reads-text", "--capture", capture, "--", "--dtype", "float32", "--max-model-len", str(MAX_LEN)]
    ours += ["--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--enforce-eager", *further]
    with _serving(folder, ours, tool=tool, place=folder, interpreted=capture == "native") as server:
        yield server


@contextmanager
def serving_run(folder: Path, *config: str) -> Iterator[Running]:
    """Start a server of a run and yield it; its log is in `folder`. config: what follows --config."""
    with _serving(folder, ["--config", *config], tool=TOOL, place=ROOT) as server:
        yield server


@contextmanager
def _serving(
    folder: Path, arguments: Sequence[str], *, tool: Path, place: Path, interpreted: bool = False
) -> Iterator[Running]:
    command = [sys.executable, str(tool), "--json", str(folder / "ready.json"), *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(INTERPRETED)] * interpreted + [str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    # Not below `folder`, whose path may be long: a socket's path may have 107 characters at most.
    with tempfile.TemporaryDirectory() as temporary, open(folder / "log", "wb") as log:
        environment |= {"TMPDIR": temporary}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=place)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not (folder / "ready.json").exists():
                tail = (folder / "log").read_text(errors="replace")[-4000:]
                assert process.poll() is None and time.monotonic() < deadline, tail
                time.sleep(0.1)
            ready = json.loads((folder / "ready.json").read_text())
            limits = httpx.Limits(keepalive_expiry=1)
            with httpx.Client(base_url=ready["url"], timeout=30, trust_env=False, limits=limits) as web:
                yield Running(process, ready, folder / "log", Path(temporary), web)
        finally:
            if process.poll() is None:
                for one in psutil.Process(process.pid).children(recursive=True):
                    one.kill()
                process.kill()
                process.wait()


def agree(store: TraceStore, model: Independent, completions, *, version: int = 0, atol: float = 1e-5) -> None:
    """Check that every completion is valid and sampled and routed as in `transformers`.

    atol: of log-probabilities; the rounding of float32 times the size of the model's output weights.
    """
    for one in completions:
        tokens = [*one.prompt_token_ids, *one.token_ids]
        record = store.read(one.routes)
        validate(record, token_ids=tokens[:-1], spec=record.spec, weight_version=version, ref=one.routes)
        model(tokens).check(one.key, record.routes, one.logprobs, atol=atol)


def alive(server: Running) -> None:
    """Check that the server still samples and records."""
    client, name = server.client(), f"alive-{time.monotonic_ns()}"
    (one,) = client.generate([GenerateRequest("a", (1, 2, 3), 1, 4, 1.0, ())], shard=name)
    assert len(one.token_ids) == 4 and server.store.info(one.routes).rows == 6


def whole_update(server: Running, checkpoint: Path, version: int, replaces: int) -> WeightUpdate:
    """Make an update with all weights of a checkpoint, in one file below the trace root."""
    tensors = load_file(checkpoint / "model.safetensors")
    place = Path(server.ready["trace_root"]) / f"sync/v{version}.safetensors"
    place.parent.mkdir(parents=True, exist_ok=True)
    write_part(place, tensors)
    infos = [info_of(name, tensor) for name, tensor in tensors.items()]
    return WeightUpdate(version, replaces, 0, True, False, infos, Files([f"sync/{place.name}"]))
