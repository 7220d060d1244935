import sys

import pytest

from moe_rl.rewards.dotted_path import dotted_path_problem


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("moe_rl.rewards.arithmetic.exact_match", None),
        ("json.loads", None),
        ("exact_match", "not a dotted path"),
        ("", "not a dotted path"),
        ("a..b", "not a dotted path"),
        ("a.b c", "not a dotted path"),
        ("moe_rl.rewards.aritmetic.exact_match", "no module moe_rl.rewards.aritmetic"),
        ("nowhere_at_all.f", "no module nowhere_at_all"),
        ("nowhere_at_all.sub.f", "no module nowhere_at_all"),
    ],
)
def test_dotted_path_problem(path, problem):
    got = dotted_path_problem(path)
    assert got is None if problem is None else problem in got


def test_a_package_is_not_imported_to_look_inside_it(tmp_path, monkeypatch):
    package = tmp_path / "package_of_user"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "rewards.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert dotted_path_problem("package_of_user.rewards.f") is None
    assert "no module package_of_user.absent" in dotted_path_problem("package_of_user.absent.f")
    assert "package_of_user" not in sys.modules
