"""Finds what is missing on this machine, for any run or for the run of one config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from moe_rl.commands.machine import (
    ALWAYS,
    CUDA,
    NCCL,
    PYTHON,
    TRACKERS,
    TRANSFORMER_ENGINE,
    VLLM,
    Machine,
    Requirement,
    found_version,
    transformer_engine_fault,
)
from moe_rl.config.check_cluster import server_problems
from moe_rl.config.check_files import absent_problems, file_problems
from moe_rl.config.passed_on import needs_engine
from moe_rl.config.schema import ClusterConfig, Config
from moe_rl.errors import About, ConfigError, Problem, describe, with_extra
from moe_rl.models.hf import read_model
from moe_rl.rollout.attach import attach_problems
from moe_rl.vllm import patches


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Holds the result of the diagnosis.

    Attributes:
        missing: Reasons why a run cannot start here, one message each.
        notes: Optional parts that are missing, and what happens without them.
    """

    missing: list[Problem]
    notes: list[str]


def installation_problems(config: Config | None = None) -> list[Problem]:
    """Return why the installed software cannot do what a run needs, one message each.

    Without a config, this checks what every run needs. If vLLM samples on this machine, its patches are checked too;
    servers check their own.
    """
    versions = {part: found_version(part) for part in ALWAYS if part is not VLLM}
    unfit = [_unfit(part, version) for part, version in versions.items() if not fits(part, version)]
    problems = [*unfit, *_broken_engine()]
    if config is None or not config.rollout.servers:
        problems += patches.problems(capture="patch" if config is None else config.rollout.capture)
    if config is not None:
        problems += _engine_problems(config, found_version(TRANSFORMER_ENGINE))
    return problems


def tracker_problems(config: Config) -> Iterator[Problem]:
    """Yield why a tracker that the run asks for cannot be used on this machine. Only the machine of rank 0 needs it."""
    for name in config.report.trackers:
        part = TRACKERS[name]
        if not fits(part, version := found_version(part)):
            do = f"{with_extra(name)}, or leave {name} out"
            yield _unfit(part, version, {"key": "report.trackers", "part": part.name}, do)
        elif name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
            yield describe(
                "MLflow does not know where to send the run",
                where={"key": "report.trackers"},
                got="no MLFLOW_TRACKING_URI in the environment",
                expected="the address of an MLflow server",
                do="set MLFLOW_TRACKING_URI, or leave mlflow out",
            )


def _broken_engine() -> Iterator[Problem]:
    if fault := transformer_engine_fault():
        yield describe(
            "its parts do not belong together; megatron would import it and fail",
            where={"part": TRANSFORMER_ENGINE.name},
            got=fault,
            expected="transformer-engine, its library for CUDA and its library for torch, of one version",
            do="install transformer-engine-torch of the same version, which takes nvcc (make venv GPU=1), or uninstall "
            "every part",
        )


def _engine_problems(config: Config, engine: str) -> Iterator[Problem]:
    """Yield a problem for each setting that only TransformerEngine implements. engine: its version, "" if absent."""
    fit = bool(engine) and SpecifierSet(">=2.3").contains(engine, prereleases=True)
    for key in needs_engine(config) if not fit else ():
        yield describe(
            "only TransformerEngine implements it",
            where={"key": key},
            got=f"transformer-engine {engine}" if engine else "no transformer-engine",
            expected="transformer-engine 2.3 or later",
            do="install it (it needs a GPU), or remove the setting",
        )
    if config.train.lora is not None and engine:
        yield describe(
            "adapters are not supported on TransformerEngine's layers",
            where={"key": "train.lora"},
            got=f"transformer-engine {engine}",
            expected="an environment without it",
            do="uninstall it, or set train.lora to null",
        )


def fits(part: Requirement, installed: str) -> bool:
    """Return whether a version meets the requirement of `part`. Local labels ("2.13.0+cu130") are ignored."""
    return bool(installed) and SpecifierSet(part.required).contains(installed, prereleases=True)


