"""Measures the transfer of weights from a trainer to a sampler, by each way.

    python benchmarks/weight_sync.py [--rounds N] [--mib N] [--ways disk shared_memory broadcast] [--json FILE]

`moe_rl.weights.sender.WeightSender` sends a random Qwen3-MoE in bfloat16 of about --mib from one rank, as a run does:
the weights are exported from the trainer's device, digested, moved, and digested again by the receiver. The way
cuda_ipc needs a GPU; the broadcast needs a CPU, because NCCL cannot connect two processes on one GPU. Without a way
(`--ways`) no sampler is started, and only the last three are measured. It prints GB/s:

    received    until everything is confirmed in the memory of a process that then drops it
    loaded      until a real vLLM engine has loaded the weights and could sample
    copy        one tensor of the same number of bytes copied to another, in memory that was used before
    digest      digesting on one side
    sums        the sums of one side of the export, see `moe_rl.weights.conservation`

Ways take turns in every round. Ratios are to the copy of the same round: median and quartiles.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from models import save_random
from output import quartiles, tell
from safetensors.torch import load_file

from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.config.training import ParallelConfig
from moe_rl.megatron import world
from moe_rl.rollout.engine import VllmEngine
from moe_rl.rollout.sampler import Blocking
from moe_rl.vllm.wire import EngineSettings
from moe_rl.weights.conservation import Content, PartSums, cut, parts_of
from moe_rl.weights.digest import tensor_digests
from moe_rl.weights.sender import WeightSender
from moe_rl.weights.stream import Round
from moe_rl.weights.update import decode, encode

WAYS = ("disk", "shared_memory", "broadcast", "cuda_ipc")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=float, default=400, help="size of the weights")
    parser.add_argument("--bucket-mib", type=float, default=64)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS[:3]))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with tempfile.TemporaryDirectory(prefix="moe_rl-sync-") as folder:
        tell(measure(Path(folder), options), options.json)
    return 0


def measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    model = make_checkpoint(folder / "model", options.mib)
    world.start(ParallelConfig(), seed=0, timeout_seconds=600)
    device = str(world.device())
    tensors = {n: t for part in sorted(model.glob("*.safetensors")) for n, t in load_file(part, device).items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    samplers: dict[str, Drain | Blocking] = {}
    if options.ways:
        samplers = {"received": Drain(model, device), "loaded": Blocking(VllmEngine(settings(model, folder)))}
    seconds: dict[str, list[float]] = {}
    octets = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    target = octets.clone()
    senders = {
        (to, way): WeightSender(Held(tensors), rollout(options), folder / f"{to}-{way}", world, way=way)
        for to in samplers
        for way in options.ways
    }
    versions = dict.fromkeys(samplers, 0)
    try:
        for _ in range(options.rounds + 1):
            clocked(seconds, "copy", lambda: target.copy_(octets))
            clocked(seconds, "digest", lambda: tensor_digests(tensors.items()))
            clocked(seconds, "sums", lambda: Held(tensors).content(torch.bfloat16))
            for (to, way), sender in senders.items():
                # One sampler has several senders here, so each must know which version it holds.
                sender._held, versions[to] = versions[to], versions[to] + 1
                clocked(seconds, f"{way} {to}", lambda s=sender, to=to: s.send(samplers[to], versions[to]))
    finally:
        for sampler in samplers.values():
            sampler.close()
        world.stop()
    return {"device": device} | result(seconds, size, len(tensors), options)


def clocked(seconds: dict[str, list[float]], name: str, act: Callable) -> None:
    start = time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds.setdefault(name, []).append(time.perf_counter() - start)


def result(seconds: dict[str, list[float]], size: int, tensors: int, options: argparse.Namespace) -> dict[str, object]:
    """Run the rounds. The first one warms up and is left out."""
    out: dict[str, object] = {"bytes": size, "tensors": tensors, "bucket MiB": options.bucket_mib}
    copies = np.array(seconds["copy"][1:])
    for name, values in seconds.items():
        times = np.array(values[1:])
        low, middle, high = quartiles(size / 1e9 / times)
        out[f"{name}, GB/s"] = middle
        out[f"{name}, GB/s, quartiles"] = f"{low:.3g} to {high:.3g}"
        if name != "copy":
            low, middle, high = quartiles(copies / times)
            out[f"{name} : copy"] = middle
            out[f"{name} : copy, quartiles"] = f"{low:.3g} to {high:.3g}"
    return out


class Held:
    """Stands in for a `Policy` of one rank that holds exactly these tensors, and returns them and their sums."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors, self.moves = tensors, 0

    def content(self, dtype: torch.dtype, **_) -> Content:
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        count = PartSums(parts_of(shapes), world.device())
        for name, tensor in self._tensors.items():
            for part, values in cut(name, tensor):
                count.add(part, values, dtype)
        return count.content()

    def export_rounds(self, dtype: torch.dtype, limit: float, *, host: bool) -> list[Round]:
        runs, held = [{}], 0
        for name, tensor in self._tensors.items():
            if runs[-1] and held + tensor.nbytes > limit:
                runs.append({})
                held = 0
            runs[-1][name] = tensor.cpu() if host else tensor
            held += tensor.nbytes
        whole = [[(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in run.items()] for run in runs]
        return [Round(described, iter(run.items())) for described, run in zip(whole, runs, strict=True)]


class Drain:
    """Runs a sampler in its own process that confirms the weights and drops them."""

    workers, address = ["engine"], "127.0.0.1"

    def __init__(self, model: Path, device: str):
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_drain, args=(theirs, model, device), daemon=True)
        self._process.start()
        self._pipe.recv_bytes()

    def update_weights(self, update) -> None:
        self._pipe.send_bytes(encode(update))
        if error := self._pipe.recv_bytes():
            raise RuntimeError(error.decode())

    def wake(self, part: str) -> None:
        pass

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _drain(pipe, model: Path, device: str) -> None:
    from moe_rl.weights.intake import Intake
    from moe_rl.weights.reader import Reader
    from moe_rl.weights.shared_disk import checkpoint_shapes

    torch.set_num_threads(1)
    intake = Intake(checkpoint_shapes(model))
    reader = Reader(intake, model, lambda tensors: None, torch.device(device))
    pipe.send_bytes(b"ready")
    while True:
        update = decode(pipe.recv_bytes())
        error = b""
        try:
            reader.take(update)
            if update.final:
                intake.finish()
                reader.release()
        except Exception as failure:
            error = str(failure).encode()
        pipe.send_bytes(error)


def rollout(options: argparse.Namespace) -> RolloutConfig:
    lengths = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 1, "max_completion_tokens": 1}
    return RolloutConfig(**lengths, dtype="bfloat16", weight_bucket_mib=options.bucket_mib)


def settings(model: Path, folder: Path) -> EngineSettings:
    return EngineSettings(
        model_path=model,
        dtype="bfloat16",
        max_model_len=128,
        max_concurrent=8,
        kv_cache_mib=64,
        trace_root=None,
        model_fingerprint="",
        log_path=folder / "engine.log",
        startup_timeout_seconds=600.0,
        seed=0,
        silence_seconds=120.0,
    )


def make_checkpoint(folder: Path, mib: float) -> Path:
    """Make a random Qwen3-MoE of about this many MiB in bfloat16, with 32 experts of 512 x 384 and enough layers."""
    from transformers import Qwen3MoeConfig

    of_layer = 2 * (32 * 3 * 512 * 384 + 3 * 512 * 512) / 2**20
    config = Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=384,
        num_hidden_layers=max(1, round((mib - 16) / of_layer)),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    return save_random(config, folder)


if __name__ == "__main__":
    raise SystemExit(main())
