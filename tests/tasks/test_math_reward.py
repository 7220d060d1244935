from moe_rl.config.reward_kinds import MathVerifyReward
from moe_rl.tasks.verifiers import RewardItem

CASES = [
    ("so it is $\\boxed{\\frac{1}{2}}$", "0.5", 1.0),
    ("so it is $\\boxed{\\frac{1}{2}}$", "\\frac{2}{4}", 1.0),
    ("\\boxed{0.333}", "\\frac{1}{3}", 0.0),
    ("The final answer is $2\\sqrt{2}$.", "$\\sqrt{8}$", 1.0),
    ("$\\boxed{x^2+2x+1}$", "\\boxed{(x+1)^2}", 1.0),
    ("$\\boxed{\\{3, 1, 2\\}}$", "$\\{1,2,3\\}$", 1.0),
    ("$\\boxed{(1,2)}$", "$(2,1)$", 0.0),
    ("$\\boxed{12}$ and then again $\\boxed{13}$", "12", 0.0),
    ("\\boxed{1,234}", "1234", 1.0),
    ("\\boxed{\\frac{1}{", "0.5", 0.0),
    ("I do not know.", "7", 0.0),
    ("", "7", 0.0),
]


def test_math_verify(make_pool):
    with make_pool(kinds={"math": MathVerifyReward(kind="math_verify")}, timeout=60.0) as pool:
        verdicts = pool.score([RewardItem("", text, {"answer": answer}) for text, answer, _ in CASES])
        [unread] = pool.score([RewardItem("", "\\boxed{7}", {"answer": ""})])
    assert [verdict.reward for verdict in verdicts] == [reward for *_, reward in CASES]
    assert unread.status == "failed" and "answer" in unread.detail


def test_an_endless_comparison_fails_and_is_no_wrong_answer(make_pool):
    endless = RewardItem("", "$\\boxed{99999999!}$", {"answer": "5"})
    with make_pool(kinds={"math": MathVerifyReward(kind="math_verify")}, timeout=60.0) as pool:
        pool.timeout = 1.0  # the first call may import for longer
        [verdict] = pool.score([endless])
        pool.timeout = 60.0
        [after] = pool.score([RewardItem("", "\\boxed{5}", {"answer": "5"})])
    assert (verdict.status, after.reward) == ("failed", 1.0)
    assert "no answer within 1 s" in verdict.detail