def diagnose(machine: Machine, config: Config | None = None) -> Diagnosis:
    """Diagnose this machine. Without a config, this checks what every run needs."""
    missing = installation_problems(config)
    missing += _gpu_problems(machine, config)
    if config is not None:
        missing += [*tracker_problems(config), *_absent(config)]
    if config is not None and config.rollout.servers:
        missing += _server_problems(config)
    return Diagnosis(missing, [*_apex(machine), *_without(machine)])


def _absent(config: Config) -> list[Problem]:
    """Return what a config names and this machine lacks: the model, prompts, libraries, functions, folders."""
    try:
        facts = read_model(config.model.path)
    except ConfigError as error:
        return [*error.problems, *absent_problems(config)]
    return file_problems(config, facts)


def _server_problems(config: Config) -> list[Problem]:
    try:
        written = list(server_problems(config))
        return written or attach_problems(config, read_model(config.model.path), config.run.runs_dir)
    except ConfigError as error:
        return error.problems


def _unfit(part: Requirement, version: str, where: About | None = None, do: str = "") -> Problem:
    usual = "run make venv" if part in ALWAYS and part is not PYTHON else "install it"
    what, where = "this version was never tested" if version else "not installed", where or {"part": part.name}
    return describe(what, where=where, got=version or None, expected=part.required, do=do or usual)


def _gpu_problems(machine: Machine, config: Config | None) -> Iterator[Problem]:
    if machine.gpus:
        for part in (CUDA, NCCL):
            if not fits(part, machine.found[part.name]):
                yield _unfit(part, machine.found[part.name])
    elif config is not None and config.rollout.capture == "native":
        where: About = {"key": "rollout.capture"}
        what, got = "vLLM's own capture of routes needs a GPU", "native, but no GPU"
        yield describe(what, where=where, got=got, expected="patch or worker")
    if config is not None and config.cluster is not None:
        yield from _node_problems(machine, config.cluster)


def _node_problems(machine: Machine, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield why this machine does not match the cluster that the run is planned for."""
    if len(machine.gpus) < cluster.gpus_per_node:
        where: About = {"key": "cluster.gpus_per_node"}
        got, expected = len(machine.gpus), cluster.gpus_per_node
        yield describe("this machine has fewer GPUs", where=where, got=got, expected=expected)
    smallest = min((gpu.memory_bytes for gpu in machine.gpus), default=None)
    if smallest is not None and smallest < cluster.gpu_memory_gib * 2**30:
        yield describe(
            "a GPU of this machine has less memory",
            where={"key": "cluster.gpu_memory_gib"},
            got=f"{smallest / 2**30:.1f} GiB",
            expected=f"{cluster.gpu_memory_gib:g} GiB",
            do="set cluster.gpu_memory_gib to the memory of this GPU, and check --plan again",
        )


def _apex(machine: Machine) -> Iterator[str]:
    if machine.apex == "unrelated":
        yield describe(
            "the installed package of this name is not NVIDIA's; megatron would import it and fail",
            where={"part": "apex"},
            got="a toolkit for a web framework, which the package registry has under this name",
            expected="NVIDIA's apex, built from source, or none",
            do="uninstall it",
        )
    elif machine.apex == "NVIDIA's, without its CUDA extensions":
        yield describe("not used", where={"part": "apex"}, got=machine.apex, do="build it with --cpp_ext --cuda_ext")


def _without(machine: Machine) -> Iterator[str]:
    version = machine.found[TRANSFORMER_ENGINE.name]
    if not machine.gpus:
        yield "no GPU: ranks communicate with gloo, layers are torch's, vLLM must be its CPU build"
    elif not fits(TRANSFORMER_ENGINE, version):
        adam = "apex's fused one" if machine.apex == "NVIDIA's" else "torch's"
        yield (
            f"{TRANSFORMER_ENGINE.name} {version or 'is not installed'}: experts run one by one, attention pads "
            f"sequences to rectangles, Adam is {adam}"
        )
