"""Implements `moe-rl trace`: inspects, verifies, fills and plots a store of routing traces.

    moe-rl trace inspect STORE
    moe-rl trace verify STORE
    moe-rl trace import STORE replies.jsonl --format vllm --shard served-1 --model assets/tiny_moe/policy
    moe-rl trace plot STORE --out plots [--against OTHER]

STORE is the folder (or fsspec URL) of a store, or one .safetensors file of it. Exit status: 1 when something is wrong
with the traces (verify, import --check), 2 with one message when a command failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from moe_rl.disk import write_json
from moe_rl.errors import MoeRLError, TraceError
from moe_rl.report.format import binary
from moe_rl.trace import TraceSpec, recover
from moe_rl.trace.adapters import importing
from moe_rl.trace.adapters.importing import ARRAY_FORMATS, FORMATS, import_array, import_lines, lint_array, lint_lines
from moe_rl.trace.audit import faults
from moe_rl.trace.inspection import inspect, measure, references, select
from moe_rl.trace.model_spec import checkpoint_spec, read_layer_map
from moe_rl.trace.parquet import export_parquet

_STORE = "folder or fsspec URL of a store, or one .safetensors file of it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of the store and their options."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, does, text: str, *, store: bool = True, **more):
        parser = commands.add_parser(name, help=text, description=text, **more)
        parser.set_defaults(trace_command=does)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to this file")
        if store:
            parser.add_argument("store", help=_STORE)
        return parser.add_argument

    key: dict[str, Any] = {"default": "*", "metavar": "PATTERN", "help": "shell pattern that keys match (default: *)"}
    command("inspect", _inspect, "show the contents of a store, its size, the entropy bound, and the popular experts")
    command("verify", _verify, "check every checksum and invariant; status 1 if one does not hold")
    add = command("cat", _cat, "print records as JSON lines")
    add("--key", **key)
    add("--limit", type=int, default=10, metavar="N", help="largest number of records; 0: all (default: 10)")
    add("--layers", type=_numbers, metavar="0-11,13", help="global numbers of MoE layers")
    add("--rows", type=_range, metavar="FIRST:LAST", help="rows of each record, LAST not included")
    text, raw = "import replies or arrays of other samplers into a new shard", argparse.RawDescriptionHelpFormatter
    add = command("import", _import, text, store=False, formatter_class=raw, epilog=importing.__doc__)
    add("store", type=Path, help="folder of the store")
    add("file", type=Path, help="replies as JSON lines, or an array")
    add("--format", required=True, choices=[*FORMATS, *ARRAY_FORMATS], help="form of the file")
    add("--shard", default="imported", help="name of the shard to publish (default: imported)")
    add("--check", action="store_true", help="write nothing; print every problem of the file")
    add(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="checkpoint that was served; its config.json gives the values of the next four options, the layer map "
        "only for families that are trained here",
    )
    add("--experts", type=int, help="routed experts per layer")
    add("--top-k", type=int, help="experts per token")
    add("--layer-map", metavar="d*3,m*58", help="d dense, m MoE, h hash-routed, t/r MTP left out/recorded")
    add("--fingerprint", help="text that names the model")
    add("--token-ids", type=Path, metavar="NPY", help="npy, megatron: token ids of the forward pass")
    add("--key", help="npy, megatron: key of the record")
    add("--weight-version", type=int, help="npy, megatron: weight version of all rows")
    add = command("export", _export, "write records to a Parquet file (needs pyarrow)")
    add("file", type=Path, help="the Parquet file to write")
    add("--key", **key)
    add("--per", choices=["layer", "token"], default="layer", help="meaning of a row (default: layer)")
    text = "save the records of an unsealed file, left by a dead writer, as a new shard"
    add = command("repair", _repair, text, store=False)
    add("file", type=Path, help="a hidden .tmp file of a store")
    add("--name", help="name of the new shard (default: the old name with -recovered)")
    add = command("bench", _bench, "measure how fast this machine encodes and reads the records of a store")
    add("--max-bytes", type=int, default=64 << 20, help="amount of raw routes to measure with")
    text = "plot popularity and co-activation of experts, and the disagreement of two stores, as PNG and HTML"
    add = command("plot", _plot, text)
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for the plots")
    add("--against", metavar="STORE", help="a second recording of the same sequences")


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    try:
        status, document = options.trace_command(options)
        if options.json:
            write_json(options.json, document)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MoeRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return status


def _inspect(options: argparse.Namespace) -> tuple[int, object]:
    facts = inspect(select(options.store))
    print(f"{facts['store']}: {facts['shards']} shards, {binary(facts['bytes'])}")
    for name in facts.get("unsealed", []):
        print(f"  not sealed: {name} (repair saves it if its writer is dead)")
    for model in facts["models"]:
        print(f"model {model['fingerprint'][:16]}: {model['top_k']} of {model['num_experts']} experts, layers ", end="")
        print(re.sub(r"(.)\1{3,}", lambda run: f"{run[1]}*{len(run[0])} ", model["layer_map"]).strip())
        named = ("sequences", "incomplete_sequences", "records", "continued_records", "aborted_records")
        shared = f"{model['stored_tokens']:,} of them stored: a prefix that sequences share is stored once"
        table = {name.replace("_", " "): f"{model[name]:,}" for name in named} | {
            "tokens of the sequences": f"{model['tokens']:,}, {shared}",
            "rows by provenance": ", ".join(f"{k} {v:,}" for k, v in model["provenance"].items()) or "none",
            "weight versions": model["weight_versions"] or "none",
            "chunks by codec": ", ".join(f"{k} {v:,}" for k, v in model["codecs"].items()) or "none",
        }
        if model["aux"]:
            table["other arrays"] = ", ".join(model["aux"])
        if model["tokens"]:
            size = f"{model['bytes_per_token']:.1f}, {model['bytes_per_stored_token']:.1f} per stored one"
            table["bytes per token"] = f"{size}, raw {model['raw_bytes_per_token']}"
            stored = f"{model['bits_per_set']:.2f} in chunks, {model['bits_per_set_with_all']:.2f} in all of the file"
            low = f"bound {model['bits_per_set_bound']:.2f}, from popularity alone {model['bits_per_set_order0']:.2f}"
            table["bits per set"] = f"{stored}; {low}"
        print(*(f"  {name:26} {value}" for name, value in table.items()), sep="\n")
        if not model["tokens"]:
            continue
        print("  layer      sets  busiest     load  never chosen  evenness")
        for row in model["popularity"]:
            print(
                f"  {row['layer']:5} {row['sets']:9,}  {row['busiest_expert']:7}  {row['busiest_load']:6.2f}x"
                f"  {row['idle_experts']:12}  {row['evenness']:8.1%}"
            )
    return 0, facts


def _verify(options: argparse.Namespace) -> tuple[int, object]:
    selection = select(options.store)
    messages = faults(selection)
    print(*messages, sep="\n", end="\n" if messages else "")
    print(f"{len(selection.shards)} shards: {f'{len(messages)} faults' if messages else 'no faults'}")
    return int(bool(messages)), {"store": selection.root, "shards": list(selection.shards), "faults": messages}


def _cat(options: argparse.Namespace) -> tuple[int, object]:
    selection, count = select(options.store), 0
    for ref in references(selection, options.key):
        if count == options.limit > 0:
            print(f"there are more than {count} records: --limit 0 prints all", file=sys.stderr)
            break
        layers = selection.store.info(ref).layers
        if options.layers is not None:
            layers = tuple(layer for layer in layers if layer in options.layers)
            if not layers:
                raise TraceError(
                    "no such layer was recorded",
                    where={"option": "--layers", "record": ref.key},
                    got=", ".join(map(str, options.layers)),
                    expected=", ".join(map(str, selection.store.info(ref).layers)),
                )
        first, last = options.rows or (0, ref.rows)
        record = selection.store.read(ref, layers=layers, rows=(min(first, ref.rows), min(last, ref.rows)))
        line = {
            "key": record.key,
            "shard": ref.parts[0].shard,
            "rows": ref.rows,
            "first_row": record.first_row,
            "layers": record.layers,
            "aborted": record.aborted,
            "spans": [[span.rows, span.weight_version, span.provenance.name.lower()] for span in record.spans],
            "token_ids": record.token_ids.tolist(),
            "routes": record.routes.tolist(),
        }
        print(json.dumps(line, separators=(",", ":")))
        count += 1
    return 0, {"store": selection.root, "records": count}


def _import(options: argparse.Namespace) -> tuple[int, object]:
    spec, path, form = _spec(options), options.file, options.format
    if options.check:
        known = {"tokens": options.token_ids, "key": options.key, "weight_version": options.weight_version}
        linted = lint_array(path, spec, form, **known) if form in ARRAY_FORMATS else lint_lines(path, spec, form)
        document, bad, sequences = [], 0, 0
        for where, findings in linted:
            sequences += 1
            bad += any(finding.certain for finding in findings)
            document += [{"sequence": where, **{k: getattr(f, k) for k in f.__slots__}} for f in findings]
            print(*(f"{where}: {finding}" for finding in findings), sep="\n", end="\n" if findings else "")
        print(f"{sequences} sequences, {bad} with faults")
        return int(bool(bad)), {"sequences": sequences, "faulty": bad, "findings": document}
    if form in ARRAY_FORMATS:
        if not (options.token_ids and options.key and options.weight_version is not None):
            raise TraceError(
                f"{form} needs more", where={"option": "--format"}, do="give --token-ids, --key and --weight-version"
            )
        known = {"key": options.key, "weight_version": options.weight_version}
        refs = import_array(path, options.token_ids, options.store, options.shard, spec, form, **known)
    else:
        refs = import_lines(path, options.store, options.shard, spec, form)
    rows = sum(ref.rows for ref in refs)
    print(f"{len(refs)} sequences, {rows:,} rows in shard {options.shard}")
    references = [dataclasses.asdict(ref) for ref in refs]
    return 0, {"shard": options.shard, "sequences": len(refs), "rows": rows, "references": references}


def _export(options: argparse.Namespace) -> tuple[int, object]:
    rows = export_parquet(select(options.store), options.file, pattern=options.key, per=options.per)
    print(f"{rows:,} rows in {options.file}")
    return 0, {"file": str(options.file), "rows": rows}


def _repair(options: argparse.Namespace) -> tuple[int, object]:
    name = options.name or options.file.name.lstrip(".").rsplit(".", 2)[0] + "-recovered"
    saved = recover(options.file, name)
    print(f"{len(saved.records)} records saved as {saved.path}; {saved.left:,} bytes left out")
    if saved.fault:
        print(f"reading stopped at: {saved.fault}")
    return 0, {"path": str(saved.path), "records": len(saved.records), "left": saved.left, "fault": saved.fault}


def _bench(options: argparse.Namespace) -> tuple[int, object]:
    result = measure(select(options.store), max_bytes=options.max_bytes)
    for name, value in result.items():
        label = name.removesuffix("_gb_per_core_second").removesuffix("_gb_per_second").replace("_", " ")
        per = "s of one core" if name.endswith("_core_second") else "s"
        print(f"{label:16} {f'{value * 1e3:,.3g} MB/{per}' if isinstance(value, float) else f'{value:,}'}")
    return 0, result


def _plot(options: argparse.Namespace) -> tuple[int, object]:
    from moe_rl.report.trace_page import write_plots  # matplotlib takes a second to import

    against = select(options.against) if options.against else None
    paths = write_plots(select(options.store), options.out, against)
    print(*paths, sep="\n")
    return 0, {"files": [str(path) for path in paths]}


def _spec(options: argparse.Namespace) -> TraceSpec:
    """Return the spec of the model, from the served checkpoint or from the options."""
    if options.model:
        return checkpoint_spec(
            options.model,
            layer_map=options.layer_map,
            num_experts=options.experts,
            top_k=options.top_k,
            fingerprint=options.fingerprint,
        )
    required = (options.fingerprint, options.experts, options.top_k, options.layer_map)
    if None in required:
        do = "give --model, or all of --experts, --top-k, --layer-map and --fingerprint"
        raise TraceError("the model of the traces is not known", do=do)
    return TraceSpec(required[0], required[1], required[2], read_layer_map(options.layer_map))


def _numbers(text: str) -> set[int]:
    """Parse numbers and ranges, such as 0-11,13."""
    numbers: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _range(text: str) -> tuple[int, int]:
    first, last = map(int, text.split(":"))
    if not 0 <= first <= last:
        raise ValueError(text)
    return first, last
