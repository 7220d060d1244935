"""routing_kl.html and what the command prints: what was compared, what came out, and why to believe it."""

from __future__ import annotations

from html import escape
from typing import Any

from moe_rl.comparison.compare import Detail
from moe_rl.comparison.plots import panels, row_name
from moe_rl.comparison.quantities import ROUTING
from moe_rl.config.schema import Config
from moe_rl.models.hf import read_model
from moe_rl.report.format import count, percent, scientific, short
from moe_rl.report.page import figure, moved, render, tile
from moe_rl.tasks.prompts import TextCodec

Result = dict[str, Any]

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
    ("perplexity_rollout", "sampler perplexity", "the same of the sampler's logprobs", short),
    ("log_perplexity_diff", "log-perplexity difference", "trainer less sampler, mean over sequences", scientific),
    ("log_perplexity_abs_diff", "its absolute value", "mean over sequences", scientific),
    ("chi2_token", "chi-square, tokens", "mean of exp(2 d), less 1", scientific),
    ("chi2_sequence_product", "chi-square, sequences", "of the product of a sequence's ratios", scientific),
    ("chi2_sequence_geometric", "the same, geometric", "of the geometric mean of a sequence's ratios", scientific),
    ("effective_sample_fraction", "effective samples", "(sum w)^2 / (tokens x sum w^2), w = exp(d)", short),
)
_ROUTING_ROWS = {
    "set_mismatch": ("set mismatch", "(token, layer) positions where the router's set is not the recorded one"),
    "token_any": ("any-layer token rate", "tokens with at least one such layer"),
    "token_layers": ("layers per token", "such layers, mean over tokens"),
    "overlap": ("overlap@k", "share of the router's experts that are recorded ones"),
    "hard_jsd": ("hard JSD", "ln 2 * (1 - overlap@k), nats: of uniform distributions on the two sets"),
    "replay_margin": ("replay margin", "by how much the router prefers its own set, mean over positions"),
}
_MEANINGS = (
    (
        "Policy KL and F(tau)",
        "The result. How far the trainer's probabilities of the sampled tokens are from the sampler's own, natively "
        "routed and under replay, both against the same stored logprobs. It is a KL of policies, not of routers.",
    ),
    (
        "Router choice (set mismatch)",
        "What the trainer's routers would choose, against the record: in the native forward, and inside the replayed "
        "one (shadow). Shadow choices are never used. The drop is the cascade from layer to layer that replay removes; "
        "what is left is each router's own disagreement, which replay overrides and does not mend.",
    ),
    (
        "Applied mismatch",
        "What was dispatched against the record. Under replay it is 0 by construction; that it is shows that replay "
        "happened, not that it helped.",
    ),
    (
        "Router KL",
        "The KL of the routers' distributions over all experts. It needs the sampler's router logits "
        "(rollout.router_logits_fraction); without them it is unavailable, and nothing stands in for it.",
    ),
    (
        "Intervals",
        "95%, percentile bootstrap over sequences, seeded; before and after are resampled together. Sequences of a "
        "prompt are drawn as if they were independent; for k3 the interval over prompts stands beside. They say how "
        "much the sample of sequences could change the mean, not what another model or another machine would give. "
        "Where no token is extreme the interval of F(tau) is 0 to 0: of N tokens, up to 3 / N cannot be excluded.",
    ),
    (
        "R2",
        "Replays what the trainer itself chose with the weights that sampled. With these weights it is native routing; "
        "it differs once the weights have moved on.",
    ),
)


