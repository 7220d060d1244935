from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from moe_rl.report import figures, history, run_plots, timeline_plots
from moe_rl.report import page as pages
from moe_rl.report.lines import encode, read_run
from moe_rl.report.run_page import write_report
from moe_rl.report.run_plots import panels
from moe_rl.report.sample_lines import SampleFile
from moe_rl.report.summary import summarize
from moe_rl.report.timeline import read_timeline
from moe_rl.report.tracker_worker import TrackerState, write_state
from tests.report.conftest import FACTS, write_run
from tests.report.test_sample_lines import LINE

VOID = {"meta", "br", "hr", "img", "link", "wbr", "input"}
PLOTS = ["pass-rate", "reward", "spread", "length", "policy-kl", "routing", "extreme", "entropy", "update", "canary"]
PLOTS += ["throughput", "memory", "time", "timeline", "idle"]


class Page(HTMLParser):
    """Checks that tags are balanced and ids unique, and collects links, tags and visible text by figure."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                self.links.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def report(run_dir, facts, replay=True):
    summarize(run_dir, facts | {"replay_mode": "r3" if replay else "off"})
    text = write_report(run_dir).read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The folder of a run of 40 steps with replay, the text of its page and the page; for tests that change nothing."""
    run_dir = write_run(tmp_path_factory.mktemp("runs") / "tiny-1")
    return run_dir, *report(run_dir, FACTS)


@pytest.fixture(scope="module")
def unreplayed(tmp_path_factory):
    """As `usual`, with replay off."""
    run_dir = write_run(tmp_path_factory.mktemp("runs") / "tiny-1", replay=False)
    return run_dir, *report(run_dir, FACTS, replay=False)


@pytest.mark.parametrize("run", ["usual", "unreplayed"])
def test_the_file_needs_nothing_else(request, run):
    _, text, page = request.getfixturevalue(run)
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert page.links and all(link.startswith("#") for link in page.links)
    assert not re.search(r"https?:|@import|//www", text)
    assert re.findall(r"url\(([^)]*)\)", text) and all(
        target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text)
    )
    # Ids are unique, and each reference has its target: inlined plots do not take each other's clip paths.
    assert len(page.ids) == len(set(page.ids))
    references = {link[1:] for link in page.links} | {target[1:] for target in re.findall(r"url\(([^)]*)\)", text)}
    assert references <= set(page.ids)


def test_a_shared_page_names_no_prompt_path_host_or_key(synthetic_run, facts, tmp_path):
    """What the run itself has is everywhere: in its name, config, history, samples, trackers and reason to end."""
    run_dir, secret = synthetic_run(), "node7.corp.example/home/ann/sk-123"
    config = run_dir / "config.yaml"
    config.write_text(
        config.read_text().replace("runs_dir: runs", f"runs_dir: {secret}").replace("tiny-moe}", f"{secret}}}")
    )
    SampleFile(run_dir).write(
        [replace(LINE, prompt=f"What does {secret} say?", completion=secret, pieces=[secret] * 3)]
    )
    history.record(run_dir, after=0, ranks=2, device=secret, changed={"model.path": (secret, "b")}, config={})
    (run_dir / "trackers").mkdir()
    write_state(run_dir, "wandb", TrackerState(place=f"https://{secret}", error=secret))
    summarize(run_dir, facts | {"collapse": f"see {secret}", "config": secret, "folder": [secret, {"a": secret}]})
    own = write_report(run_dir).read_text()
    assert own.count(secret) > 8 and run_dir.name in own
    shared = write_report(run_dir, share=tmp_path / "page.html").read_text()
    assert secret not in shared and "node7" not in shared and run_dir.name not in shared
    assert len(shared) < 2 << 20 and "moe_rl.tasks" not in shared
    page = Page(shared)
    for said in ("gspo", "bfloat16", "vLLM 0.32.0", "was exact on every step", "Policy KL k3, native to replay"):
        assert said in page.words


def test_headline_and_proof(usual):
    _, _, page = usual
    assert "31.7% \u2192 75.3%" in page.words and "+43.6 points" in page.words
    assert "Replay (R3) of the sampler's routes was exact on every step" in page.words
    for proof in ("routes consumed exactly once: 61,440 of 61,440", "applied mismatch 0", "coverage 100%"):
        assert f"\u2713 {proof}" in page.words
    assert "40 steps" in page.words and "vLLM 0.32.0" in page.words
    assert page.tags.count("svg") == len(PLOTS)
    assert "What the policy wrote" not in page.words  # the run has no samples


def test_readings_quote_the_paired_numbers(usual):
    run_dir, _, page = usual
    steps, native, replayed = read_run(run_dir).paired("policy_kl/k3_native", "policy_kl/k3")
    assert steps == [1, 6, 11, 16, 21, 26, 31, 36]
    assert (
        f"In steps with both passes (8): {sum(native) / 8:.1e} native, {sum(replayed) / 8:.1e} with replay"
        in page.words
    )


