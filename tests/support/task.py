"""Opens the prompts of a config as a run does. The working directory is the repository."""

from moe_rl.config.schema import Config
from moe_rl.tasks.prompts import PromptSource, TaskPrompts, load_task
from moe_rl.tasks.tokenizer import TextCodec


def task_of(config: Config) -> TaskPrompts:
    """Return all prompts of the task."""
    return load_task(config, TextCodec(config.model.path, ()))


def source_of(config: Config) -> PromptSource:
    """Return the training prompts in their order."""
    return PromptSource(task_of(config).train, config.run.seed)
