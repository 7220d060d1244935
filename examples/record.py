from pathlib import Path

from vllm import SamplingParams

from moe_rl import messages, record

ANSWERS = {"12+34=": "46", "7+8=": "15"}

params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, stop_token_ids=[1])
with record(
    "assets/tiny_moe/policy",
    trace_root="routes",
    dtype="float32",  # this one and what follows are arguments of vllm.LLM
    max_model_len=64,
    kv_cache_memory_bytes=64 << 20,
    enforce_eager=True,
) as llm:
    done = llm.generate(list(ANSWERS), params, shard="step0")

sequences = []
for one, answer in zip(done, ANSWERS.values(), strict=True):
    print(repr(one.output.text), one.routes.shape, one.routes.dtype, one.logprobs.shape)
    print("  its first token went to experts", one.routes[0, 0], "of layer", one.layers[0])
    sequences.append(one.sequence(reward=float(answer in one.output.text)))
Path("sequences").write_bytes(messages.encode(sequences))  # tokens, logprobs, references; the store has the routes
