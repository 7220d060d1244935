import pytest

from moe_rl.tasks.rewards import answer_format, boxed_integer, exact_match


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
    ("completion", "reward"),
    [
        ("so it is \\boxed{42}.", 1.0),
        ("\\boxed{7}, no: \\boxed{ 042 }", 1.0),
        ("\\boxed{42}, no: \\boxed{7}", 0.0),
        ("\\boxed{42}, no: \\boxed{\\frac{1}{2}}", 0.0),
        ("\\boxed{42.5}", 0.0),
        ("42", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_box_counts(completion, reward):
    assert boxed_integer(completion, "42") == reward


def test_large_and_negative_integers():
    assert boxed_integer("\\boxed{-1,234}", "-1234") == 1.0
    with pytest.raises(ValueError):
        boxed_integer("\\boxed{1}", "one half")
