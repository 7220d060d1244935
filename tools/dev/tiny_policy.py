"""Makes assets/tiny_moe: the arithmetic task, the tokenizer and the warm-started tiny Qwen3-MoE policy.

The warm start leaves something to learn. The policy has seen only right answers, but in mixed styles: four in ten in
the format that passes, the others bare, without the closing tag, or after a word. It mostly knows the sums, but less
than half of its samples pass. Reinforcement learning mainly has to find the format.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tools.dev.arithmetic_task import Problem, build_splits, problem_stream, wanted_completion, write_jsonl

VOCAB_SIZE = 320
PAD, EOS = "<|pad|>", "<|end|>"
PAD_ID, EOS_ID = 0, 1
MAX_PROMPT_TOKENS = 16
MAX_COMPLETION_TOKENS = 10

# Fraction of each style among the demonstrations. The first style is the one that passes.
STYLES: dict[str, float] = {
    "<answer>{}</answer>": 0.40,
    "{}": 0.25,
    "<answer>{}": 0.17,
    "answer: {}": 0.10,
    "= {}": 0.08,
}
# Fraction of bare answers while the sums are learnt. Bare answers are the shortest, so they teach most per token.
BARE_SHARE = 0.8

# Text for the byte-pair merges: the words of the styles and plain English about the task.
_CORPUS = [style.format("") for style in STYLES if "<" not in style] * 8 + [
    "the answer is the sum of the numbers",
    "the difference of two numbers can be negative",
    "add the tens, then the ones, and carry when the sum of the ones is ten or more",
    "an expression has an equals sign at its end",
    "answer with the number that the expression equals",
]

# config.json in the form that published Qwen3-MoE checkpoints have.
POLICY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "eos_token_id": EOS_ID,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.05,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "max_window_layers": 8,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": PAD_ID,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}


@dataclass(frozen=True, slots=True)
class WarmStartConfig:
    """Sets the warm start: the sums are learnt first, mostly from bare answers, then the shares of STYLES.

    arithmetic_steps, style_steps: optimizer steps with `batch` examples each. aux_coef: weight of the load-balancing
    loss.
    """

    seed: int = 7
    arithmetic_steps: int = 2000
    style_steps: int = 300
    batch: int = 128
    lr: float = 2e-3
    warmup_steps: int = 60
    final_lr_fraction: float = 0.05
    weight_decay: float = 0.05
    clip_grad: float = 1.0
    aux_coef: float = 0.02


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with exactly VOCAB_SIZE entries. Each digit is a token, and so are `<answer>` and
    `</answer>`.

    The two tags are not special tokens, so decoding with `skip_special_tokens=True` keeps them.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tags = [AddedToken(tag, special=False, normalized=False) for tag in ("<answer>", "</answer>")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, EOS, *(tag.content for tag in tags)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    # The BPE trainer makes every reserved token special, but the tags are text.
    layout = json.loads(tokenizer.to_str())
    for token in layout["added_tokens"]:
        token["special"] = token["content"] in (PAD, EOS)
    tokenizer = Tokenizer.from_str(json.dumps(layout))
    if tokenizer.get_vocab_size() != VOCAB_SIZE or tokenizer.token_to_id(EOS) != EOS_ID:
        raise AssertionError(f"{tokenizer.get_vocab_size()} entries instead of {VOCAB_SIZE}: lengthen _CORPUS")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def build_policy(seed: int) -> Qwen3MoeForCausalLM:
    """Return the untrained policy in fp32."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**POLICY_CONFIG | {"torch_dtype": "float32"}))


