import math

import torch

from moe_rl.objectives.logprobs import token_logprobs_and_entropies
from moe_rl.objectives.penalties import entropy_bonus
from tests.support.refusals import refused


def test_the_bonus_is_the_mean_over_all_tokens_however_they_are_cut():
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, scalar = torch.zeros(7, dtype=torch.int64), 0.0
    for row in logits.tolist():
        total = math.fsum(math.exp(x) for x in row)
        scalar -= math.fsum(math.exp(x) / total * (x - math.log(total)) for x in row) / 7
    gradients = []
    for cuts in ([7], [3, 4], [0, 1, 6]):
        leaf = logits.clone().requires_grad_()
        rows = zip(leaf.split(cuts), tokens.split(cuts), strict=True)
        parts = [entropy_bonus(token_logprobs_and_entropies(*part, 1.0)[1], 7) for part in rows]
        assert math.isclose(sum(parts).item(), scalar, rel_tol=1e-12)
        sum(parts).backward()
        gradients.append(leaf.grad)
    assert all(torch.allclose(gradient, gradients[0], rtol=1e-12, atol=0) for gradient in gradients)
    # a step along it raises the entropy
    assert token_logprobs_and_entropies(logits + gradients[0], tokens, 1.0)[1].mean() > scalar


def test_nothing_to_divide_by_is_refused():
    with refused(ValueError, argument="denominator", got=0):
        entropy_bonus(torch.zeros(0), 0)
