"""`moe-rl check-replay DUMP`: check the routes of a batch that any trainer has saved. Needs no model, store or sampler.

DUMP is a .npz file of `numpy.savez`, with arrays of N tokens of S sequences, end to end:

    token_ids    [N]        forwarded tokens: prompt + completion without the last token
    lengths      [S]        tokens of each sequence
    routes       [N, C, K]  the recorded experts of all decoder layers, or of those with experts
    native_topk  [N, L, K]  optional: what the trainer's routers choose by themselves, with the same weights
    scores       [N, L, E]  optional: what they rank by, for claims about single ids
    prompts      [S]        optional: tokens of each prompt
    lags         [N]        optional: how many updates the weights that routed a row are behind

Each claim is proven, weak or refused. Exit status: 1 when a claim is refused, 2 with one message when the file cannot
be read.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

import numpy as np

from moe_rl.disk import write_json
from moe_rl.errors import DataError
from moe_rl.replay.batch_check import BatchReport, check_batch

_BY_TOKEN = ("token_ids", "routes", "native_topk", "scores", "lags")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe-rl check-replay`."""
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("dump", type=Path, metavar="DUMP", help="the .npz file")
    parser.add_argument("--experts", type=int, required=True, metavar="N", help="experts of a layer")
    parser.add_argument(
        "--layer-map", metavar="d*3,m*58", help="d dense, m with experts, h hash-routed (default: all m)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the claims to this file")


def run(options: argparse.Namespace) -> int:
    """Print the claims. Returns the exit status."""
    report = check_dump(options.dump, options.experts, options.layer_map)
    print(report)
    if options.json:
        claims = [
            {"name": claim.name, "status": claim.status, "power": claim.power, "found": list(claim.found)}
            for claim in report.claims
        ]
        write_json(options.json, {"claims": claims, "faults": report.faults})
    return 1 if report.faults else 0


def check_dump(path: Path, experts: int, layer_map: str | None) -> BatchReport:
    """Check the batch in a file. Raises DataError or RouteValidationError if it is no such file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        got, expected = str(error)[:120], "a file that numpy.savez wrote"
        raise DataError("not a .npz file of arrays", where={"file": path}, got=got, expected=expected) from error

    def wrong(name: str, what: str, got: object, expected: str | None = None) -> DataError:
        return DataError(what, where={"file": path, "array": name}, got=got, expected=expected)

    for name in ("token_ids", "lengths", "routes"):
        if name not in arrays:
            raise wrong(name, "an array is missing", ", ".join(sorted(arrays)), "token_ids, lengths and routes")
    lengths = np.asarray(arrays["lengths"])
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not len(lengths) or int(lengths.min()) < 0:
        raise wrong("lengths", "lengths are no numbers of tokens", lengths.dtype)
    ends = np.cumsum(lengths.astype(np.int64))
    for name in ("token_ids", *_BY_TOKEN[2:]):
        if name in arrays and len(arrays[name]) != ends[-1]:
            expected = f"{ends[-1]}, the sum of lengths"
            raise wrong(name, "an array has other rows than the sequences", len(arrays[name]), expected)

    def by_sequence(name: str) -> list[np.ndarray] | None:
        return np.split(arrays[name], ends[:-1]) if name in arrays else None

    tokens, routes = by_sequence("token_ids"), by_sequence("routes")
    assert tokens is not None and routes is not None
    return check_batch(
        tokens,
        routes,
        by_sequence("native_topk"),
        layer_map,
        num_experts=experts,
        scores=by_sequence("scores"),
        prompts=arrays["prompts"].tolist() if "prompts" in arrays else None,
        lags=by_sequence("lags"),
    )
