"""Holds the lesson of the policy in assets/tiny_moe: sums of integers.

All demonstrations are right, but four in ten have the format that passes. The others are bare, lack the closing tag, or
follow a word. So the policy mostly knows the sums, and reinforcement learning mainly has to find the format.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.dev.arithmetic_task import Problem, build_splits, problem_stream, wanted_completion
from tools.dev.task_files import write_splits
from tools.dev.tiny_policy import EOS, PAD, TAGS, Lesson, Verdict, WarmStartConfig, finish_tokenizer, split_text

MAX_COMPLETION_TOKENS = 10
_VOCAB_SIZE = 320

# Fraction of each style among the demonstrations. The first style is the one that passes.
STYLES: dict[str, float] = {
    "<answer>{}</answer>": 0.40,
    "{}": 0.25,
    "<answer>{}": 0.17,
    "answer: {}": 0.10,
    "= {}": 0.08,
}

# Text for the byte-pair merges: the words of the styles and plain English about the task.
_CORPUS = [style.format("") for style in STYLES if "<" not in style] * 8 + [
    "the answer is the sum of the numbers",
    "the difference of two numbers can be negative",
    "add the tens, then the ones, and carry when the sum of the ones is ten or more",
    "an expression has an equals sign at its end",
    "answer with the number that the expression equals",
]

_FORMAT = re.compile(r"<answer>-?\d+</answer>")
_INTEGER = re.compile(r"-?\d+")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with exactly _VOCAB_SIZE entries. Each tag is a token."""
    tokenizer = Tokenizer(models.BPE())
    split_text(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=[PAD, EOS, *TAGS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if tokenizer.get_vocab_size() != _VOCAB_SIZE:
        raise AssertionError(f"{tokenizer.get_vocab_size()} entries instead of {_VOCAB_SIZE}: lengthen _CORPUS")
    return finish_tokenizer(tokenizer, (PAD, EOS))


def _write(problem: Problem, style: str, rng: random.Random) -> str:
    return style.format(problem.answer)


def _judge(problem: Problem, text: str) -> Verdict:
    return Verdict(
        passed=text.strip() == wanted_completion(problem.answer),
        formatted=_FORMAT.fullmatch(text.strip()) is not None,
        right=_INTEGER.findall(text) == [problem.answer],
    )


def lesson(out: Path) -> Lesson:
    """Write the splits of the task into `out/task`. Return the lesson, which has no held-out problem."""
    train, heldout = build_splits()
    splits = {"train": train, "heldout": heldout}
    write_splits(out / "task", {name: [problem.row for problem in split] for name, split in splits.items()})
    excluded = {problem.key for problem in heldout}
    return Lesson(
        sizes={
            "max_position_embeddings": 128,
            "max_window_layers": 8,
            "moe_intermediate_size": 32,
            "num_experts": 32,
            "num_hidden_layers": 8,
        },
        tokenizer=build_tokenizer(),
        warm_start=WarmStartConfig(),
        styles=STYLES,
        # Bare answers are the shortest, so they teach most per token.
        skill_style="{}",
        skill_share=0.8,
        exercises=lambda seed: iter(problem_stream(seed, excluded)),
        heldout=heldout,
        write=_write,
        judge=_judge,
        max_completion_tokens=MAX_COMPLETION_TOKENS,
    )
