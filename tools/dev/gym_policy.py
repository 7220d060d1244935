"""Holds the lesson of the policy in assets/tiny_gym: three tasks of reasoning-gym, worked out in steps.

Four demonstrations in ten have all steps and the answer in tags. The others leave out the tags or the closing one,
give an answer without steps, or stop in the middle of their steps and give what they have. Reinforcement learning has
to find that steps to the end, followed by tags, pay.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moe_rl.config.load import load_config
from moe_rl.config.prompt_sources import PromptSourceConfig
from moe_rl.tasks.rewards import find_answer
from moe_rl.tasks.rows import open_generator
from tools.dev.tiny_policy import EOS, PAD, TAGS, Lesson, Verdict, WarmStartConfig, finish_tokenizer, split_text

CONFIG = Path(__file__).parents[2] / "configs" / "reasoning_gym_cpu.yaml"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Fraction of each style among the demonstrations. The first style is the one that passes.
STYLES: dict[str, float] = {"whole": 0.38, "no tags": 0.20, "unclosed": 0.14, "no steps": 0.14, "stopped": 0.14}


@dataclass(frozen=True, slots=True)
class Exercise:
    """Holds an item of a generator: the rendered prompt, the steps to its answer, and what each step arrives at."""

    prompt: str
    answer: str
    level: str
    steps: tuple[tuple[str, str], ...]


def _sums(metadata: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield one sum per sign: `12+34=46`, then ` 46-5=41`."""
    first, *others = re.findall(r"(?:[+-] )?\d+", metadata["expression"])
    result = int(first)
    for number, term in enumerate(others):
        term = term.replace(" ", "")
        line = f"{result}{term}={result + int(term)}"
        result += int(term)
        yield " " * (number > 0) + line, str(result)


def _backward(metadata: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the letters from the last to the first."""
    done = ""
    for letter in reversed(metadata["word"]):
        done += letter
        yield "," * (len(done) > 1) + letter, done


def _letters(metadata: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the words, with the count behind each letter that is counted: `hun1dred`, then ` thousan2d`."""
    count = 0
    for number, word in enumerate(metadata["span"]):
        line = " " * (number > 0)
        for letter in word:
            line += letter
            if letter.lower() == metadata["target_letter"]:
                count += 1
                line += str(count)
        yield line, str(count)


_STEPS: dict[str, Callable[[dict[str, Any]], Iterator[tuple[str, str]]]] = {
    "chain_sum": _sums,
    "spell_backward": _backward,
    "letter_counting": _letters,
}


def _write(exercise: Exercise, style: str, rng: random.Random) -> str:
    steps, answer = exercise.steps, exercise.answer
    if style == "stopped":
        steps = steps[: rng.randrange(1, len(steps))]
        answer = steps[-1][1]
    worked = "".join(line for line, _ in steps)
    if style == "no tags":
        return f"{worked} {answer}"
    if style == "unclosed":
        return f"{worked} <answer>{answer}"
    return f"{worked if style != 'no steps' else ''} <answer>{answer}</answer>"


def _judge(exercise: Exercise, text: str) -> Verdict:
    answer = find_answer(text, "tags")
    bare = re.split(r" |<answer>", text.removesuffix(TAGS[1]))[-1]
    return Verdict(passed=answer == exercise.answer, formatted=answer is not None, right=bare == exercise.answer)


def _build_tokenizer(questions: list[list[str]]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the words that most questions of a task have, and bytes for all else.

    So the prompts are short, and the policy sees the letters of the words that it is asked about.
    """
    tokenizer = Tokenizer(models.BPE())
    split_text(tokenizer)
    alphabet, words = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    for task in questions:
        split = tokenizer.pre_tokenizer.pre_tokenize_str
        seen = Counter(word for question in task for word in dict.fromkeys(piece for piece, _ in split(question)))
        words += [word for word, count in seen.items() if 2 * count > len(task) and len(word) > 1]
    special = (PAD, EOS, *_ROLES)
    vocabulary = dict.fromkeys([*special, *TAGS, *alphabet, *words])
    # With ignore_merges, a word of the vocabulary is one token although no merges lead to it.
    tokenizer.model = models.BPE({word: id for id, word in enumerate(vocabulary)}, [], ignore_merges=True)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in (*special, *TAGS)])
    return finish_tokenizer(tokenizer, special, _TEMPLATE)


def lesson(out: Path) -> Lesson:
    """Return the lesson. The tasks and the held-out exercises are those of the config."""
    config = load_config(CONFIG, [])

    def items(source: PromptSourceConfig) -> Callable[[int], dict[str, Any]]:
        return open_generator(source, "task")

    train = [items(source) for source in config.task.train]
    tokenizer = _build_tokenizer([[make(number)["question"] for number in range(100)] for make in train])

    def exercise(item: dict[str, Any]) -> Exercise:
        message = {"role": "user", "content": item["question"]}
        prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        metadata = item["metadata"]
        level = metadata["source_dataset"]
        return Exercise(prompt, item["answer"], level, tuple(_STEPS[level](metadata)))

    def fits(exercise: Exercise) -> bool:
        return len(tokenizer.encode(exercise.prompt)) <= config.rollout.max_prompt_tokens

    tasks = [
        [exercise(make(number)) for number in range(config.eval.prompts)] for make in map(items, config.task.heldout)
    ]
    heldout = [one for row in zip(*tasks, strict=True) for one in row if fits(one)]
    excluded = {one.prompt for one in heldout}

    def exercises(seed: int) -> Iterator[Exercise]:
        # Another seed than those of the config.
        own = [items(source.model_copy(update={"seed": 1000 + seed})) for source in config.task.train]
        number = 0
        while True:
            one = exercise(own[number % len(own)](number // len(own)))
            number += 1
            if one.prompt not in excluded and fits(one):
                yield one

    return Lesson(
        sizes={
            "max_position_embeddings": 256,
            "max_window_layers": 4,
            "moe_intermediate_size": 64,
            "num_experts": 16,
            "num_hidden_layers": 4,
        },
        tokenizer=tokenizer,
        warm_start=WarmStartConfig(skill_steps=650, style_steps=150, batch=64),
        styles=STYLES,
        skill_style="whole",
        skill_share=0.8,
        exercises=exercises,
        heldout=heldout,
        write=_write,
        judge=_judge,
        max_completion_tokens=config.rollout.max_completion_tokens,
    )
