"""Samples of a run: written, read back, rewound, and put on the page with the tokens where the engines differ."""

import dataclasses
import math

import pytest

from moe_rl.errors import MoeRLError
from moe_rl.report import history
from moe_rl.report.run_page import write_report
from moe_rl.report.sample_lines import FILE, SampleFile, SampleLine, read_samples
from moe_rl.types import VersionSpan

LINE = SampleLine(
    step=3,
    key="s3/p0/c1",
    prompt="2+2=<b>",
    completion="four",
    reward=0.5,
    parts={"exact": 0.5},
    advantages=[-1.25],
    finish_reason="stop",
    versions=(VersionSpan(1, 2), VersionSpan(2, 3)),
    prompt_tokens=2,
    pieces=["two ", "plus", "<end>"],
    sampler_logprobs=[-0.5, -1.0, -0.25],
    trainer_logprobs=[-0.5, -1.5, None],
    differing_layers=[0, 0, 0, 5],
)


def other(step, **changes):
    return dataclasses.replace(LINE, step=step, **changes)


def test_differences_are_those_of_the_sampled_tokens():
    assert LINE.differences[:2] == [0.0, -0.5] and math.isnan(LINE.differences[2]) and math.isnan(LINE.mismatch)
    assert other(3, trainer_logprobs=[-0.4, -1.5, 0.0]).mismatch == pytest.approx((0.1 + 0.5 + 0.25) / 3)
    # The row of a sampled token lies behind those of the prompt; the last token is not forwarded.
    assert [LINE.layers_at(at) for at in range(3)] == [0, 5, None]
    unseen = other(3, trainer_logprobs=[], differing_layers=[])
    assert unseen.differences == [] and math.isnan(unseen.mismatch) and unseen.layers_at(0) is None


def test_samples_come_back_and_are_rewound(tmp_path):
    file = SampleFile(tmp_path)
    file.rewind(1)
    assert read_samples(tmp_path) == []
    steps = [[other(1), other(1, key="b")], [other(2)], [other(3)]]
    for lines in steps:
        file.write(lines)
    assert read_samples(tmp_path) == sum(steps, [])
    with (tmp_path / FILE).open("ab") as stream:
        stream.write(b'{"step": 4, "ke')  # cut short by a kill
    assert read_samples(tmp_path) == sum(steps, [])
    file.rewind(5)
    assert read_samples(tmp_path) == sum(steps, []) and (tmp_path / FILE).read_bytes().endswith(b"\n")
    file.rewind(3)
    file.write([other(3, key="again")])
    assert [line.key for line in read_samples(tmp_path)] == [LINE.key, "b", LINE.key, "again"]


def test_a_damaged_line_is_named(tmp_path):
    SampleFile(tmp_path).write([LINE, LINE])
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(b'"step": 3', b'"step": "x"', 1))
    with pytest.raises(MoeRLError) as caught:
        read_samples(tmp_path)
    assert f"{FILE}:1" in str(caught.value)


def test_a_start_that_was_cut_short_leaves_the_history_readable(tmp_path):
    for after in (0, 4):
        history.record(tmp_path, after=after, ranks=1, device="CPU", changed={}, config={})
    path = tmp_path / history.FILE
    path.write_bytes(path.read_bytes()[:-9])
    history.record(tmp_path, after=6, ranks=2, device="CPU", changed={"run.steps": (4, 8)}, config={})
    first, last = history.read_history(tmp_path)
    assert (first.after, last.after, last.changed) == (0, 6, {"run.steps": (4, 8)})


def test_the_page_colours_what_differs(synthetic_run):
    run_dir = synthetic_run()
    SampleFile(run_dir).write([LINE])
    page = write_report(run_dir).read_text()
    assert "2+2=&lt;b&gt;" in page and "<b>2+2" not in page
    tokens = {text: tag for tag, _, text in (one.partition(">") for one in page.split("<span title=")[1:])}
    first, second, last = (
        next(tokens[key] for key in tokens if key.startswith(p)) for p in ("two <", "plus<", "&lt;end")
    )
    assert "background" not in first and 'class="parts"' not in first
    assert "100%" in second and 'class="parts"' in second and "5 layers differ" in second
    assert "100%" in last and "nan" in last  # a value that is not finite is not hidden
