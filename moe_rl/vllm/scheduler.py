"""Makes a vLLM scheduler with two changes.

A request that waits during a pause gets no prefix cached before it. New weights arrive in a pause. vLLM looks up cached
prefixes when a request begins. The salt that separates prefixes of different weights comes with the request, which may
begin much later, once there is room.

A grammar ends only with the request's own stop tokens. vLLM also lets the model's end it, but those do not end the
request, which would continue without a grammar.
"""

from __future__ import annotations

from typing import Any

SCHEDULER = f"{__name__}.make"


def make(*, vllm_config: Any, structured_output_manager: Any, **rest: Any) -> Any:
    """Return vLLM's scheduler with these changes. vLLM calls this as its `scheduler_cls`."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler

    base: Any = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler

    class Salting(base):
        pauses = 0

        def set_pause_state(self, pause_state: PauseState) -> None:
            super().set_pause_state(pause_state)
            if pause_state != PauseState.UNPAUSED:
                return
            self.pauses += 1
            for request in self.waiting:
                if not request.num_computed_tokens and not request.num_preemptions:
                    request.cache_salt = f"pause {self.pauses}"
                    request.block_hashes.clear()
                    request.update_block_hashes()

    begin = structured_output_manager.grammar_init

    def begin_exactly(request: Any) -> None:
        request.sampling_params._all_stop_token_ids = set(request.sampling_params.stop_token_ids)
        begin(request)

    structured_output_manager.grammar_init = begin_exactly
    return Salting(vllm_config=vllm_config, structured_output_manager=structured_output_manager, **rest)
