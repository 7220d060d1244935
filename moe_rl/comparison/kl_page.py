"""Writes routing_kl.html and the command's printed text: the compared data, the results, and the evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_rl.comparison.experiment import Detail
from moe_rl.comparison.kl_plots import panels, row_name, settings
from moe_rl.comparison.quantities import PARTS, ROUTING
from moe_rl.config.schema import Config
from moe_rl.models.hf import read_model
from moe_rl.report.format import count, percent, scientific, short
from moe_rl.report.page import Tile, render
from moe_rl.tasks.tokenizer import TextCodec

Result = dict[str, Any]
Form = Callable[[float | None], str]


def _percent2(value: float | None) -> str:
    return percent(value, 2)


_POLICY_ROWS = (
    ("k1", "policy KL k1", "mean of -d, nats/token; unbiased for KL(rollout || trainer), may be negative", scientific),
    ("k3", "policy KL k3", "mean of exp(d) - 1 - d, nats/token; the same KL, never negative", scientific),
    ("F(2)", "F(2)", "tokens whose probabilities differ by more than a factor of 2", scientific),
    ("F(5)", "F(5)", "by more than a factor of 5", scientific),
    ("abs", "mean |d|", "nats", scientific),
    ("abs_p50", "median |d|", "nats; no interval is given for quantiles", scientific),
    ("abs_p99", "99th percentile of |d|", "nats", scientific),
    ("abs_max", "largest |d|", "nats", short),
    ("perplexity_train", "trainer perplexity", "mean over sequences of exp(-mean logprob)", short),
    ("perplexity_rollout", "sampler perplexity", "the same, from the sampler's logprobs", short),
    ("log_perplexity_diff", "log-perplexity difference", "trainer less sampler, mean over sequences", scientific),
    ("log_perplexity_abs_diff", "its absolute value", "mean over sequences", scientific),
    ("chi2_token", "chi-square, tokens", "mean of exp(2 d), less 1", scientific),
    ("chi2_sequence_product", "chi-square, sequences", "of the product of a sequence's ratios", scientific),
    ("chi2_sequence_geometric", "the same, geometric", "of the geometric mean of a sequence's ratios", scientific),
    ("effective_sample_fraction", "effective samples", "(sum w)^2 / (tokens x sum w^2), w = exp(d)", short),
)
_ROUTING_ROWS: dict[str, tuple[str, str, Form]] = {
    "set_mismatch": (
        "set mismatch",
        "(token, layer) positions where the router's set is not the recorded one",
        _percent2,
    ),
    "token_any": ("any-layer token rate", "tokens with a mismatch in at least one layer", _percent2),
    "token_layers": ("layers per token", "layers with a mismatch, mean over tokens", short),
    "overlap": ("overlap@k", "share of the router's experts that are also recorded", "{:.4f}".format),
    "hard_jsd": (
        "hard JSD",
        "ln 2 * (1 - overlap@k), nats: Jensen-Shannon divergence of uniform distributions on the two sets",
        scientific,
    ),
    "replay_margin": ("replay margin", "how much the router prefers its own set, mean over positions", scientific),
}
WHEN = ("before", "after", "before_less_after")


@dataclass(frozen=True, slots=True)
class Cell:
    """Format a number of a table, with its interval below it."""

    value: str
    under: str = ""


def page(result: Result, detail: Detail, config: Config) -> str:
    """Return the whole page as HTML."""
    setup, weights = result["setup"], result["weights"]
    codec = TextCodec(config.model.path, read_model(config.model.path).eos_token_ids)
    return render(
        "comparison.html",
        title="routing comparison - moe_rl",
        kicker="moe_rl routing comparison",
        heading="Sampler against trainer, before and after replay",
        facts=[
            f"{setup['sequences']:,} sequences, {setup['completion_tokens']:,} completion tokens",
            f"sampler {setup['sampler']}",
            f"trainer {setup['trainer_dtype']}",
            f"weights after step {weights['version']}" if weights["version"] else "initial weights",
            f"seed {setup['seed']}",
        ],
        source=setup["rollouts"],
        tiles=_tiles(result),
        reasons=result["verdict"]["reasons"],
        looks=[_look(look) for look in result["decision"]["looks"]],
        planned=len(result["decision"]["planned"]),
        budget=count(result["decision"]["budget"]),
        confidence=f"{result['decision']['confidence']:.1%}",
        quantities=[_policy_table(result), *(_routing_table(result, part) for part in PARTS)],
        totals=[_applied_total(result), *(_router_kl_total(result, part) for part in PARTS)],
        settings=[(name, [(row["routing"], _setting(row)) for row in rows]) for name, rows in settings(result["rows"])],
        panels=panels(result, detail, codec.decode),
        noise={name: _noise_line(noise) for name, noise in result["noise"].items()},
        self_test=result["self_test"],
        forced=[(fault["fault"], _forced(fault)) for fault in result["self_test"]["forced"]],
        setup={f"weights {key}": value for key, value in weights.items()} | setup,
    )


def text(result: Result) -> str:
    """Return the text that the command prints."""
    lines = []
    header = ("sampler / trainer, weights", "routing", "policy KL k3, nats/token", "F(2)", "set mismatch", "applied",
              "router KL")  # fmt: skip
    table = [header] + [
        (row_name(row), row["routing"], _interval(row["policy"]["k3"]), scientific(row["policy"]["F(2)"]["value"]),
         _percent2(row["router_choice"]["set_mismatch"]["value"]), _applied(row), _soft(row["router_kl"]))
        for row in result["rows"]
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    lines.append("")
    decision = result["decision"]
    for number, look in enumerate(decision["looks"], start=1):
        lines.append(
            f"look {number} of {len(decision['planned'])}, {look['tokens']:,} tokens of {look['prompts']:,} prompts: "
            f"k3, native less R3, {_interval(look['difference'])}, interval of {decision['confidence']:.1%}"
        )
    for name, noise in result["noise"].items():
        lines.append(f"noise floor, native {name}: {_noise_line(noise)}")
    for fault in result["self_test"]["forced"]:
        lines.append(
            f"planted and forced, {fault['fault']}: k3 {scientific(fault['k3']['planted'])} instead of "
            f"{scientific(fault['k3']['honest'])}, set mismatch {percent(fault['set_mismatch']['planted'])} instead of "
            f"{percent(fault['set_mismatch']['honest'])}"
        )
    lines.append("")
    lines += [f"NOT PASSED: {reason}" for reason in result["verdict"]["reasons"]] or [
        "passed: every route was applied, replay lowered k3, every planted fault was found"
    ]
    return "\n".join(lines)


def _tiles(result: Result) -> list[Tile]:
    policy = result["quantities"]["completion"]["policy"]["k3"]
    mismatch = result["quantities"]["all"]["routing"]["set_mismatch"]
    applied = _replayed(result)["applied"]
    soft = result["quantities"]["all"]["router_kl"]
    return [
        Tile(
            "Policy KL k3, native to replay",
            scientific(policy["before"]["value"]),
            f"nats/token; native less replay {_interval(policy['before_less_after'])}",
            scientific(policy["after"]["value"]),
        ),
        Tile(
            "Set mismatch, native to shadow",
            _percent2(mismatch["before"]["value"]),
            f"of positions; native less shadow {_span(mismatch['before_less_after'], _percent2)}",
            _percent2(mismatch["after"]["value"]),
        ),
        Tile(
            "Applied mismatch",
            count(applied["mismatch"]),
            f"of {count(applied['checked'])} (sequence, layer) pairs; an integrity check",
        ),
        Tile("Router KL", "unavailable", "the sampler's router logits were not recorded")
        if soft is None
        else Tile(
            "Router KL, native to shadow",
            scientific(soft["before"]["value"]),
            f"nats; {soft['before']['rows']:,} rows with stored logits",
            scientific(soft["after"]["value"]),
        ),
    ]


def _policy_table(result: Result) -> dict[str, Any]:
    quantities = result["quantities"]["completion"]
    rows = [
        {"name": name, "note": meaning, "cells": [_cell(quantities["policy"][key].get(when), form) for when in WHEN]}
        for key, name, meaning, form in _POLICY_ROWS
    ]
    if (prompts := quantities["k3_by_prompt"]) is not None:
        meaning = "intervals over prompts instead of sequences, because completions of a prompt are alike"
        rows.append({"name": "k3 again", "note": meaning, "cells": [_cell(prompts[when], scientific) for when in WHEN]})
    return {
        "name": "1. policy, completion tokens",
        "note": "",
        "columns": ("native", "replay (R3)", "native less replay"),
        "rows": rows,
    }


def _routing_table(result: Result, part: str) -> dict[str, Any]:
    quantities, rows = result["quantities"][part], []
    for key in ROUTING:
        name, meaning, form = _ROUTING_ROWS[key]
        if key == "replay_margin":
            meaning += f", {result['setup']['margin_unit']}"
        cells = [_cell(quantities["routing"][key][when], form) for when in WHEN]
        rows.append({"name": name, "note": meaning, "cells": cells})
    return {
        "name": f"2. router choice, {part} rows",
        "note": f"{quantities['tokens']:,} tokens, {quantities['positions']:,} positions",
        "columns": ("native", "shadow in replay", "native less shadow"),
        "rows": rows,
    }


def _applied_total(result: Result) -> dict[str, Any]:
    row = _replayed(result)
    taken = f"routes taken {count(row['applied']['consumed'])} of {count(row['applied']['expected'])}"
    cells = [Cell("-"), Cell(_applied(row)), Cell(taken)]
    return {"name": "3. applied mismatch, must be 0", "note": "", "cells": cells}


def _router_kl_total(result: Result, part: str) -> dict[str, Any]:
    soft = result["quantities"][part]["router_kl"]
    cells = [Cell("unavailable") if soft is None else _cell(soft[when], scientific) for when in ("before", "after")]
    note = "" if soft is None else f"{soft['before']['rows']:,} rows"
    return {"name": f"4. router KL, {part} rows, nats", "note": note, "cells": [*cells, Cell("-")]}


def _setting(row: dict[str, Any]) -> list[Cell]:
    """Return one row of the table of settings."""
    policy, mismatch = row["policy"], row["router_choice"]["set_mismatch"]
    return [
        _cell(policy["k1"], scientific),
        _cell(policy["k3"], scientific),
        Cell(scientific(policy["F(2)"]["value"])),
        Cell(scientific(policy["F(5)"]["value"])),
        _cell(mismatch, _percent2),
        Cell(_applied(row)),
        Cell(_soft(row["router_kl"])),
        Cell("") if row["routing"] == "native" else _cell(row["native_less_this"]["k3"], scientific),
    ]


def _look(look: dict[str, Any]) -> list[Cell]:
    """Return one row of the table of looks."""
    numbers = [Cell(count(look[name])) for name in ("tokens", "sequences", "prompts")]
    return [*numbers, _cell(look["difference"], scientific)]


def _forced(fault: dict[str, Any]) -> list[Cell]:
    """Return the cells of a fault that was forced past every check: each quantity, honest and with the fault."""
    forms: dict[str, Form] = {"k3": scientific, "F(2)": scientific, "set_mismatch": percent}
    return [
        Cell(
            f"{form(fault[key]['honest'])} \N{RIGHTWARDS ARROW} {form(fault[key]['planted'])}",
            f"worse by {_span(fault[key]['worse_by'], form)}",
        )
        for key, form in forms.items()
    ]


def _replayed(result: Result) -> dict[str, Any]:
    return next(row for row in result["rows"] if row["routing"] == "R3")


def _cell(estimate: dict[str, float] | float | None, form: Form) -> Cell:
    if not isinstance(estimate, dict):
        return Cell(form(estimate))
    return Cell("-") if estimate["value"] is None else Cell(form(estimate["value"]), _span(estimate, form))


def _span(estimate: dict[str, float], form) -> str:
    return f"{form(estimate['low'])} to {form(estimate['high'])}"


def _interval(estimate: dict[str, float]) -> str:
    return f"{scientific(estimate['value'])} ({_span(estimate, scientific)})"


def _applied(row: dict[str, Any]) -> str:
    return "-" if row["applied"] is None else f"{row['applied']['mismatch']} of {count(row['applied']['checked'])}"


def _soft(soft: dict[str, Any] | None) -> str:
    return "unavailable" if soft is None else scientific(soft["value"])


def _noise_line(noise: dict[str, Any] | None) -> str:
    if noise is None:
        return "these few sequences cannot be packed in another way"
    if noise["bitwise_equal"]:
        return "the same logprobs, bit for bit"
    return (
        f"|change of logprobs| {scientific(noise['abs_logprob_change_mean'])} mean, "
        f"{scientific(noise['abs_logprob_change_max'])} at most; k3 changes by "
        f"{_interval(noise['k3_native_less_this'])}; {percent(noise['choices_changed'], 3)} of expert choices change"
    )
