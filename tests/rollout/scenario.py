"""Runs engines in processes of their own, each started as a test asks and driven step by step.

`python scenario.py` imports vLLM once, which takes longer than most scenarios, then forks for every line of its input,
an object with the paths spec, result and log, and answers with the exit status of each.

spec is a JSON object:
  engine        arguments of vllm.LLM
  recording     fields of additional_config["moe_rl"]
  capture       "patch" or "worker"
  asynchronous  schedule asynchronously, which vLLM's CPU platform switches off
  amx           tell vLLM that this CPU has AMX
  acts          a list of acts:
                {"sample": [request, ...], "sink": name, "abort_after": steps}; a request has key, prompt, seed ...
                the same with "fault": what is wrong with the recorder from then on, see _break
                the same with "update", a WeightUpdate, and "update_after": steps
                the same with requests that have a "salt" for their cached prefixes
                the same with "refused": true, when the publication must fail
                {"update": a WeightUpdate, "lost": tensor that the model drops}

result is a JSON object. For each "sample" it has the completions and references ("failed" has the error instead). It
also has the recorder's stats, the prefix hits, and the witnesses by which tests see that a scenario took place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from typing import NoReturn

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def main() -> None:
    import vllm.entrypoints.llm  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    for line in sys.stdin:
        order = json.loads(line)
        if not (pid := os.fork()):
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(log, 1), os.dup2(log, 2)
            try:
                play(order["spec"], order["result"])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


def play(given: str, result: str) -> NoReturn:
    """Play a scenario and end the process."""
    with open(given) as file:
        spec = json.load(file)
    if spec.get("asynchronous"):
        _schedule_asynchronously()
    if spec.get("amx"):
        _say_amx()
    import vllm

    from moe_rl.vllm.worker import CONTROL, WORKER
    from moe_rl.weights.receiver import BACKEND

    arguments = {
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 64,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": True,
        "disable_log_stats": False,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": CONTROL,
        "additional_config": {"moe_rl": spec["recording"]},
    } | spec["engine"]
    if any("update" in act for act in spec["acts"]):
        arguments["weight_transfer_config"] = {"backend": BACKEND}
    if spec.get("capture") == "worker":
        arguments["worker_cls"] = WORKER
    llm = vllm.LLM(**arguments)
    engine = llm.llm_engine
    llm.update_weight_version("0")
    if spec.get("asynchronous"):
        assert engine.vllm_config.scheduler_config.async_scheduling
        assert engine.engine_core.engine_core.batch_queue is not None
    results = []
    for act in spec["acts"]:
        if "update" in act and "sample" not in act:
            if "lost" in act:
                llm.collective_rpc(_lose, args=(act["lost"],))
            answer = _update(llm, act["update"])
            if answer["refused"]:
                results.append({"failed": answer["refused"], "whole": answer["whole"]})
                break
        else:
            if "fault" in act:
                llm.collective_rpc(_break, args=(act["fault"],))
            try:
                results.append(_sample(llm, act))
            except Exception as error:
                if not act.keys() & {"fault", "refused"}:
                    raise
                results.append({"failed": str(error)})
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    with open(result, "w") as file:
        json.dump(
            {
                "acts": results,
                "stats": [stats for stats in llm.collective_rpc("moe_rl_stats") if stats is not None],
                "attention": [type(group.kv_cache_spec).__name__ for group in _cache_groups(engine)],
                "compile_cache_keys": _compile_cache_keys(engine.vllm_config),
                "metrics": metrics,
            },
            file,
        )
    sys.stdout.flush()
    os._exit(0)


def _say_amx() -> None:
    import torch

    torch.cpu._is_amx_tile_supported = torch.cpu._is_amx_fp16_supported = lambda: True


def _update(llm, update: dict) -> dict:
    """Load new weights, and return what the worker then holds."""
    (answer,) = llm.collective_rpc("moe_rl_update_weights", args=(json.dumps(update).encode(),))
    if not answer["refused"]:
        llm.update_weight_version(str(update["version"]))
    return answer


def _break(worker, fault: str) -> None:
    """Make the capture write well-formed but wrong rows, or the recorder misunderstand preemptions; "" repairs it."""
    recorder = worker.moe_rl_recorder
    capture = recorder._capture
    if not hasattr(recorder, "preempt"):
        recorder.preempt, recorder.rows = recorder._preempt, recorder._rows
    overwritten = lambda request, *rest: recorder.rows(dataclasses.replace(request, kept=None), *rest)  # noqa: E731
    recorder._rows = overwritten if fault == "overwritten by the second pass" else recorder.rows
    recorder._preempt = (lambda request: None) if fault == "preemption missed" else recorder.preempt
    if not hasattr(capture, "sound"):
        capture.sound = capture.capture

    def broken(layer, ids):
        if fault == "late":
            ids = ids.roll(1, 0)
        elif fault == "constant" and layer == 1:
            ids = ids.new_tensor(range(ids.shape[1])).expand_as(ids)
        elif fault == "swapped":
            layer = {1: 2, 2: 1}.get(layer, layer)
        capture.sound(layer, ids)

    capture.capture = broken if fault else capture.sound
    # vLLM keeps the bound method that it was given.
    for layer, module in capture.modules.items():
        module.router.set_capture_fn(lambda ids, layer=layer: capture.capture(layer, ids))


def _lose(worker, name: str) -> None:
    """Make the model skip one tensor in later updates."""
    model = worker.model_runner.get_model()
    load = model.load_weights
    model.load_weights = lambda weights: load((key, tensor) for key, tensor in weights if key != name)


def _sample(llm, act: dict) -> dict:
    """Sample, optionally abort the rest after some steps, publish, and return the results."""
    from vllm import SamplingParams

    from moe_rl.vllm.route_source import join_parts

    engine, sink = llm.llm_engine, act["sink"]
    requests = {}
    for at, request in enumerate(act["sample"]):
        name, key, prompt = f"{sink}-{at}", request.pop("key"), request.pop("prompt")
        extra = {"moe_rl_key": key, "moe_rl_sink": sink} | request.pop("extra", {})
        if (request.get("n") or 1) > 1:
            extra["moe_rl_samples"] = request["n"]
        prompt_of_vllm = {"prompt_token_ids": prompt} | (
            {"cache_salt": salt} if (salt := request.pop("salt", "")) else {}
        )
        arguments = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False} | request
        engine.add_request(name, prompt_of_vllm, SamplingParams(**arguments, extra_args=extra))
        requests[name] = {"key": key, "prompt": prompt, "n": arguments.get("n", 1), "samples": {}}
        requests[name]["temperature"] = arguments["temperature"] or 1.0  # greedy: log-probabilities as they are
    steps, aborted = 0, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            request = requests[output.request_id]
            for one in output.outputs:
                if one.logprobs is not None:
                    logprobs = [at[token].logprob for at, token in zip(one.logprobs, one.token_ids, strict=True)]
                    request["samples"][one.index] = (list(one.token_ids), logprobs, _versions(one))
                if one.finish_reason:
                    request.setdefault("finished", []).append(one.index)
        steps += 1
        if steps == act.get("update_after"):
            assert not _update(llm, act["update"])["refused"]
        if steps == act.get("abort_after"):
            left = [name for name, request in requests.items() if len(request.get("finished", ())) < request["n"]]
            engine.abort_request(left)
            aborted = [requests[name]["key"] for name in left if requests[name]["samples"]]
    engine.step()
    completions = []
    for request in requests.values():
        for index, (token_ids, logprobs, versions) in sorted(request["samples"].items()):
            key = f"{request['key']}/{index}" if request["n"] > 1 else request["key"]
            completions.append(
                {"key": key, "prompt": request["prompt"], "token_ids": token_ids, "logprobs": logprobs,
                 "temperature": request["temperature"], "versions": versions, "aborted": key in aborted}
            )  # fmt: skip
    sequences = {one["key"]: [*one["prompt"], *one["token_ids"][:-1]] for one in completions}
    llm.collective_rpc("moe_rl_publish", args=(sink, sink, sequences, aborted))
    refs = join_parts(llm.collective_rpc("moe_rl_claims", args=(sink,)))
    for one in completions:
        one["rows"] = len(sequences[one["key"]])
        one["ref"] = dataclasses.asdict(refs[one["key"]])
    return {"completions": completions, "steps": steps}


def _versions(output) -> list[tuple[int, int]]:
    """Return how many tokens each version of the weights sampled; nothing before the end."""
    return [(span.end - span.start, int(span.version)) for span in output.weight_versions or ()]


def _cache_groups(engine) -> list:
    return engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups


def _compile_cache_keys(config) -> list[str]:
    """Return the compile-cache keys of this engine and of the same engine without recording."""
    key = config.compute_hash()
    config.additional_config = {}
    return [key, config.compute_hash()]


def _schedule_asynchronously() -> None:
    """Overlap the scheduling of a step with the one before, as vLLM does on a GPU: its CPU platform forbids it.

    What a GPU does behind a stream happens at once here; the order of the scheduler's decisions is the real one.
    """
    import contextlib

    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, config) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)

    class Event:
        def __init__(self, *args, **kwargs):
            pass

        def record(self, *args) -> None:
            pass

        synchronize = wait = record

        def query(self) -> bool:
            return True

    class Stream(Event):
        device = torch.device("cpu")
        wait_stream = wait_event = synchronize = Event.record

    torch.cuda.Stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *args: Stream()
    torch.Event = Event


if __name__ == "__main__":
    main()