def test_the_distribution_and_the_memory_of_the_last_step_are_said(usual):
    run_dir, _, page = usual
    last = read_run(run_dir).train[-1]
    low, high = (round(last[f"reward/quantile/{end}"], 3) for end in ("p05", "p95"))
    assert f"In the last step: reward {low} to {high}, median" in page.words
    assert "Host: 3.0 GiB; GPU: 70.0 GiB." in page.words


BROKEN = {
    "routing/applied_mismatch": (2, "applied mismatch 2"),
    "routing/coverage": (0.999999, "coverage 99.9999%"),
    "routing/consumed": (1535, "routes consumed exactly once: 61,439 of 61,440"),
}


@pytest.mark.parametrize("faults", [[*BROKEN], *(pytest.param([key], marks=pytest.mark.long) for key in BROKEN)])
def test_a_broken_proof_is_loud(synthetic_run, facts, step_metrics, faults):
    run_dir = synthetic_run()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(
            encode(40, "train", step_metrics(40) | {key: BROKEN[key][0] for key in faults})
        )  # the later line of a step counts
    text, page = report(run_dir, facts)
    assert all(f"\u2717 {BROKEN[key][1]}" in page.words for key in faults)
    assert "routes was NOT exact on every step" in page.words and "was exact on every step" not in page.words
    assert text.count('<tr class="broken">') == len(faults)
    assert text.count("<details open><summary><b>") == 1  # of routing/; groups without a fault are folded


def test_weak_claims_are_said(synthetic_run, facts, step_metrics):
    run_dir = synthetic_run()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(
            encode(40, "train", step_metrics(40) | {"routing/proven/single_ids": 0.5, "routing/proven/layer": 1})
        )
    _, page = report(run_dir, facts)
    assert "in how many of 40 steps: single ids (1)." in page.words


def test_replay_off_says_so_and_claims_nothing(unreplayed):
    _, _, page = unreplayed
    assert "Replay is off." in page.words
    assert "Replay was exact" not in page.words and "\u2713" not in page.words
    assert "replay is off, so nothing corrects it" in page.words


@pytest.mark.parametrize("replay", [pytest.param(True, marks=pytest.mark.long), False])
def test_what_was_not_measured_is_said_in_words(synthetic_run, facts, replay):
    _, page = report(synthetic_run(replay=replay, native_every=0), facts, replay)
    missing = "Not measured: replay is off and no native pass compared its routes."
    assert ("the native pass was not measured" if replay else missing) in page.words
    assert page.tags.count("svg") == len(PLOTS) - (not replay)


def test_a_run_that_never_took_a_step(tmp_path):
    run_dir = tmp_path / "empty"
    run_dir.mkdir()
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert "svg" not in page.tags
    assert "no training step logged" in page.words and "holds no config.yaml" in page.words
    assert "has not written its summary" in page.words


def test_an_unfinished_torn_run_is_reported_as_such(synthetic_run):
    run_dir = synthetic_run(steps=7)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "ki')
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert "7 of 40 steps" in page.words and "incomplete" in page.words


def test_a_run_that_was_ended_says_why(synthetic_run, facts):
    _, page = report(synthetic_run(steps=7), facts | {"collapse": "the run has collapsed (steps 5 to 7)"})
    assert "The run was ended before its last step: the run has collapsed (steps 5 to 7)." in page.words


def test_held_out_sets_have_their_intervals_and_the_best_policy_is_named(synthetic_run, facts):
    best = {"heldout_best_metric": "eval/pass_at/sums/4", "heldout_best_step": 30, "heldout_best": 0.75}
    run_dir = synthetic_run()
    _, page = report(run_dir, facts | best)
    summary = json.loads((run_dir / "summary.json").read_text())
    first, last = (summary[f"heldout_rates_{end}"]["pass_at/sums/4"] for end in ("first", "last"))
    shown = [f"{100 * rate:.1f}% {100 * low:.1f}% to {100 * high:.1f}%" for low, rate, high in (first, last)]
    assert f"sums, pass@4 {shown[0]} {shown[1]}" in page.words and shown[0] != shown[1]
    assert "best eval/pass_at/sums/4 75.0% after step 30" in page.words
    assert "all, greedy" in page.words  # without an interval in this log
    _, page = report(run_dir, facts | best | {"ended_early": "eval/pass_at/sums/4 did not rise"})
    assert "ended early: eval/pass_at/sums/4 did not rise" in page.words


def test_names_from_outside_are_escaped(synthetic_run, facts, step_metrics):
    run_dir = synthetic_run(steps=2)
    evil = "<img src=http://evil.example/x>"
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(encode(3, "train", step_metrics(3) | {f"reward/part/{evil}": 1.0}))
        file.write(encode(3, "eval", {"eval/pass_rate": 0.5, f"eval/level/{evil}": 0.5}))
    _, page = report(run_dir, facts | {"config": evil})
    assert evil in page.words and "img" not in page.tags


