"""Opens the prompts of a config as a run does."""

from moe_rl.config.schema import Config
from moe_rl.tasks.prompts import PromptSource, load_task
from moe_rl.tasks.tokenizer import TextCodec


def source_of(config: Config) -> PromptSource:
    """Return the training prompts in their order. The working directory is the repository."""
    return PromptSource(load_task(config, TextCodec(config.model.path, ())).train, config.run.seed)
