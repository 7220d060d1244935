"""Makes a tiny Qwen3-MoE policy with a tokenizer, warm-started on demonstrations. A lesson says of what.

The warm start leaves something to learn. The policy sees demonstrations in mixed styles, and less than half of its
samples pass. See tools/dev/arithmetic_policy.py, gym_policy.py and calculator_policy.py for the lessons.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tools.dev.policy_folder import save_policy

PAD, EOS = "<|pad|>", "<|end|>"
PAD_ID, EOS_ID = 0, 1
TAGS = ("<answer>", "</answer>")

# config.json in the form that published Qwen3-MoE checkpoints have. A lesson adds the sizes.
_POLICY_CONFIG: dict[str, Any] = {
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
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
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
}


class Exercise(Protocol):
    """Has a prompt, as the policy reads it, and the right answer."""

    @property
    def prompt(self) -> str: ...

    @property
    def answer(self) -> str: ...

    @property
    def level(self) -> str:
        """Return the class that pass rates are given for."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says of a completion whether it passes, has the wanted format, and has the right answer in any format."""

    passed: bool
    formatted: bool
    right: bool


@dataclass(frozen=True, slots=True)
class WarmStartConfig:
    """Sets the warm start: the skill is learnt first, mostly from one style, then the shares of the lesson's styles.

    skill_steps, style_steps: optimizer steps with `batch` examples each. aux_coef: weight of the load-balancing loss.
    """

    seed: int = 7
    skill_steps: int = 2000
    style_steps: int = 300
    batch: int = 128
    lr: float = 2e-3
    warmup_steps: int = 60
    final_lr_fraction: float = 0.05
    weight_decay: float = 0.05
    clip_grad: float = 1.0
    aux_coef: float = 0.02

    @property
    def steps(self) -> int:
        return self.skill_steps + self.style_steps


@dataclass(frozen=True, slots=True)
class Lesson:
    """Holds what a policy is made from.

    sizes: what config.json has beside the common keys. warm_start: its settings. styles: share of each style among the
    demonstrations. skill_style, skill_share: the style that the skill is learnt from, and its share meanwhile.
    exercises: endless, never one of `heldout`. write: the completion for an exercise in a style. judge: of a text.
    max_completion_tokens: of one turn. given: a pattern of what the policy is given between its turns; "" where it has
    one turn. reply: what it is given behind all that was said and given until then; "" at the end.
    """

    sizes: Mapping[str, int]
    tokenizer: PreTrainedTokenizerFast
    warm_start: WarmStartConfig
    styles: Mapping[str, float]
    skill_style: str
    skill_share: float
    exercises: Callable[[int], Iterator[Any]]
    heldout: Sequence[Any]
    write: Callable[[Any, str, random.Random], str]
    judge: Callable[[Any, str], Verdict]
    max_completion_tokens: int
    given: str = ""
    reply: Callable[[str], str] | None = None

    @property
    def policy_config(self) -> dict[str, Any]:
        merged = _POLICY_CONFIG | dict(self.sizes) | {"vocab_size": len(self.tokenizer)}
        return dict(sorted(merged.items()))


def split_text(tokenizer: Tokenizer) -> None:
    """Make the tokenizer byte-level, with a token for each digit."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()


def finish_tokenizer(
    tokenizer: Tokenizer, special: Sequence[str], template: str | None = None, pad: str = PAD, end: str = EOS
) -> Any:
    """Return the tokenizer as transformers has it. Only the tokens `special` are special, `<answer>` is text.

    So decoding with `skip_special_tokens=True` keeps the tags. pad, end: the padding and the end token.
    """
    layout = json.loads(tokenizer.to_str())
    for token in layout["added_tokens"]:
        token["special"] = token["content"] in special
    tokenizer = Tokenizer.from_str(json.dumps(layout))
    if tokenizer.token_to_id(pad) != PAD_ID or tokenizer.token_to_id(end) != EOS_ID:
        raise AssertionError("the ids of the padding and the end token are not those of config.json")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end, chat_template=template)


def build_policy(lesson: Lesson) -> Qwen3MoeForCausalLM:
    """Return the untrained policy in fp32."""
    torch.manual_seed(lesson.warm_start.seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**lesson.policy_config | {"torch_dtype": "float32"}))


def encode_demonstration(lesson: Lesson, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
    """Return the token ids of a demonstration with its end token, and which of them the policy says."""
    encode = lesson.tokenizer.backend_tokenizer.encode
    ids = encode(prompt).ids
    said = [False] * len(ids)
    parts = re.split(f"({lesson.given})", completion) if lesson.given else [completion]
    for number, part in enumerate(parts):
        tokens = encode(part).ids
        ids += tokens
        said += [number % 2 == 0] * len(tokens)
    return [*ids, EOS_ID], [*said, True]


def _batches(lesson: Lesson) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return token ids [B, T], right-padded, and the mask [B, T] of the tokens to predict (what the policy says and its
    end token).
    """
    config = lesson.warm_start
    rng = random.Random(config.seed + 1)
    exercises = lesson.exercises(config.seed)
    styles, shares = list(lesson.styles), list(lesson.styles.values())
    for step in range(config.steps):
        share = 0.0 if step >= config.skill_steps else lesson.skill_share
        rows = []
        for _ in range(config.batch):
            exercise = next(exercises)
            style = lesson.skill_style if rng.random() < share else rng.choices(styles, shares)[0]
            rows.append(encode_demonstration(lesson, exercise.prompt, lesson.write(exercise, style, rng)))
        width = max(len(row) for row, _ in rows)
        ids = torch.full((config.batch, width), PAD_ID)
        mask = torch.zeros((config.batch, width), dtype=torch.bool)
        for number, (row, said) in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = torch.tensor(said)
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


