import pytest

from moe_rl.tasks.boxed_reward import integer_match


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
    assert integer_match(completion, "42") == reward


def test_large_and_negative_integers():
    assert integer_match("\\boxed{-1,234}", "-1234") == 1.0
    with pytest.raises(ValueError):
        integer_match("\\boxed{1}", "one half")
