"""Holds the lesson of the policy in assets/tiny_tool: it may call a calculator, which computes one operation a call.

One in five demonstrations makes the calls that a question needs. The others answer at once, stop calling in the middle
and work out the rest by themselves, or give the calculator all operations in one call, which it refuses. All final
answers are right, but a small model cannot learn to multiply by itself. Reinforcement learning has to find that calls
pay, up to the last one, and that an easy sum needs none.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moe_rl.tasks.environments.examples.pocket_calculator import MOST_TOKENS, TOOL, answer, reward
from tools.dev.calculator_task import Problem, build_splits, problem_stream
from tools.dev.task_files import write_splits
from tools.dev.tiny_policy import Lesson, Verdict, WarmStartConfig, finish_tokenizer, split_text

_PAD, _END, _START = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_MOST_CALLS = 3

# Fraction of each style among the demonstrations. The first style is the one that passes.
STYLES: dict[str, float] = {"all calls": 0.20, "no call": 0.55, "stopped": 0.17, "in one call": 0.08}

# The text of Qwen3's chats, so that the renderer of Qwen3 serves the policy. It is the same for every turn, so that a
# dialogue only ever grows.
_BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    f"{{{{ {json.dumps(_BEFORE_TOOLS)} }}}}"
    "{% for tool in tools %}{{ '\n' if not loop.first }}{{ tool | tojson }}{% endfor %}"
    f"{{{{ {json.dumps(_AFTER_TOOLS)} }}}}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.previtem is undefined or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}"
    "{% if loop.nextitem is undefined or loop.nextitem.role != 'tool' %}<|im_end|>{{ '\n' }}{% endif %}"
    "{% elif not (loop.first and message.role == 'system') %}"
    "<|im_start|>{{ message.role ~ '\n' ~ (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n' if message.content or not loop.first }}"
    """{{ '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}"""
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}<|im_end|>{{ '\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
_GIVEN = r"\n<\|im_start\|>user\n<tool_response>.*?<\|im_start\|>assistant\n"
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Exercise:
    """Holds a problem and its rendered prompt."""

    prompt: str
    problem: Problem

    @property
    def answer(self) -> str:
        return self.problem.answer

    @property
    def level(self) -> str:
        return self.problem.level


def _call(expression: str) -> str:
    call = {"name": "calculate", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _reply(said: str) -> str:
    """Return what the policy is given behind its last calls, "" if it made none or may make no more."""
    *earlier, last = re.split(_GIVEN, said, flags=re.DOTALL)
    if len(earlier) == _MOST_CALLS or not (calls := _CALL.findall(last)):
        return ""
    results = []
    for call in calls:
        try:
            function = json.loads(call)
            given = {"name": function["name"], "arguments": json.dumps(function["arguments"])}
        except (ValueError, KeyError, TypeError):
            return ""  # the environment takes such a text for the end
        results.append(f"\n<tool_response>\n{answer(given)}\n</tool_response>")
    return f"{_END}\n{_START}user{''.join(results)}{_END}\n{_START}assistant\n"


def _write(exercise: Exercise, style: str, rng: random.Random) -> str:
    steps, needed = [expression for expression, _ in exercise.problem.steps], int(exercise.level)
    expressions = {
        "all calls": steps[:needed],
        "no call": [],
        # Where no call is needed, it makes one nevertheless.
        "stopped": steps[: rng.randrange(1, needed)] if needed > 1 else steps[: 1 - needed],
        "in one call": [exercise.problem.expression],
    }[style]
    said = ""
    for expression in expressions:
        said += _call(expression)
        said += _reply(said)
    return f"{said}It is {exercise.answer}."


def _judge(exercise: Exercise, text: str) -> Verdict:
    *earlier, last = re.split(_GIVEN, text, flags=re.DOTALL)
    calls, needed = sum(len(_CALL.findall(part)) for part in earlier), int(exercise.level)
    given = reward("" if _CALL.search(last) else last, calls, {"answer": exercise.answer, "calls": needed})
    return Verdict(passed=given >= 0.5, formatted=calls == needed and "error" not in text, right=given > 0)


def _build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each digit, each word of the dialogues, and each fixed part of a prompt."""
    tokenizer = Tokenizer(models.BPE())
    split_text(tokenizer)
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    seen = Counter(piece for text in texts for piece, _ in split(text))
    words = sorted(word for word, count in seen.items() if 20 * count > len(texts) and len(word) > 1)
    fixed = (_BEFORE_TOOLS, json.dumps(TOOL), _AFTER_TOOLS)
    special = (_PAD, _END, _START)
    added = (*special, *_TAGS, *fixed)
    vocabulary = dict.fromkeys([*added, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words])
    # With ignore_merges, a word of the vocabulary is one token although no merges lead to it.
    tokenizer.model = models.BPE({word: id for id, word in enumerate(vocabulary)}, [], ignore_merges=True)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in added])
    return finish_tokenizer(tokenizer, special, _TEMPLATE, _PAD, _END)


def lesson(out: Path) -> Lesson:
    """Write the splits of the task into `out/task`. Return the lesson."""
    train, heldout = build_splits()
    splits = {"train": train, "heldout": heldout}
    write_splits(out / "task", {name: [problem.row for problem in split] for name, split in splits.items()})
    excluded = {problem.key for problem in heldout}
    rng = random.Random(0)
    parts = [f"system\nuser\nassistant\n{one.question}" for one in train[:200]]
    parts += [_write(Exercise("", one), style, rng) for one in train[:200] for style in STYLES]
    tokenizer = _build_tokenizer([re.sub(r"<[|\w/]+>", "", part) for part in parts])

    def exercise(problem: Problem) -> Exercise:
        message = {"role": "user", "content": problem.question}
        prompt = tokenizer.apply_chat_template([message], tools=[TOOL], tokenize=False, add_generation_prompt=True)
        return Exercise(prompt, problem)

    def exercises(seed: int) -> Iterator[Exercise]:
        return map(exercise, problem_stream(seed, excluded))

    return Lesson(
        sizes={
            "max_position_embeddings": 256,
            "max_window_layers": 4,
            "moe_intermediate_size": 64,
            "num_experts": 16,
            "num_hidden_layers": 4,
        },
        tokenizer=tokenizer,
        warm_start=WarmStartConfig(skill_steps=320, style_steps=100, batch=32),
        styles=STYLES,
        skill_style="all calls",
        skill_share=0.8,
        exercises=exercises,
        heldout=[exercise(problem) for problem in heldout],
        write=_write,
        judge=_judge,
        max_completion_tokens=MOST_TOKENS,
        given=f"(?s:{_GIVEN})",
        reply=_reply,
    )
