"""The list of faults is whole: every promise has rows, every row is shown, the page is up to date."""

import ast
import re
from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS, of
from tests.chaos.plants import FULL, RANK, planted
from tests.chaos.table import PROMISES, page
from tools.dev.runs import ROOT


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_promise_has_faults():
    assert {number for fault in FAULTS for number in fault.promise.split(", ")} == set(PROMISES)


@pytest.mark.parametrize("fault", of("tests"), ids=lambda fault: fault.name)
def test_the_tests_of_a_fault_exist(fault):
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert name in functions(ROOT / file), test


def test_every_other_fault_is_planted_by_code():
    for fault in FAULTS:
        if fault.scene in ("lab", "large lab", "layouts", "chain", "flight") and not fault.name.startswith(FULL):
            name = re.sub(r" \([^)]*\)$", "", fault.name) if fault.scene == "layouts" else fault.name
            assert name.partition(RANK)[0] in planted(), fault.name


def test_names_are_used_once():
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/generated/chaos.md").read_text() == page()
