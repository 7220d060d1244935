"""Makes the spec of a trace from a checkpoint folder of any family, including models that are not trained here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from moe_rl.errors import ConfigError, TraceError
from moe_rl.models.hf import FAMILIES, facts_of, fingerprint_of, read_config
from moe_rl.models.routed import Experts, family_name, find_experts
from moe_rl.trace.record import TraceSpec

_GIVE = {
    "top_k": "give --top-k",
    "layer_map": "give --layer-map, or layer_map in a program: a letter for each decoder layer, d for a dense one and "
    "m for one with experts, as in d*3,m*58",
}


def read_layer_map(text: str) -> str:
    """Return a layer map without the short form: "d*3,m*2" is "dddmm"."""
    return re.sub(r"([dmhtr])\*([0-9]{1,4})", lambda run: run[1] * int(run[2]), text).replace(",", "")


def routed_fingerprint(folder: Path | str) -> str:
    """Return the fingerprint of a mixture of experts of any family. Raises ConfigError for a dense model."""
    raw = read_config(folder)
    if find_experts(raw) is None:
        facts_of(raw, Path(folder) / "config.json")  # says what is wrong
    return fingerprint_of(raw)


def checkpoint_spec(
    folder: Path | str,
    *,
    layer_map: str | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
    fingerprint: str | None = None,
) -> TraceSpec:
    """Make the spec of the model in a checkpoint folder. Only its config.json is read.

    Args:
        layer_map: in the form that `read_layer_map` takes. config.json gives it only for the families of
            `moe_rl.models`.
        num_experts, top_k: for a config.json that lacks them.
        fingerprint: another name of the model in the trace.

    Raises:
        ConfigError: config.json is missing, is that of a dense model, or lacks a value that was not given.
        TraceError: a given value contradicts config.json, or is impossible.
    """
    file, raw = Path(folder) / "config.json", read_config(folder)
    try:
        facts = facts_of(raw, file)
        sizes, derived = Experts("", facts.num_experts, facts.top_k, facts.layers), TraceSpec.of(facts).layer_map
    except ConfigError:
        known = find_experts(raw)
        if known is None or (layer_map is None and FAMILIES.keys() & set(raw.get("architectures") or ())):
            raise
        sizes, derived = known, None
    values: dict[str, tuple[Any, Any]] = {
        "num_experts": (num_experts, sizes.num_experts),
        "top_k": (top_k, sizes.top_k),
        "layer_map": (None if layer_map is None else read_layer_map(layer_map), derived),
    }
    for field, (given, value) in values.items():
        if given is None and value is None:
            raise ConfigError(
                "config.json does not say it in a way that is known here",
                where={"field": field, "file": file},
                got=family_name(raw),
                expected=f"{' or '.join(FAMILIES)}, or that it is given",
                do=_GIVE[field],
            )
        if field != "layer_map" and None not in (given, value) and given != value:
            raise TraceError("contradicts config.json", where={"field": field, "file": file}, got=given, expected=value)
    experts, chosen, letters = (value if given is None else given for given, value in values.values())
    spec = TraceSpec(fingerprint_of(raw) if fingerprint is None else fingerprint, experts, chosen, letters)
    decoder = sum(letter in "dmh" for letter in spec.layer_map)
    if sizes.layers not in (None, decoder):
        raise TraceError(
            "not the layers of this model",
            where={"field": "layer_map", "file": file},
            got=f"{decoder} letters d, m and h",
            expected=f"{sizes.layers}, the decoder layers of config.json",
        )
    return spec