def test_panels_keep_their_order_and_units_and_a_long_run_costs_no_more_points(synthetic_run):
    run_dir = synthetic_run(steps=1250, native_every=1)
    drawn = panels(read_run(run_dir)) + timeline_plots.panels(read_timeline(run_dir))
    assert [panel.name for panel in drawn] == PLOTS
    for panel in drawn:
        assert re.search(r"better|bad|good", panel.direction), panel.name
        assert panel.reading.endswith("."), panel.name
        assert "nan" not in panel.reading and "None" not in panel.reading, panel.name
        points = [len(re.findall("[ML]", path)) for path in re.findall(r' d="([^"]*)"', panel.svg)]
        assert max(points) <= figures.MOST_POINTS, panel.name
        # tick marks and letters are elements too
        assert panel.svg.count("<use") + panel.svg.count("<path") < 3 * figures.MOST_MARKS + 100, panel.name
    assert re.search(r"1\d\d of 1250 steps are drawn", drawn[PLOTS.index("time")].reading)


def test_a_thinned_line_keeps_its_ends_and_its_extremes():
    values, others = np.random.default_rng(0).normal(size=(2, 5003))
    kept = figures.thinned(values, others, most=100)
    assert 90 < len(kept) <= 100 and kept[0] == 0 and kept[-1] == 5002 and (np.diff(kept) > 0).all()
    assert {series.argmin() for series in (values, others)} | {series.argmax() for series in (values, others)} <= {
        *kept
    }
    # Every run of neighbours shows how far it reaches, not only the whole.
    for run in np.split(np.arange(5003), np.linspace(0, 5003, 25).astype(int)[1:-1]):
        assert {run[find(series[run])] for find in (np.argmin, np.argmax) for series in (values, others)} <= {*kept}
    assert figures.thinned(values[:100], most=100).tolist() == list(range(100))


def test_values_not_above_zero_are_owned_up_to_on_the_log_axis(synthetic_run, step_metrics):
    run_dir = synthetic_run(steps=3)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(encode(4, "train", step_metrics(4) | {"policy_kl/k3": 0.0}))
    kl = next(panel for panel in panels(read_run(run_dir)) if panel.name == "policy-kl")
    assert "1 values that are not above 0 are not shown" in kl.reading


def test_few_pairs_old_tokens_and_a_replay_of_a_run_are_said(synthetic_run, step_metrics, facts):
    run_dir = synthetic_run(steps=6)  # of which steps 1 and 6 measure both passes
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("seed: 1,", "seed: 1, replays: runs/other,"))
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in (7, 8):
            lags = {"policy_kl/k3_lag/0": 1e-4, "policy_kl/k3_lag/2-3": 1e-3 * step}
            file.write(encode(step, "train", step_metrics(step) | lags))
    _, page = report(run_dir, facts)
    assert "with replay: too few to tell." in page.words and "times lower" not in page.words
    assert "paired steps: 2 (too few to tell); tokens of lag 0, 2-3" in page.words
    assert "means by lag in versions: lag 0: 1.0e-04, lag 2-3: 7.5e-03." in page.words
    assert "trained again on the rollouts of another run (--replay)" in page.words


def test_no_plot_has_a_factor_over_its_axis():
    figure, axes = figures.figure_of()
    figures.line(axes, [1, 2], [6e-5, 1e-4], figures.BLUE, "rate")
    figure.draw_without_rendering()
    assert "8e\u221205" in [label.get_text() for label in axes.get_yticklabels()]
    assert axes.yaxis.get_offset_text().get_text() == ""


def test_utilization_is_shown_where_it_was_measured(synthetic_run, step_metrics):
    run_dir = synthetic_run(steps=3)
    without = run_plots._throughput(read_run(run_dir))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(encode(4, "train", step_metrics(4) | {"throughput/mfu": 0.371}))
    measured = run_plots._throughput(read_run(run_dir))
    assert "No MFU" in without.reading and "37.1%" in measured.reading
    assert "utilization" in measured.svg and "utilization" not in without.svg


def test_the_report_is_reproducible(usual):
    run_dir, text, _ = usual
    assert write_report(run_dir).read_text(encoding="utf-8") == text


def test_templates_take_only_plots_as_they_are():
    """All text from outside (a path, a name, a message) is escaped on every page."""
    folder = Path(pages.__file__).parent / "templates"
    taken = {path.name: re.findall(r"\S+ \| safe", path.read_text()) for path in folder.iterdir()}
    assert {name: found for name, found in taken.items() if found} == {
        "figure.html": ["panel.svg | safe"],
        "run.html": ['"/<wbr>" | safe'],
    }
    assert not any("autoescape" in path.read_text() for path in folder.iterdir())


def test_a_run_without_any_finite_clip_fraction_has_its_plot(tmp_path, step_metrics):
    rows = [step_metrics(step) | {"objective/clip_fraction": float("nan")} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(encode(1 + n, "train", row) for n, row in enumerate(rows)))
    panel = run_plots._update(read_run(tmp_path))
    assert panel.svg is not None and "of ratios clipped" not in panel.reading