def page(result: Result, detail: Detail, config: Config) -> str:
    """The whole page."""
    setup = result["setup"]
    codec = TextCodec(config.model.path / "tokenizer.json", read_model(config.model.path).eos_token_ids[0])
    facts = [
        f"{setup['sequences']:,} sequences, {setup['completion_tokens']:,} completion tokens",
        f"sampler {setup['sampler']}",
        f"trainer {setup['trainer_dtype']}",
        f"weights after step {result['weights']['version']}" if result["weights"]["version"] else "initial weights",
        f"seed {setup['seed']}",
    ]
    header = (
        '<header><p class="kicker">moe_rl routing comparison</p><h1>Sampler against trainer, before and after replay'
        f'</h1><p class="facts">{" &middot; ".join(map(escape, facts))}<br>{escape(setup["rollouts"])}</p></header>'
    )
    plots = "".join(figure(panel) for panel in panels(result, detail, lambda ids: codec.decode(ids)))
    body = [
        header,
        _tiles(result),
        _verdict(result),
        "<h2>The four quantities</h2>",
        _quantities(result),
        "<h2>Every setting</h2>",
        _table(result),
        "<h2>Plots</h2>",
        f'<div class="plots">{plots}</div>',
        "<h2>Noise floor</h2>",
        _noise(result),
        "<h2>Planted faults</h2>",
        _faults(result),
        "<h2>What each number is, and is not</h2>",
        "<table>" + "".join(f"<tr><th>{a}</th><td>{escape(b)}</td></tr>" for a, b in _MEANINGS) + "</table>",
        "<h2>What was compared</h2>",
        _setup(result),
    ]
    return render("routing comparison - moe_rl", "\n".join(body))


