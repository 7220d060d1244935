"""Makes whole RL steps with TRL's GRPOTrainer and prints their seconds as a list: `trl_steps.py JSON`, with the fields
of `peers.Steps`.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
import time
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))

from peer_sides.rewards import parity

from moe_rl.tasks.rewards import answer_format, exact_match


class Stamps(TrainerCallback):
    """Notes when each update ended."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, *args, **kwargs):
        self.ends.append(time.perf_counter())


def main() -> None:
    todo, stamps = json.loads(sys.argv[1]), Stamps()
    updates = todo["updates"]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            seed=1,
            model_init_kwargs={"dtype": todo["dtype"]},
            bf16=todo["dtype"] == "bfloat16",
            gradient_checkpointing=False,  # on by default; the step would take longer
            per_device_train_batch_size=todo["prompts"] * todo["group"] // updates,
            steps_per_generation=updates,
            num_generations=todo["group"],
            max_completion_length=todo["longest_answer"],
            temperature=1.0,
            loss_type="grpo",
            importance_sampling_level="sequence",
            epsilon=0.1,
            epsilon_high=0.15,
            beta=0.0,
            router_aux_loss_coef=0.0,  # the demo trains without one
            learning_rate=1e-4,
            max_steps=updates * (todo["steps"] + 1),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(todo["model"])
        trainer = GRPOTrainer(
            model=todo["model"],
            reward_funcs=[_of_tokens(reward, tokenizer) for reward in (exact_match, answer_format, parity)],
            args=settings,
            train_dataset=load_dataset("json", data_files=todo["data"], split="train"),
            processing_class=tokenizer,
            callbacks=[stamps],
        )
        trainer.train()
    # the first step, of which only the end is known, warms up
    ends = stamps.ends[updates - 1 :: updates]
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    seconds = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    print(json.dumps({"seconds": seconds, "answer_tokens": sum(lengths) / len(lengths)}))


def _of_tokens(reward, tokenizer):
    """Make a reward function for TRL, which would leave the tags of the answer out of the text."""
    columns = inspect.signature(reward).parameters.keys() - {"completion"}

    def rewards(completion_ids, **given):
        of_row = [{name: given[name][row] for name in columns} for row in range(len(completion_ids))]
        ends = tokenizer.eos_token_id
        texts = [tokenizer.decode([token for token in ids if token != ends]) for ids in completion_ids]
        return [reward(text, **columns) for text, columns in zip(texts, of_row, strict=True)]

    rewards.__name__ = reward.__name__
    return rewards


if __name__ == "__main__":
    main()
