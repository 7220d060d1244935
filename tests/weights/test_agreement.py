"""Tests how the answers of a sampler's workers are combined."""

from __future__ import annotations

import pytest

from moe_rl.weights.update import Holding, agreement, refusal

NEW, OLD, TORN = Holding(2, "b" * 32, True), Holding(1, "a" * 32, True), Holding(1, "a" * 32, False)


def test_what_all_hold_is_held():
    assert agreement([NEW, NEW, NEW]) == NEW and agreement([TORN, TORN]) == TORN


def test_one_that_is_not_whole_makes_nothing_whole():
    assert not agreement([OLD, TORN]).whole and not agreement([TORN, OLD]).whole


@pytest.mark.parametrize("answers", [[NEW, OLD], [OLD, NEW], [NEW, Holding(2, "c" * 32, True)]])
def test_workers_that_hold_different_weights_hold_nothing(answers):
    """One worker kept its old weights, or loaded other weights under the same version."""
    agreed = agreement(answers)
    assert not agreed.whole and "workers of one sampler hold different weights" in agreed.refused
    assert all(f"version {one.version}, digest {one.digest}" in agreed.refused for one in answers)
    assert "until then nothing is sampled" in str(refusal(agreed))


def test_the_refusal_of_one_is_that_of_all():
    refused = Holding(1, "a" * 32, True, "The new weights are stale")
    assert agreement([OLD, refused]) == refused
    assert str(refusal(refused)) == "The new weights are stale. The sampler continues with version 1, which it had"
    one_loaded = agreement([NEW, refused])
    assert not one_loaded.whole and "One refused: The new weights are stale" in one_loaded.refused
