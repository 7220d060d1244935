"""What a request to sample asks for."""

from types import SimpleNamespace

from moe_rl.train.rollouts import Rollouts
from moe_rl.types import Prompt


def test_tokens_are_removed_where_the_policy_is_sampled_and_not_where_it_is_greedy():
    rollouts = object.__new__(Rollouts)
    rollouts.config = SimpleNamespace(
        run=SimpleNamespace(seed=1),
        rollout=SimpleNamespace(max_completion_tokens=5, top_k=8, top_p=0.9, min_p=0.1),
    )
    rollouts.stop_tokens = (1,)
    prompt = Prompt("p", "text", "answer", "1", (4, 5))
    sampled, greedy = (rollouts._request(f"t{t}", prompt, t) for t in (0.7, 0.0))
    assert (sampled.top_k, sampled.top_p, sampled.min_p) == (8, 0.9, 0.1)
    assert (greedy.top_k, greedy.top_p, greedy.min_p) == (0, 1.0, 0.0)
