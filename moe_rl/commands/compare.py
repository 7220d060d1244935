"""Implements `moe-rl compare`: checks the request before any process starts, then compares sampler and trainer."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.commands.diagnosis import installation_problems
from moe_rl.commands.export import write_weights
from moe_rl.config.check import problems, refuse
from moe_rl.config.layout import on_one_rank
from moe_rl.config.load import load_config
from moe_rl.config.schema import Config
from moe_rl.disk import write_whole
from moe_rl.errors import About, ConfigError, MoeRLError, ReplayError
from moe_rl.models.hf import read_model
from moe_rl.train import run_folder
from moe_rl.train.run_folder import RunFolder

PRECISIONS = ("bfloat16", "float32", "fp8")
BUDGET_TOKENS = 100_000
# --bisect tries as many versions of the weights, those nearest to the sampler's.
_VERSIONS = 3
OVERRIDES = (
    "model.path",
    "train.dtype",
    "train.microbatch_tokens",
    "parallel.",
    "rollout.kv_cache_mib",
    "rollout.max_concurrent",
)

_EPILOG = """
Makes one native and one replayed forward pass of the trainer, with the same weights, tokens and packing, and compares
both with the same stored logprobs of the sampler. A second native pass and one with another packing measure the noise
floor. R2 and planted faults follow. --run takes the newest step whose rollouts are kept together with the weights that
sampled them, and also scores them with every later checkpoint. Works with plain python (one rank) and under torchrun.
torchrun takes --run as its own option unless two dashes come first:
torchrun --nproc-per-node N -m -- moe_rl compare --run RUN

--bisect swaps one cause at a time between sampler and trainer of a run, most of them in transformers on the CPU, and
prints a table: how much of the policy KL each one removes, which of them carry it, and what was not tested. It writes
bisection.json. Its exit status is 0 if the found causes carry most of the KL, or there is none, else 3.

While the paired difference of k3 is undecided, it samples more with the same weights, up to --budget-tokens.

