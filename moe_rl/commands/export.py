"""Implements `moe-rl export`: writes a run's weights, or an unpacked checkpoint, as a Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.commands.tokenizer_code import convert_tokenizer
from moe_rl.config.layout import layout_problems, on_one_rank
from moe_rl.config.schema import Config
from moe_rl.config.training import ParallelConfig
from moe_rl.disk import write_json
from moe_rl.errors import ConfigError
from moe_rl.models.hf import ModelFacts, expected_tensors, read_model
from moe_rl.models.weight_files import notes
from moe_rl.train import run_folder

EPILOG = """
One process can export any run; it then holds the whole model. Several processes, started with torchrun, divide the
model in the layout of the run, or in another layout such as parallel.expert=4. Each reads and writes its own part.
    torchrun --nproc-per-node N -m -- moe_rl export --run RUN --out FOLDER
(Without the two dashes before moe_rl, torchrun takes --run as its own option.)
--model: the ranks divide the tensors of a checkpoint in float8 (DeepSeek-V3) or 4 bits (gpt-oss), and write the numbers
that these encode.
--tokenizer: some checkpoints have a tokenizer that is Python code (auto_map in tokenizer_config.json, no
tokenizer.json). The first call names the files of the code and their digest, and runs nothing. Read the files, and give
the digest:
    moe-rl export --tokenizer Moonlight-16B-A3B --out tokenizer
    moe-rl export --tokenizer Moonlight-16B-A3B --out tokenizer --run-code DIGEST
    cp tokenizer/* Moonlight-16B-A3B/
Exit status: 0 done, 2 an error with an explanation.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, the description and the exit status of `moe-rl export`."""
    parser.description = "Write weights as a Hugging Face folder that transformers and vLLM load."
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, metavar="RUN", help="folder of a run")
    source.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face checkpoint")
    source.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="a checkpoint whose tokenizer needs its own code"
    )
    add = parser.add_argument
    add("--run-code", metavar="DIGEST", help="run this code of --tokenizer once, to make a tokenizer.json from it")
    add(
        "--step",
        type=checkpoints.step_argument,
        metavar="N",
        help="the run's checkpoint after this many steps, or the best one: best (default: the newest)",
    )
    add("--out", type=Path, required=True, metavar="FOLDER", help="the folder to create")
    add(
        "--adapter",
        action="store_true",
        help="write the adapters of a run with train.lora as a folder of peft, not the weights with them merged in",
    )
    add("--dtype", choices=("bfloat16", "float32"), help="default: the dtype of the run, or bfloat16 with --model")
    add("--json", type=Path, metavar="FILE", help="write a description of the export (folder, dtype, ...) to this file")
    add(
        "overrides",
        nargs="*",
        metavar="a.b=c",
        help="use another layout than the run (parallel.*), or give the new path of its model (model.path)",
    )


def run(options: argparse.Namespace) -> int:
    """Check, then export. Return the exit status."""
    if options.run_code is not None and options.tokenizer is None:
        raise ConfigError("--run-code needs --tokenizer")
    if options.tokenizer is not None:
        print(f"written: {options.out}, {convert_tokenizer(options.tokenizer, options.out, options.run_code)}")
        return 0
    if options.adapter and (options.run is None or options.dtype or options.json):
        raise ConfigError("--adapter needs --run, and takes neither --dtype nor --json")
    if options.model is not None and (options.overrides or options.step is not None):
        raise ConfigError("--step and overrides of parallel.* need --run: a --model has no layout")
    if options.model is not None:
        return _from_model(options, options.dtype or "bfloat16")
    folder, config = run_folder.reopen(options.run, options.overrides, may_change=("parallel.", "model.path"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 and not any(text.startswith("parallel.") for text in options.overrides):
        config = on_one_rank(config)
    facts, dtype = read_model(config.model.path), options.dtype or config.train.dtype
    if problems := list(layout_problems(config.parallel, config.train, facts, ranks)):
        raise ConfigError(problems)
    if options.adapter and config.train.lora is None:
        raise ConfigError("this run trained no adapters", where={"key": "train.lora"}, do="leave --adapter out")
    path = checkpoints.find(folder.checkpoints, options.step)
    done, first = write_weights(path, options.out, config, facts, dtype, adapter=options.adapter)
    if first:
        print(f"written: {options.out}, the {'adapters' if options.adapter else 'weights'} after {done} steps")
        _write_result(options, dtype, {"step": done})
    return 0


def write_weights(
    path: Path | None, out: Path, config: Config, facts: ModelFacts, dtype: str, *, adapter: bool = False
) -> tuple[int, bool]:
    """Write the weights of a run's checkpoint as a Hugging Face folder. All processes call it together.

    Args:
        path: The checkpoint; None: model.path with the adapters, if any, that the run begins with.
        config: Of the run, in the layout of these processes.
        adapter: Write a folder of peft with the adapters alone.

    Returns:
        The steps of the checkpoint, 0 without one, and whether this process is the first.
    """
    # torch and megatron are imported only here, so that mistakes in the options show at once.
    import torch.distributed as dist

    from moe_rl.megatron import checkpoint, hf_map, world
    from moe_rl.megatron.frozen_policy import ReferencePolicy
    from moe_rl.megatron.hf_files import CheckpointReader, write_checkpoint
    from moe_rl.megatron.lora import write_peft
    from moe_rl.megatron.model import DTYPES, unwrap

    world.start(config.parallel, seed=config.run.seed, timeout_seconds=3600)
    try:
        model, train = config.model.path, config.train
        # A checkpoint has the adapters, and what they began with may be gone.
        if path is not None and train.lora is not None:
            train = train.model_copy(update={"lora": train.lora.model_copy(update={"start": None})})
        policy = ReferencePolicy(facts, train, config.parallel, model, temperature=1.0)
        done = 0 if path is None else checkpoint.load_weights(path, policy)["step"]
        if adapter:
            assert train.lora is not None
            write_peft(out, map(unwrap, policy.chunks), facts, train.lora, model)
        else:
            dense, experts = world.holds_first_replica()
            tensors = hf_map.export(map(unwrap, policy.chunks), facts, dense=dense, experts=experts)
            write_checkpoint(out, tensors, facts, CheckpointReader(model, facts), DTYPES[dtype])
        return done, dist.get_rank() == 0
    finally:
        world.stop()


def _from_model(options: argparse.Namespace, dtype: str) -> int:
    facts = read_model(options.model)
    import torch.distributed as dist

    from moe_rl.megatron import world
    from moe_rl.megatron.hf_files import CheckpointReader, write_checkpoint
    from moe_rl.megatron.model import DTYPES

    world.start(ParallelConfig(), seed=0, timeout_seconds=3600)
    try:
        source = CheckpointReader(options.model, facts)
        mine = list(expected_tensors(facts))[dist.get_rank() :: dist.get_world_size()]
        write_checkpoint(options.out, ((name, source.whole(name)) for name in mine), facts, source, DTYPES[dtype])
        if dist.get_rank() == 0:
            for note in notes(options.model, facts):
                print(note)
            print(f"written: {options.out}, {len(source.packing)} tensors unpacked")
            _write_result(options, dtype, {"unpacked": len(source.packing)})
    finally:
        world.stop()
    return 0


def _write_result(options: argparse.Namespace, dtype: str, result: dict[str, int]) -> None:
    """Write the file of --json: the folder, its contents, and `result`."""
    if options.json is None:
        return
    index = json.loads((options.out / "model.safetensors.index.json").read_text())
    size = {"tensors": len(index["weight_map"]), "bytes": index["metadata"]["total_size"]}
    write_json(options.json, {"folder": str(options.out), "dtype": dtype} | size | result)
