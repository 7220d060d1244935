"""Measures what recording costs a rollout:
`python benchmarks/recording.py [--model mid] [--pairs 15] [--graphs] [--json FILE]`.

One engine samples the same requests with recording on and off in turn, so that a noisy machine disturbs both alike. On
includes everything: capture, the mirror of the KV cache, validation, compression, writing and publishing the shard.
Prints the ratio of throughputs (on : off) as median and quartiles over the pairs, and the ratio of processor times,
which other processes disturb less.

--graphs compiles the forward pass, and replays CUDA graphs on a GPU. A graph contains the kernels that record, so there
the requests without recording go to a second engine that has no recorder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from models import SHAPES, make_model
from output import quartiles, tell

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid", choices=sorted(SHAPES), help="shape of the random model")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64, help="tokens sampled per request")
    parser.add_argument("--graphs", action="store_true", help="compiled, with CUDA graphs on a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    tell(result, options.json)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    import psutil
    import vllm

    from moe_rl.vllm.worker import CONTROL

    process = psutil.Process()
    recording = {"trace_root": str(folder / "trace"), "model_fingerprint": options.model}
    together = options.prompts * options.samples
    how = {"compilation_config": {"cudagraph_capture_sizes": [together]}} if options.graphs else {"enforce_eager": True}
    start_engine = partial(
        vllm.LLM,
        model=str(make_model(options.model, folder / "model")),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=256,
        block_size=32,
        kv_cache_memory_bytes=512 << 20,
        gpu_memory_utilization=0.01,  # decides nothing but the free memory that a second engine needs at its start
        logprobs_mode="processed_logprobs",
        **how,
    )
    llm = start_engine(worker_extension_cls=CONTROL, additional_config={"moe_rl": recording})
    plain = start_engine() if options.graphs else llm
    switch = Switch(llm)
    sample(plain, options, 0, None)  # warm up
    before = process.memory_info().rss
    ratios, cpu_ratios, seconds, stored, rows, checks = [], [], {True: [], False: []}, 0, 0, []
    for pair in range(options.pairs + 1):
        took, worked = {}, {}
        for on in (pair % 2 == 0, pair % 2 == 1):
            if plain is llm:
                switch(on)
            start, start_cpu = time.perf_counter(), time.process_time()
            sampled = sample(llm if on else plain, options, pair, f"pair{pair}" if on else None)
            if on:
                sequences = sampled
                llm.collective_rpc("moe_rl_publish", args=(f"pair{pair}", f"pair{pair}", sequences))
                (claims,) = llm.collective_rpc("moe_rl_claims", args=(f"pair{pair}",))
            took[on], worked[on] = time.perf_counter() - start, time.process_time() - start_cpu
        if pair == 0:
            continue  # the first pair allocates memory that later ones reuse
        for on, value in took.items():
            seconds[on].append(value)
        ratios.append(took[False] / took[True])
        cpu_ratios.append(worked[True] / worked[False])
        checks.append(validation_seconds(folder / "trace", sequences, claims) / took[True])
        stored += (folder / "trace" / f"pair{pair}.safetensors").stat().st_size
        rows += sum(map(len, sequences.values()))
    low, middle, high = quartiles(ratios)
    tokens = options.prompts * options.samples * options.tokens
    layers, top_k = SHAPES[options.model]["num_hidden_layers"], SHAPES[options.model]["num_experts_per_tok"]
    return {
        "throughput with : without recording": middle,
        "  lower quartile": low,
        "  upper quartile": high,
        "processor time with : without recording": statistics.median(cpu_ratios),
        "pairs": options.pairs,
        "sampled tokens/s without": tokens / statistics.median(seconds[False]),
        "sampled tokens/s with": tokens / statistics.median(seconds[True]),
        "validator, share of rollout time": statistics.median(checks),
        "stored bytes per token": stored / rows,
        "raw bytes per token (uint8)": layers * top_k,
        "memory of the mirror, MiB": switch.mirror_bytes / 2**20,
        "growth of the process, MiB": (process.memory_info().rss - before) / 2**20,
        "model": options.model,
        "compiled, with CUDA graphs on a GPU": options.graphs,
        "device": str(llm.llm_engine.vllm_config.device_config.device),
        "cpus": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "vllm": vllm.__version__,
    }


class Switch:
    """Turns recording on and off in a running engine, by removing what the patch and the recorder installed."""

    def __init__(self, llm):
        (self._worker,) = llm.collective_rpc(lambda wrapper: wrapper.worker)
        self._recorder = self._worker.moe_rl_recorder
        modules = self._recorder._capture.modules.values()
        self._hooks = [(module.router, module.router.capture_fn) for module in modules]

    def __call__(self, on: bool) -> None:
        for router, hook in self._hooks:
            router.set_capture_fn(hook if on else None)
        self._worker.moe_rl_recorder = self._recorder if on else None

    @property
    def mirror_bytes(self) -> int:
        slots = self._recorder._slots
        return sum(array.nbytes for array in vars(slots).values() if isinstance(array, np.ndarray))


def sample(llm, options: argparse.Namespace, seed: int, sink: str | None) -> dict[str, list[int]]:
    """Sample the requests of one measurement, with an empty prefix cache. Return {key: number of forwarded tokens}."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 8192, options.prompt_tokens).tolist() for _ in range(options.prompts)]
    engine, keys = llm.llm_engine, {}
    for p, prompt in enumerate(prompts):
        for c in range(options.samples):
            key = f"p{p}/c{c}"
            params = SamplingParams(
                temperature=1.0,
                max_tokens=options.tokens,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                extra_args={"moe_rl_key": key, "moe_rl_sink": sink} if sink else None,
            )
            engine.add_request(key, {"prompt_token_ids": prompt}, params)
            keys[key] = prompt
    sequences = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                sequences[output.request_id] = [*keys[output.request_id], *output.outputs[0].token_ids[:-1]]
    engine.step()
    return sequences


def validation_seconds(root: Path, sequences: dict[str, list[int]], claims: dict[str, tuple]) -> float:
    """Return the time that the validator takes for all records of one measurement, without reading them."""
    from moe_rl.trace import TraceStore, validate
    from moe_rl.vllm.route_source import join_parts

    store, seconds, refs = TraceStore(root), 0.0, join_parts([claims])
    for key, tokens in sequences.items():
        ref = refs[key]
        record = store.read(ref)
        start = time.perf_counter()
        validate(record, token_ids=tokens, spec=record.spec, weight_version=0, ref=ref)
        seconds += time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    sys.exit(main())