Exit status: 0 if every replayed route was applied (mismatch 0), the interval of the paired difference of the policy KL
k3, native less replay, lies above 0, and the self-test passes: every planted fault is refused where it must be, and
worsens the numbers where it is forced past the checks. 3 if not. 2 for bad input.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, the description and the exit status of the comparison."""
    parser.description = "Compare sampler and trainer before and after routing replay."
    parser.epilog, parser.formatter_class, parser.allow_abbrev = _EPILOG, argparse.RawDescriptionHelpFormatter, False
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, metavar="RUN_DIR", help="compare on the rollouts that this run kept")
    source.add_argument("--config", type=Path, metavar="FILE", help="sample the prompts of a first step, then compare")
    source.add_argument(
        "--bisect", type=Path, metavar="RUN_DIR", help="find which cause makes sampler and trainer of this run differ"
    )
    add = parser.add_argument
    add(
        "--engines",
        action="store_true",
        help="with --bisect: also start the vLLM engines and the ranks that some causes need",
    )
    add(
        "--sampler-dtype",
        nargs="+",
        type=_precision_or_override,
        default=[],
        metavar="DTYPE",
        help=f"sample the same prompts now in each of these precisions ({', '.join(PRECISIONS)}), one "
        "engine after the other; fp8 means float8 weights; each adds lines to the table (default "
        "with --config: the precision of the config, which comes first)",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for routing_kl.json and .html (default: the run's folder, or a new one)",
    )
    add(
        "--budget-tokens",
        type=_tokens,
        metavar="N",
        help="sample more with the same weights until the verdict is decided, or N completion tokens are compared "
        f"(default {BUDGET_TOKENS:,}, with an environment 0: sample no more)",
    )
    add("--json", type=Path, metavar="FILE", help="also write the result to this file")
    add(
        "overrides",
        nargs="*",
        metavar="a.b=c",
        help=f"replace single values of the config (--run: only {', '.join(OVERRIDES)}...)",
    )


def run(options: argparse.Namespace) -> int:
    """Check the options, compare, and write the result. Return the exit status."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        if options.bisect or options.engines:
            return _bisect(options)
        config, folder = _configure(options)
        # A run that was compared kept its prompts, and may have been moved to a machine without their files.
        all_problems = problems(config, int(os.environ.get("WORLD_SIZE", "1")), samples=folder is None)
        if options.config or options.sampler_dtype or options.budget_tokens:
            all_problems += installation_problems(config)
        refuse(all_problems)
    except MoeRLError as error:
        if rank == 0:
            print(f"moe_rl: {error}", file=sys.stderr)
        return 2
    try:
        return _compare(config, folder, options)
    except ReplayError as error:
        print(f"moe_rl: rank {rank}: replay was not exact: {error}", file=sys.stderr, flush=True)
        return 3
    except MoeRLError as error:
        print(f"moe_rl: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2


def _bisect(options: argparse.Namespace) -> int:
    """Find the causes, print the table and write bisection.json. Return the exit status."""
    if options.bisect is None:
        raise ConfigError("is for --bisect only", where={"option": "--engines"})
    beside = options.overrides + options.sampler_dtype
    beside += [f"--budget-tokens {options.budget_tokens}"] if options.budget_tokens is not None else []
    if "WORLD_SIZE" in os.environ or beside:
        got, expected = " ".join(beside) or "torchrun", "only --engines, --out and --json beside it"
        what = "compares a run as it was, in one process"
        raise ConfigError(what, where={"option": "--bisect"}, got=got, expected=expected)
    run = run_folder.existing(options.bisect, "--bisect")
    config = load_config(run.config)
    _existing_folder(options.out)
    all_problems = problems(on_one_rank(config), 1, samples=False)
    refuse(all_problems + (installation_problems(_in_own_engine(config)) if options.engines else []))
    # torch, megatron and transformers are imported only here, so that mistakes in the options show at once.
    from moe_rl.comparison.bisection import bisect, text

    out = options.out or run.path
    with _sides(config, run, out if options.engines else None) as (sampler, trainer, untested):
        bisection = bisect(sampler, trainer, untested=untested, seed=config.run.seed)
    _write(json.dumps(asdict(bisection), indent=1), out / "bisection.json", options.json)
    print(text(bisection))
    print(f"written: {out / 'bisection.json'}")
    return 0 if bisection.explained else 3


@contextmanager
def _sides(config: Config, run: RunFolder, out: Path | None) -> Iterator[tuple[Any, Any, dict[str, str]]]:
    """Yield the two sides of a run, and what is not tested and why. out: for engines and ranks; None: start none."""
    from moe_rl.comparison import sources
    from moe_rl.comparison.run_sides import Versions, sides_of_run
    from moe_rl.megatron import world

    saved = dict(checkpoints.complete(run.checkpoints))
    step, (sampled, *_) = sources.of_run(run, config)
    trained = step - 1 if step - 1 in saved else sampled.version
    start = sources.initial(config).path
    paths = {0: start} | saved
    nearest = sorted(paths, key=lambda version: abs(version - sampled.version))[:_VERSIONS]
    with tempfile.TemporaryDirectory(prefix="moe-rl-bisect-") as spare:
        folders = {}
        for version in dict.fromkeys((sampled.version, trained, *nearest)):
            folders[version], path = Path(spare) / f"version{version}", paths[version]
            if version == 0 and config.starts_from_model:
                folders[version] = config.model.path
            else:
                facts = read_model(config.model.path)
                write_weights(path, folders[version], on_one_rank(config), facts, config.train.dtype)
        work = None if out is None else out / "bisection"
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
        world.start(on_one_rank(config).parallel, seed=config.run.seed, timeout_seconds=3600)
        try:
            versions = Versions(step, sampled.version, trained, paths[trained], folders)
            yield sides_of_run(config, run, versions, work)
        finally:
            world.stop()


def _existing_folder(out: Path | None) -> None:
    if out and not out.is_dir():
        raise ConfigError("no such folder", where={"option": "--out"}, got=out, do="make it first")


def _tokens(value: str) -> int:
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"got {value}, expected a number of tokens, 0 or more")
    return int(value)


