"""Exports routes to a Parquet file for dataframes and SQL. Not for training: no code reads the file back into a
store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.errors import TraceError
from moe_rl.trace.inspection import Selection, references
from moe_rl.trace.record import RouteRecord
from moe_rl.trace.spans import versions_of_rows
from moe_rl.types import Provenance

# Rows times layers of a record held in memory at once.
_CELLS = 1 << 20


def export_parquet(selection: Selection, path: Path, *, pattern: str = "*", per: str = "layer") -> int:
    """Write the records whose key matches a shell pattern, and return the number of rows in the file.

    An existing file is replaced when the new one is complete.

    Args:
        selection: the shards.
        path: the file to write.
        pattern: shell pattern of keys.
        per: "layer" writes one row per token and MoE layer: key, position, token_id, weight_version, provenance,
            aborted, layer, experts (list of K). "token" writes one row per token, with a column `layer_<n>` (list of K)
            for each layer in place of the last two.

    Raises:
        TraceError: pyarrow is not installed, or the records are of several models.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise TraceError("export needs pyarrow, which is not installed", do="run: pip install 'pyarrow>=17'") from error

    unfinished = path.with_name(f".{path.name}.unfinished")
    rows, writer = 0, None
    try:
        for record in _blocks(selection, pattern):
            if writer is None:
                layout = (record.spec, record.layers)
                writer = pq.ParquetWriter(unfinished, _schema(pa, record, per), compression="zstd")
            if layout != (record.spec, record.layers) and (per == "token" or layout[0].top_k != record.spec.top_k):
                raise TraceError(
                    "records have other layers or another model than those before",
                    where={"record": record.key},
                    got=f"layers {record.layers[0]} to {record.layers[-1]}",
                    expected=f"layers {layout[1][0]} to {layout[1][-1]} of {layout[0].model_fingerprint[:16]}",
                    do="export one shard at a time, or a row per layer",
                )
            table = _table(pa, record, per, writer.schema)
            writer.write_table(table)
            rows += table.num_rows
        if writer is None:
            raise TraceError("nothing to export", where={"folder": selection.root}, got=f"no record like {pattern!r}")
        writer.close()
        os.replace(unfinished, path)
    except OSError as error:
        raise TraceError("file cannot be written", where={"file": path}, got=error.strerror or error) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return rows


def _blocks(selection: Selection, pattern: str) -> Iterator[RouteRecord]:
    for ref in references(selection, pattern):
        layers = selection.store.info(ref).layers
        step = max(1, _CELLS // len(layers))
        for first in range(0, ref.rows, step):
            yield selection.store.read(ref, layers=layers, rows=(first, min(first + step, ref.rows)))


def _schema(pa: Any, record: RouteRecord, per: str) -> Any:
    experts = pa.list_(pa.uint16(), record.spec.top_k)
    common = [
        ("key", pa.string()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("weight_version", pa.int64()),
        ("provenance", pa.string()),
        ("aborted", pa.bool_()),
    ]
    if per == "layer":
        return pa.schema([*common, ("layer", pa.int16()), ("experts", experts)])
    return pa.schema([*common, *((f"layer_{layer}", experts) for layer in record.layers)])


def _table(pa: Any, record: RouteRecord, per: str, schema: Any) -> Any:
    rows, layers, top_k = record.routes.shape
    times = layers if per == "layer" else 1
    counts = [span.rows for span in record.spans]
    names = [span.provenance for span in record.spans]
    position = np.arange(record.first_row, record.first_row + rows, dtype=np.int32)

    def column(values: np.ndarray) -> Any:
        return pa.array(np.repeat(values, times))

    def sets(routes: np.ndarray) -> Any:
        return pa.FixedSizeListArray.from_arrays(pa.array(routes.reshape(-1).astype(np.uint16)), top_k)

    kinds = pa.DictionaryArray.from_arrays(
        np.repeat(np.repeat(np.array(names, np.int8), counts), times), [kind.name.lower() for kind in Provenance]
    )
    columns = [
        pa.array([record.key], pa.string()).take(pa.array(np.zeros(rows * times, np.int32))),
        column(position),
        column(record.token_ids),
        column(versions_of_rows(record.spans)),
        kinds.cast(pa.string()),
        pa.array(np.full(rows * times, record.aborted)),
    ]
    if per == "layer":
        columns += [pa.array(np.tile(np.array(record.layers, np.int16), rows)), sets(record.routes)]
    else:
        columns += [sets(record.routes[:, layer]) for layer in range(layers)]
    return pa.Table.from_arrays(columns, schema=schema)