def warm_start(policy: Qwen3MoeForCausalLM, lesson: Lesson) -> dict[str, Any]:
    """Train `policy` in place on demonstrations."""
    config, steps = lesson.warm_start, lesson.warm_start.steps
    decayed = [p for p in policy.parameters() if p.ndim > 1]
    others = [p for p in policy.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), weight_decay=config.weight_decay)

    def lr_factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        return config.final_lr_fraction + (1 - config.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    started, history = time.monotonic(), []
    policy.train()
    for step, (ids, mask) in enumerate(_batches(lesson)):
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
    max_tokens: int,
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
        completion = torch.full((len(ids), max_tokens), PAD_ID)
        cache, step_ids = None, ids
        for position in range(max_tokens):
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


def try_out(
    policy: Qwen3MoeForCausalLM, lesson: Lesson, prompts: int, samples: int, seed: int, greedy: bool = False
) -> tuple[list[list[Verdict]], float, float]:
    """Sample from the first held-out exercises. Return verdicts [prompts][samples], and what `sample` returns."""
    exercises = lesson.heldout[:prompts]
    asked = [exercise.prompt for exercise in exercises]
    texts, tokens, truncated = sample(
        policy, lesson.tokenizer, asked, samples, seed, lesson.max_completion_tokens, greedy
    )
    while lesson.reply:
        given = [(n, at, lesson.reply(text)) for n, group in enumerate(texts) for at, text in enumerate(group)]
        given = [(n, at, reply) for n, at, reply in given if reply]
        if not given:
            break
        seed += 1
        further = [asked[n] + texts[n][at] + reply for n, at, reply in given]
        said, mean, cut = sample(policy, lesson.tokenizer, further, 1, seed, lesson.max_completion_tokens, greedy)
        for (n, at, reply), (text,) in zip(given, said, strict=True):
            texts[n][at] += reply + text
        tokens += mean * len(given) / (samples * len(asked))
        truncated += cut * len(given) / (samples * len(asked))
    judged = [[lesson.judge(one, text) for text in group] for one, group in zip(exercises, texts, strict=True)]
    return judged, tokens, truncated


def evaluate(
    policy: Qwen3MoeForCausalLM,
    lesson: Lesson,
    samples: int = 4,
    pass_at: int = 8,
    pass_at_prompts: int = 128,
    seed: int = 11,
) -> dict[str, Any]:
    """Measure pass rates on the held-out exercises, at temperature 1 and greedily."""
    prompts = len(lesson.heldout)
    groups, mean_tokens, truncated = try_out(policy, lesson, prompts, samples, seed)
    by_level: dict[str, list[Verdict]] = {}
    for exercise, group in zip(lesson.heldout, groups, strict=True):
        by_level.setdefault(exercise.level, []).extend(group)
    rows = [row for level in by_level.values() for row in level]
    greedy, _, _ = try_out(policy, lesson, prompts, 1, seed, greedy=True)
    many, _, _ = try_out(policy, lesson, pass_at_prompts, pass_at, seed + 1)
    solved = [[row.passed for row in group] for group in many]

    def rate(flags: Iterable[bool]) -> float:
        flags = list(flags)
        return round(sum(flags) / max(1, len(flags)), 4)

    levels = sorted(by_level)
    return {
        "prompts": prompts,
        "samples_per_prompt": samples,
        "pass_rate": rate(row.passed for row in rows),
        "pass_rate_by_level": {level: rate(row.passed for row in by_level[level]) for level in levels},
        "format_rate": rate(row.formatted for row in rows),
        "accuracy_given_format": rate(row.passed for row in rows if row.formatted),
        "answer_accuracy": rate(row.right for row in rows),
        "answer_accuracy_by_level": {level: rate(row.right for row in by_level[level]) for level in levels},
        "greedy_pass_rate": rate(row.passed for group in greedy for row in group),
        f"pass_at_{pass_at}": rate(any(group) for group in solved),
        f"mixed_groups_of_{pass_at}": rate(any(group) and not all(group) for group in solved),
        "mean_completion_tokens": round(mean_tokens, 3),
        "truncated_fraction": round(truncated, 4),
    }


@torch.inference_mode()
def expert_usage(policy: Qwen3MoeForCausalLM, lesson: Lesson) -> dict[str, Any]:
    """Return the load of the experts on completions in the first style, per layer, as multiples of the even load."""
    config = policy.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts)
    passing, rng = next(iter(lesson.styles)), random.Random(0)
    texts = [exercise.prompt + lesson.write(exercise, passing, rng) for exercise in lesson.heldout]
    encoded = [lesson.tokenizer.encode(text) for text in texts]
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


def make(folder: Path, lesson: Lesson) -> dict[str, Any]:
    """Write the policy into `folder`. Returns the measured rates, as JSON values."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = (
        False  # the check of addresses costs time and is not needed here
    )

    started = time.monotonic()
    policy = build_policy(lesson)
    training = warm_start(policy, lesson)
    seconds = time.monotonic() - started
    save_policy(policy, lesson.policy_config, lesson.tokenizer, folder)

    report = {"styles": dict(lesson.styles), "training": training, "training_seconds": round(seconds)}
    for dtype in (torch.bfloat16, torch.float32):
        shipped = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        report[str(dtype).removeprefix("torch.")] = evaluate(shipped, lesson)
    report["expert_load"] = expert_usage(shipped, lesson)
    return report
