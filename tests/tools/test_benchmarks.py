"""Tests what several benchmarks share."""


def test_one_round_is_its_own_quartiles(benchmark):
    ratio = benchmark("updates").ratio
    assert ratio([3.0], [2.0], "a : b") == {"a : b": 1.5, "a : b, quartiles": [1.5, 1.5]}
    assert ratio([2.0, 8.0, 4.0], [2.0] * 3, "a : b") == {"a : b": 2.0, "a : b, quartiles": [1.5, 3.0]}
