"""Is a taskset of the package verifiers, with a harness that asks once in this process."""

from __future__ import annotations

import httpx
import verifiers.v1 as vf

__all__ = ["SumHarness", "SumTaskset"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(str(self.data.answer) in (trace.last_reply or ""))

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply or "") < 5)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(3):
            yield SumTask(SumData(prompt=f"{a}+3?", answer=a + 3), self.config.task)


class SumHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        code = 0 if answer.status_code == 200 else 1
        return vf.ProgramResult(code, answer.text, "")
