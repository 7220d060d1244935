"""The verdicts of the kind math_verify: completion, right answer, and whether they are equal."""

import pytest

from moe_rl.config.reward_kinds import MathVerifyReward
from moe_rl.tasks.math_reward import mathematically_equal
from moe_rl.tasks.verifiers import RewardItem

TABLE = [
    (r"\boxed{10^{-20}}", r"10^{-30}", 0),
    (r"\boxed{9\times 10^{-23}}", r"6\times 10^{-23}", 0),
    (r"\boxed{0.00000034}", r"0.00000012", 0),
    (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", 0),
    (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", 0),
    (r"\boxed{0.3333333}", r"\frac13", 0),
    (r"\boxed{7.0000001}", r"7.0000002", 0),
    (r"\boxed{6\times10^{-23}}", r"6e-23", 1),
    (r"\boxed{9e-23}", r"6e-23", 0),
    (r"\boxed{6e-23}", r"6e-23", 1),
    (r"\boxed{6e-23}", r"6\times 10^{-23}", 1),
    (r"\boxed{1.5e3}", r"1500", 1),
    (r"\boxed{0<x<12.5}", r"(0, 12.5)", 1),
    (r"\boxed{x>2}", r"(2,\infty)", 1),
    (r"\boxed{x\ge 2}", r"[2,\infty)", 1),
    (r"\boxed{x<2}", r"(-\infty,2)", 1),
    (r"\boxed{0\le x<12.5}", r"[0, 12.5)", 1),
    (r"\boxed{0<x<12.5}", r"[0, 12.5]", 0),
    (r"\boxed{x>2}", r"[2,\infty)", 0),
    (r"The answer is (B).", r"B", 1),
    (r"\boxed{B}", r"B", 1),
    (r"\boxed{\text{B}}", r"B", 1),
    (r"\boxed{(B)}", r"B", 1),
    (r"\boxed{B}", r"(B)", 1),
    (r"\boxed{A}", r"B", 0),
    (r"The answer is (A).", r"B", 0),
    (r"\boxed{\text{(C)}}", r"\text{C}", 1),
    (r"\boxed{1 250}", r"1250", 1),
    (r"\boxed{1\,250}", r"1250", 1),
    (r"\boxed{1{,}250}", r"1250", 1),
    (r"\boxed{1,250}", r"1250", 1),
    (r"\boxed{1~250}", r"1250", 1),
    (r"\boxed{12 500 000}", r"12500000", 1),
    (r"\boxed{1 250}", r"1", 0),
    (r"\boxed{1 250}", r"250", 0),
    (r"\boxed{１２}", r"12", 1),
    (r"\boxed{½}", r"0.5", 1),
    (r"\boxed{2½}", r"2.5", 1),
    (r"\boxed{1250}", r"\$1,250", 1),
    (r"\boxed{32348}", r"\$32,\!348", 1),
    (r"\boxed{1250}", r"\boxed{\$1,250}", 1),
    (r"\boxed{\$1,250}", r"1250", 1),
    (r"\boxed{\$1,251}", r"\$1,250", 0),
    (r"\boxed{1728}", r"1331, 1728", 0),
    (r"\boxed{1728, 1331}", r"1331, 1728", 1),
    (r"\boxed{1331,1728}", r"1331, 1728", 1),
    (r"\boxed{6x-2y+26=0}", r"3x-y+13=0", 1),
    (r"\boxed{3x+4y+14=0}", r"3x-y+13=0", 0),
    (r"\boxed{50}", r"50\%", 1),
    (r"\boxed{0.5}", r"50\%", 1),
    (r"\boxed{1267650600228229401496703205376}", r"2^{100}", 1),
    (r"\boxed{1267650600228229401496703205377}", r"2^{100}", 0),
    (r"\boxed{[1,2]}", r"(1,2)", 0),
    (r"\boxed{1.4142}", r"\sqrt{2}", 0),
    (r"#### 72", r"72", 1),
    (r"So **73**", r"73", 1),
    (r"\boxed{5\text{ cm}}", r"5", 1),
    (r"\boxed{90^\circ}", r"90", 1),
    (r"\boxed{−5}", r"-5", 1),
    (r"\boxed{x=5}", r"5", 1),
    (r"\boxed{\frac{1}{2}}", r"0.5", 1),
    (r"\boxed{0.333}", r"\frac{1}{3}", 0),
    (r"\boxed{(2,1)}", r"(1,2)", 0),
    (r"\boxed{\{3,1,2\}}", r"\{1,2,3\}", 1),
    (r"\boxed{3.14}", r"\pi", 0),
    (r"\boxed{3.14159265358979}", r"\pi", 0),
    (r"\boxed{0.1}", r"\frac{1}{10}", 1),
    (r"\boxed{0.1+0.2}", r"0.3", 1),
    (r"\boxed{1e10}", r"10^{10}", 1),
    (r"\boxed{10000000001}", r"10000000000", 0),
    (r"\boxed{\frac{1}{10^{16}}}", r"\frac{1}{10^{17}}", 0),
    (r"\boxed{1.0000000000000001}", r"1", 0),
    (r"\boxed{\sqrt{2}+10^{-20}}", r"\sqrt{2}", 0),
    (r"\boxed{e^{-50}}", r"e^{-51}", 0),
    (r"\boxed{\sin(10^{-10})}", r"\sin(10^{-11})", 0),
    (r"\boxed{2^{-60}}", r"0", 0),
    (r"\boxed{1-10^{-18}}", r"1", 0),
    (r"\boxed{\infty}", r"\infty", 1),
    (r"\boxed{1,250.5}", r"1250.5", 1),
    (r"\boxed{1.250}", r"1250", 0),
    (r"\boxed{1, 250}", r"1250", 0),
    (r"\boxed{\frac{2}{4}}", r"\frac12", 1),
    (r"\boxed{6.02\times 10^{23}}", r"6.02e23", 1),
    (r"\boxed{6.02\cdot 10^{23}}", r"6.02\times 10^{23}", 1),
    (r"\boxed{6.03\times 10^{23}}", r"6.02\times 10^{23}", 0),
    (r"\boxed{\frac12 \text{ or } 3}", r"3, \frac{1}{2}", 1),
    (r"\boxed{x=1,y=2}", r"(1,2)", 1),
    (r"\boxed{\text{Yes}}", r"Yes", 1),
    (r"\boxed{No}", r"Yes", 0),
    (r"\boxed{12:30}", r"12:30", 1),
    (r"\boxed{1:2}", r"\frac{1}{2}", 1),
    (r"\boxed{7\frac{1}{2}}", r"7.5", 1),
    (r"\boxed{10\%}", r"0.1", 1),
    (r"\boxed{-\frac{1}{2}}", r"-0.5", 1),
    (r"\boxed{٣}", r"3", 1),
    (r"\boxed{−½}", r"-0.5", 1),
    (r"\boxed{2.5E-3}", r"0.0025", 1),
    (r"\boxed{2e-3}", r"2e-3", 1),
    (r"The answer is 6e-23.", r"6", 0),
    (r"The answer is 6e-23.", r"6\times 10^{-23}", 1),
    (r"The answer is 1.5e-3.", r"0.0015", 1),
    (r"\boxed{(6e-23,1)}", r"(9e-23,1)", 0),
    (r"\boxed{(6e-23,1)}", r"(6\times 10^{-23},1)", 1),
    (r"\boxed{\{6e-23,1\}}", r"\{9e-23,1\}", 0),
    (r"\boxed{251}", r"1 250", 0),
    (r"\boxed{0}", r"12 500 000", 0),
    (r"\boxed{2}", r"(−∞, 2)", 0),
    (r"\boxed{(−∞, 2)}", r"(-\infty,2)", 1),
    (r"\boxed{(−∞, 2)}", r"2", 0),
    (r"\boxed{1 1/2}", r"1.5", 1),
    (r"\boxed{3 125/250}", r"3.5", 1),
    (r"\boxed{x²}", r"x^2", 1),
    (r"\boxed{10⁻²³}", r"10^{-23}", 1),
    (r"\boxed{√2}", r"\sqrt{2}", 1),
    (r"\boxed{2√3}", r"2\sqrt{3}", 1),
    (r"\boxed{90°}", r"90", 1),
    (r"\boxed{∞}", r"\infty", 1),
    (r"\boxed{€1,250}", r"1250", 1),
    (r"The answer is A little long.", r"A", 0),
    (r"The answer is B", r"B", 1),
    (r"**Answer: (C)**", r"C", 1),
    (r"Answer: D.", r"D", 1),
    (r"A cat sat.", r"A", 0),
    (r"I think (B) or (C). The answer is (C).", r"B", 0),
    (r"1250", r"$1,250", 1),
    (r"\boxed{12}", r"$12", 1),
    (r"\boxed{x=3}", r"$x=3$", 1),
    (r"\boxed{5}", r"$5\text{ cm}$", 1),
    (r"\boxed{1250}", r"\$1250.00", 1),
    (r"\boxed{1250.5}", r"\$1,250.50", 1),
    (r"\boxed{$1,250}", r"1250", 1),
    (r"\boxed{0.49}", r"0.5", 0),
    (r"\boxed{10^{-20}}", r"0", 0),
    (r"\boxed{0}", r"10^{-20}", 0),
    (r"\boxed{0}", r"0", 1),
    (r"\boxed{0.0}", r"0", 1),
    (r"\boxed{\sqrt{2}-\sqrt{2}}", r"0", 1),
    (r"\boxed{\sin(\pi)}", r"0", 1),
    (r"\boxed{(10^{-20},1)}", r"(10^{-30},1)", 0),
    (r"\boxed{\begin{pmatrix}10^{-20}\\1\end{pmatrix}}", r"\begin{pmatrix}10^{-30}\\1\end{pmatrix}", 0),
    (r"\boxed{2e-3x}", r"2e-3x", 1),
    (r"\boxed{10 100 1000}", r"10100", 0),
    (r"\boxed{\frac{1}{3}}", r"\frac13", 1),
    (r"\boxed{3 1/0}", r"4", 0),
    (r"The answer is 1 250.", r"1250", 1),
    (r"\boxed{3.0}", r"3", 1),
    (r"\boxed{6*10^-23}", r"6e-23", 1),
    (r"\boxed{6 \times 10^{+5}}", r"600000", 1),
    (r"\boxed{9*10^-23}", r"6e-23", 0),
    (r"\boxed{–5}", r"-5", 1),
    (r"\boxed{1–5}", r"-4", 0),
    (r"\boxed{1250}", r"\text{\$}1,250", 1),
    (r"The correct option is C.", r"C", 1),
    (r"The answer is option (D).", r"D", 1),
    (r"The correct choice is (A).", r"B", 0),
    (r"\boxed{12.5>x>0}", r"(0,12.5)", 1),
    (r"\boxed{x\neq 2}", r"(-\infty,2)\cup(2,\infty)", 1),
    (r"\boxed{x=10^{-20}}", r"10^{-30}", 0),
    (r"\boxed{10^{-20}x}", r"10^{-30}x", 0),
    (r"\boxed{1\,250\,000}", r"1250000", 1),
    (r"\boxed{6÷2}", r"3", 1),
    (r"5", 5, 1),
    (r"\boxed{2.50}", 2.5, 1),
    ("The answer is (b).", "B", 1),
    ("The answer is B because it is larger.", "B", 1),
    ("The answer is A because B is smaller.", "B", 0),
    ("The answer is B. 12", "B", 1),
    ("the answer is b) 12", "B", 1),
    ("The answer is a prime number, 7", "A", 0),
    (r"$10\thinspace 000$", "10000", 1),
    ("$1250$", "1,250 dollars", 1),
    ("<answer>42</answer>", "42", 1),
    ("<think>7, or 42</think> <answer>7</answer> 42", "42", 0),
    (r"I think 7. <answer>\frac{1}{2}</answer>", "0.5", 1),
    ("<answer>(b)</answer>", "B", 1),
    ("<answer>It is $42$.</answer>", "42", 1),
    ("<answer>It is 42.</answer>", "42", 1),
]
# Floats have 15 digits, and numbers inside tuples are compared to 15 decimals.
KNOWN_WRONG = [
    (r"\boxed{0.30000000000000004}", r"0.3", 0),
    (r"\boxed{\frac{1}{3}}", r"0.333333333333333", 0),
    (r"\boxed{(0.00000000000000001,1)}", r"(0.00000000000000002,1)", 0),
]


@pytest.mark.parametrize(
    ("completion", "answer", "equal"),
    [*TABLE, *(pytest.param(*row, marks=pytest.mark.xfail(strict=True)) for row in KNOWN_WRONG)],
)
def test_the_verdict_is_right(completion, answer, equal):
    assert mathematically_equal(completion, answer) == equal


@pytest.mark.parametrize("answer", ["", " ", "$", "$$", "\\boxed{}", None, True, ["2"]])
def test_an_answer_in_which_nothing_is_read(answer):
    with pytest.raises(ValueError, match="column answer"):
        mathematically_equal("\\boxed{2}", answer)


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
