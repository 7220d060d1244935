import json
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from moe_rl import MismatchSums, advantages, audit, global_denominator, policy_loss, record, replay_topk, token_logprobs

STEPS, PROMPTS, GROUP = 3, 16, 8
START = Path("assets/tiny_moe/policy")
TASK = [json.loads(line) for line in Path("assets/tiny_moe/task/train.jsonl").read_text().splitlines()]
ENGINE = {"dtype": "bfloat16", "max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}

model = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32, attn_implementation="eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
routes: torch.Tensor | None = None  # [tokens, layers, k] of the sequence at hand; None: the routers choose


def replay(router: torch.nn.Module, layer: int) -> None:
    """Make a router take the recorded experts, with the weights of its own scores."""
    own = router.forward

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if routes is None:
            return own(hidden)
        scores = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        return scores, *replay_topk(scores, routes[:, layer])

    router.forward = forward


for layer, block in enumerate(model.model.layers):
    replay(block.mlp.gate, layer)
watch = audit(model)


def score(tokens: tuple[int, ...], prompt: int) -> torch.Tensor:
    """Return the trainer's log-probabilities of the tokens after the prompt. The last token is not forwarded."""
    logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0, prompt - 1 :]
    return token_logprobs(logits, torch.tensor(tokens[prompt:]), temperature=1.0)


for step in range(STEPS):
    # vLLM samples with the trainer's weights. The store keeps the routes of every token.
    weights = START if step == 0 else Path(f"weights{step}")
    if step:
        model.save_pretrained(weights)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(START / name, weights)
    asked = TASK[PROMPTS * step : PROMPTS * (step + 1)]
    params = SamplingParams(n=GROUP, max_tokens=8, temperature=1.0, seed=step, stop_token_ids=[1])
    with record(weights, trace_root="routes", **ENGINE) as llm:
        done = llm.generate([one["prompt"] for one in asked], params, shard=f"step{step}")

    # Rewards, advantages, and one denominator for the whole update.
    groups = [at // GROUP for at in range(len(done))]
    rewards = [float(asked[group]["answer"] in one.output.text) for group, one in zip(groups, done, strict=True)]
    lengths = [len(one.logprobs) for one in done]
    worth = advantages("group_std", rewards, groups, lengths)
    denominator = global_denominator("gspo", lengths, max_tokens=8)

    # Without replay the trainer routes by itself: this pass is only there for comparison.
    prompts = [len(one.prompt_token_ids) for one in done]
    tokens = [one.prompt_token_ids + tuple(one.output.token_ids) for one in done]
    with torch.no_grad():
        native = [score(*given) for given in zip(tokens, prompts, strict=True)]

    # One update with replay. Each sequence is a microbatch, so a pass has the rows 0, 1, ... of one sequence.
    rows = [(np.full(len(one.routes), at), np.arange(len(one.routes))) for at, one in enumerate(done)]
    replayed = []
    fed = [np.array(one[:-1]) for one in tokens]
    with watch.step(fed, [one.routes for one in done], rows, prompts=prompts) as seen:
        for at, one in enumerate(done):
            routes = torch.from_numpy(one.routes.astype(np.int64))
            seen.forward(at)
            logprobs = score(tokens[at], prompts[at])
            replayed.append(logprobs.detach())
            result = policy_loss(
                "gspo",
                logprobs,
                replayed[at],  # with one update a step, the old policy is this one
                torch.tensor([worth[at]]),
                torch.zeros(lengths[at], dtype=torch.int64),
                rollout_logprobs=torch.from_numpy(one.logprobs),
                denominator=denominator,
                clip_low=3e-4,
                clip_high=4e-4,
            )
            result.loss.backward()
    routes = None
    seen.report.refuse()  # unless every router took every recorded row once, this raises and no weight moves
    optimizer.step()
    optimizer.zero_grad()

    sampled = torch.from_numpy(np.concatenate([one.logprobs for one in done]))
    of = torch.repeat_interleave(torch.arange(len(done)), torch.tensor(lengths))
    k3 = [MismatchSums.of(torch.cat(one), sampled, of, len(done)).metrics()["k3"] for one in (native, replayed)]
    print(f"step {step}: reward {np.mean(rewards):.2f}, policy KL {k3[0]:.1e} native, {k3[1]:.1e} replayed")
