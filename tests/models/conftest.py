"""Provides the model folders of tests/config."""

from tests.config.conftest import (  # noqa: F401  fixtures
    config_file,
    hf_config,
    model,
    write_deepseek,
    write_glm,
    write_gpt_oss,
    write_model,
)
