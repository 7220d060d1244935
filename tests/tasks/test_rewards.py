import pytest

from moe_rl.tasks.rewards import answer_format, exact, exact_match, find_answer, numeric


@pytest.mark.parametrize(
    ("completion", "answer", "exact", "form"),
    [
        ("<answer>42</answer>", "42", 1.0, 1.0),
        (" \n<answer>42</answer>\t\n", "42", 1.0, 1.0),
        ("<answer>-7</answer>", "-7", 1.0, 1.0),
        ("<answer>0</answer>", "0", 1.0, 1.0),
        ("<answer>41</answer>", "42", 0.0, 1.0),
        ("<answer>7</answer>", "-7", 0.0, 1.0),
        ("<answer>042</answer>", "42", 0.0, 0.0),
        ("<answer>+42</answer>", "42", 0.0, 0.0),
        ("<answer>-0</answer>", "0", 0.0, 0.0),
        ("<answer>--7</answer>", "-7", 0.0, 0.0),
        ("<answer> 42</answer>", "42", 0.0, 0.0),
        ("<answer>4_2</answer>", "42", 0.0, 0.0),
        ("<answer>4 2</answer>", "42", 0.0, 0.0),
        ("<answer>42.0</answer>", "42", 0.0, 0.0),
        ("<answer>\u0664\u0662</answer>", "42", 0.0, 0.0),  # Arabic-Indic digits: int() would take them
        ("<answer></answer>", "", 0.0, 0.0),
        ("42", "42", 0.0, 0.0),
        ("", "", 0.0, 0.0),
        ("<answer>42", "42", 0.0, 0.0),
        ("<Answer>42</Answer>", "42", 0.0, 0.0),
        ("so <answer>42</answer>", "42", 0.0, 0.0),
        ("<answer>42</answer>.", "42", 0.0, 0.0),
        ("<answer>41</answer><answer>42</answer>", "42", 0.0, 0.0),
        ("<answer>42</answer><|endoftext|>", "42", 0.0, 0.0),
    ],
)
def test_arithmetic_rewards(completion, answer, exact, form):
    assert exact_match(completion, answer) == exact
    assert answer_format(completion) == form


@pytest.mark.parametrize(
    ("completion", "answer_in", "answer"),
    [
        (" all of it\n", "completion", "all of it"),
        ("<answer>1</answer>, no: <answer> 2 </answer> it is", "tags", "2"),
        ("<answer>1</answer>, no: <answer>2", "tags", None),
        ("1</answer>", "tags", None),
        ("<answer></answer>", "tags", ""),
        ("\\boxed{7}, no: $\\boxed{ \\frac{1}{2} }$.", "box", "\\frac{1}{2}"),
        ("\\boxed{7}, no: \\boxed{8", "box", None),
        ("7", "box", None),
        ("", "box", None),
    ],
)
def test_the_last_answer_counts(completion, answer_in, answer):
    assert find_answer(completion, answer_in) == answer


def test_a_tag_that_ends_a_completion_as_a_stop_text_is_closed():
    said = "12, so <answer>7"
    for kind in (exact(answer_in="tags"), numeric(answer_in="tags", tolerance=0, relative_tolerance=0)):
        assert kind(said, "7", stop_string="</answer>") == 1.0 and kind(said, "7") == 0.0
        assert kind(said, "7", stop_string="###") == 0.0


def test_exact():
    same = exact(answer_in="tags")
    assert same("so <answer> B </answer>", " B") == 1.0
    assert same("so <answer>b</answer>", "B") == 0.0
    assert same("B", "B") == 0.0
    with pytest.raises(ValueError):
        same("<answer>1</answer>", 1)


@pytest.mark.parametrize(
    ("given", "answer", "reward"),
    [
        ("42", "42", 1.0),
        (" 42.0 ", "42", 1.0),
        ("042", 42, 1.0),
        ("4.2e1", "42", 1.0),
        ("+42", "42", 1.0),
        ("-42", "42", 0.0),
        ("\u221242", "-42", 1.0),  # the minus sign of Unicode
        ("--42", "-42", 0.0),
        ("- 42", "-42", 1.0),
        (".5", 0.5, 1.0),
        ("5.", "5", 1.0),
        ("0.1", "0.10", 1.0),
        ("0.3", 0.1 + 0.2, 0.0),  # no tolerance: every digit counts
        # thousands
        ("1,234,567.5", "1234567.5", 1.0),
        ("1{,}234", "1,234", 1.0),
        ("1\\,234", "1234", 1.0),
        ("1,23", "123", 0.0),
        ("1,2345", "12345", 0.0),
        ("1 234", "1234", 0.0),
        ("1_234", "1234", 0.0),
        ("1.234.567", "1234567", 0.0),
        # units are part of the answer
        ("5 km", "5km", 1.0),
        ("5.0 km/h", "5 km/h", 1.0),
        ("5 km", "5", 0.0),
        ("5", "5 km", 0.0),
        ("5 m", "5 km", 0.0),
        ("50%", "50 \\%", 1.0),
        ("50%", "0.5", 0.0),
        ("\\$18", "$18.00", 1.0),
        ("$18", "18", 0.0),
        ("$18$", "18", 1.0),  # mathematics in LaTeX, no currency
        ("20\u00b0", "20 \u00b0", 1.0),
        # no number
        ("5 or 6", "5", 0.0),
        ("1/2", "0.5", 0.0),
        ("x = 5", "5", 0.0),
        ("1e5x", "100000", 0.0),
        ("5^2", "5", 0.0),
        ("nan", "5", 0.0),
        ("inf", "5", 0.0),
        ("\u0664\u0662", "42", 0.0),  # Arabic-Indic digits
        ("", "0", 0.0),
        ("9e999999", "1", 0.0),
        ("1e9999999", "1", 0.0),
        ("9" * 100_000, "9" * 99_999, 0.0),
        ("-" + "9" * 100_000, "-" + "9" * 100_000, 1.0),
    ],
)
def test_numeric(given, answer, reward):
    assert numeric(answer_in="completion", tolerance=0.0, relative_tolerance=0.0)(given, answer) == reward
    assert numeric(answer_in="box", tolerance=0.0, relative_tolerance=0.0)(f"\\boxed{{{given}}}", answer) == reward


@pytest.mark.parametrize(
    ("given", "answer", "tolerance", "relative", "reward"),
    [
        ("3.14", "3.14159", 0.002, 0.0, 1.0),
        ("3.14", "3.14159", 0.001, 0.0, 0.0),
        ("1.01", "1", 0.01, 0.0, 1.0),  # the limit itself counts, in decimal arithmetic
        ("101", "100", 0.0, 0.01, 1.0),
        ("102", "100", 0.0, 0.01, 0.0),
        ("-101", "-100", 0.0, 0.01, 1.0),
        ("0.001", "0", 0.0, 0.01, 0.0),
        ("0.001", "0", 0.01, 0.01, 1.0),
        ("9e999999", "-9e999999", 0.1, 0.0, 0.0),
    ],
)
def test_numeric_tolerance(given, answer, tolerance, relative, reward):
    assert numeric(answer_in="completion", tolerance=tolerance, relative_tolerance=relative)(given, answer) == reward


@pytest.mark.parametrize("answer", ["one half", "1/2", "", True, None, [1], float("nan"), float("inf")])
def test_a_right_answer_that_is_no_number_is_a_failure(answer):
    with pytest.raises(ValueError):
        numeric(answer_in="completion", tolerance=0.0, relative_tolerance=0.0)("1", answer)