def _precision_or_override(value: str) -> str:
    """Let an option with several values also take the overrides after it; `_configure` separates them."""
    if value not in PRECISIONS and "=" not in value:
        raise argparse.ArgumentTypeError(f"got {value}, expected one of {', '.join(PRECISIONS)}")
    return value


def _configure(options: argparse.Namespace) -> tuple[Config, RunFolder | None]:
    options.overrides += [value for value in options.sampler_dtype if "=" in value]
    options.sampler_dtype = [value for value in options.sampler_dtype if "=" not in value]
    if options.config:
        config, run = run_folder.with_date(load_config(options.config, options.overrides)), None
    else:
        others = [text for text in options.overrides if not text.startswith(OVERRIDES)]
        if others:
            got, expected = " ".join(others), f"only overrides of {', '.join(OVERRIDES)}"
            do = "give --config to compare another setting"
            where: About = {"option": "--run"}
            raise ConfigError("compares a run as it was", where=where, got=got, expected=expected, do=do)
        run = run_folder.existing(options.run, "--run")
        config = load_config(run.config, options.overrides)
    if "WORLD_SIZE" not in os.environ and not any(text.startswith("parallel.") for text in options.overrides):
        # The layout of the run may need many ranks; without torchrun there is one.
        config = on_one_rank(config)
    if len(set(options.sampler_dtype)) != len(options.sampler_dtype):
        raise ConfigError("named twice", where={"option": "--sampler-dtype"}, got=" ".join(options.sampler_dtype))
    _existing_folder(options.out)
    episodes = config.task.environment is not None
    if episodes and (options.config or options.budget_tokens):
        raise ConfigError(
            "compare plays no episodes, and cannot sample the prompts of an environment",
            where={"option": "--config" if options.config else "--budget-tokens", "given": "task.environment is set"},
            got=options.config or options.budget_tokens,
            expected="--run, with --budget-tokens 0 or without this option",
        )
    if options.budget_tokens is None:
        options.budget_tokens = 0 if episodes else BUDGET_TOKENS
    return _in_own_engine(config), run


def _in_own_engine(config: Config) -> Config:
    """Return the config for the one engine that this command starts, whatever sampled in the run."""
    own = {
        "servers": (),
        "token_file": None,
        "max_lost_servers": 0,
        "engines": 1,
        "in_flight": None,
        "weight_transfer": "auto",
        "vllm": {name: value for name, value in config.rollout.vllm.items() if name != "stream_interval"},
    }
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=own)})


def _compare(config: Config, run: RunFolder | None, options: argparse.Namespace) -> int:
    # torch and megatron are imported only here, so that mistakes in the options show at once.
    import torch.distributed as dist

    from moe_rl.comparison.experiment import Asked, compare
    from moe_rl.comparison.kl_page import page, text
    from moe_rl.comparison.sources import own_precision
    from moe_rl.megatron import world

    world.start(config.parallel, seed=config.run.seed, timeout_seconds=3600)
    try:
        main_rank = dist.get_rank() == 0
        out = options.out or (run.path if run else None)
        if out is None:
            out = Path(world.broadcast(str(run_folder.create(config).path) if main_rank else None, str))
        if main_rank and config.task.environment is not None:
            print("task.environment is set, and compare plays no episodes: the verdict is about what the run kept")
        precisions = tuple(options.sampler_dtype) or (() if run else (own_precision(config.rollout),))
        result, detail = compare(Asked(config, run, precisions, out, options.budget_tokens))
        if main_rank:
            # The results are on disk before anything shows them: what shows them may fail.
            _write(json.dumps(result, indent=1, allow_nan=False), out / "routing_kl.json", options.json)
            print(text(result))
            write_whole(out / "routing_kl.html", page(result, detail, config))
            print(f"written: {out / 'routing_kl.json'}, {out / 'routing_kl.html'}")
        # torchrun ends all ranks as soon as one has a status other than 0, so only the rank that writes the result
        # returns it.
        return result["verdict"]["exit_code"] if main_rank else 0
    finally:
        world.stop()


def _write(content: str, path: Path, copy: Path | None) -> None:
    for file in filter(None, (path, copy)):
        write_whole(file, content + "\n")
