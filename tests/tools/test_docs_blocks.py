"""The blocks of the docs do what the pages say, as far as that is quick; `make docs-test` runs the rest."""

import pytest

from tools.dev.docs_blocks import ROOT, Page, blocks, docs, judge_page, summary
from tools.dev.docs_commands import commands, line_faults

FENCE = "```"


def of(text: str) -> list:
    return list(blocks("page.md", text.replace("'''", FENCE)))


@pytest.fixture
def judge(tmp_path):
    """Judges the blocks of a text quickly; returns outcome and reason of each."""
    page = Page(tmp_path, quick=True)
    yield lambda text: [(one.outcome, one.reason) for one in map(page.judge, of(text))]
    page.close()


@pytest.mark.xdist_group("docs blocks")
@pytest.mark.parametrize("page", docs(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_quick_blocks_of_a_page(page):
    found = judge_page(page, quick=True)
    assert [(one.where, one.reason) for one in found if one.outcome in ("failed", "unmarked")] == []


def test_few_blocks_are_sketches():
    sketches = [
        block.where for page in docs() for block in blocks(str(page), page.read_text()) if "sketch" in block.marks
    ]
    assert len(sketches) <= 10, sketches


def test_blocks_are_found_with_language_line_and_marks():
    found = of(
        "Text.\n\n<!-- needs: gpu -->\n<!-- base: configs/a.yaml -->\n'''yaml\na: 1\n'''\n\nThen\n\n'''sh\nls\n'''\n"
    )
    assert [(one.language, one.line, one.marks, one.text) for one in found] == [
        ("yaml", 5, {"needs": "gpu", "base": "configs/a.yaml"}, "a: 1\n"),
        ("sh", 11, {}, "ls\n"),
    ]


def test_indented_code_is_a_block_without_language_and_lists_are_none():
    assert [(one.language, one.text) for one in of("So:\n\n    make demo\n\nDone.\n")] == [("", "make demo\n")]
    assert of("- one\n\n    more of it\n    - inner\n\n    also\n\nText\nwith\n    hanging lines\n") == []


def test_a_block_in_a_list_loses_its_indentation():
    assert [one.text for one in of("- so:\n\n  '''sh\n  ls\n  '''\n")] == ["ls\n"]


def test_unknown_languages_and_marks_are_unmarked(judge):
    text = (
        "'''\nx\n'''\n\n'''bash\nls\n'''\n\n<!-- needs: luck -->\n'''sh\nls\n'''\n\n<!-- sketch -->\n'''sh\n...\n'''\n"
    )
    assert [outcome for outcome, _ in judge(text)] == ["unmarked", "unmarked", "unmarked", "sketch"]


def test_commands_share_a_folder_and_variables(judge):
    made = "'''sh\nexport WORD=seen\necho hi > a.txt\n'''\n\n"
    text = f"{made}'''sh\ntest $WORD = seen\ncat a.txt\n'''\n\n'''sh\ncat b.txt\n'''\n"
    (first, _), (second, _), (third, reason) = judge(text)
    assert (first, second, third) == ("run", "run", "failed") and "b.txt" in reason


def test_python_runs_continues_and_its_output_is_compared(judge):
    code = "'''python\na = 2\n'''\n\n<!-- after: previous -->\n'''python\nprint('x'); print(a)\n'''\n\n"
    assert [outcome for outcome, _ in judge(code + "'''text\nx\n...\n2\n'''\n")] == ["run", "run", "run"]
    assert [outcome for outcome, _ in judge(code + "'''text\n3\n'''\n")] == ["run", "run", "failed"]
    assert judge("'''python\nfrom moe_rl.trace import Nothing\n'''\n")[0] == ("failed", "moe_rl.trace has no Nothing")


def test_a_file_that_the_page_names_is_written(judge):
    text = "Save this as `mine.py`:\n\n'''python\ndef f(): pass\n'''\n\n'''sh\ngrep def mine.py\n'''\n"
    assert [outcome for outcome, _ in judge(text)] == ["run", "run"]


def test_configs_are_loaded_over_their_base(judge):
    assert judge("'''yaml\nrun: {steps: 3}\n'''\n") == [("run", "")]
    ((outcome, reason),) = judge("'''yaml\nreplay: {max_staleness: 3}\n'''\n")
    assert outcome == "failed" and "max_staleness" in reason
    ((outcome, reason),) = judge("'''yaml\ntask: {train: [{name: a, data: absent.jsonl}]}\n'''\n")
    assert outcome == "failed" and "absent.jsonl" in reason
    base = "<!-- base: configs/qwen3_30b_a3b.yaml -->\n<!-- needs: gpu -->\n"
    assert judge(f"{base}'''yaml\nrun: {{steps: 3}}\n'''\n") == [("checked", "")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("moe-rl train --ranks 2 --config configs/tiny_moe_cpu.yaml run.steps=3", ""),
        ("moe-rl train --ranks 2 --config configs/tiny_moe_cpu.yaml run.step=3", "run.step"),
        ("moe-rl train --rank-count 2 --config configs/tiny_moe_cpu.yaml", "--rank-count"),
        ("moe-rl report $RUN && moe-rl nothing", "nothing"),
        ("torchrun --nproc-per-node 8 -m -- moe_rl export --run $RUN --out F --speed 3", "--speed"),
        ("python tools/train_moe_rl.py --config configs/qwen3_30b_a3b.yaml --plan", ""),
        ("python tools/nothing.py", "tools/nothing.py"),
        ("python -m tools.dev.nothing", "tools.dev.nothing"),
        ("nice -n 19 make nightly PARTS=pairs", ""),
        ("moe-rl serve --config configs/qwen3_30b_a3b.yaml $OURS --port $PORT", ""),
        (
            'moe-rl train --ranks 2 --config configs/tiny_moe_cpu.yaml "rollout.servers=[${SERVERS%,}]" run.step=3',
            "run.step",
        ),
        ("make demos", "demos"),
        ("pip install 'moe_rl[wandb]'", "no index"),
        ("pip install -e '.[wandb,nothing]'", "nothing"),
        (".venv/bin/python -m pytest tests/trace/test_store.py -k sliced", "selects no test"),
        (".venv/bin/python -m pytest tests/trace/test_store.py -k slice", ""),
        ("moe-rl serve --config configs/tiny_moe_cpu.yaml --port 1 -- --max-model-len 64 > log 2>&1 &", ""),
        ("moe-rl trace cat store --rows 0:4 | head", ""),
    ],
)
def test_lines_that_do_not_run_are_checked(line, said):
    found = line_faults(line)
    assert len(found) == bool(said) and said in "".join(found), found


def test_commands_of_a_line():
    line = "A=1 nice -n 19 moe-rl show $RUN 2>&1 | head -3; (cd x && ls) > y"
    assert list(commands(line)) == [["moe-rl", "show", "$RUN"], ["head", "-3"], ["cd", "x"], ["ls"]]


def test_the_summary_counts_every_block_once():
    counts = summary(judge_page(ROOT / "docs/reference/trace_format.md", quick=True))
    assert counts.pop("blocks") == sum(counts.values())
    assert set(counts) == {"run", "checked", "sketches", "failed", "unmarked"}