def _batches(
    problems: Iterable[Problem], tokenizer: PreTrainedTokenizerFast, config: WarmStartConfig
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return token ids [B, T], right-padded, and the mask [B, T] of the tokens to predict (completion and end
    token).
    """
    rng = random.Random(config.seed + 1)
    encode = tokenizer.backend_tokenizer.encode
    problems = iter(problems)
    for step in range(config.arithmetic_steps + config.style_steps):
        bare = 0.0 if step >= config.arithmetic_steps else BARE_SHARE
        rows = []
        for _ in range(config.batch):
            problem = next(problems)
            style = "{}" if rng.random() < bare else rng.choices(list(STYLES), list(STYLES.values()))[0]
            prompt = encode(problem.prompt).ids
            rows.append((prompt, encode(style.format(problem.answer)).ids + [EOS_ID]))
        width = max(len(prompt) + len(completion) for prompt, completion in rows)
        ids = torch.full((config.batch, width), PAD_ID)
        mask = torch.zeros((config.batch, width), dtype=torch.bool)
        for row, (prompt, completion) in enumerate(rows):
            length = len(prompt) + len(completion)
            ids[row, :length] = torch.tensor(prompt + completion)
            mask[row, len(prompt) : length] = True
        yield ids, mask


def _balance_loss(router_logits: Sequence[torch.Tensor], real: torch.Tensor, top_k: int) -> torch.Tensor:
    """Compute the load-balancing loss of the Switch Transformer (arXiv 2101.03961, eq. 4-6), mean over layers; 1 if
    even.

    router_logits: per layer [B*T, E]. real [B*T]: False for padding.
    """
    losses = []
    for logits in router_logits:
        probs = logits[real].softmax(-1)
        chosen = torch.zeros_like(probs).scatter_(1, probs.topk(top_k, dim=-1).indices, 1.0 / top_k)
        losses.append(probs.shape[-1] * (chosen.mean(0) * probs.mean(0)).sum())
    return torch.stack(losses).mean()


def warm_start(
    policy: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    excluded: set[tuple[int, ...]],
    config: WarmStartConfig,
) -> dict[str, Any]:
    """Train `policy` in place on demonstrations of new problems, none of whose keys is in `excluded`."""
    decayed = [p for p in policy.parameters() if p.ndim > 1]
    others = [p for p in policy.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), weight_decay=config.weight_decay)

    steps = config.arithmetic_steps + config.style_steps

    def lr_factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        return config.final_lr_fraction + (1 - config.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    batches = _batches(problem_stream(config.seed, excluded), tokenizer, config)
    started, history = time.monotonic(), []
    policy.train()
    for step, (ids, mask) in enumerate(batches):
        # The last token is predicted, but never an input.
        output = policy(input_ids=ids[:, :-1], output_router_logits=True, use_cache=False)
        wanted = mask[:, 1:]
        loss = F.cross_entropy(output.logits[wanted], ids[:, 1:][wanted])
        real = (ids[:, :-1] != PAD_ID).flatten()
        balance = _balance_loss(output.router_logits, real, policy.config.num_experts_per_tok)
        (loss + config.aux_coef * balance).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.clip_grad)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            history.append({"step": step, "loss": round(loss.item(), 4), "balance_loss": round(balance.item(), 4)})
            seconds = time.monotonic() - started
            print(f"step {step:5d}  loss {loss:.4f}  balance {balance:.4f}  {seconds:6.0f} s", flush=True)
    with torch.no_grad():
        # The padding token was never an input, so its embedding is still zero, where the gradient of the first norm is
        # unbounded. The policy may sample this token, so it gets an embedding of ordinary size.
        embeddings = policy.model.embed_tokens.weight
        embeddings[PAD_ID] = embeddings[EOS_ID]
    policy.eval()
    return {"config": asdict(config), "history": history}


@torch.inference_mode()
def sample(
    policy: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    samples: int,
    seed: int,
    greedy: bool = False,
) -> tuple[list[list[str]], float, float]:
    """Sample. Return texts [prompts][samples], the mean length in tokens (with end token), and the truncated
    fraction.
    """
    torch.manual_seed(seed)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    texts: list[list[str]] = [[] for _ in prompts]
    tokens = truncated = 0
    # Prompts of one length are run together, so no padding is needed.
    for length in sorted({len(ids) for ids in encoded}):
        chosen = [number for number, ids in enumerate(encoded) if len(ids) == length]
        ids = torch.tensor([encoded[number] for number in chosen]).repeat_interleave(samples, 0)
        finished = torch.zeros(len(ids), dtype=torch.bool)
        completion = torch.full((len(ids), MAX_COMPLETION_TOKENS), PAD_ID)
        cache, step_ids = None, ids
        for position in range(MAX_COMPLETION_TOKENS):
            output = policy(input_ids=step_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits, cache = output.logits[:, -1].float(), output.past_key_values
            drawn = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1).squeeze(1)
            completion[~finished, position] = drawn[~finished]
            finished |= drawn == EOS_ID
            step_ids = drawn[:, None]
            if finished.all():
                break
        tokens += int((completion != PAD_ID).sum())
        truncated += int((~finished).sum())
        for row, number in enumerate(n for n in chosen for _ in range(samples)):
            texts[number].append(tokenizer.decode(completion[row], skip_special_tokens=True))
    total = len(prompts) * samples
    return texts, tokens / total, truncated / total


_FORMAT = re.compile(r"<answer>-?\d+</answer>")
_INTEGER = re.compile(r"-?\d+")


def evaluate(
    policy: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    samples: int = 4,
    pass_at: int = 8,
    pass_at_prompts: int = 128,
    seed: int = 11,
) -> dict[str, Any]:
    """Measure pass rates at temperature 1 and greedily. A completion passes if its stripped text equals the wanted
    one.
    """
    prompts = [problem.prompt for problem in problems]
    texts, mean_tokens, truncated = sample(policy, tokenizer, prompts, samples, seed)
    by_level: dict[str, list[tuple[bool, bool, bool]]] = {}
    for problem, completions in zip(problems, texts, strict=True):
        for text in completions:
            passed = text.strip() == wanted_completion(problem.answer)
            formatted = _FORMAT.fullmatch(text.strip()) is not None
            right = _INTEGER.findall(text) == [problem.answer]
            by_level.setdefault(problem.level, []).append((passed, formatted, right))
    rows = [row for level in by_level.values() for row in level]
    greedy, _, _ = sample(policy, tokenizer, prompts, 1, seed, greedy=True)
    many, _, _ = sample(policy, tokenizer, prompts[:pass_at_prompts], pass_at, seed + 1)
    wanted = [wanted_completion(problem.answer) for problem in problems]
    solved = [[text.strip() == want for text in group] for group, want in zip(many, wanted, strict=False)]

    def rate(flags: Iterable[bool]) -> float:
        flags = list(flags)
        return round(sum(flags) / max(1, len(flags)), 4)

    return {
        "prompts": len(prompts),
        "samples_per_prompt": samples,
        "pass_rate": rate(row[0] for row in rows),
        "pass_rate_by_level": {level: rate(row[0] for row in by_level[level]) for level in sorted(by_level)},
        "format_rate": rate(row[1] for row in rows),
        "accuracy_given_format": rate(row[0] for row in rows if row[1]),
        "integer_accuracy": rate(row[2] for row in rows),
        "integer_accuracy_by_level": {level: rate(row[2] for row in by_level[level]) for level in sorted(by_level)},
        "greedy_pass_rate": rate(group[0].strip() == want for group, want in zip(greedy, wanted, strict=True)),
        f"pass_at_{pass_at}": rate(any(group) for group in solved),
        f"mixed_groups_of_{pass_at}": rate(any(group) and not all(group) for group in solved),
        "mean_completion_tokens": round(mean_tokens, 3),
        "truncated_fraction": round(truncated, 4),
    }


@torch.inference_mode()
def expert_usage(
    policy: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> dict[str, Any]:
    """Return the load of the experts on the wanted completions, per layer, as multiples of the even load."""
    config = policy.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts)
    texts = [problem.prompt + wanted_completion(problem.answer) for problem in problems]
    encoded = [tokenizer.encode(text) for text in texts]
    for length in sorted({len(ids) for ids in encoded}):
        ids = torch.tensor([row for row in encoded if len(row) == length])
        output = policy(input_ids=ids, output_router_logits=True, use_cache=False)
        for layer, logits in enumerate(output.router_logits):
            chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices
            counts[layer] += torch.bincount(chosen.flatten(), minlength=config.num_experts)
    load = counts / counts.mean(1, keepdim=True)
    half = config.num_experts // 2
    return {
        "min": [round(x, 3) for x in load.min(1).values.tolist()],
        "max": [round(x, 3) for x in load.max(1).values.tolist()],
        "unused_experts": [int(x) for x in (counts == 0).sum(1)],
        "lower_half_share": [round(x, 3) for x in (counts[:, :half].sum(1) / counts.sum(1)).tolist()],
    }


def save_policy(policy: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the Hugging Face folder: bf16 tensors under the published per-expert names, configs, tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in policy.state_dict().items():
        value = value.detach().to(torch.bfloat16)
        # transformers stacks the experts of a layer: gate_up_proj [E, 2I, H], down_proj [E, H, I].
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for expert, fused in enumerate(value):
                gate, up = fused.chunk(2)
                tensors[f"{stem}{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{stem}{expert}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            for expert, weight in enumerate(value):
                tensors[f"{stem}{expert}.down_proj.weight"] = weight.contiguous()
        else:
            tensors[name] = value.contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    _write_json(out / "config.json", POLICY_CONFIG)
    _write_json(out / "generation_config.json", {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID})
    # The older name of the class, which every transformers since 4 knows.
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": EOS,
            "pad_token": PAD,
            "model_max_length": POLICY_CONFIG["max_position_embeddings"],
        },
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")


def make(out: Path, config: WarmStartConfig) -> dict[str, Any]:
    """Write `policy/` and `task/` into `out`. Returns the measured rates, as JSON values."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = (
        False  # the check of addresses costs time and is not needed here
    )

    train, heldout = build_splits()
    (out / "task").mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "task" / "train.jsonl", "train", train)
    write_jsonl(out / "task" / "heldout.jsonl", "heldout", heldout)

    started = time.monotonic()
    tokenizer = build_tokenizer()
    policy = build_policy(config.seed)
    training = warm_start(policy, tokenizer, {problem.key for problem in heldout}, config)
    seconds = time.monotonic() - started
    folder = out / "policy"
    save_policy(policy, tokenizer, folder)

    report = {"styles": STYLES, "training": training, "training_seconds": round(seconds)}
    for dtype in (torch.bfloat16, torch.float32):
        shipped = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        report[str(dtype).removeprefix("torch.")] = evaluate(shipped, tokenizer, heldout)
    report["expert_load"] = expert_usage(shipped, tokenizer, heldout)
    return report
