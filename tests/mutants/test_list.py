"""Every entry of the list applies to the present code, and the page shows the results of these entries."""

import ast
from pathlib import Path

from tests.mutants.faults import MUTANTS
from tests.mutants.planting import ROOT, with_fault
from tests.mutants.table import fingerprint, page, read_results

AGAIN = "run: python -m tests.mutants {} --record; make generated"


def test_every_entry_applies_and_has_a_name_and_tests_of_its_own():
    assert len(MUTANTS) >= 70
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        with_fault(mutant)
        assert (ROOT / mutant.folder).exists(), mutant.name
        for test in mutant.tests:
            assert (ROOT / test).exists(), f"{mutant.name} names {test}, which is not there"


def test_every_room_has_a_fault():
    rooms = {path.name for path in (ROOT / "moe_rl").iterdir() if (path / "__init__.py").exists()}
    assert rooms <= {mutant.room for mutant in MUTANTS}


def test_the_results_are_of_the_present_faults_and_tests():
    results = read_results()
    assert results.keys() == {mutant.name for mutant in MUTANTS}
    for mutant in MUTANTS:
        result = results[mutant.name]
        assert result["fault"] == fingerprint(mutant), AGAIN.format(mutant.name)
        assert _exists(result["killer"]), f"{result['killer']} is gone; {AGAIN.format(mutant.name)}"


def test_the_page_is_written_from_them():
    assert (ROOT / "docs/generated/mutants.md").read_text() == page(), AGAIN.format("")


def _exists(test: str) -> bool:
    file, *names = test.partition("[")[0].split("::")
    path = ROOT / file
    # A file alone is one that could not be imported: that kills nothing.
    return bool(names) and path.exists() and names[-1] in _functions(path)


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
