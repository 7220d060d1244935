"""Provides the functions that the patched vLLM calls. Every vLLM worker process imports this file: keep it light."""

from __future__ import annotations

from moe_rl.errors import EngineError


def attach_recorder(worker) -> None:
    """Give `worker` (vLLM's Worker, its model just loaded) a recorder if its config asks for one.

    The config asks with `LLM(additional_config={"moe_rl": {"trace_root": ..., "model_fingerprint": ...}})`. This is
    part of vLLM's config and therefore of the key of vLLM's compile cache, so a graph traced without the capture is
    never reused with a recorder. Tensor-parallel workers all route alike, so only the first one records.

    Raises EngineError for a worker without moe_rl's control methods: its recording could never be published.
    """
    additional = worker.vllm_config.additional_config
    if not isinstance(additional, dict) or "moe_rl" not in additional or additional["moe_rl"].get("native"):
        return
    if not hasattr(worker, "moe_rl_publish"):
        raise EngineError(
            "Routes would be recorded but could never be read",
            where={"argument": "additional_config"},
            got="a worker without moe_rl's control methods",
            expected='worker_extension_cls="moe_rl.vllm.worker.RecorderControl"',
            do="start the LLM with moe_rl.record(model, ...), or a server with moe-rl serve",
        )
    refuse_layout(worker.vllm_config, uses_v2_runner=worker.use_v2_model_runner)
    from vllm.distributed.parallel_state import get_tp_group

    if get_tp_group().rank_in_group:
        return
    # Imported late: only an engine that records should load the recorder.
    from moe_rl.vllm.recorder import Recorder

    worker.moe_rl_recorder = Recorder(worker, additional["moe_rl"])


def refuse_layout(config, *, uses_v2_runner: bool) -> None:
    """Raise EngineError if rows recorded under this VllmConfig would be wrong or incomplete."""
    parallel = config.parallel_config
    for wrong, why, do in (
        (
            parallel.data_parallel_size > 1,
            "data-parallel workers of one engine see each other's tokens",
            "start one engine per data-parallel rank",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "a context-parallel worker holds only some of a request's KV slots",
            "set the context parallel sizes to 1",
        ),
        (parallel.use_ubatching, "the second micro-batch overwrites the first", "turn enable_dbo and ubatch_size off"),
        (
            config.speculative_config is not None and config.scheduler_config.async_scheduling,
            "an asynchronous scheduler counts drafts before it knows which are accepted",
            "set async_scheduling to false",
        ),
        (config.kv_transfer_config is not None, "a KV connector moves blocks unseen", "drop kv_transfer_config"),
        (
            uses_v2_runner,
            "Model Runner V2 has a different structure",
            "set VLLM_USE_V2_MODEL_RUNNER=0, or rollout.capture: native",
        ),
    ):
        if wrong:
            raise EngineError("Routes cannot be recorded with this engine", got=why, do=do)