def text(result: Result) -> str:
    """What the command prints."""
    lines = []
    header = ("sampler / trainer, weights", "routing", "policy KL k3, nats/token", "F(2)", "set mismatch", "applied",
              "router KL")  # fmt: skip
    table = [header] + [
        (row_name(row), row["routing"], _interval(row["policy"]["k3"]), scientific(row["policy"]["F(2)"]["value"]),
         percent(row["router_choice"]["set_mismatch"]["value"], 2), _applied(row), _soft(row["router_kl"]))
        for row in result["rows"]
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    difference = result["quantities"]["completion"]["policy"]["k3"]["before_less_after"]
    lines.append("")
    lines.append(f"k3, native less R3, paired: {_interval(difference)}")
    if (prompts := result["quantities"]["completion"]["k3_by_prompt"]) is not None:
        lines.append(f"the same, prompts resampled: {_interval(prompts['before_less_after'])}")
    for name, noise in result["noise"].items():
        lines.append(f"noise floor, native {name}: {_noise_line(noise)}")
    for one in result["self_test"]["forced"]:
        lines.append(
            f"planted and forced, {one['fault']}: k3 {scientific(one['k3']['planted'])} instead of "
            f"{scientific(one['k3']['honest'])}, set mismatch {percent(one['set_mismatch']['planted'])} instead of "
            f"{percent(one['set_mismatch']['honest'])}"
        )
    lines.append("")
    lines += [f"NOT PASSED: {reason}" for reason in result["verdict"]["reasons"]] or [
        "passed: every route applied, the interval of k3 lies lower under replay, every planted fault was found"
    ]
    return "\n".join(lines)


def _tiles(result: Result) -> str:
    policy = result["quantities"]["completion"]["policy"]["k3"]
    mismatch = result["quantities"]["all"]["routing"]["set_mismatch"]
    replayed = next(row for row in result["rows"] if row["routing"] == "R3")
    soft = result["quantities"]["all"]["router_kl"]
    tiles = [
        tile(
            "Policy KL k3, native to replay",
            moved(scientific(policy["before"]["value"]), scientific(policy["after"]["value"])),
            f"nats/token; native less replay {_interval(policy['before_less_after'])}",
            lead=True,
        ),
        tile(
            "Set mismatch, native to shadow",
            moved(percent(mismatch["before"]["value"], 2), percent(mismatch["after"]["value"], 2)),
            f"of positions; native less shadow {_span(mismatch['before_less_after'], lambda v: percent(v, 2))}",
        ),
        tile(
            "Applied mismatch",
            count(replayed["applied"]["mismatch"]),
            f"of {count(replayed['applied']['checked'])} (sequence, layer) pairs; an integrity check",
        ),
        tile("Router KL", "unavailable", "the sampler's router logits were not recorded")
        if soft is None
        else tile(
            "Router KL, native to shadow",
            moved(scientific(soft["before"]["value"]), scientific(soft["after"]["value"])),
            f"nats; {soft['before']['rows']:,} rows with stored logits",
        ),
    ]
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _verdict(result: Result) -> str:
    verdict = result["verdict"]
    if verdict["passed"]:
        return (
            '<section class="proof ok"><p><b>Replay was exact and lowered the policy KL.</b></p><ul>'
            '<li class="ok">&#10003; every route applied</li>'
            '<li class="ok">&#10003; the interval of k3 under replay lies below the native one</li>'
            '<li class="ok">&#10003; every planted fault was found</li></ul></section>'
        )
    items = "".join(f'<li class="bad">&#10007; {escape(reason)}</li>' for reason in verdict["reasons"])
    return f'<section class="proof bad"><p><b>Not shown.</b></p><ul>{items}</ul></section>'


def _quantities(result: Result) -> str:
    policy = result["quantities"]["completion"]["policy"]
    head = "<th class=n>native</th><th class=n>replay (R3)</th><th class=n>native less replay</th>"
    rows = [f"<tr><th>1. policy, completion tokens</th>{head}</tr>"]
    for key, name, meaning, form in _POLICY_ROWS:
        values = policy[key]
        cells = [_cell(values[when], form) for when in ("before", "after", "before_less_after") if when in values]
        cells += ["<td class=n>-</td>"] * (3 - len(cells))
        rows.append(f'<tr><td>{name} <span class="under">{escape(meaning)}</span></td>{"".join(cells)}</tr>')
    if (prompts := result["quantities"]["completion"]["k3_by_prompt"]) is not None:
        cells = "".join(_cell(prompts[when], scientific) for when in ("before", "after", "before_less_after"))
        meaning = "intervals over prompts instead of sequences: completions of a prompt are alike"
        rows.append(f'<tr><td>k3 again <span class="under">{meaning}</span></td>{cells}</tr>')
    shadow = head.replace("replay (R3)", "shadow in replay").replace("native less replay", "native less shadow")
    for part, title in (("all", "all rows"), ("prompt", "prompt rows"), ("completion", "completion rows")):
        found = result["quantities"][part]
        note = f"{found['tokens']:,} tokens, {found['positions']:,} positions"
        rows.append(f'<tr><th>2. router choice, {title} <span class="under">{note}</span></th>{shadow}</tr>')
        for key in ROUTING:
            name, meaning = _ROUTING_ROWS[key]
            form = {"overlap": lambda v: f"{v:.4f}", "hard_jsd": scientific, "replay_margin": scientific,
                    "token_layers": short}.get(key, lambda v: percent(v, 2))  # fmt: skip
            if key == "replay_margin":
                meaning += f", {result['setup']['margin_unit']}"
            values = found["routing"][key]
            cells = "".join(_cell(values[when], form) for when in ("before", "after", "before_less_after"))
            rows.append(f'<tr><td>{name} <span class="under">{escape(meaning)}</span></td>{cells}</tr>')
    applied = next(row for row in result["rows"] if row["routing"] == "R3")["applied"]
    rows.append(
        "<tr><th>3. applied mismatch, must be 0</th><td class=n>-</td>"
        f"<td class=n>{applied['mismatch']} of {count(applied['checked'])}</td><td class=n>routes taken "
        f"{count(applied['consumed'])} of {count(applied['expected'])}</td></tr>"
    )
    for part in ("all", "prompt", "completion"):
        soft = result["quantities"][part]["router_kl"]
        cells = (
            "<td class=n>unavailable</td>" * 2
            if soft is None
            else "".join(_cell(soft[when], scientific) for when in ("before", "after"))
        )
        note = "" if soft is None else f' <span class="under">{soft["before"]["rows"]:,} rows</span>'
        rows.append(f"<tr><th>4. router KL, {part} rows, nats{note}</th>{cells}<td class=n>-</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _table(result: Result) -> str:
    head = (
        "<tr><th>sampler / trainer, weights</th><th>routing</th><th class=n>1. k1</th>"
        "<th class=n>1. k3, nats/token</th>"
        "<th class=n>F(2)</th><th class=n>F(5)</th><th class=n>2. set mismatch</th><th class=n>3. applied</th>"
        "<th class=n>4. router KL</th><th class=n>k3, native less this</th></tr>"
    )
    rows = []
    for at, row in enumerate(result["rows"]):
        policy, mismatch = row["policy"], row["router_choice"]["set_mismatch"]
        # The three lines of a setting follow each other.
        name = f'<td rowspan="3">{escape(row_name(row))}</td>' if at % 3 == 0 else ""
        rows.append(
            f"<tr>{name}<td>{row['routing']}</td>{_cell(policy['k1'], scientific)}"
            f"{_cell(policy['k3'], scientific)}<td class=n>{scientific(policy['F(2)']['value'])}</td>"
            f"<td class=n>{scientific(policy['F(5)']['value'])}</td>{_cell(mismatch, lambda v: percent(v, 2))}"
            f"<td class=n>{_applied(row)}</td><td class=n>{_soft(row['router_kl'])}</td>"
            f"{_cell(row['native_less_this']['k3'], scientific) if row['routing'] != 'native' else '<td></td>'}</tr>"
        )
    return (
        f"<table>{head}{''.join(rows)}</table>"
        "<p class=\"under\">Set mismatch is of the router's own choice in that forward against the sampler's record, "
        "also under R2, which replays another one. Under R2 applied mismatch is against the routes that R2 "
        "recorded.</p>"
    )


def _noise(result: Result) -> str:
    rows = []
    for name, meaning in (
        ("repeated", "the native forward once more, the same packing"),
        ("repacked", "the native forward, the sequences packed otherwise"),
    ):
        noise = result["noise"][name]
        said = _noise_line(noise)
        rows.append(f"<tr><td>{meaning}</td><td>{escape(said)}</td></tr>")
    return (
        f"<table><tr><th>pass</th><th>against the first native pass</th></tr>{''.join(rows)}</table>"
        '<p class="under">A change that replay makes counts only beyond this. On a CPU the same computation gives the '
        "same bits; on a GPU it need not.</p>"
    )


def _faults(result: Result) -> str:
    test = result["self_test"]
    refusals = "".join(
        f"<tr><td>{escape(one['fault'])}</td><td>{escape(one['where'])}</td>"
        + (
            '<td><span class="ok">&#10003; refused</span> '
            f'<span class="under">{escape(_cut(one["message"]))}</span></td>'
            if one["message"]
            else "<td>not visible there: the record is valid and carries right checksums of wrong routes. Only the "
            "numbers below show it.</td>"
        )
        + "</tr>"
        for one in test["refusals"]
    )
    forced = "".join(
        f"<tr><td>{escape(one['fault'])}</td>"
        + "".join(
            f"<td class=n>{form(one[key]['honest'])} &rarr; {form(one[key]['planted'])}"
            f'<br><span class="under">worse by {_span(one[key]["worse_by"], form)}</span></td>'
            for key, form in (("k3", scientific), ("F(2)", scientific), ("set_mismatch", lambda v: percent(v, 1)))
        )
        + "</tr>"
        for one in test["forced"]
    )
    problems = "".join(f'<p class="warning">{escape(problem)}</p>' for problem in test["problems"])
    return (
        f"{problems}<table><tr><th>fault</th><th>planted</th><th>what became of it</th></tr>{refusals}</table>"
        '<p class="under">The same faults, given to the session as the truth, with checksums to match:</p>'
        "<table><tr><th>forced past every check</th><th class=n>policy KL k3, honest to planted</th>"
        f"<th class=n>F(2)</th><th class=n>set mismatch against the honest record</th></tr>{forced}</table>"
    )


def _setup(result: Result) -> str:
    flat = {**{f"weights {key}": value for key, value in result["weights"].items()}, **result["setup"]}
    rows = "".join(
        f"<tr><td>{escape(key.replace('_', ' '))}</td><td><code>{escape(str(value))}</code></td></tr>"
        for key, value in flat.items()
    )
    return f'<table class="small">{rows}</table>'


def _cell(estimate: dict[str, float] | float | None, form) -> str:
    if not isinstance(estimate, dict):
        return f"<td class=n>{form(estimate)}</td>"
    if estimate["value"] is None:
        return "<td class=n>-</td>"
    return f'<td class=n>{form(estimate["value"])}<br><span class="under">{_span(estimate, form)}</span></td>'


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
        return "there is no other packing of so few sequences"
    if noise["bitwise_equal"]:
        return "the same logprobs, bit for bit"
    return (
        f"|change of logprobs| {scientific(noise['abs_logprob_change_mean'])} mean, "
        f"{scientific(noise['abs_logprob_change_max'])} at most; k3 changes by "
        f"{_interval(noise['k3_native_less_this'])}; {percent(noise['choices_changed'], 3)} of expert choices change"
    )


def _cut(message: str, limit: int = 260) -> str:
    return message if len(message) <= limit else message[: limit - 3] + "..."
